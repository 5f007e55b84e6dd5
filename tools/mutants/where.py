"""What is tried, which tests try it, and where the outcome goes: the one place that knows the repository."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "classlens"
SOURCES = "core/rules/*.py", "core/capture/fold.py", "methods/**/*.py"
FIRST = "core/", "methods/agf/"  # what is tried first: what every other method is built on, and the default one
TESTS = "tests/core", "tests/methods", "tests/test_explanation.py"
TABLES = ("tests/methods/test_registry.py",)  # tests of what modules put into tables when they are imported
WIDE = ("methods", "core/rules", "core/capture")  # folders of tests of many things
LEFT_ASIDE = ("tests/methods/test_zoo.py",)  # whole architectures, seconds each
QUIET = ("-x", "-q", "-s", "--no-header", "--tb=native", "--assert=plain", "-p", "no:cacheprovider")  # how pytest runs
SECONDS = 8.0  # what the tests of one fault take together
REACH = ROOT / "build" / "mutants_reach.json"
VERDICTS, SURVIVORS = (Path(__file__).with_name(name) for name in ("verdicts.txt", "survivors.toml"))
TABLE = ROOT / "tests" / "MUTANTS.md"


def source_files(only: Sequence[str] = ("",)) -> list[str]:
    """Paths inside the package, those that contain one of `only`."""
    files = sorted({path.relative_to(PACKAGE).as_posix() for glob in SOURCES for path in PACKAGE.glob(glob)})
    return [file for file in files if any(part in file for part in only)]


def test_files() -> list[str]:
    """Paths inside the repository."""
    places = [ROOT / place for place in TESTS]
    files = [file for place in places for file in (place.rglob("test_*.py") if place.is_dir() else [place])]
    return sorted({file.relative_to(ROOT).as_posix() for file in files} - set(LEFT_ASIDE))


@functools.cache
def near_tests(file: str) -> tuple[str, ...]:
    """The test file that mirrors a source file, those of its folder if that is about one thing, and of the tables."""
    path = Path(file)
    own = ROOT / f"tests/{path.parent}/test_{path.stem}.py"
    folder = {own} if path.parent.as_posix() in WIDE else {own, *own.parent.glob("test_*.py")}
    return *sorted(test.relative_to(ROOT).as_posix() for test in folder if test.exists()), *TABLES
