"""One fault in one fork: the changed module by an import hook, the tests that reach it, and what came of it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import pytest
from faults import Mutant
from fork import forked
from reach import QUIET, Reach, tests_for
from where import PACKAGE

MEMORY = 6 * 2**30  # bytes: a changed size may ask for more than there is
Outcome = dict[str, Any]  # {"outcome": "killed" or "survived", "by": test, "seconds": 1.2}


def tried(
    todo: Sequence[Mutant], sources: Mapping[str, str], reach: Reach, jobs: int
) -> Iterator[tuple[Mutant, Outcome]]:
    """Each fault with its outcome, `jobs` at a time."""
    waiting, running = list(reversed(todo)), list[Trial]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                mutant = waiting.pop()
                if tests := tests_for(mutant, reach):
                    running.append(_begun(mutant, sources[mutant.file], tests, reach))
                else:
                    yield mutant, {"outcome": "survived", "by": "no test reaches it", "seconds": 0.0}
            for trial in list(running):
                outcome = trial.outcome()
                if outcome is not None:
                    running.remove(trial)
                    yield trial.mutant, outcome
            time.sleep(0.01)
    finally:  # interrupted: no fork goes on alone
        for trial in running:
            os.kill(trial.pid, signal.SIGKILL)


def _begun(mutant: Mutant, source: str, tests: Sequence[str], reach: Reach) -> Trial:
    read, write = os.pipe()
    expected = sum(reach[test]["seconds"] for test in tests)
    pid = forked(lambda: _try(mutant, source, tests, write))
    os.close(write)
    return Trial(mutant, pid, read, time.monotonic(), 30 + 10 * expected)


@dataclass
class Trial:
    """A fault being tried."""

    mutant: Mutant
    pid: int
    answer: int
    begun: float
    limit: float

    def outcome(self) -> Outcome | None:
        """None while it runs."""
        seconds = round(time.monotonic() - self.begun, 1)
        found, status = os.waitpid(self.pid, os.WNOHANG)
        if not found and seconds < self.limit:
            return None
        by = "time"
        if not found:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        elif os.waitstatus_to_exitcode(status) == 0:
            by = ""
        else:
            by = os.read(self.answer, 4096).decode() or "import"
        os.close(self.answer)
        return {"outcome": "killed" if by else "survived", "by": by, "seconds": seconds}


def _try(mutant: Mutant, source: str, tests: Sequence[str], answer: int) -> int:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    sys.meta_path.insert(0, Changed(mutant.file, mutant.applied(source)))
    return int(pytest.main([*tests, *QUIET], plugins=[Watcher(tests, answer)]))


class Watcher:
    """A pytest plugin that runs the tests in the order given and ends the process with the first that fails."""

    def __init__(self, order: Sequence[str], answer: int) -> None:
        self.order, self.answer = {test: i for i, test in enumerate(order)}, answer

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items.sort(key=lambda item: self.order.get(item.nodeid, len(self.order)))

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            os.write(self.answer, report.nodeid.encode())
            os._exit(1)


class Changed(importlib.abc.MetaPathFinder):
    """An import hook that gives one module another source."""

    def __init__(self, file: str, source: str) -> None:
        self.name = "classlens." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        self.path, self.source = PACKAGE / file, source

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        within = [str(self.path.parent)] if self.path.name == "__init__.py" else None
        loader = Loader(name, str(self.path), self.source)
        return importlib.util.spec_from_file_location(name, self.path, loader=loader, submodule_search_locations=within)


class Loader(importlib.machinery.SourceFileLoader):
    """What reads that source."""

    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self.changed = source

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.changed, self.path, "exec", dont_inherit=True)
