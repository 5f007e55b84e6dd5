"""Chooses the layer, and how many concepts: those that carry the class's logit, which those of its rival do not carry.

    a third of the pictures -> directions at each layer, of the class and of its rival
    another third           -> how much of the class's logit either carry, kept or removed: the layer and the number
    the last third          -> the same for directions of the first two: pictures that chose nothing

The rival is the class that the network finds likeliest in these pictures besides. At an early layer directions of any
similar class carry as much: they are what the classes have in common. So the layer is the one whose concepts carry most
beyond what as many of the rival carry, in the same pictures. The number is the smallest that carries nearly as much as
the largest. The directions that are shown are found in all pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
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
    rival: int | None  # the class that is likeliest besides; None if there is one class only
    by_rival: float  # share of the same logit that as many directions of the rival carry
    stability: float  # how alike the directions of two halves of the pictures are: 0 to 1


Key = tuple[str, int, int | None]  # a layer, a number of concepts, and the class whose they are
Candidates = Mapping[Key, Tensor]  # directions (M,C)
Carried = tuple[float, float]  # share of the logit that concepts carry: kept alone, and removed


def choose(subject: Subject, dataset: Dataset, gathered: Gathered, count: int | None, progress: Progress) -> Choice:
    """The layer and the number of concepts; `count` is the number if the user gives it."""
    counts = [n for n in COUNTS if n <= len(gathered.items)] if count is None else [count]
    find, select, judge = thirds(len(gathered.items))
    own, rival = subject.target, rival_of(gathered.logits[find], subject.target)
    theirs = of_rival(subject, dataset, gathered, rival, find, progress)

    def scored(found: Candidates, rows: Sequence[int] = select) -> dict[Key, float]:
        carried = carried_by(subject, dataset, gathered, found, rows, progress)
        return {key: sum(one) / 2 for key, one in carried.items()}

    most = counts[-1]
    found = scored({
        (layer, most, whose): supporting(relevance, most)
        for whose, layers in ((own, {name: one[find] for name, one in gathered.relevance.items()}), (rival, theirs))
        for layer, relevance in layers.items()
    })  # fmt: skip
    layer = max(gathered.relevance, key=lambda name: found[name, most, own] - found.get((name, most, rival), 0.0))
    relevance = gathered.relevance[layer]
    found |= scored({(layer, n, own): supporting(relevance[find], n) for n in counts[:-1]})
    number = next(n for n in counts if found[layer, n, own] >= ENOUGH * found[layer, most, own])
    judged = scored(
        {(layer, number, own): supporting(relevance[sorted([*find, *select])], number)}
        | ({(layer, number, rival): supporting(theirs[layer], number)} if theirs else {}),
        judge,
    )
    stability = likeness(*(supporting(half, number) for half in (relevance[0::2], relevance[1::2])))
    return Choice(
        layer, fitted(relevance, number), judged[layer, number, own], rival,
        judged.get((layer, number, rival), 0.0), stability,
    )  # fmt: skip


def rival_of(logits: Tensor, target: int) -> int | None:
    """The class with the highest mean logit (n,classes) besides the target."""
    others = [k for k in logits.mean(0).argsort(descending=True).tolist() if k != target]
    return others[0] if others else None


def of_rival(
    subject: Subject, dataset: Dataset, gathered: Gathered, rival: int | None, rows: Sequence[int], progress: Progress
) -> dict[str, Tensor]:
    """The relevance of the rival at each layer, in the same pictures: (n,2,C,h,w)."""
    found: dict[str, list[Tensor]] = {}
    for done, row in enumerate(rows if rival is not None else ()):
        progress("the likeliest other class", done, len(rows))
        tape = subject.record(subject.read(dataset, gathered.items[row]))
        for name, layer in subject.layers(tape).items():
            found.setdefault(name, []).append(subject.evidence(tape, layer, rival).float().cpu())
    progress("the likeliest other class", len(rows), len(rows))
    return {name: torch.stack(several) for name, several in found.items()}


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
