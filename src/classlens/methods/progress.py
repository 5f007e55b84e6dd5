"""How far a long method is, for whoever wants to show it.

    >>> def show(label: str, done: int, total: int) -> None:
    ...     print(f"{label}: {done} of {total}")
    >>> with reporting(show):
    ...     explain(model, image, method="rise")

The callback is called at the start (0 done) and after each step; it belongs to the thread (and task) that set it.
Without `reporting` nothing is called.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Callback = Callable[[str, int, int], None]  # (what runs, steps done, steps in all)
T = TypeVar("T")

_callback: ContextVar[Callback | None] = ContextVar("classlens_progress", default=None)


@contextmanager
def reporting(callback: Callback) -> Iterator[None]:
    """Within this block, methods report each step of their long loops to `callback`."""
    token = _callback.set(callback)
    try:
        yield
    finally:
        _callback.reset(token)


def ticker(total: int, label: str) -> Callable[[], None]:
    """A function to call after each of `total` steps, for loops that are someone else's."""
    report, done = _callback.get(), itertools.count(1)
    if report is None:
        return lambda: None
    report(label, 0, total)
    return lambda: report(label, next(done), total)


def track(steps: Iterable[T], total: int, label: str) -> Iterator[T]:
    """The same steps, each reported when it is done.

    >>> list(track("abc", 3, "letters"))
    ['a', 'b', 'c']
    """
    tick = ticker(total, label)
    for step in steps:
        yield step
        tick()
