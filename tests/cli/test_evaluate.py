from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from classlens.cli import app, main
from classlens.evaluate.store import Store


def test_the_command_prints_tables_and_writes_files(labelled: Path, tmp_path: Path) -> None:
    words = (
        "evaluate pointing --model world:make --methods gradcam,random --shapes 2x1 --limit 9 --threads 1 --device cpu"
    )
    arguments = [*words.split(), "--data", str(labelled), "--out", str(tmp_path / "run")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "Pointing game 2x1: classes" in done.stdout
    assert "Chance is 50.0" in done.stdout
    assert "scores" in done.stderr  # progress
    for name in ("table.md", "table.csv", "curves.png", "report.html", "manifest.json"):
        assert (tmp_path / "run" / name).stat().st_size > 100
    assert len(Store(tmp_path / "run").read("pointing")) == 2 * 8


def test_a_wrong_folder_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["evaluate", "all", "--data", str(tmp_path), "--model", "world:make", "--out", str(tmp_path / "run")]
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert "has no known layout" in error
    assert not (tmp_path / "run").exists()


def test_an_unknown_method_is_one_line(labelled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["evaluate", "all", "--data", str(labelled), "--methods", "agfx", "--out", str(tmp_path / "run")])
    assert "there is no method 'agfx'; did you mean agf" in capsys.readouterr().err
