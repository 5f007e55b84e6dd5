"""Where the time of a run goes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Seconds by stage. A stage inside another stops the outer one, so that they add up to the time that passed.

    >>> with watch("scores"):
    ...     with watch("further forward"):      # does not count as "scores"
    ...         ...
    """

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._stages: list[str] = []
        self._since = 0.0

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self._switch()
        self._stages.append(stage)
        try:
            yield
        finally:
            self._switch()
            self._stages.pop()

    def take(self) -> dict[str, float]:
        """What has gathered since the last call."""
        taken, self._seconds = self._seconds, defaultdict(float)
        return dict(taken)

    def _switch(self) -> None:
        now = time.perf_counter()
        if self._stages:
            self._seconds[self._stages[-1]] += now - self._since
        self._since = now
