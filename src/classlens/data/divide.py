"""Which pictures of a data set are taken: orders that a seed decides, halves, and pictures held out.

    >>> [path.name for path in shuffled([Path("a.jpg"), Path("b.jpg"), Path("d.jpg")], seed=2)]
    ['b.jpg', 'd.jpg', 'a.jpg']
    >>> half_of("val/cat/a.jpg")
    'A'

Everything depends on names and seeds alone, never on the machine, the folder or the other pictures.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from classlens.files import draw_key


class Named(Protocol):
    """Whatever has a name of its own: an item, an animal, a path."""

    @property
    def name(self) -> str: ...


Thing = TypeVar("Thing", bound=Named)

EVERY = 5  # without a split of its own, every fifth picture of a data set is held out


def shuffled(things: Iterable[Thing], seed: int) -> list[Thing]:
    """In an order that only the names and the seed decide; so the first N of more things are mostly the same."""
    return sorted(things, key=lambda thing: draw_key(seed, thing.name))


def hold_out(things: Sequence[Thing], seed: int) -> tuple[list[Thing], list[Thing]]:
    """Things to learn from, and every fifth of a shuffled order to judge with; both in the order given."""
    held_out = {thing.name for thing in shuffled(things, seed)[::EVERY]}
    learnt = [thing for thing in things if thing.name not in held_out]
    return learnt, [thing for thing in things if thing.name in held_out]


def half_of(name: str) -> str:
    """Which half a file belongs to, "A" or "B": a bit of the hash of its name, whatever its folder."""
    return "AB"[hashlib.sha256(name.rsplit("/", 1)[-1].encode()).digest()[0] & 1]
