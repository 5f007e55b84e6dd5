"""The watch on skipped tests."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from skips import Allowed, Skipped, read_list, unlisted

ROOT = Path(__file__).resolve().parents[1]
BROWSER = Allowed("tests/app", "needs chromium", "apt", ci=False)
CUDA = Allowed("tests/cli", "without CUDA", "no such machine", ci=True)
TWO_PROCESSES = ["-p", "xdist", "-n", "2", "--dist", "loadfile"]  # as `make unit` runs them


def test_what_is_listed_may_be_skipped_and_in_ci_less() -> None:
    browser, cuda = Skipped("tests/app/test_a.py::b", "needs chromium"), Skipped("tests/cli/c.py", "x without CUDA")
    other = [Skipped("tests/app/test_a.py::b", "no selenium"), Skipped("tests/d.py::e", "needs chromium")]
    assert unlisted([browser, cuda], [BROWSER, CUDA], in_ci=False) == []
    assert unlisted([browser, cuda], [BROWSER, CUDA], in_ci=True) == [browser]
    assert unlisted(other, [BROWSER, CUDA], in_ci=False) == other


def test_the_list_is_short_and_gives_reasons_that_tests_have() -> None:
    entries = read_list()
    assert len(entries) <= 5
    given = reasons_to_skip()
    for entry in entries:
        assert entry.why
        assert any(one.test.startswith(entry.test) and one.reason == entry.reason for one in given), entry


def test_every_reason_to_skip_is_on_the_list() -> None:
    """On a machine without a browser, for instance, `make test` would fail with one that is not."""
    left = unlisted(reasons_to_skip(), read_list(), in_ci=False)
    assert {one.reason for one in left} == {"needs torchvision"}  # which `make test` installs


def reasons_to_skip() -> set[Skipped]:
    """All that `skip` and `skipif` say in the tests, with their files."""
    found = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        file = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or file.startswith("tests/outside/"):
                continue
            name = ast.unparse(node.func)
            said = [word.value for word in node.keywords if name.endswith("mark.skipif") and word.arg == "reason"]
            said += node.args if name == "pytest.skip" else []
            found |= {Skipped(file, text.value) for text in said if isinstance(text, ast.Constant)}
    return found


def run(folder: Path, ci: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A run of pytest in a folder, with nothing but the watch."""
    changes = {"PYTHONPATH": str(ROOT / "tests"), "CI": ci, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "skips", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=folder, env=os.environ | changes, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("body", "ci", "arguments", "code"),
    [
        ("pytest.skip('tired')", "", [], 0),
        ("pytest.skip('tired')", "true", [], 1),
        ("pytest.skip('tired')", "", ["--listed-skips"], 1),
        ("pass", "true", ["--listed-skips"], 0),
        ("pytest.skip('tired')", "true", TWO_PROCESSES, 1),
        ("pass", "true", TWO_PROCESSES, 0),
    ],
)
def test_a_run_with_a_skip_that_is_not_listed_fails(
    body: str, ci: str, arguments: list[str], code: int, tmp_path: Path
) -> None:
    (tmp_path / "test_lazy.py").write_text(f"import pytest\n\ndef test_one():\n    {body}\n")
    done = run(tmp_path, ci, *arguments)
    assert done.returncode == code, done.stdout
    assert ("test_lazy.py::test_one: Skipped: tired" in done.stdout) == bool(code)


@pytest.mark.parametrize("arguments", [[], TWO_PROCESSES])
def test_a_whole_file_counts_too(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "test_lazy.py").write_text("import pytest\npytest.importorskip('nothing_of_that_name')\n")
    (tmp_path / "test_good.py").write_text("def test_one():\n    pass\n")
    assert run(tmp_path, "true", *arguments).returncode == 1
