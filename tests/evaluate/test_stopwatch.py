from __future__ import annotations

import time

from classlens.evaluate.stopwatch import Stopwatch


def test_time_is_counted_once() -> None:
    watch = Stopwatch()
    with watch("outer"), watch("inner"):
        end = time.perf_counter() + 0.02
        while time.perf_counter() < end:
            pass
    taken = watch.take()
    assert taken["inner"] > 0.02 > taken["outer"]
    assert watch.take() == {}
