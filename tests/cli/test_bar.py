"""The command's progress bar: late on a terminal, lines elsewhere."""

from __future__ import annotations

import threading
import time

import pytest

from classlens.cli import bar as module
from classlens.cli.bar import Bar


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes stderr for a terminal
    monkeypatch.setenv("COLUMNS", "120")


def test_without_a_terminal_a_stage_ends_with_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with Bar() as bar:
        for clock[0], done in ((100.0, 0), (101.0, 1), (102.0, 2), (106.0, 3)):
            bar("pictures [a]", done, 3)
        bar("pictures [a]", 3, 3)  # told twice, printed once
        for clock[0], done in ((110.0, 0), (111.0, 1), (120.0, 3)):
            bar("drawing", done, 3)
    assert capsys.readouterr().err == "pictures [a]: 3 of 3, 0.50/s\ndrawing: 3 of 3, 0.30/s\n"


def test_without_a_terminal_a_long_stage_says_how_long_it_will_take(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with Bar() as bar:
        bar("pictures", 0, 100)
        for clock[0], done in ((110.0, 5), (140.0, 20), (141.0, 21)):
            bar("pictures", done, 100)
    assert capsys.readouterr().err == "pictures: 20 of 100, 0.50/s, 160 s left\n"


def test_a_new_stage_has_its_own_clock(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with Bar() as bar:
        for clock[0], what, done in ((100.0, "a", 0), (1100.0, "a", 9), (1100.0, "b", 0), (1140.0, "b", 4)):
            bar(what, done, 10)
    assert capsys.readouterr().err.splitlines()[-1] == "b: 4 of 10, 0.10/s, 60 s left"


@pytest.mark.usefixtures("terminal")
def test_a_short_run_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    before = threading.active_count()
    with Bar() as bar:
        bar("pictures", 1, 2)
    assert capsys.readouterr().err == ""
    assert threading.active_count() == before


def wait_for(bar: Bar) -> None:
    """Until the bar is drawn, however busy the machine is."""
    end = time.monotonic() + 60
    while not bar._bar.live.is_started and time.monotonic() < end:
        time.sleep(0.01)


@pytest.mark.usefixtures("terminal")
def test_a_long_run_shows_a_bar_that_steps_aside(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 0.0)
    with Bar() as bar:
        bar("pictures", 1, 20)
        wait_for(bar)
        with bar.aside():
            capsys.readouterr()
            time.sleep(0.2)
            assert capsys.readouterr().err == ""
        bar("pictures", 2, 20)
        wait_for(bar)
    shown = capsys.readouterr().err
    assert "pictures" in shown
    assert "2/20" in shown
