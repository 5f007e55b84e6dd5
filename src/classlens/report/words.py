"""The findings in plain words: a sentence for each image, and the summary at the top of the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median

from classlens.report import choose
from classlens.report.choose import Oddness, Usual
from classlens.report.collect import Record

Names = Callable[[int], str]

_ENOUGH = 5  # minimum number of images for a sentence about their median
# Of two maps' evidence, what lies in the same cells. By agf on EfficientNet-Lite0, two breeds on one animal share 0.27
# or more (25 pets, the likeliest breed with the second and the third), two things side by side 0.09 at most (21 pairs).
_SAME_PLACES, _OTHER_PLACES = 0.7, 0.2
_TELLING = 0.05  # a smaller drop in probability is not informative


@dataclass(frozen=True)
class Finding:
    """A number with its meaning, and the section that shows it."""

    number: str
    title: str
    text: str
    section: str
    alarming: bool = False


def percent(share: float) -> str:
    """71 %; only an exact 0 is written as 0 %, only an exact 1 as 100 %.

    >>> percent(0.714), percent(0.001), percent(0.999)
    ('71 %', '<1 %', '>99 %')
    """
    if 0 < share < 0.005:
        return "<1 %"
    return ">99 %" if 0.995 <= share < 1 else f"{100 * share:.0f} %"


def count(number: int, thing: str) -> str:
    """`1 picture`, `3 pictures`."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


# ---------------------------------------------------------------------------------------------- one picture


def verdict(record: Record, names: Names) -> str:
    """The prediction, and whether it is right."""
    said = f"{names(record.predicted)}, {percent(record.confidence)}"
    if record.right:
        return f"{said} – right"
    if record.true_class is not None:
        return f"{said} – wrong: {names(record.true_class)}, {percent(record.truth_confidence or 0.0)}"
    return f"{said} – labelled {record.truth.label}" if record.truth.label else said


def sentence(record: Record, names: Names, odd: Oddness | None = None, reference: Usual | None = None) -> str:
    """Where the evidence lies: for the measure that is odd, or in general."""
    if odd is not None and reference is not None:
        if not odd.unusual:
            return f"Nothing unusual: {_lower(_whole(record))}"
        if odd.measure == "border":
            return border_sentence(record)
        if odd.measure == "spread":
            return _spread_sentence(record, reference)
        return object_sentence(record, names)
    return _whole(record)


def object_sentence(record: Record, names: Names) -> str:
    """The share on the object, and the prediction without the object."""
    where, hidden, said = record.where, record.hidden, names(record.predicted)
    if where.inside is None or where.area is None:
        return _whole(record)
    chance = " – less than chance" if where.inside < where.area else ""
    only = "" if where.inside >= choose.MOST else "Only "
    text = (
        f"{only}{percent(where.inside)} of the evidence lies on the object, which covers {percent(where.area)} of the "
        f"picture{chance}."
    )
    if hidden.object is None or hidden.instead is None:
        return text
    if hidden.instead == record.predicted:
        return f"{text} With the object hidden the model still says {said} ({percent(hidden.object)})."
    return (
        f"{text} With the object hidden the model says {names(hidden.instead)}, and {said} falls to "
        f"{percent(hidden.object)}."
    )


def border_sentence(record: Record) -> str:
    """The share in the outer tenth of the image."""
    return (
        f"{percent(record.where.border)} of the evidence lies in the outer tenth of the picture; spread evenly it "
        f"would be {percent(record.where.even_border)}."
    )


def pair_sentence(
    record: Record, other: int, overlap: float | None, leads: tuple[str, str], names: Names, locates: bool = True
) -> str:
    """How similar the maps of two classes are on one image, and where each has more.

    Only maps that show the evidence for each class by itself (`locates`) can say whether the classes are found on the
    same thing. In a contrast, the map of the less likely class is inverted.
    """
    mine, theirs = names(record.predicted), names(other)
    if overlap is None:
        return f"There is no evidence for {theirs} in this picture."
    shared = f"{percent(overlap)} of the evidence for the two lies in the same places"
    if locates and overlap >= _SAME_PLACES:
        text = f"{shared}: both classes are found on the same thing."
    elif locates and overlap <= _OTHER_PLACES:
        text = f"Only {shared}: the classes are found on different things."
    else:
        text = f"{shared}."
    if leads[0] == leads[1]:
        return text
    return f"{text} Of the two, {mine} leads in the {leads[0]}, {theirs} in the {leads[1]}."


def _whole(record: Record) -> str:
    where = record.where
    spread = f"half of it in {percent(where.half)} of the picture"
    if where.inside is None:
        return f"{percent(where.border)} of the evidence lies on the border, {spread}."
    return f"{percent(where.inside)} of the evidence lies on the object, {spread}."


def _spread_sentence(record: Record, reference: Usual) -> str:
    half, usual = record.where.half, reference.middle["spread"]
    how = "is spread out: half of it takes up" if half > usual else "is narrow: half of it sits in"
    return f"The evidence {how} {percent(half)} of the picture, where {percent(usual)} is usual."


def _lower(text: str) -> str:
    return text[0].lower() + text[1:]


# --------------------------------------------------------------------------------------------------- summary


