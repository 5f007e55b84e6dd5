"""Chooses the layer, and how many concepts: those that best carry the class's logit when they are kept or removed.

    half of the pictures -> directions at each layer -> the other half: how much of the logit they carry

The layer is the one whose most concepts carry most. The number is the smallest that carries nearly as much.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from classlens.concept.directions import COUNTS, ENOUGH, Directions, carried, fitted, likeness
from classlens.concept.gather import Gathered, Subject
from classlens.core.capture import Tape
from classlens.data.layouts import Dataset
from classlens.methods.featuremaps import FeatureMap
from classlens.methods.tail import Tail
from classlens.progress import Progress

_TRIED = 8  # pictures in which concepts are kept and removed


@dataclass(frozen=True, eq=False)
class Choice:
    """The directions of a class at the chosen layer, and how good they are."""

    layer: str
    directions: Directions
    carried: float  # share of the logit that they carry in pictures they were not found in: 0 to 1
    stability: float  # how alike the directions of two halves of the pictures are: 0 to 1


Candidates = Mapping[tuple[str, int], Directions]


def choose(subject: Subject, dataset: Dataset, gathered: Gathered, count: int | None, progress: Progress) -> Choice:
    """The layer and the number of concepts; `count` is the number if the user gives it."""
    counts = [n for n in COUNTS if n <= len(gathered.items)] if count is None else [count]
    halves = {name: (found[0::2], found[1::2]) for name, found in gathered.relevance.items()}

    def scored(layers: Sequence[str], numbers: Sequence[int]) -> dict[tuple[str, int], float]:
        candidates = {(name, n): fitted(halves[name][0], n) for name in layers for n in numbers}
        return _carried(subject, dataset, gathered, candidates, progress)

    found = scored(list(halves), counts[-1:])
    layer = max(found, key=lambda key: found[key])[0]
    if len(counts) > 1:
        found |= scored([layer], counts[:-1])
    best = found[layer, counts[-1]]
    number = next(n for n in counts if found[layer, n] >= ENOUGH * best)
    stability = likeness(*(fitted(half, number) for half in halves[layer]))
    return Choice(layer, fitted(gathered.relevance[layer], number), found[layer, number], stability)


def _carried(
    subject: Subject, dataset: Dataset, gathered: Gathered, candidates: Candidates, progress: Progress
) -> dict[tuple[str, int], float]:
    """The mean over pictures that no direction was found in."""
    rows = range(1, len(gathered.items), 2)[:_TRIED]
    totals = dict.fromkeys(candidates, 0.0)
    for done, row in enumerate(rows):
        progress("concepts kept and removed", done, len(rows))
        tape = subject.record(subject.read(dataset, gathered.items[row]))
        layers = subject.layers(tape)
        for key, directions in candidates.items():
            tail = tail_of(tape, layers[key[0]])
            relevance = gathered.relevance[key[0]][row].to(tape.image.tensor)
            remove = scaled_features(layers[key[0]])
            totals[key] += carried(tail, remove, relevance, directions.support, subject.target) / len(rows)
            subject.cost.forwards += 4
    progress("concepts kept and removed", len(rows), len(rows))
    return totals


def scaled_features(layer: FeatureMap) -> Callable[[Tensor], Tensor]:
    """Weights (C,h,w) -> the value of the layer with its features times them; a class token stays as it is."""
    features = layer.as_map(layer.value.tensor)
    return lambda weights: layer.value.tensor + layer.restored(((weights - 1) * features)[None])[0]


def tail_of(tape: Tape, layer: FeatureMap) -> Tail:
    """The network after a layer."""
    return Tail.after(tape, layer.value, "concepts cannot be removed from this layer")
