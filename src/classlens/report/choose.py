"""Selects the images to show: typical and surprising ones of each class, evidence off the object, confusions.

- *typical*: the map closest to the medians of the class, among its more confident half (correct ones, if known).
- *surprising*: the model is confident although the evidence lies elsewhere. Flagged maps (more than half off the object
  or on the border) come first, then those farthest from the medians of all images.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from classlens.report.collect import Record, Where

MOST = 0.5  # an image is flagged if more than this share of the evidence lies elsewhere
SURE = 0.5  # minimum probability of a confident prediction
UNUSUAL = 3.0  # robust standard deviations from the median
_FEW = 3  # images that a section shows if none is flagged
_MAD_TO_DEVIATION = 1.4826  # of a normal distribution

Measure = Callable[[Where], float | None]
MEASURES: dict[str, Measure] = {
    "outside": lambda where: None if where.inside is None else 1 - where.inside,
    "border": lambda where: where.border,
    "spread": lambda where: where.half,
}
"""The measures that make a map odd, each a share in [0,1]."""
# The minimum deviation of each measure: if all maps are similar, a tiny difference is not unusual.
_LEAST = {"outside": 0.1, "border": 0.1, "spread": 0.02}


# -------------------------------------------------------------------------------------------------- the usual


@dataclass(frozen=True)
class Usual:
    """What is usual among all images: the median and the deviation of each measure."""

    middle: dict[str, float]
    scale: dict[str, float]


@dataclass(frozen=True)
class Oddness:
    """The measure in which a map is odd, and by how many deviations."""

    measure: str
    flagged: bool  # more than half of the evidence lies there
    deviations: float

    @property
    def unusual(self) -> bool:
        return self.flagged or self.deviations >= UNUSUAL


def usual(records: Sequence[Record]) -> Usual:
    """Medians and robust deviations (from the median absolute deviation)."""
    middle, scale = {}, {}
    for name, measured in MEASURES.items():
        values = [value for record in records if (value := measured(record.where)) is not None]
        if values:
            middle[name] = median(values)
            apart = median(abs(value - middle[name]) for value in values)
            scale[name] = max(_LEAST[name], _MAD_TO_DEVIATION * apart)
    return Usual(middle, scale)


def oddness(where: Where, reference: Usual) -> Oddness:
    """The measure in which a map is oddest. More evidence on the object, or less on the border, is never odd."""
    found = []
    for name, measured in MEASURES.items():
        value = measured(where)
        if value is not None:
            away = (value - reference.middle[name]) / reference.scale[name]
            flagged = name != "spread" and value > MOST
            found.append(Oddness(name, flagged, abs(away) if name == "spread" else away))
    return max(found, key=lambda odd: (odd.flagged, odd.deviations))


# ---------------------------------------------------------------------------------------------- by class


@dataclass(frozen=True)
class ClassView:
    """The images of one predicted class: all of them, the typical one, and the most surprising one (with why)."""

    predicted: int
    records: tuple[Record, ...]
    typical: Record
    surprising: Record | None = None
    odd: Oddness | None = None


def class_views(records: Sequence[Record], reference: Usual) -> list[ClassView]:
    """Every class that was predicted, the most surprising first."""
    groups: defaultdict[int, list[Record]] = defaultdict(list)
    for record in records:
        groups[record.predicted].append(record)
    views = [_view(predicted, group, reference) for predicted, group in groups.items()]
    return sorted(views, key=lambda view: (_rank(view.odd), -len(view.records), view.predicted))


def typical(records: Sequence[Record]) -> Record:
    """The map closest to the medians of its class, among the more confident half (correct ones, if known)."""
    candidates = [record for record in records if record.right] or list(records)
    sure = median(record.confidence for record in candidates)
    middle = usual(records).middle

    def distance(record: Record) -> float:
        values = {name: measured(record.where) for name, measured in MEASURES.items()}
        return sum(abs(value - middle[name]) for name, value in values.items() if value is not None)

    return min((r for r in candidates if r.confidence >= sure), key=lambda r: (distance(r), r.item.name))


def surprising(records: Iterable[Record], reference: Usual) -> tuple[Record, Oddness] | None:
    """The oddest map among confident predictions; None if there are none."""
    sure = [(record, oddness(record.where, reference)) for record in records if record.confidence >= SURE]
    return min(sure, key=lambda found: (_rank(found[1]), found[0].item.name), default=None)


def _view(predicted: int, group: Sequence[Record], reference: Usual) -> ClassView:
    usual_one = typical(group)
    found = surprising((record for record in group if record is not usual_one), reference)
    return ClassView(predicted, tuple(group), usual_one, *(found or ()))


def _rank(odd: Oddness | None) -> tuple[bool, float]:
    """For sorting: the oddest first, those without last."""
    return (True, 0.0) if odd is None else (not odd.flagged, -odd.deviations)


# ------------------------------------------------------------------------------------------------- elsewhere


def off_object(records: Iterable[Record]) -> list[Record]:
    """Images with a mask, those with the least evidence on the object first."""
    return sorted((r for r in records if r.where.inside is not None), key=lambda r: (r.where.inside, r.item.name))


def on_border(records: Iterable[Record]) -> list[Record]:
    """Images with the most evidence on their border first."""
    return sorted(records, key=lambda r: (-r.where.border, r.item.name))


def is_off_object(record: Record) -> bool:
    """Whether more than half of the evidence lies off the object."""
    return record.where.inside is not None and 1 - record.where.inside > MOST


def is_on_border(record: Record) -> bool:
    """Whether more than half of the evidence lies in the outer tenth of the image."""
    return record.where.border > MOST


def without_object(records: Iterable[Record]) -> list[Record]:
    """Images with the same prediction when the object is hidden, the most confident first."""
    same = [r for r in records if r.hidden.instead == r.predicted and r.hidden.object is not None]
    return sorted(same, key=lambda r: (-(r.hidden.object or 0), r.item.name))


# ------------------------------------------------------------------------------------------------ confusions


@dataclass(frozen=True)
class Pair:
    """Two classes that the model confuses, with the images, the most confident first."""

    predicted: int
    other: int
    records: tuple[Record, ...]


def confusions(records: Iterable[Record]) -> list[Pair]:
    """(predicted, true) pairs of wrong predictions, the most frequent first."""
    return _pairs((record, record.true_class) for record in records if record.right is False)


def undecided(records: Iterable[Record]) -> list[Pair]:
    """For images without a known label: (predicted, runner-up) pairs with similar probabilities."""
    return _pairs((record, record.second) for record in records if record.confidence < 2 * record.second_confidence)


def instead(records: Iterable[Record]) -> list[tuple[str, int, Counter[int]]]:
    """Labels that are not classes of the model: the number of images, and the predictions."""
    said: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for record in records:
        if record.truth.label is not None and not record.truth.outputs:
            said[record.truth.label][record.predicted] += 1
    found = [(label, counts.total(), counts) for label, counts in said.items()]
    return sorted(found, key=lambda entry: (-entry[1], entry[0]))


def _pairs(found: Iterable[tuple[Record, int | None]]) -> list[Pair]:
    groups: defaultdict[tuple[int, int], list[Record]] = defaultdict(list)
    for record, other in found:
        if other is not None:
            groups[record.predicted, other].append(record)
    pairs = [
        Pair(predicted, other, tuple(sorted(group, key=lambda r: (-r.confidence, r.item.name))))
        for (predicted, other), group in groups.items()
    ]
    return sorted(pairs, key=lambda pair: (-len(pair.records), -pair.records[0].confidence))


# ------------------------------------------------------------------------------------------------- everything


@dataclass(frozen=True)
class Chosen:
    """The content of the page."""

    views: list[ClassView]  # of all classes
    shown: list[ClassView]  # those with pictures
    off_object: list[Record]
    border: list[Record]
    same: list[Record]  # with the object hidden
    pairs: list[Pair]
    labelled: bool  # whether the pairs are (predicted, true), or (predicted, runner-up)
    reference: Usual

    def wanted(self) -> dict[str, tuple[Record, list[int]]]:
        """The images to draw, each once, with the other classes whose maps it needs."""
        found: dict[str, tuple[Record, list[int]]] = {}
        singles = [*self.off_object, *self.border, *self.same]
        singles += [r for view in self.shown for r in (view.typical, view.surprising) if r is not None]
        for record in singles:
            found.setdefault(record.item.name, (record, []))
        for pair in self.pairs:
            record = pair.records[0]
            others = found.setdefault(record.item.name, (record, []))[1]
            others += [pair.other] if pair.other not in others else []
        return found


def choose_all(records: Sequence[Record], top: int) -> Chosen:
    """At most `top` entries for each section."""
    reference = usual(records)
    views = class_views(records, reference)
    labelled = any(record.right is not None for record in records)
    return Chosen(
        views=views,
        shown=[view for view in views if view.surprising is not None][:top],
        off_object=_flagged_or_few(off_object(records), is_off_object, top),
        border=_flagged_or_few(on_border(records), is_on_border, top),
        same=without_object(records)[:top],
        pairs=(confusions(records) if labelled else undecided(records))[:top],
        labelled=labelled,
        reference=reference,
    )


def _flagged_or_few(ranked: list[Record], flagged: Callable[[Record], bool], top: int) -> list[Record]:
    return [record for record in ranked if flagged(record)][:top] or ranked[: min(top, _FEW)]
