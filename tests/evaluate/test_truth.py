from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from classlens.cli import app
from classlens.errors import MethodError
from classlens.evaluate import TESTS, Settings, options_of_tests
from classlens.evaluate.report import Report
from classlens.evaluate.truth import prove, shipped_pictures


def test_the_pictures_that_ship_are_windows_of_one(tmp_path: Path) -> None:
    folder = Path(shipped_pictures(tmp_path))
    windows = sorted(folder.iterdir())
    assert len(windows) == 16
    assert len({Image.open(window).tobytes() for window in windows}) == 16
    before = [window.stat().st_mtime_ns for window in windows]
    shipped_pictures(tmp_path)
    assert [window.stat().st_mtime_ns for window in windows] == before


def test_one_table_with_a_row_for_each_test(labelled: Path, tmp_path: Path) -> None:
    tests = tuple(name for name, test in TESTS.items() if test.proof and not test.own)
    options = options_of_tests(networks=("plain",), drawings=1, repeat_images=2)
    settings = Settings(
        tests=tests, everything=True, data=(str(labelled),), methods=("lrp", "random"), model="world:make", limit=4,
        options=options,
    )  # fmt: skip
    report = prove(settings, tmp_path)
    (table,) = report.tables
    assert [metric.name for metric in table.metrics] == ["lrp", "random"]
    amount, _ = table.rows["Set by hand (plain, asked for the logit): amount ↑"]
    assert 70 < amount.value < 75  # 100 but for three of the seven classes
    assert "Repeatability: correlation, shift ↑" in table.rows
    text = (tmp_path / "truth.md").read_text()
    assert "| test | lrp | random | n |" in text
    assert (tmp_path / "handset" / "report.html").exists()


def test_flags_of_tests_that_are_not_part_of_it_are_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["evaluate", "truth", "--out", str(tmp_path / "run"), "--fill", "blur"])
    assert done.exit_code == 2
    assert "--fill is for perturbation; do not use it with truth" in " ".join(done.output.split())


def test_without_methods_there_is_a_control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Settings] = []

    def noted(settings: Settings, *_: object) -> Report:
        asked.append(settings)
        return Report("", (), (), ())

    monkeypatch.setattr("classlens.evaluate.truth.prove", noted)
    for given in ([], ["--methods", "odam"]):
        done = CliRunner().invoke(app, ["evaluate", "truth", "--out", str(tmp_path / "run"), *given])
        assert done.exit_code == 0, done.output
    assert [settings.methods for settings in asked] == [("agf", "gradcam", "lrp", "random"), ("odam",)]
    nothing = CliRunner().invoke(app, ["evaluate", "truth", "--out", str(tmp_path / "run"), "--methods", ""])
    assert isinstance(nothing.exception, MethodError)
