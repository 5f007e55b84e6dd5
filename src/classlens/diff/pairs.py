"""Which class of one network is which class of another: matched by name.

>>> classes = matched(before, after, 1000, 37)
>>> classes.to_b[207], classes.only_a[:2]
(12, ('tench', 'goldfish'))
"""

from __future__ import annotations

from dataclasses import dataclass

from classlens.data.labels import label_index
from classlens.errors import ModelError
from classlens.models import LoadedModel


@dataclass(frozen=True)
class Classes:
    """The classes that two networks share, and those that only one of them has."""

    to_b: dict[int, int]  # output of A -> output of B
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()

    @property
    def to_a(self) -> dict[int, int]:
        return {b: a for a, b in self.to_b.items()}


def matched(a: LoadedModel, b: LoadedModel, classes_a: int, classes_b: int) -> Classes:
    """Classes match if their names do; without names in both networks, if both have as many outputs."""
    if a.labels == b.labels and classes_a == classes_b:
        return Classes({index: index for index in range(classes_a)})
    if a.labels is None or b.labels is None:
        unnamed = a.name if a.labels is None else b.name
        raise ModelError(
            f"{unnamed} has no class names, so its {classes_a if a.labels is None else classes_b} outputs cannot be "
            "matched with those of the other network: give them in a card"
        )
    found = {i: label_index(name, b.labels, classes_b) for i, name in enumerate(a.labels)}
    to_b = {i: k for i, k in found.items() if k is not None and list(found.values()).count(k) == 1}
    if not to_b:
        raise ModelError(f"{a.name} and {b.name} have no class of the same name: there is nothing to compare")
    only_a = tuple(name for i, name in enumerate(a.labels) if i not in to_b)
    only_b = tuple(name for k, name in enumerate(b.labels) if k not in to_b.values())
    return Classes(to_b, only_a, only_b)
