"""The latest click wins: an older drawing in the same browser ends when it is no longer wanted."""

from __future__ import annotations

from collections.abc import Callable

from classlens.app.studio import OutOfDate


class Turn:
    """Lets only the latest click draw in a visitor's browser."""

    def __init__(self) -> None:
        self._latest = 0

    def take(self) -> Callable[[], None]:
        """Start a new drawing; the returned function raises `OutOfDate` once another has started."""
        self._latest += 1
        mine = self._latest

        def still_wanted() -> None:
            if mine != self._latest:
                raise OutOfDate

        return still_wanted
