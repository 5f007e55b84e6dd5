from __future__ import annotations

import time

import pytest

from classlens.evaluate.stopwatch import Stopwatch


def test_time_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 101.0, 103.0, 107.0])  # at each beginning and end
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    watch = Stopwatch()
    with watch("outer"), watch("inner"):
        pass
    assert watch.take() == {"outer": 1.0 + 4.0, "inner": 2.0}
    assert watch.take() == {}
