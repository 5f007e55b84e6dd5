"""Does a test fail when the code is wrong? One small fault at a time, and the tests that reach it.

    python tools/mutants.py                              # all of it; goes on where it was
    python tools/mutants.py --only linear.py --sample 40
    python tools/mutants.py --again                      # those that survived, after tests were added

torch is imported once; each fault is tried in a fork of this process, whose import hook gives it the changed module.
Which tests reach a line is measured first, and of these the quickest are run first. A fault that no test notices has
to stand in tools/mutants_survivors.toml with the reason why; tests/MUTANTS.md is the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import resource
import signal
import sys
import time
import tomllib
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import hypothesis
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from mutations import Mutant, mutants

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "classlens"
SOURCES = "core/rules/*.py", "core/capture/fold.py", "methods/**/*.py"
TESTS = "tests/core", "tests/methods", "tests/test_explanation.py", "tests/test_promises.py"
LEFT_ASIDE = ("tests/methods/test_zoo.py",)  # whole architectures: seconds each
ROWS, LINES = ROOT / "build" / "mutants.jsonl", ROOT / "build" / "mutants_lines.json"
REASONS, TABLE = ROOT / "tools" / "mutants_survivors.toml", ROOT / "tests" / "MUTANTS.md"
SECONDS, OTHERS, MEMORY = 12.0, 60, 6 * 2**30  # for one fault: tests that take this long, so many of other files, bytes
QUIET = ("-x", "-q", "--no-header", "--tb=short", "--assert=plain", "-p", "no:cacheprovider")


def main() -> None:
    """Try the faults that were not tried yet, and say what came of it."""
    args = _arguments()
    _warm_up()
    sources = {file: (PACKAGE / file).read_text() for file in _source_files(args.only)}
    reach = measured_lines()
    everything = [m for file, source in sources.items() for m in mutants(file, source)]
    chosen = random.Random(0).sample(everything, args.sample) if args.sample else everything
    rows = Rows(sources)
    todo = [m for m in chosen if (args.again and rows.survived(m)) or m not in rows]
    print(f"{len(chosen)} faults in {len(sources)} files, {len(todo)} to try")
    begun = time.monotonic()
    for done, (mutant, outcome) in enumerate(_tried(todo, sources, reach, args.jobs), start=1):
        rows.add(mutant, outcome)
        if outcome["outcome"] == "survived":
            print(f"survived  {mutant.file}:{mutant.line}  {mutant.key}", flush=True)
        if done % 100 == 0:
            print(f"{done} of {len(todo)}, {time.monotonic() - begun:.0f} s", flush=True)
    sys.exit(report(chosen, rows, write=args.only == [""] and not args.sample))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=[""], help="files whose path contains one of these")
    parser.add_argument("--sample", type=int, default=0, help="so many faults, always the same ones; else all")
    parser.add_argument("--jobs", type=int, default=2, help="faults tried at once")
    parser.add_argument("--again", action="store_true", help="try those again that survived")
    return parser.parse_args()


def _warm_up() -> None:
    """What takes long to import and is not ours. Nothing is computed here: threads would not survive the fork."""
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    for name in ("numpy", "captum.attr", "matplotlib", "PIL.Image", "torch._dynamo"):
        importlib.import_module(name)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    torch.set_num_threads(1)
    hypothesis.settings.register_profile("mutants", derandomize=True, database=None, deadline=None)
    hypothesis.settings.load_profile("mutants")
    gc.freeze()  # pytest collects garbage as it ends: half a second if it had to look at all of torch


def _source_files(only: Sequence[str] = ("",)) -> list[str]:
    files = sorted(path.relative_to(PACKAGE).as_posix() for glob in SOURCES for path in PACKAGE.glob(glob))
    return [file for file in files if any(part in file for part in only)]


def _digest(paths: Iterable[Path]) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(paths))).hexdigest()[:16]


def _tests_digest() -> str:
    return _digest((ROOT / "tests").rglob("*.py"))


# ------------------------------------------------------------------------------------------- which tests reach a line

Reach = dict[str, dict[str, Any]]  # test -> {"seconds": 0.1, "lines": {file: [1, 2, ...]}}


def measured_lines() -> Reach:
    """Every test's time and the lines of the sources it reaches; kept until sources or tests change."""
    state = _digest(PACKAGE / file for file in _source_files()) + _tests_digest()
    if LINES.exists() and (kept := json.loads(LINES.read_text()))["state"] == state:
        return kept["reach"]
    print("measuring which tests reach which lines", flush=True)
    LINES.parent.mkdir(exist_ok=True)
    _, status = os.waitpid(_forked(lambda: _measure(state), str(LINES.with_suffix(".log"))), 0)
    if status:
        sys.exit(f"the tests fail without any fault; {LINES.with_suffix('.log')} has them")
    return json.loads(LINES.read_text())["reach"]


