"""Questions to any network: objects that find their numbers in what a network returns, and combine.

>>> explain(model, image, region("person", pixel=(40, 60)))
>>> explain(model, image, text("a cat") - 0.5 * text("a dog"))

A question is asked of one image. `find` looks at the network's answers, says in one line if the question does not fit
them, and returns what to read. A new kind of question is a new file here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from classlens.core.capture import Pick, Picker, Reading, Recorder, pick_part
from classlens.core.targets.answers import Answers, Models
from classlens.core.targets.base import LabelOf
from classlens.errors import TargetError


@dataclass(frozen=True)
class Box:
    """A box to draw: left, top, right, bottom, in pixels of the network's input."""

    left: float
    top: float
    right: float
    bottom: float


Outline = Box | Tensor  # a box, or a mask (H,W) of the network's input


@dataclass(frozen=True, eq=False)
class Found:
    """What a question reads of one image, and how it makes one number of it."""

    text: str  # the question in words
    picks: tuple[Pick, ...]
    combine: Callable[[Sequence[Tensor]], Tensor]  # the numbers of each pick -> the number to explain
    outlines: tuple[Outline, ...] = ()


class Question:
    """The interface of all questions. They can be added, subtracted, and multiplied by a number."""

    @property
    def layers(self) -> frozenset[str]:
        """The layers that it looks into."""
        return frozenset()

    def find(self, answers: Answers, image: int) -> Found:
        """What to read; raises `TargetError` if the question does not fit the answers of the network."""
        raise NotImplementedError

    def __add__(self, other: Any) -> Mix:
        return Mix((*_parts(self), *_parts(other)))

    def __mul__(self, factor: Any) -> Mix:
        if not isinstance(factor, int | float) or isinstance(factor, bool):
            raise TargetError(f"a question can be multiplied by a number, not by {factor!r}")
        return Mix(tuple((weight * factor, part) for weight, part in _parts(self)))

    __rmul__ = __mul__

    def __neg__(self) -> Mix:
        return self * -1

    def __sub__(self, other: Any) -> Mix:
        return self + -1 * Mix(_parts(other))


@dataclass(frozen=True)
class Mix(Question):
    """A weighted sum of questions."""

    parts: tuple[tuple[float, Question], ...]

    @property
    def layers(self) -> frozenset[str]:
        return frozenset().union(*(part.layers for _, part in self.parts))

    def find(self, answers: Answers, image: int) -> Found:
        found = [(weight, part.find(answers, image)) for weight, part in self.parts]
        sizes = [len(one.picks) for _, one in found]

        def combine(numbers: Sequence[Tensor]) -> Tensor:
            places = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
            terms = [w * one.combine(numbers[a:b]) for (w, one), a, b in zip(found, places, places[1:], strict=False)]
            return torch.stack(terms).sum(0)

        picks = tuple(pick for _, one in found for pick in one.picks)
        outlines = tuple(outline for _, one in found for outline in one.outlines)
        return Found(in_words([(weight, one.text) for weight, one in found]), picks, combine, outlines)


def _parts(given: Any) -> tuple[tuple[float, Question], ...]:
    if isinstance(given, Mix):
        return given.parts
    if not isinstance(given, Question):
        raise TargetError(f"{given!r} cannot be combined with a question; combine it with another, such as text(...)")
    return ((1.0, given),)


def in_words(terms: Sequence[tuple[float, str]]) -> str:
    """A weighted sum in words.

    >>> in_words([(1, "a cat"), (-0.5, "a dog")])
    'a cat minus 0.5 × a dog'
    """
    words = ""
    for weight, text in terms:
        size = "" if abs(weight) == 1 else f"{abs(weight):g} × "
        sign = (" minus " if weight < 0 else " plus ") if words else ("minus " if weight < 0 else "")
        words += f"{sign}{size}{text}"
    return words


# ------------------------------------------------------------------------------------------- asked of a forward pass


@dataclass(frozen=True, eq=False)
class Asked:
    """A question as a target of a method: its number, computed from all numbers that were read of an image."""

    found: Found
    places: tuple[slice, ...]  # of the numbers of each pick
    kind: ClassVar[str] = "question"

    def words(self, label: LabelOf) -> str:
        return self.found.text

    def fits(self, outputs: int, label: LabelOf) -> None:
        """Nothing to check: `find` did."""

    def value(self, logits: Tensor) -> Tensor:
        return self.found.combine([logits[place] for place in self.places]).reshape(())


@dataclass
class Asking:
    """The questions about the images of a batch; given to `record`, which calls `bind` with the network's result."""

    rows: Sequence[Sequence[Question]]
    models: Models
    size: tuple[int, int]  # (H,W) of the network's input
    output: Picker = None  # which part of the result the questions are about
    targets: tuple[tuple[Asked, ...], ...] = ()  # known after `bind`
    reading: Reading | None = None

    @property
    def layers(self) -> frozenset[str]:
        """The layers that the questions look into."""
        return frozenset().union(*(question.layers for row in self.rows for question in row))

    def bind(self, result: Any, recorder: Recorder) -> Reading:
        """Find what every question reads. All images read the same numbers, so that a batch is one tensor."""
        part = result if self.output is None else pick_part(result, self.output)
        answers = Answers(part, len(self.rows), self.size, recorder, self.models)
        found = [[question.find(answers, image) for question in row] for image, row in enumerate(self.rows)]
        sizes: dict[Pick, slice] = {}
        end = 0
        for pick in dict.fromkeys(pick for row in found for one in row for pick in one.picks):
            count = pick.of(part, answers.inside).shape[1]
            sizes[pick] = slice(end, end + count)
            end += count
        self.targets = tuple(tuple(Asked(one, tuple(sizes[p] for p in one.picks)) for one in row) for row in found)
        self.reading = Reading(tuple(sizes), self.output)
        return self.reading
