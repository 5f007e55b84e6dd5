"""Which tests reach which lines, and how long each takes: measured once, again where a file has changed."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import pytest
from faults import Mutant
from fork import forked
from where import PACKAGE, QUIET, REACH, ROOT, SECONDS, TABLES, own_tests, source_files, test_files, version

Reach = dict[str, dict[str, Any]]  # test -> {"seconds": 0.1, "lines": {file: [1, 2, ...]}}
Lines = dict[str, set[int]]  # by file


def measured() -> Reach:
    """Every test's time and the lines of the sources that it reaches."""
    sources = version(PACKAGE / file for file in source_files())
    shared = version((ROOT / "tests").glob("*.py"))
    states = {file: sources + shared + version([ROOT / file]) for file in test_files()}
    kept = json.loads(REACH.read_text()) if REACH.exists() else {}
    todo = [file for file, state in states.items() if kept.get(file, {}).get("state") != state]
    if todo:
        print(f"measuring which lines the tests of {len(todo)} files reach", flush=True)
        new = _traced(todo, lambda tracer: tracer.by_file())
        kept |= {file: {"state": states[file], "reach": new.get(file, {})} for file in todo}
        REACH.write_text(json.dumps(kept))
    return {test: reached for file in states for test, reached in kept[file]["reach"].items()}


def on_import() -> Lines:
    """The lines that run when the tests are imported, before any test runs."""
    found = _traced(["--collect-only", *test_files()], lambda tracer: {f: sorted(at) for f, at in tracer.now.items()})
    return {file: set(lines) for file, lines in found.items()}


def _traced(arguments: Sequence[str], result: Callable[[Tracer], dict[str, Any]]) -> dict[str, Any]:
    """What a tracer saw of a run of pytest in a fork."""
    REACH.parent.mkdir(exist_ok=True)
    log, out = REACH.with_suffix(".log"), REACH.with_suffix(".part")

    def work() -> int:
        tracer = Tracer()
        failed = pytest.main([*arguments, *QUIET], plugins=[tracer])
        out.write_text(json.dumps(result(tracer)))
        return int(failed)

    _, status = os.waitpid(forked(work, log), 0)
    if status:
        sys.exit(f"the tests fail without any fault: {log}")
    found: dict[str, Any] = json.loads(out.read_text())
    return found


class Tracer:
    """A pytest plugin that writes down, for each test, its time and the lines it reaches."""

    def __init__(self) -> None:
        self.files = {str(PACKAGE / file): file for file in source_files()}
        self.tests: Reach = {}
        self.fixtures: dict[str, Lines] = {}  # by test file: what they reach counts for all its tests
        self.now: Lines = {}

    def trace(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        file = self.files.get(frame.f_code.co_filename)
        if file is None:
            return None
        lines = self.now.setdefault(file, set())

        def line(frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
            lines.add(frame.f_lineno)
            return line

        return line(frame, event, arg)

    def _during(self, into: Lines) -> Iterator[None]:
        self.now = into
        sys.settrace(self.trace)
        try:
            yield
        finally:
            sys.settrace(None)

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Iterator[None]:
        yield from self._during({})

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: Any) -> Iterator[None]:
        yield from self._during(self.fixtures.setdefault(file_of(item.nodeid), {}))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Iterator[None]:
        _forget()
        lines: Lines = {}
        begun = time.process_time()
        yield from self._during(lines)
        self.tests[item.nodeid] = {"seconds": time.process_time() - begun, "lines": lines}

    def by_file(self) -> dict[str, Reach]:
        """For each test file, its tests."""
        found: dict[str, Reach] = {}
        for test, reached in self.tests.items():
            lines = reached["lines"]
            for file, more in self.fixtures[file_of(test)].items():
                lines.setdefault(file, set()).update(more)
            found.setdefault(file_of(test), {})[test] = reached | {"lines": {f: sorted(at) for f, at in lines.items()}}
        return found


def _forget() -> None:
    """Empty the package's caches: what an earlier test left there, this one would not reach."""
    for name, module in list(sys.modules.items()):
        if name.startswith("classlens"):
            for value in list(vars(module).values()):
                if callable(getattr(value, "cache_clear", None)):
                    value.cache_clear()


def file_of(test: str) -> str:
    """`tests/a.py::b[c]` is in `tests/a.py`."""
    return test.partition("::")[0]


class Plan:
    """Which tests try a fault, and in which order."""

    def __init__(self, reach: Reach, imported: Lines) -> None:
        self.reach, self.imported = reach, imported

    def runs_on_import(self, mutant: Mutant) -> bool:
        """Whether the code of a fault has run before any test does: outside of functions, or called from there."""
        return not mutant.owner or bool(_lines(mutant) & self.imported.get(mutant.file, set()))

    def seconds(self, tests: Sequence[str]) -> float:
        return float(sum(self.reach[test]["seconds"] for test in tests))

    def tests_for(self, mutant: Mutant) -> list[str]:
        """The tests that reach a fault, the most promising first: all of its own test file, and others for SECONDS.

        First one of each test function for each way that tests take through the function with the fault, the tests of
        its own test file before others; then a second one, and so on.
        """
        first, last = mutant.around
        turns = Counter[tuple[str, frozenset[int]]]()
        ordered = []
        for test in sorted(self._reaching(mutant), key=lambda test: (self.reach[test]["seconds"], test)):
            way = frozenset(n for n in self.reach[test]["lines"].get(mutant.file, ()) if first <= n <= last)
            turns[test.partition("[")[0], way] += 1
            turn, elsewhere = turns[test.partition("[")[0], way], file_of(test) != own_tests(mutant.file)
            ordered.append((turn, elsewhere, self.reach[test]["seconds"], test))
        chosen: list[str] = []
        total = 0.0
        for _, elsewhere, seconds, test in sorted(ordered):
            total += seconds * elsewhere
            if not elsewhere or total <= SECONDS or not chosen:
                chosen.append(test)
        return chosen

    def _reaching(self, mutant: Mutant) -> list[str]:
        if self.runs_on_import(mutant):  # any test of the file may notice, and those of tables that modules write into
            return [t for t, r in self.reach.items() if mutant.file in r["lines"] or file_of(t) in TABLES]
        at = _lines(mutant)
        return [test for test, reached in self.reach.items() if at & set(reached["lines"].get(mutant.file, ()))]


def _lines(mutant: Mutant) -> set[int]:
    first, last = mutant.lines
    return set(range(min(first, mutant.line), last + 1))
