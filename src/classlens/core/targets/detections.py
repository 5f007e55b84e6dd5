"""A detected object: the evidence for the class of its box, or for where one of its edges is.

>>> explain(detector, image, detection(0))                          # the box with the highest score
>>> explain(detector, image, box(10, 20, 80, 90))                   # the detection at this place
>>> explain(detector, image, detection(0, edge="left"))             # what moves its left edge outwards
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from classlens.core.targets.answers import Answers
from classlens.core.targets.candidates import (
    OVERLAP,
    Detection,
    detections,
    heads_of,
    last_gradients,
    logit_of,
    overlap,
    pick_at,
)
from classlens.core.targets.questions import Box, Found, Question
from classlens.core.targets.region import as_box, in_words
from classlens.errors import TargetError

EDGES = ("left", "top", "right", "bottom")
_MOST_OF_AN_EDGE = 256  # numbers: YOLO has 16 for each edge


@dataclass(frozen=True)
class OfDetection(Question):
    """The class logit, or an edge, of the n-th detection, counted from 0 by score."""

    number: int
    edge: str | None = None

    def find(self, answers: Answers, image: int) -> Found:
        found = detections(answers, image)
        if not found:
            raise TargetError(f"the detector finds nothing in image {image}, so there is no box {self.number}")
        if self.number >= len(found):
            raise TargetError(f"there is no box {self.number}; the detector finds boxes 0..{len(found) - 1}")
        return _asked(answers, found[self.number], image, self.number, self.edge)


@dataclass(frozen=True)
class AtBox(Question):
    """The class logit, or an edge, of the detection that overlaps a box most."""

    box: Box
    category: int | str | None = None
    edge: str | None = None

    def find(self, answers: Answers, image: int) -> Found:
        found = list(enumerate(detections(answers, image)))
        if self.category is not None:
            wanted = answers.class_index(self.category, 1 << 30)
            found = [(number, one) for number, one in found if one.label == wanted]
        if not found:
            what = "nothing" if self.category is None else f"no {self.category}"
            raise TargetError(f"the detector finds {what} in image {image}, so nothing is in {in_words(self.box)}")
        shares = overlap(_tensor([self.box]), _tensor([one.box for _, one in found]))[0]
        number, best = found[int(shares.argmax())]
        if shares.max() < OVERLAP:
            raise TargetError(
                f"no detection overlaps {in_words(self.box)} by half; the nearest is box {number}, "
                f"{answers.label(best.label)} in {in_words(best.box)}"
            )
        return _asked(answers, best, image, number, self.edge)


def _asked(answers: Answers, one: Detection, image: int, number: int, edge: str | None) -> Found:
    words = f"box {number}: {answers.label(one.label)} {100 * one.score:.0f} %"
    if edge is not None:
        return _edge(answers, one, number, edge, f"{edge} edge of {words}")
    return Found(words, (logit_of(answers, one, image, number),), lambda numbers: numbers[0].sum(), (one.box,))


def _edge(answers: Answers, one: Detection, number: int, edge: str, words: str) -> Found:
    """How far an edge lies outwards, linear in the numbers from which the network computes it.

    A box is decoded from a few outputs of its regression layer (shifts, logarithms of sizes, distributions over
    distances). Each is weighted by the derivative of the edge's position, in pixels of the input.
    """
    side = EDGES.index(edge)
    outwards = one.corners[side] * (-1 if side < 2 else 1)
    found = last_gradients(answers, outwards)
    moving = {node: gradient for node, gradient in found.items() if gradient.any()}
    picks, weights = [], []
    for node in heads_of(answers.recorder.nodes, moving):
        gradient = moving[node]
        for place in gradient.flatten().nonzero()[:, 0]:
            picks.append(pick_at(answers, node, place, gradient.shape))
            weights.append(float(gradient.flatten()[place]))
    if not 0 < len(picks) <= _MOST_OF_AN_EDGE:
        why = f"it depends on {len(picks)} outputs" if picks else "it is cut off at the border of the picture"
        raise TargetError(f"the {edge} edge of box {number} cannot be explained: {why}; ask for its class")

    def moved(numbers: Sequence[Tensor]) -> Tensor:
        return torch.stack([weight * value.sum() for weight, value in zip(weights, numbers, strict=True)]).sum()

    return Found(words, tuple(picks), moved, (one.box,))


def _tensor(boxes: Sequence[Box]) -> Tensor:
    return torch.tensor([[b.left, b.top, b.right, b.bottom] for b in boxes], dtype=torch.float64)


def detection(number: int = 0, edge: str | None = None) -> OfDetection:
    """The n-th detected object, counted from 0 by score: the evidence for the class of its box.

    >>> classlens.explain(detector, "street.jpg", [classlens.detection(0), classlens.detection(1)])

    With `edge` ("left", "top", "right", "bottom"): the evidence for that edge to lie further out.
    """
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise TargetError(f"a box is counted from 0, so there is no box {number!r}")
    return OfDetection(number, _as_edge(edge))


def box(
    left: float, top: float, right: float, bottom: float, category: int | str | None = None, edge: str | None = None
) -> AtBox:
    """The detected object at a place, in pixels of the network's input; optionally of a class.

    >>> classlens.explain(detector, "street.jpg", classlens.box(10, 20, 80, 90, "person"))

    With `edge`, as in `detection`.
    """
    return AtBox(as_box((left, top, right, bottom)), category, _as_edge(edge))


def _as_edge(edge: str | None) -> str | None:
    if edge is not None and edge not in EDGES:
        raise TargetError(f"a box has no edge {edge!r}; choose one of {', '.join(EDGES)}")
    return edge
