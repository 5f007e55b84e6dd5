"""How far something long has come, for whoever wants to show it.

    >>> def show(what: str, done: int, total: int) -> None:
    ...     print(f"{what}: {done} of {total}")
    >>> report(model, "photos", "report.html", progress=show)

Functions that work through many images take such a callback. A method of explanation cannot: it reports to the
callback of `reporting`, if there is one.

    >>> with reporting(show):
    ...     explain(model, image, method="rise")

It is called at the start (0 done) and after each step, and belongs to the thread (and task) that set it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeVar

T = TypeVar("T")


class Progress(Protocol):
    """Is told what runs, how many steps are done, and of how many: `progress("pictures", 3, 200)`."""

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
    """The callback that `reporting` set, to hand on to a function that takes one."""
    return _listener.get()


def ticker(total: int, label: str) -> Callable[[], None]:
    """A function to call after each of `total` steps, for loops that are someone else's."""
    report, done = listener(), itertools.count(1)
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