def findings(records: Sequence[Record], names: Names) -> list[Finding]:
    """The findings about the model that the data support."""
    found = [
        _accuracy(records, names),
        _on_object(records),
        _off_object(records, names),
        _without_object(records, names),
        _border(records, names),
        _unknown(records, names),
        _trust(records),
    ]
    return [finding for finding in found if finding is not None]


def _accuracy(records: Sequence[Record], names: Names) -> Finding | None:
    known = [record for record in records if record.right is not None]
    if not known:
        return None
    right = sum(bool(record.right) for record in known)
    text = f"The model is right on {right} of {count(len(known), 'picture')} with a label that it knows."
    pairs = choose.confusions(records)
    if pairs and len(pairs[0].records) > 1:
        mine, theirs, times = names(pairs[0].predicted), names(pairs[0].other), len(pairs[0].records)
        text += f" Its most frequent mistake: {theirs} called {mine}, {times} times."
    return Finding(percent(right / len(known)), "right", text, "confused")


def _on_object(records: Sequence[Record]) -> Finding | None:
    inside = [record.where.inside for record in records if record.where.inside is not None]
    if not inside:
        return None
    area = median(record.where.area for record in records if record.where.area is not None)
    middle = percent(median(inside))
    text = f"The median picture has {middle} of its evidence on the object, which covers {percent(area)}."
    right, wrong = (
        [r.where.inside for r in records if r.right is good and r.where.inside is not None] for good in (True, False)
    )
    if min(len(right), len(wrong)) >= _ENOUGH:
        text += f" Where the model is right it is {percent(median(right))}, where it is wrong {percent(median(wrong))}."
    return Finding(middle, "on the object", text, "object")


def _off_object(records: Sequence[Record], names: Names) -> Finding | None:
    masked = choose.off_object(records)
    if not masked:
        return None
    off = [record for record in masked if choose.is_off_object(record)]
    text = _more_than_half(off, len(masked), "outside of the object", names)
    if off:
        sure = sum(record.confidence >= choose.SURE for record in off)
        text += f" The model is sure of itself ({percent(choose.SURE)} or more) in {sure or 'none'} of them."
    return Finding(str(len(off)), "off the object", text, "object", bool(off))


def _without_object(records: Sequence[Record], names: Names) -> Finding | None:
    tried = [record for record in records if record.hidden.object is not None]
    if not tried:
        return None
    same = choose.without_object(tried)
    pictures = f"{len(same) or 'none'} of {count(len(tried), 'picture')}"
    text = f"With the object hidden the model still says the same of {pictures}"
    text += f"{_mostly(same, names)}: there the surroundings are enough." if same else "."
    return Finding(str(len(same)), "known by the surroundings", text, "hidden" if same else "pictures", bool(same))


def _border(records: Sequence[Record], names: Names) -> Finding:
    there = [record for record in records if choose.is_on_border(record)]
    text = _more_than_half(there, len(records), "in the outer tenth of the picture", names)
    return Finding(str(len(there)), "on the border", text, "border", bool(there))


def _unknown(records: Sequence[Record], names: Names) -> Finding | None:
    """Images whose label is not a class of the model, and the most consistent prediction for one such label."""
    labels = choose.instead(records)
    if not labels:
        return None
    total = sum(pictures for _, pictures, _ in labels)
    text = f"{count(total, 'picture')} of {count(len(labels), 'label')} that match no class of the model."
    label, pictures, said = max(labels, key=lambda entry: entry[2].most_common(1)[0][1])
    index, times = said.most_common(1)[0]
    if times > 1:
        text += f" {label} is called {names(index)} most often ({times} of {pictures})."
    return Finding(str(total), "outside of its classes", text, "confused")


def _trust(records: Sequence[Record]) -> Finding:
    """Whether the maps show what the model uses: hide their strongest part, or an equal part of the rest."""
    whole = mean(record.confidence for record in records)
    evidence = mean(record.hidden.evidence for record in records)
    elsewhere = mean(record.hidden.elsewhere for record in records)
    size = mean(record.where.half for record in records)
    text = (
        f"Hiding the {percent(size)} of a picture that hold half of the evidence lowers the class's probability from "
        f"{percent(whole)} to {percent(evidence)} on average; hiding as much of the rest, to {percent(elsewhere)}. "
    )
    believable = whole - evidence > max(_TELLING, 2 * (whole - elsewhere))
    text += "The maps show what the model uses." if believable else "Read these maps with caution."
    number = f"{percent(whole)} → {percent(evidence)}"
    return Finding(number, "with the evidence hidden", text, "made", not believable)


def _more_than_half(found: Sequence[Record], total: int, place: str, names: Names) -> str:
    if not found:
        return f"In none of {count(total, 'picture')} does more than half of the evidence lie {place}."
    pictures = f"{len(found)} of {count(total, 'picture')}"
    return f"For {pictures} more than half of the evidence lies {place}{_mostly(found, names)}."


def _mostly(records: Sequence[Record], names: Names) -> str:
    """The most frequent class among them, if there is a single one."""
    (predicted, times), *others = Counter(record.predicted for record in records).most_common(2)
    if times < 2:
        return ""
    if not others:
        return f", all of them called {names(predicted)}"
    return f", most often called {names(predicted)} ({times})" if times > others[0][1] else ""
