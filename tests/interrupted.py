"""Processes that die, or that another one overtakes, at any of their writes; without a second process.

>>> with interrupted(3, die):
...     run(settings, out)      # raises Killed at its third write
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock


class Killed(BaseException):
    """What stands for a kill: no handler of the product catches it, and cleaning up fails from then on."""


def die() -> None:
    raise Killed


@contextmanager
def interrupted(at: int, then: Callable[[], None], after: bool = False) -> Iterator[None]:
    """Before (or after) the n-th file is put in its place, call `then`. A killed process changes no file any more."""
    seen, dead = 0, False
    replace, unlink, fsync = Path.replace, Path.unlink, os.fsync

    def interrupt() -> None:
        nonlocal dead
        try:
            then()
        except Killed:
            dead = True
            raise

    def replacing(self: Path, target: Path) -> Path:
        nonlocal seen
        alive()
        seen += 1
        here = seen == at
        if here and not after:
            interrupt()
        put = replace(self, target)
        if here and after:
            interrupt()
        return put

    def alive() -> None:
        if dead:
            raise Killed

    def unlinking(self: Path, missing_ok: bool = False) -> None:
        alive()
        unlink(self, missing_ok)

    def syncing(file: int) -> None:
        alive()
        fsync(file)

    with (
        mock.patch.object(Path, "replace", replacing),
        mock.patch.object(Path, "unlink", unlinking),
        mock.patch.object(os, "fsync", syncing),
    ):
        yield
