"""Chooses the layer, and how many concepts: those that best carry the class's logit when they are kept or removed.

    a third of the pictures -> directions at each layer
    another third           -> how much of the logit they carry: the layer and the number are chosen
    the last third          -> the same for directions of the first two: pictures that chose nothing

The layer is the one whose most concepts carry most. The number is the smallest that carries nearly as much. The
directions that are shown are found in all pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from classlens.concept.directions import COUNTS, ENOUGH, Directions, carried, fitted, likeness, supporting
from classlens.concept.gather import Gathered, Subject, tail_of
from classlens.data.layouts import Dataset
from classlens.methods.featuremaps import FeatureMap
from classlens.progress import Progress

_TRIED = 8  # pictures in which concepts are kept and removed


@dataclass(frozen=True, eq=False)
class Choice:
    """The directions of a class at the chosen layer, and how good they are."""

    layer: str
    directions: Directions
    carried: float  # share of the logit that such directions carry in pictures that chose nothing: 0 to 1
    stability: float  # how alike the directions of two halves of the pictures are: 0 to 1


Key = tuple[str, int]  # a layer, and a number of concepts
Candidates = Mapping[Key, Tensor]  # directions for the class (M,C)
Carried = tuple[float, float]  # share of the logit that concepts carry: kept alone, and removed


def choose(subject: Subject, dataset: Dataset, gathered: Gathered, count: int | None, progress: Progress) -> Choice:
    """The layer and the number of concepts; `count` is the number if the user gives it."""
    counts = [n for n in COUNTS if n <= len(gathered.items)] if count is None else [count]
    find, select, judge = thirds(len(gathered.items))

    def scored(layers: Sequence[str], numbers: Sequence[int]) -> dict[Key, float]:
        candidates = {(name, n): supporting(gathered.relevance[name][find], n) for name in layers for n in numbers}
        found = carried_by(subject, dataset, gathered, candidates, select, progress)
        return {key: sum(one) / 2 for key, one in found.items()}

    found = scored(list(gathered.relevance), counts[-1:])
    layer = max(found, key=lambda key: found[key])[0]
    if len(counts) > 1:
        found |= scored([layer], counts[:-1])
    best = found[layer, counts[-1]]
    number = next(n for n in counts if found[layer, n] >= ENOUGH * best)
    relevance = gathered.relevance[layer]
    others = {(layer, number): supporting(relevance[sorted([*find, *select])], number)}
    (judged,) = carried_by(subject, dataset, gathered, others, judge, progress).values()
    stability = likeness(*(supporting(half, number) for half in (relevance[0::2], relevance[1::2])))
    return Choice(layer, fitted(relevance, number), sum(judged) / 2, stability)


def thirds(pictures: int) -> tuple[list[int], list[int], list[int]]:
    """The pictures that give directions, those that choose among them, and those that chose nothing."""
    find, select, judge = (list(range(start, pictures, 3)) for start in range(3))
    return find, select, judge


def carried_by(
    subject: Subject, dataset: Dataset, gathered: Gathered, candidates: Candidates, rows: Sequence[int],
    progress: Progress,
) -> dict[Key, Carried]:  # fmt: skip
    """What each candidate carries, kept and removed: the mean over these pictures, at most eight of them."""
    rows = rows[:_TRIED]
    totals = dict.fromkeys(candidates, (0.0, 0.0))
    for done, row in enumerate(rows):
        progress("concepts kept and removed", done, len(rows))
        tape = subject.record(subject.read(dataset, gathered.items[row]))
        layers = subject.layers(tape)
        for key, support in candidates.items():
            tail = tail_of(tape, layers[key[0]])
            relevance = gathered.relevance[key[0]][row].to(tape.image.tensor)
            remove = scaled_features(layers[key[0]])
            kept, removed = carried(tail, remove, relevance, support, subject.target)
            before = totals[key]
            totals[key] = (before[0] + kept / len(rows), before[1] + removed / len(rows))
            subject.cost.forwards += 4
    progress("concepts kept and removed", len(rows), len(rows))
    return totals


def scaled_features(layer: FeatureMap) -> Callable[[Tensor], Tensor]:
    """Weights (C,h,w) -> the value of the layer with its features times them; a class token stays as it is."""
    features = layer.as_map(layer.value.tensor)
    return lambda weights: layer.value.tensor + layer.restored(((weights - 1) * features)[None])[0]
