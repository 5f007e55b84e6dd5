"""Faults, the tests that reach them, and what came of it.

A fault in a function is put into the function that is there, so that packages and tests are imported only once; many
share a fork (`batch.py`). A fault in what runs on import has a fork of its own: the changed statement is run again in
its module, and a kill counts if the unchanged statement runs and the test passes after it. What survives that is tried
in a fork of a process without the package, whose import hook gives the changed module.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import os
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
from batch import MEMORY, UNREACHED, Outcome, tried_in_batches
from faults import Mutant
from fork import FAILED, forked
from reach import Plan, file_of
from where import PACKAGE, QUIET

IMPORT = "import"  # what kills a fault with which the module cannot be imported
Keep = Callable[[Mutant, Outcome], None]
Attempt = Callable[[Mutant, Sequence[str], int], int]  # a fault, its tests, where to write which of them failed


def try_on_import(todo: Sequence[Mutant], sources: Mapping[str, str], plan: Plan, jobs: int, keep: Keep) -> None:
    """Faults in what runs on import: every fork imports the package anew."""

    def attempt(mutant: Mutant, tests: Sequence[str], answer: int) -> int:
        sys.meta_path.insert(0, Changed(mutant.file, mutant.applied(sources[mutant.file])))
        files = dict.fromkeys(file_of(test) for test in tests)
        return int(pytest.main([*files, *QUIET], plugins=[Collected(lambda items: _run(items, tests, answer))]))

    for mutant, outcome in _tried(todo, plan, jobs, attempt):
        keep(mutant, outcome)


def try_in_place(
    todo: Sequence[Mutant], sources: Mapping[str, str], plan: Plan, jobs: int, keep: Keep, files: Sequence[str]
) -> int:
    """Faults in what is loaded: the tests are collected here, once, and every fork runs some of them. 1: interrupted.

    What survives in a statement that ran on import is not kept: other modules may hold what it had made.
    """

    def loop(items: Mapping[str, Any]) -> None:
        functions = [f for f in gc.get_objects() if isinstance(f, FunctionType)]
        functions = [f for f in functions if f.__code__.co_filename.startswith(str(PACKAGE))]
        gc.freeze()  # or every fork copies what the garbage collector looks at

        codes = {file: _codes(source, PACKAGE / file) for file, source in sources.items()}

        def put(mutant: Mutant) -> Callable[[], None]:
            new = _codes(mutant.applied(sources[mutant.file]), PACKAGE / mutant.file)
            return replace(functions, codes[mutant.file], new, mutant.owner)

        def attempt(mutant: Mutant, tests: Sequence[str], answer: int) -> int:
            run_again(mutant, sources[mutant.file], sources[mutant.file])
            try:
                run_again(mutant, sources[mutant.file], mutant.applied(sources[mutant.file]))
            except Exception:
                os.write(answer, IMPORT.encode())
                return 1
            return _run(items, tests, answer)

        def unchanged(mutant: Mutant, tests: Sequence[str], answer: int) -> int:
            run_again(mutant, sources[mutant.file], sources[mutant.file])
            return _run(items, tests, answer)

        in_functions = [m for m in todo if not plan.runs_on_import(m)]
        for mutant, outcome in tried_in_batches(in_functions, plan, jobs, put, items):
            keep(mutant, outcome)
        for mutant, outcome in _tried([m for m in todo if plan.runs_on_import(m)], plan, jobs, attempt):
            by = outcome["by"]  # IMPORT: the unchanged statement did run again, just before the changed one failed
            if by == IMPORT or (by in items and _passes(mutant, by, unchanged)):
                keep(mutant, outcome)

    ended = pytest.main([*files, *QUIET], plugins=[Collected(loop)]) if todo else 0
    return int(ended == pytest.ExitCode.INTERRUPTED)


class Collected:
    """A pytest plugin that hands the collected tests to a function instead of running them."""

    def __init__(self, loop: Callable[[dict[str, Any]], Any]) -> None:
        self.loop = loop

    def pytest_runtestloop(self, session: Any) -> bool:
        if session.testsfailed:  # a file cannot be imported
            raise session.Failed("not collected")
        self.loop({item.nodeid: item for item in session.items})
        return True


def _run(items: Mapping[str, Any], tests: Sequence[str], answer: int) -> int:
    """Run tests in this order; the first that fails ends the process."""
    chosen = [items[test] for test in tests if test in items]
    if len(chosen) < len(tests):  # their parameters come from the table that the fault is in
        os.write(answer, b"collection")
        return 1
    chosen[0].config.pluginmanager.register(Watcher(answer))
    for item, following in zip(chosen, [*chosen[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    return 0


class Watcher:
    """A pytest plugin that ends the process with the first test that fails."""

    def __init__(self, answer: int) -> None:
        self.answer = answer

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            os.write(self.answer, report.nodeid.encode())
            os._exit(1)


# ---------------------------------------------------------------------------------------------------- the forks


def _tried(todo: Sequence[Mutant], plan: Plan, jobs: int, attempt: Attempt) -> Iterator[tuple[Mutant, Outcome]]:
    """Each fault with its outcome, `jobs` at a time."""
    waiting, running = list(reversed(todo)), list[Trial]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                mutant = waiting.pop()
                if tests := plan.tests_for(mutant):
                    running.append(_begun(mutant, tests, plan.seconds(tests), attempt))
                else:
                    yield mutant, UNREACHED
            for trial in list(running):
                outcome = trial.outcome()
                if outcome is not None:
                    running.remove(trial)
                    plan.killed(trial.mutant, outcome["by"])
                    yield trial.mutant, outcome
            time.sleep(0.01)
    finally:  # interrupted: no fork goes on alone
        for trial in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(trial.pid, signal.SIGKILL)


def _passes(mutant: Mutant, test: str, attempt: Attempt) -> bool:
    """Whether a test passes in a fork."""
    trial = _begun(mutant, [test], 10.0, attempt)
    while (outcome := trial.outcome()) is None:
        time.sleep(0.01)
    return outcome["outcome"] == "survived"


def _begun(mutant: Mutant, tests: Sequence[str], expected: float, attempt: Attempt) -> Trial:
    read, write = os.pipe()
    seconds = int(20 + 5 * expected)  # of the processor: a busy machine kills no fault

    def work() -> int:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        return attempt(mutant, tests, write)

    pid = forked(work)
    os.close(write)
    return Trial(mutant, pid, read, time.monotonic(), 20.0 * seconds)


@dataclass
class Trial:
    """A fault being tried."""

    mutant: Mutant
    pid: int
    answer: int
    begun: float
    limit: float  # for one that waits for ever

    def outcome(self) -> Outcome | None:
        """None while it runs."""
        found, status, used = os.wait4(self.pid, os.WNOHANG)
        if not found and time.monotonic() - self.begun < self.limit:
            return None
        if not found:
            os.kill(self.pid, signal.SIGKILL)
            _, status, used = os.wait4(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code == FAILED:
            sys.exit(f"this fault could not be tried: {self.mutant.file}:{self.mutant.line}  {self.mutant.key}")
        by = os.read(self.answer, 4096).decode() if code else ""
        os.close(self.answer)
        by = by or (f"signal {-code}" if code < 0 else IMPORT if code else "")
        seconds = round(used.ru_utime + used.ru_stime, 2)
        return {"outcome": "killed" if by else "survived", "by": by, "seconds": seconds}


# ------------------------------------------------------------------------------------------------ the changed code


Codes = dict[tuple[str, int], CodeType]  # by name, and turn among those of this name


def replace(functions: Sequence[FunctionType], old: Codes, new: Codes, owner: str) -> Callable[[], None]:
    """Give the functions called `owner`, and those inside it, the code that a changed source has for them.

    Returns a function that gives them their own code back.
    """
    names = {code: name for name, code in old.items() if f"{name[0]}.".startswith(f"{owner}.")}
    files = {code.co_filename for code in names}  # codes that do the same are equal, wherever they are
    there = [f for f in functions if f.__code__ in names and f.__code__.co_filename in files]
    if not there:
        raise LookupError(f"{owner} is not imported")
    own = [(function, function.__code__) for function in there]
    for function, code in own:
        if names[code] in new:
            function.__code__ = new[names[code]]

    def restore() -> None:
        for function, code in own:
            function.__code__ = code

    return restore


def can_run_again(mutant: Mutant, source: str) -> bool:
    """Whether a fault is in a statement that can run a second time: not in a class, nor inside of a function."""
    statement = ast.parse(source).body[_statement_at(mutant, source)]
    if isinstance(statement, ast.FunctionDef):
        return mutant.line < statement.body[0].lineno
    return isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr)


def run_again(mutant: Mutant, source: str, changed: str) -> None:
    """Run the statement that a fault is in, as `changed` has it, in the module that is loaded."""
    statement = ast.parse(changed).body[_statement_at(mutant, source)]
    code = compile(ast.Module([statement], []), str(PACKAGE / mutant.file), "exec", dont_inherit=True)
    exec(code, vars(sys.modules[module_name(mutant.file)]))


def _statement_at(mutant: Mutant, source: str) -> int:
    """The number of the statement of the module that a fault is in."""
    body = ast.parse(source).body
    return next(i for i, statement in enumerate(body) if mutant.line <= (statement.end_lineno or 0))


def module_name(file: str) -> str:
    """`methods/agf/terms.py` is `classlens.methods.agf.terms`."""
    return "classlens." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _codes(source: str, path: Path) -> Codes:
    """All code objects of a source file."""
    found, turns = {}, Counter[str]()
    waiting = [compile(source, str(path), "exec", dont_inherit=True)]
    while waiting:
        code = waiting.pop(0)
        turns[code.co_qualname] += 1
        found[code.co_qualname, turns[code.co_qualname]] = code
        waiting += [part for part in code.co_consts if isinstance(part, CodeType)]
    return found


class Changed(importlib.abc.MetaPathFinder):
    """An import hook that gives one module another source."""

    def __init__(self, file: str, source: str) -> None:
        self.name = module_name(file)
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
