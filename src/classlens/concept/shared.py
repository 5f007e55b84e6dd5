"""What two classes have in common: one set of directions for both, and the share of each in the evidence of either.

    pictures of a, relevance of a  }
    pictures of b, relevance of b  }  at one layer -> directions of both together -> two shares of each direction

Directions of two classes that were found apart are never the same. So the relevance of both is factorised together, at
one layer and with as many pictures of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from classlens.concept.directions import Directions, supporting
from classlens.concept.gather import FORMAT, Gathered, Subject, packed, stored, unpacked
from classlens.concept.references import Reference, as_arrays, from_arrays, references
from classlens.data.layouts import Dataset, data_hash
from classlens.errors import MethodError
from classlens.files import text_hash
from classlens.progress import Progress

MOST = 10  # directions of two classes together


@dataclass(frozen=True, eq=False)
class SharedConcept:
    """A direction in the evidence for two classes."""

    direction: Tensor  # (C,)
    shares: tuple[float, float]  # of the evidence that the concepts explain, in the pictures of each class
    references: tuple[tuple[Reference, ...], tuple[Reference, ...]]  # for each class, the strongest first

    @property
    def common(self) -> float:
        """The smaller of the two shares: what both classes have of it."""
        return min(self.shares)


@dataclass(frozen=True, eq=False)
class Shared:
    """The concepts of two classes; those that they have most in common first."""

    targets: tuple[int, int]
    layer: str
    concepts: tuple[SharedConcept, ...]

    @property
    def common(self) -> float:
        """The share of their evidence that lies in the same concepts: 0 to 1."""
        return sum(one.common for one in self.concepts)


def shared(
    subjects: tuple[Subject, Subject], dataset: Dataset, gathered: tuple[Gathered, Gathered], layer: str, count: int,
    progress: Progress,
) -> Shared:  # fmt: skip
    """The concepts of two classes at one layer, at most `count`; computed once for an index."""
    first, second = subjects
    if (first.network.id, first.method) != (second.network.id, second.method):
        raise MethodError("concepts of two classes are compared within one network and one method")
    decides = (
        FORMAT, first.network.id, first.method, layer, min(count, MOST),
        *((one.target, data_hash(dataset, found.items)) for one, found in zip(subjects, gathered, strict=True)),
    )  # fmt: skip

    def compute() -> bytes:
        support = _together(gathered, layer, min(count, MOST))
        directions = Directions(support, support[:0])
        arrays = {"support": support.numpy()}
        for name, subject, found in zip("ab", subjects, gathered, strict=True):
            shown, shares = references(subject, dataset, found, layer, directions, progress)
            arrays |= {f"{name} {key}": value for key, value in as_arrays(shown).items()}
            arrays[f"{name} shares"] = shares.mean(1).numpy()
        return packed(arrays)

    arrays = unpacked(stored(first.index, f"shared-{text_hash(repr(decides))}.npz", compute), first.index)
    support = torch.from_numpy(arrays["support"])
    of_each = [_of_class(arrays, name, len(support)) for name in "ab"]
    concepts = [
        SharedConcept(direction, (a, b), (tuple(left), tuple(right)))
        for direction, a, b, left, right in zip(
            support, of_each[0][0], of_each[1][0], of_each[0][1], of_each[1][1], strict=True
        )
    ]
    order = sorted(concepts, key=lambda one: (-one.common, -max(one.shares)))
    return Shared((first.target, second.target), layer, tuple(order))


def _together(gathered: Sequence[Gathered], layer: str, count: int) -> Tensor:
    """(M,C): the directions of the evidence for both classes, each with the same number of pictures."""
    pictures = min(len(one.items) for one in gathered)
    return supporting(torch.cat([one.relevance[layer][:pictures] for one in gathered]), count)


def _of_class(arrays: dict[str, np.ndarray], name: str, count: int) -> tuple[list[float], list[list[Reference]]]:
    """The shares of each concept, which sum to 1, and its references."""
    mine = {key[2:]: value for key, value in arrays.items() if key.startswith(f"{name} ")}
    shares = mine.pop("shares")
    return (shares / max(shares.sum(), np.finfo(shares.dtype).tiny)).tolist(), from_arrays(mine, count)
