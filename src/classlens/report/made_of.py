"""The section on concepts: what the classes of a report are made of, and what two confused classes share.

It is made only if it is asked for: each class costs a thousand forward passes and more. What was computed is kept in a
folder, so that a stopped report resumes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from classlens.concept.flow import METHOD, can_follow
from classlens.concept.found import Concepts, of_class
from classlens.concept.gather import LEAST, Cost, Gathered, gather
from classlens.concept.gather import Subject as ConceptSubject
from classlens.concept.references import Reference
from classlens.concept.shared import Shared, SharedConcept, shared
from classlens.errors import DataError, MethodError
from classlens.progress import Progress
from classlens.render.html import jpeg
from classlens.report.choose import ClassView, Pair
from classlens.report.collect import Subject
from classlens.report.words import Names, count, percent

LIMIT = 32  # pictures of a class
_SHOWN = 4  # concepts of a class
_NAMED = 20  # classes with too few pictures that are named
_COMMON = 0.05  # a concept with less of the evidence for either class is not called shared
_SIDE, _QUALITY = 112, 84
_CROPS, _HALF = 6, 3  # of a class; of each of two classes


@dataclass(frozen=True)
class Crop:
    """What a concept looks like in one picture."""

    jpeg: bytes
    alt: str


@dataclass(frozen=True)
class Row:
    """A concept: its words, its share of the evidence, and crops for each class that it is shown for."""

    title: str
    text: str
    width: float  # of its bar, in percent
    crops: tuple[tuple[Crop, ...], ...]
    against: bool = False


@dataclass(frozen=True)
class Entry:
    """A class, or two confused classes, with their concepts."""

    title: str
    small: str
    text: str
    rows: tuple[Row, ...]
    names: tuple[str, ...] = ()  # of the two classes, above their crops


@dataclass(frozen=True)
class MadeOf:
    """The section."""

    classes: tuple[Entry, ...]
    pairs: tuple[Entry, ...]
    without: tuple[str, ...]  # why a class, or a pair, has no concepts
    made: str  # the method, and the cost


def made_of(
    subject: Subject, views: Sequence[ClassView], pairs: Sequence[Pair], top: int, index: str | os.PathLike[str],
    progress: Progress,
) -> MadeOf:  # fmt: skip
    """The concepts of the `top` classes with the most pictures, and of the pairs whose classes have enough of them."""
    method = subject.method if can_follow(subject.method) else METHOD
    maker = _Maker(subject, method, Path(index), progress)
    pairs = list({frozenset((pair.predicted, pair.other)): pair for pair in reversed(pairs)}.values())[::-1]
    views = sorted(views, key=lambda view: (-len(view.records), view.predicted))
    enough = {view.predicted: view for view in views if len(view.records) >= LEAST}
    classes = [entry for view in list(enough.values())[:top] if (entry := maker.of_class(view)) is not None]
    two = [
        entry for pair in pairs if {pair.predicted, pair.other} <= set(enough) for entry in maker.of_pair(pair, enough)
    ]
    few = {subject.name(view.predicted): len(view.records) for view in views if view.predicted not in enough}
    without = (*_too_few(few), *_lone(pairs, enough, subject.name), *maker.refused)
    cost = f"{method}; {maker.cost.forwards} forward passes and {maker.cost.sweeps} sweeps"
    return MadeOf(tuple(classes), tuple(two), without, cost)


class _Maker:
    """Computes the concepts of classes and of pairs, each class once."""

    def __init__(self, subject: Subject, method: str, index: Path, progress: Progress) -> None:
        self.cost = Cost()
        self.refused: list[str] = []
        self._subject, self._method, self._index, self._progress = subject, method, index, progress
        self._found: dict[int, tuple[ConceptSubject, Gathered, Concepts] | None] = {}

    def of_class(self, view: ClassView) -> Entry | None:
        """The entry of a class, or None: `refused` then says why."""
        made = self._made(view)
        return None if made is None else class_entry(made[2])

    def of_pair(self, pair: Pair, views: dict[int, ClassView]) -> list[Entry]:
        """The entry of two classes; none if one of them has no concepts."""
        mine, other = (self._made(views[index]) for index in (pair.predicted, pair.other))
        if mine is None or other is None:
            return []
        number = sum(one.sign > 0 for found in (mine[2], other[2]) for one in found.concepts)
        both = (mine[0], other[0]), self._subject.dataset, (mine[1], other[1])
        return [pair_entry(shared(*both, mine[2].layer, number, self._progress), self._subject.name)]

    def _made(self, view: ClassView) -> tuple[ConceptSubject, Gathered, Concepts] | None:
        if view.predicted not in self._found:
            self._found[view.predicted] = self._make(view)
        return self._found[view.predicted]

    def _make(self, view: ClassView) -> tuple[ConceptSubject, Gathered, Concepts] | None:
        about = self._subject
        one = ConceptSubject(about.model, view.predicted, self._method, None, self._index, self.cost)
        try:
            gathered = gather(one, about.dataset, [record.item for record in view.records], LIMIT, self._progress)
            return one, gathered, of_class(one, about.dataset, gathered, None, self._progress)
        except (DataError, MethodError) as error:
            self.refused.append(f"{about.name(view.predicted)}: {error}")
            return None


# ----------------------------------------------------------------------------------------------------- entries


def class_entry(found: Concepts) -> Entry:
    """The strongest concepts of a class."""
    shown = found.concepts[:_SHOWN]
    most = max(abs(one.share) for one in shown) if shown else 1.0
    rows = [
        Row(
            one.name, f"{percent(abs(one.share))} of the evidence", 100 * abs(one.share) / most,
            (_crops(one.references[:_CROPS]),), one.sign < 0,
        )
        for one in shown
    ]  # fmt: skip
    text = (
        f"Its concepts carry {percent(found.carried)} of its score{found.beside} in pictures that they were not found "
        f"in, and are {percent(found.stability)} alike in two halves of the pictures."
    )
    return Entry(found.label, f"{count(found.pictures, 'picture')}, layer {found.layer}", text, tuple(rows))


def pair_entry(found: Shared, names: Names) -> Entry:
    """What two classes share, and what each has for itself."""
    first, second = (names(index) for index in found.targets)
    common = [one for one in found.concepts if one.common >= _COMMON]
    text = f"{percent(found.common)} of the evidence for the two lies in concepts that they share."
    if not common:
        text += f" No concept has {percent(_COMMON)} of the evidence for both."
    rows = [_pair_row("shared", one, first, second) for one in common[:2]]
    for place, name in enumerate((first, second)):
        own = max(found.concepts, key=lambda one: one.shares[place] - one.shares[1 - place], default=None)
        if own is not None and own.shares[place] > 2 * own.shares[1 - place]:
            rows.append(_pair_row(f"mostly {name}", own, first, second))
    return Entry(f"{first} and {second}", f"layer {found.layer}", text, tuple(rows), (first, second))


def _pair_row(title: str, one: SharedConcept, first: str, second: str) -> Row:
    text = f"{percent(one.shares[0])} of {first}, {percent(one.shares[1])} of {second}"
    return Row(title, text, 100 * max(one.shares), tuple(_crops(shown[:_HALF]) for shown in one.references))


def _crops(references: Sequence[Reference]) -> tuple[Crop, ...]:
    return tuple(Crop(jpeg(one.crop, _SIDE, _QUALITY), f"part of {one.name}") for one in references)


def _too_few(few: dict[str, int]) -> list[str]:
    if not few:
        return []
    named = ", ".join(f"{name} ({pictures})" for name, pictures in list(few.items())[:_NAMED])
    more = f" and {len(few) - _NAMED} more" if len(few) > _NAMED else ""
    return [f"Too few pictures are taken for these classes; concepts need {LEAST}: {named}{more}."]


def _lone(pairs: Sequence[Pair], enough: dict[int, ClassView], names: Names) -> list[str]:
    lone = [f"{names(p.other)} and {names(p.predicted)}" for p in pairs if not {p.predicted, p.other} <= set(enough)]
    if not lone:
        return []
    named = "; ".join(lone[:_NAMED]) + (f"; and {len(lone) - _NAMED} more" if len(lone) > _NAMED else "")
    return [f"Confused classes are compared only if each has {LEAST} pictures; these have fewer: {named}."]
