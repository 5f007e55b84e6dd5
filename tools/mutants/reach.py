"""Which tests reach which lines, and how long each takes: measured once, and again for tests that have changed.

Lines are kept relative to their function. If the function has changed since, all of its lines count as reached.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import pytest
from faults import Mutant, functions
from fork import forked, waited_for
from where import PACKAGE, QUIET, REACH, ROOT, TABLES, near_tests, source_files

Reach = dict[str, dict[str, Any]]  # test -> {"seconds": 0.1, "lines": {file: [1, 2, ...]}}
Lines = dict[str, set[int]]  # by file
Functions = Mapping[str, tuple[int, int, str]]  # first line, last line and version by name


def measured(tests: Sequence[str], anew: bool = True) -> Reach:
    """The time of every test and the lines of the sources that it reaches; without `anew`, of those known already.

    What was measured is kept in batches: the versions of the functions at that time, and what the tests reached.
    """
    states = _states(tests)
    batches = json.loads(REACH.read_text()) if REACH.exists() else []
    known = {test: state for batch in batches for test, state in batch["states"].items()}
    todo = [test for test in tests if known.get(test) != states[test]]
    now = {file: functions((PACKAGE / file).read_text()) for file in source_files()}
    if todo and anew:
        print(f"measuring which lines {len(todo)} tests reach", flush=True)
        new = _traced(todo, Tracer.reached)
        for test in sorted(set(todo) - set(new)):
            print(f"fails or is skipped without any fault, so it is left out: {test}")
        reach = _with_lines(new, lambda source, lines: _by_function(lines, now[source]))
        versions = {file: {name: of for name, (_, _, of) in named.items()} for file, named in now.items()}
        batches.append({"states": {test: states[test] for test in reach}, "versions": versions, "reach": reach})
        REACH.write_text(json.dumps(batches))
    found = {test: reached for batch in batches for test, reached in _as_it_is_now(batch, now).items()}
    return {test: found[test] for test in tests if test in found}


def _states(tests: Sequence[str]) -> dict[str, str]:
    """A text for each test that changes when its function does."""
    files = {file: functions((ROOT / file).read_text()) for file in {file_of(test) for test in tests}}
    names = {test: test.partition("[")[0].split("::", 1)[1].replace("::", ".") for test in tests}
    return {test: files[file_of(test)].get(name, (0, 0, ""))[2] for test, name in names.items()}


def _as_it_is_now(batch: Mapping[str, Any], now: Mapping[str, Functions]) -> Reach:
    """What tests reach, in lines of the sources as they are now."""
    then = batch["versions"]
    return _with_lines(batch["reach"], lambda file, places: _lines_now(places, then[file], now.get(file, {})))


def _with_lines(reach: Reach, change: Callable[[str, Any], Any]) -> Reach:
    return {
        test: reached | {"lines": {source: change(source, lines) for source, lines in reached["lines"].items()}}
        for test, reached in reach.items()
    }


def _by_function(lines: Sequence[int], named: Functions) -> dict[str, list[int]]:
    """Lines as the distances from the beginnings of their functions."""
    found = {name: [n - first for n in lines if first <= n <= last] for name, (first, last, _) in named.items()}
    return {name: at for name, at in found.items() if at}


def _lines_now(places: Mapping[str, Sequence[int]], then: Mapping[str, str], named: Functions) -> list[int]:
    """The lines that such distances mean in the source as it is now."""
    lines: list[int] = []
    for name, at in places.items():
        if name in named:
            first, last, of = named[name]
            lines += [first + n for n in at] if then[name] == of else range(first, last + 1)
    return sorted(lines)


def collected(files: Sequence[str]) -> tuple[list[str], Lines]:
    """The tests in files, and the lines that run when they are imported, before any test runs."""
    found = _traced(
        ["--collect-only", *files],
        lambda tracer: {"tests": tracer.found, "lines": {f: sorted(at) for f, at in tracer.now.items()}},
    )
    return found["tests"], {file: set(lines) for file, lines in found["lines"].items()}


def _traced(arguments: Sequence[str], result: Callable[[Tracer], dict[str, Any]]) -> dict[str, Any]:
    """What a tracer saw of a run of pytest in a fork."""
    REACH.parent.mkdir(exist_ok=True)
    log, out = REACH.with_suffix(".log"), REACH.with_suffix(".part")

    def work() -> int:
        tracer = Tracer()
        ended = pytest.main([*arguments, *(flag for flag in QUIET if flag != "-x")], plugins=[tracer])
        out.write_text(json.dumps(result(tracer)))
        return int(ended not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED))

    if waited_for(forked(work, log)):
        sys.exit(f"the tests cannot be run: {log}")
    found: dict[str, Any] = json.loads(out.read_text())
    return found


class Tracer:
    """A pytest plugin that writes down, for each test, its time and the lines it reaches."""

    def __init__(self) -> None:
        self.files = {str(PACKAGE / file): file for file in source_files()}
        self.tests: Reach = {}
        self.fixtures: dict[str, Lines] = {}  # by test file: what they reach counts for all its tests
        self.now: Lines = {}
        self.found: list[str] = []
        self.failed: list[str] = []

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

    def pytest_collection_finish(self, session: Any) -> None:
        self.found = [item.nodeid for item in session.items]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: Any) -> Iterator[None]:
        yield from self._during(self.fixtures.setdefault(file_of(item.nodeid), {}))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Iterator[None]:
        forget()
        lines: Lines = {}
        begun = time.process_time()
        yield from self._during(lines)
        self.tests[item.nodeid] = {"seconds": time.process_time() - begun, "lines": lines}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def reached(self) -> Reach:
        """What each test reached, its fixtures included. A test that fails without any fault cannot judge one."""
        for test in self.failed:
            self.tests.pop(test, None)
        for test, reached in self.tests.items():
            lines = reached["lines"]
            for file, more in self.fixtures[file_of(test)].items():
                lines.setdefault(file, set()).update(more)
            reached["lines"] = {file: sorted(at) for file, at in lines.items()}
        return self.tests


def forget() -> None:
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

    def __init__(self, most: float, reach: Reach, imported: Lines) -> None:
        self.most = most  # seconds that the tests of one fault take together
        self.reach, self.imported = reach, imported
        self.known: dict[tuple[Any, ...], list[str]] = {}  # what `_chosen` gave for a statement
        self.kills = Counter[tuple[str, str, str]]()  # of each test, by file and function of the faults
        self.tests_at: dict[tuple[str, int], list[str]] = {}  # by file and line
        for test, reached in self.reach.items():
            for file, lines in reached["lines"].items():
                for line in lines:
                    self.tests_at.setdefault((file, line), []).append(test)

    def runs_on_import(self, mutant: Mutant) -> bool:
        """Whether the code of a fault has run before any test does: outside of functions, or called from there."""
        return not mutant.owner or bool(_lines(mutant) & self.imported.get(mutant.file, set()))

    def seconds(self, tests: Sequence[str]) -> float:
        return float(sum(self.reach[test]["seconds"] for test in tests))

    def killed(self, mutant: Mutant, test: str) -> None:
        """Write down which test killed a fault: it will try others of this function first."""
        self.kills[mutant.file, mutant.owner, test] += 1

    def tests_for(self, mutant: Mutant) -> list[str]:
        """The tests that reach a fault, the most promising first: kills of this function so far, by time."""
        at = mutant.file, mutant.line, mutant.lines, mutant.around
        if at not in self.known:
            self.known[at] = self._chosen(mutant)
        kills = {test: self.kills[mutant.file, mutant.owner, test] for test in self.known[at]}
        return sorted(self.known[at], key=lambda test: -kills[test] / (0.1 + self.reach[test]["seconds"]))

    def _chosen(self, mutant: Mutant) -> list[str]:
        """Tests that reach a fault, as many as the time allows.

        Quick ones before slow ones. The second test of a function that takes the same way through the function with the
        fault counts as twice as slow, the third as three times; so does one outside of the fault's own test file.
        """
        ways = self._ways(mutant)
        turns = Counter[tuple[str, frozenset[int]]]()
        price: dict[str, float] = {}
        for test in sorted(self._reaching(mutant), key=lambda test: (self.reach[test]["seconds"], test)):
            way = test.partition("[")[0], frozenset(ways.get(test, ()))
            turns[way] += 1
            factor = 1 if file_of(test) in near_tests(mutant.file) else 3
            price[test] = factor * turns[way] * (0.02 + self.reach[test]["seconds"])
        chosen: list[str] = []
        total = 0.0
        for test in sorted(price, key=lambda test: price[test]):
            seconds = self.reach[test]["seconds"]
            if not chosen or total + seconds <= self.most:
                chosen.append(test)
                total += seconds
        return chosen

    def _ways(self, mutant: Mutant) -> dict[str, list[int]]:
        """The lines of the function with the fault that each test reaches."""
        first, last = mutant.around
        ways: dict[str, list[int]] = {}
        for line in range(first, last + 1):
            for test in self.tests_at.get((mutant.file, line), ()):
                ways.setdefault(test, []).append(line)
        return ways

    def _reaching(self, mutant: Mutant) -> set[str]:
        if self.runs_on_import(mutant):  # tests of the file, and of the tables that modules write into
            near = {test for test in self.reach if file_of(test) in near_tests(mutant.file)}
            if near_tests(mutant.file) != TABLES:
                return near
            return near | {test for test, reached in self.reach.items() if mutant.file in reached["lines"]}
        return {test for line in _lines(mutant) for test in self.tests_at.get((mutant.file, line), ())}


def _lines(mutant: Mutant) -> set[int]:
    first, last = mutant.lines
    return set(range(min(first, mutant.line), last + 1))
