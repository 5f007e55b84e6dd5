"""Progress callbacks for long-running functions.

    >>> def show(what: str, done: int, total: int) -> None:
    ...     print(f"{what}: {done} of {total}")
    >>> report(model, "photos", "report.html", progress=show)

Functions that process many images take such a callback. A method cannot take one: it reports to the callback that
`reporting` set, if any.

    >>> with reporting(show):
    ...     explain(model, image, method="rise")

The callback is called at the start (0 done) and after each step. It is local to the thread (and task) that set it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeVar

T = TypeVar("T")


class Progress(Protocol):
    """A callback that gets a label, the number of steps done and their total: `progress("images", 3, 200)`."""

    def __call__(self, what: str, done: int, total: int, /) -> None: ...


def silent(what: str, done: int, total: int, /) -> None:
    """Shows nothing."""


_listener: ContextVar[Progress] = ContextVar("classlens_progress", default=silent)


@contextmanager
def reporting(progress: Progress) -> Iterator[None]:
    """Within this block, methods report each step of their long loops to `progress`."""
    token = _listener.set(progress)
    try:
        yield
    finally:
        _listener.reset(token)


def listener() -> Progress:
    """The callback that `reporting` set, to pass to a function that takes one."""
    return _listener.get()


def ticker(total: int, label: str) -> Callable[[], None]:
    """A function to call after each of `total` steps, for loops inside other libraries."""
    report, done = listener(), itertools.count(1)
    report(label, 0, total)
    return lambda: report(label, next(done), total)


def track(steps: Iterable[T], total: int, label: str) -> Iterator[T]:
    """Yield the same steps and report each one when it is done.

    >>> list(track("abc", 3, "letters"))
    ['a', 'b', 'c']
    """
    tick = ticker(total, label)
    for step in steps:
        yield step
        tick()