def _measure(state: str) -> int:
    ignored = [f"--ignore={path}" for path in LEFT_ASIDE]
    tracer = Tracer()
    failed = pytest.main([*TESTS, *ignored, *QUIET], plugins=[tracer])
    LINES.write_text(json.dumps({"state": state, "reach": tracer.reach()}))
    return int(failed)


class Tracer:
    """A pytest plugin that writes down, for each test, its time and the lines it reaches."""

    def __init__(self) -> None:
        self.files = {str(PACKAGE / file): file for file in _source_files()}
        self.tests: dict[str, dict[str, Any]] = {}
        self.shared: dict[str, dict[str, set[int]]] = {}  # by test file: lines that fixtures reach, for all its tests
        self.now: dict[str, set[int]] = {}

    def trace(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        file = self.files.get(frame.f_code.co_filename)
        if file is None:
            return None
        lines = self.now.setdefault(file, set())

        def line(frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
            lines.add(frame.f_lineno)
            return line

        return line(frame, event, arg)

    def _during(self, into: dict[str, set[int]]) -> Iterator[None]:
        self.now = into
        sys.settrace(self.trace)
        try:
            yield
        finally:
            sys.settrace(None)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: Any) -> Iterator[None]:
        yield from self._during(self.shared.setdefault(item.nodeid.partition("::")[0], {}))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Iterator[None]:
        begun, lines = time.perf_counter(), {}
        yield from self._during(lines)
        self.tests[item.nodeid] = {"seconds": time.perf_counter() - begun, "lines": lines}

    def reach(self) -> Reach:
        found: Reach = {}
        for test, measured in self.tests.items():
            lines = measured["lines"]
            for file, more in self.shared.get(test.partition("::")[0], {}).items():
                lines.setdefault(file, set()).update(more)
            found[test] = measured | {"lines": {file: sorted(at) for file, at in lines.items()}}
        return found


def tests_for(mutant: Mutant, reach: Reach) -> list[str]:
    """The tests that reach a fault: those of its own test file, then the quickest, one of each function at a time."""
    first, last = mutant.lines
    at = set(range(first, last + 1))
    reaching = [test for test, measured in reach.items() if at & set(measured["lines"].get(mutant.file, ()))]
    if mutant.on_import:  # any test of the file may notice
        reaching = [test for test, measured in reach.items() if mutant.file in measured["lines"]]
    own_file = f"tests/{Path(mutant.file).parent}/test_{Path(mutant.file).stem}.py"
    turns: dict[str, int] = {}
    ordered = []
    for test in sorted(reaching, key=lambda test: (reach[test]["seconds"], test)):
        file, function = test.partition("::")[0], test.partition("[")[0]
        turns[function] = turns.get(function, 0) + 1
        ordered.append((file != own_file, turns[function], reach[test]["seconds"], test))
    chosen, total, others = [], 0.0, 0
    for elsewhere, _, seconds, test in sorted(ordered):
        total, others = total + seconds, others + elsewhere
        if chosen and (total > SECONDS or others > OTHERS):
            break
        chosen.append(test)
    return chosen


# ------------------------------------------------------------------------------------------------- one fault, one fork


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


def _try(mutant: Mutant, source: str, tests: Sequence[str], answer: int) -> int:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    sys.meta_path.insert(0, Changed(mutant.file, mutant.applied(source)))
    return int(pytest.main([*tests, *QUIET], plugins=[Watcher(tests, answer)]))


def _forked(work: Callable[[], int], says: str = os.devnull) -> int:
    """Run a function in a fork of this process, with what it says into a file; gives its id."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        file = os.open(says, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        for stream in (0, 1, 2):
            os.dup2(file, stream)
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@dataclasses.dataclass
class Trial:
    """A fault being tried in a fork."""

    mutant: Mutant
    pid: int
    answer: int
    begun: float
    limit: float

    def outcome(self) -> dict[str, Any] | None:
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


def _tried(
    todo: Sequence[Mutant], sources: dict[str, str], reach: Reach, jobs: int
) -> Iterator[tuple[Mutant, dict[str, Any]]]:
    waiting, running = list(reversed(todo)), list[Trial]()
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


def _begun(mutant: Mutant, source: str, tests: Sequence[str], reach: Reach) -> Trial:
    read, write = os.pipe()
    expected = sum(reach[test]["seconds"] for test in tests)
    pid = _forked(lambda: _try(mutant, source, tests, write))
    os.close(write)
    return Trial(mutant, pid, read, time.monotonic(), 30 + 10 * expected)


# --------------------------------------------------------------------------------------------------------- outcomes


class Rows:
    """What was tried already, a line of JSON each; a row counts while its source file is as it was."""

    def __init__(self, sources: dict[str, str]) -> None:
        self.versions = {file: hashlib.sha256(text.encode()).hexdigest()[:12] for file, text in sources.items()}
        lines = ROWS.read_text().splitlines() if ROWS.exists() else []
        rows = [json.loads(line) for line in lines]
        self.rows = {(r["file"], r["key"]): r for r in rows if self.versions.get(r["file"]) == r["version"]}

    def __contains__(self, mutant: Mutant) -> bool:
        return (mutant.file, mutant.key) in self.rows

    def survived(self, mutant: Mutant) -> bool:
        return mutant in self and self.rows[mutant.file, mutant.key]["outcome"] == "survived"

    def add(self, mutant: Mutant, outcome: dict[str, Any]) -> None:
        row = {"file": mutant.file, "key": mutant.key, "version": self.versions[mutant.file], **outcome}
        self.rows[mutant.file, mutant.key] = row
        ROWS.parent.mkdir(exist_ok=True)
        with ROWS.open("a") as out:
            out.write(json.dumps(row) + "\n")


def report(chosen: Sequence[Mutant], rows: Rows, write: bool) -> int:
    """Print what survived without a reason and, after a whole run, write the table; gives the exit code."""
    entries = tomllib.loads(REASONS.read_text())["survivors"] if REASONS.exists() else []
    reasons = {(entry["file"], key): entry["reason"] for entry in entries for key in entry["mutants"]}
    survivors = [m for m in chosen if rows.survived(m)]
    unexplained = [m for m in survivors if (m.file, m.key) not in reasons]
    for mutant in unexplained:
        print(f"no test fails, and no reason is given: {mutant.file}:{mutant.line}  {mutant.key}")
    stale = set(reasons) - {(m.file, m.key) for m in survivors}
    if write:
        for file, key in sorted(stale):
            print(f"listed, but it does not survive: {file}  {key}")
        TABLE.write_text(_table(chosen, rows, entries))
    share = 1 - len(survivors) / max(len(chosen), 1)
    print(
        f"{len(chosen)} faults, {len(survivors)} survived, {100 * share:.1f} % killed, {len(unexplained)} unexplained"
    )
    return int(bool(unexplained) or share < 0.95 or bool(write and stale))


def _table(chosen: Sequence[Mutant], rows: Rows, entries: Sequence[dict[str, Any]]) -> str:
    lines = [
        "# Mutants", "",
        "`make mutants` puts one small fault at a time into the maths (`tools/mutations.py` has the kinds) and runs",
        "the tests that reach it. A fault is killed when a test fails. Survivors are listed below with the reason.", "",
        "| file | faults | killed | survived | killed, % |", "|---|---|---|---|---|",
    ]  # fmt: skip
    files = list(dict.fromkeys(m.file for m in chosen))
    for name, of_file in [*((f"`{f}`", [m for m in chosen if m.file == f]) for f in files), ("all", list(chosen))]:
        survived = sum(rows.survived(m) for m in of_file)
        count = len(of_file)
        if count:
            share = 100 * (count - survived) / count
            lines.append(f"| {name} | {count} | {count - survived} | {survived} | {share:.1f} |")
    lines += ["", "## Survivors", ""]
    for entry in entries:
        lines += [f"`{entry['file']}`: {entry['reason']}", "", *(f"    {key}" for key in entry["mutants"]), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
