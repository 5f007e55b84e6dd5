"""A detected object: the evidence for the class of its box.

>>> explain(detector, image, detection(0))                          # the box with the highest score
>>> explain(detector, image, box(10, 20, 80, 90))                   # the detection at this place
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from classlens.core.targets.answers import Answers
from classlens.core.targets.candidates import OVERLAP, Detection, detections, logit_of, overlap
from classlens.core.targets.questions import Box, Found, Question
from classlens.core.targets.region import as_box, in_words
from classlens.errors import TargetError


@dataclass(frozen=True)
class OfDetection(Question):
    """The class logit of the n-th detection, counted from 0 by score."""

    number: int

    def find(self, answers: Answers, image: int) -> Found:
        found = detections(answers, image)
        if not found:
            raise TargetError(f"the detector finds nothing in image {image}, so there is no box {self.number}")
        if self.number >= len(found):
            raise TargetError(f"there is no box {self.number}; the detector finds boxes 0..{len(found) - 1}")
        return _asked(answers, found[self.number], image, self.number)


@dataclass(frozen=True)
class AtBox(Question):
    """The class logit of the detection that overlaps a box most."""

    box: Box
    category: int | str | None = None

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
        return _asked(answers, best, image, number)


def _asked(answers: Answers, one: Detection, image: int, number: int) -> Found:
    words = f"box {number}: {answers.label(one.label)} {100 * one.score:.0f} %"
    return Found(words, (logit_of(answers, one, image, number),), lambda numbers: numbers[0].sum(), (one.box,))


def _tensor(boxes: Sequence[Box]) -> Tensor:
    return torch.tensor([[b.left, b.top, b.right, b.bottom] for b in boxes], dtype=torch.float64)


def detection(number: int = 0) -> OfDetection:
    """The n-th detected object, counted from 0 by score: the evidence for the class of its box.

    >>> classlens.explain(detector, "street.jpg", [classlens.detection(0), classlens.detection(1)])
    """
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise TargetError(f"a box is counted from 0, so there is no box {number!r}")
    return OfDetection(number)


def box(left: float, top: float, right: float, bottom: float, category: int | str | None = None) -> AtBox:
    """The detected object at a place, in pixels of the network's input; optionally of a class.

    >>> classlens.explain(detector, "street.jpg", classlens.box(10, 20, 80, 90, "person"))
    """
    return AtBox(as_box((left, top, right, bottom)), category)
