"""ATTACKS: each is a generator that yields the outcome of one attempt: "done", "killed" or "refused".

It raises `Wrong` as soon as something is silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from arena import Arena

Attack = Callable[[Arena], Iterator[str]]
ATTACKS: dict[str, Attack] = {}


def attack(name: str) -> Callable[[Attack], Attack]:
    """Add an attack: `@attack("disk full: evaluate")`."""

    def add(run: Attack) -> Attack:
        ATTACKS[name] = run
        return run

    return add
