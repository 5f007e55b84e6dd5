"""Deterministic subsets of a data set: seeded orders, halves, and held-out images.

    >>> [path.name for path in shuffled([Path("a.jpg"), Path("b.jpg"), Path("d.jpg")], seed=2)]
    ['b.jpg', 'd.jpg', 'a.jpg']
    >>> half_of("val/cat/a.jpg")
    'A'

Everything depends only on names and seeds, never on the machine, the folder or the other images.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from classlens.files import draw_key


class Named(Protocol):
    """Anything with a name: an item, an animal, a path."""

    @property
    def name(self) -> str: ...


Thing = TypeVar("Thing", bound=Named)

EVERY = 5  # in a data set without splits, every fifth image is held out


def shuffled(things: Iterable[Thing], seed: int) -> list[Thing]:
    """In an order that depends only on names and seed, so that adding things hardly changes the first N."""
    return sorted(things, key=lambda thing: draw_key(seed, thing.name))


def hold_out(things: Sequence[Thing], seed: int) -> tuple[list[Thing], list[Thing]]:
    """The training split, and every fifth thing of a shuffled order as the held-out split; both in the given order."""
    held_out = {thing.name for thing in shuffled(things, seed)[::EVERY]}
    learnt = [thing for thing in things if thing.name not in held_out]
    return learnt, [thing for thing in things if thing.name in held_out]


def half_of(name: str) -> str:
    """The half that a file belongs to, "A" or "B": one bit of the hash of its name; its folder is ignored."""
    return "AB"[hashlib.sha256(name.rsplit("/", 1)[-1].encode()).digest()[0] & 1]
