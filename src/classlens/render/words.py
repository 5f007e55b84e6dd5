"""Evidence maps in words: the question, where the evidence lies, and how much relevance arrived.

>>> where(explanation.maps[0, 0])
'top half 92 %, strongest in top-left (41 %); 8 % of all evidence is against'
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from classlens.core.targets import Asked, Class, Contrast
from classlens.render.colours import Evidence, checked

if TYPE_CHECKING:
    from classlens.explanation import Explanation

_ROWS, _COLUMNS = ("top", "centre", "bottom"), ("left", "centre", "right")
_REST = "the rest stayed in biases"
_ONE_SIDED = 0.65  # of the evidence in one half of the picture: said in words
_CELLS = [[row if row == column else f"{row}-{column}" for column in _COLUMNS] for row in _ROWS]


def where(evidence: Evidence, signed: bool = True, contrast: bool = False) -> str:
    """Where the evidence for the class lies, in a few words; in a contrast, the rest is evidence for its rivals.

    >>> where(np.array([[3.0, 0.0, 0.0], [0.0, 0.0, -1.0], [0.0, 0.0, 0.0]]))
    'top half 100 %, mostly top-left (100 %); 25 % of all evidence is against'
    """
    cells, against = shares(evidence)
    other = "for its rivals" if contrast else "against"
    if not cells:
        return "no evidence for the class" + (f"; all of it is {other}" if against else "")
    cell = max(cells, key=cells.__getitem__)
    text = f"{'mostly' if cells[cell] >= 0.5 else 'strongest in'} {cell} ({percent(cells[cell])})"
    if checked(evidence).ndim == 3:
        text = f"{_strongest_slices(evidence)}, {text}"
    side = one_sided(evidence)
    if side:
        text = f"{side[0]} half {percent(side[1])}, {text}"
    elif cells[cell] < 0.2:
        text = f"spread out, {text}"
    return f"{text}; {percent(against)} of all evidence is {other}" if signed else text


def shares(evidence: Evidence) -> tuple[dict[str, float], float]:
    """The distribution of the evidence for the class over a 3x3 grid, and the share of all evidence against it.

    >>> shares(np.array([[3.0, 0.0, 0.0], [0.0, 0.0, -1.0], [0.0, 0.0, 0.0]]))[1]
    0.25

    Without any evidence for the class the grid is empty.
    """
    values = checked(evidence)
    positive = np.maximum(values, 0)
    total, size = positive.sum(), np.abs(values).sum()
    against = float(1 - total / size) if size else 0.0
    if not total:
        return {}, against
    in_plane = _in_plane(positive)
    rows, columns = (np.arange(n) * 3 // n for n in in_plane.shape)
    grid = np.zeros((3, 3))
    np.add.at(grid, (rows[:, None], columns[None, :]), in_plane / total)
    return {_CELLS[i][j]: float(grid[i, j]) for i in range(3) for j in range(3)}, against


def _in_plane(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The sum over the slices of a volume; an image unchanged."""
    return values.sum(0) if values.ndim == 3 else values


def _strongest_slices(evidence: Evidence) -> str:
    """The run of slices around the strongest one that holds half of the evidence for the class."""
    of_slice = np.maximum(checked(evidence), 0).sum((1, 2))
    low = high = int(of_slice.argmax())
    while of_slice[low : high + 1].sum() < of_slice.sum() / 2:
        below, above = (of_slice[i] if 0 <= i < len(of_slice) else -1.0 for i in (low - 1, high + 1))
        low, high = (low - 1, high) if below > above else (low, high + 1)
    return f"half of it in slices {low + 1} to {high + 1} of {len(of_slice)}"


def one_sided(evidence: Evidence) -> tuple[str, float] | None:
    """The half of the image with most of the evidence for the class, and its share, if that is worth a word."""
    sides = halves(evidence)
    side = max(sides, key=sides.__getitem__)
    return (side, sides[side]) if sides[side] >= _ONE_SIDED else None


def halves(evidence: Evidence) -> dict[str, float]:
    """The share of the evidence for the class in each half of the image; 0 without any.

    >>> halves(np.array([[3.0, 1.0], [0.0, -1.0]]))
    {'top': 1.0, 'bottom': 0.0, 'left': 0.75, 'right': 0.25}
    """
    positive = _in_plane(np.maximum(checked(evidence), 0))
    height, width = positive.shape
    total = positive.sum() or 1.0
    # Weights 1 ... 1 0 ... 0; the middle line of an odd number belongs to both halves by 0.5.
    before = [np.clip(size / 2 - np.arange(size), 0, 1) for size in (height, width)]
    upper, left = (float(weights @ positive.sum(1 - axis) / total) for axis, weights in enumerate(before))
    whole = float(positive.sum() / total)
    return {"top": upper, "bottom": whole - upper, "left": left, "right": whole - left}


def question_text(explanation: Explanation) -> str:
    """The question of a whole figure: "evidence for the class rather than Egyptian cat"."""
    target = explanation.target()
    if isinstance(target, Contrast):
        return f"evidence for the class {target.than(explanation.label)}"
    if isinstance(target, Asked):
        return "evidence for what is named above the map"
    return "evidence for the class" if isinstance(target, Class) else "evidence for the number above the map"


def rival_text(explanation: Explanation, row: int, k: int) -> str:
    """The rivals of a class in words, with a probability; empty if it has no rivals.

    >>> rival_text(explain(m, "photo.jpg", "tabby", rather_than="Egyptian cat"), 0, 0)
    'rather than Egyptian cat (14.9 %)'
    >>> rival_text(explain(m, "photo.jpg", "tabby", rather_than="rivals"), 0, 0)
    'rather than its rivals (most likely: Egyptian cat, 14.9 %)'
    """
    target, found = explanation.target(row, k), explanation.likeliest_rival(row, k)
    if not isinstance(target, Contrast) or found is None:
        return ""
    chance = probability_text(found[1])
    single = target.rivals is not None and len(target.rivals) == 1
    likely = chance if single else f"most likely: {explanation.label(found[0])}, {chance}"
    return f"{target.than(explanation.label)} ({likely})"


def class_name(explanation: Explanation, row: int, k: int) -> str:
    """The class without its rivals; for a callable, its name."""
    index = int(explanation.targets[row, k])
    return explanation.label(index) if index >= 0 else explanation.name(row, k)


def arrival_text(explanation: Explanation, row: int = 0) -> str:
    """How much of the relevance is in the maps, how much stayed behind, and what is unaccounted for.

    >>> arrival_text(explanation)
    'relevance: 0.0088 % reached the picture, the rest stayed in biases; 0.00022 % is unaccounted for'

    Nothing for methods that do not propagate relevance.
    """
    report = explanation.report
    missing, shares = report.conservation[row].max(), report.arrived_share[row]
    if math.isnan(missing):
        return ""
    words = f"{_fine(float(missing))} is unaccounted for"
    if not math.isnan(shares.sum()):
        low, high = _fine(float(shares.min())), _fine(float(shares.max()))
        reached = low if low == high else f"{low} to {high}"
        arrived = "all of it reached the picture" if low == "100 %" else f"{reached} reached the picture, {_REST}"
        words = f"{arrived}; {words}"
    return f"relevance: {words}"


def _fine(share: float) -> str:
    """0.0088 %: two digits, however small."""
    return f"{100 * share:.2g} %" if share < 0.995 else "100 %"


def describe(explanation: Explanation, row: int = 0) -> list[dict[str, Any]]:
    """A description of each explained class of an image, as JSON.

    >>> [(c["name"], c["where"]) for c in describe(explanation)]
    [('Egyptian cat', 'top half 100 %, strongest in top-centre (39 %); 43 % of all evidence is against')]
    """
    return [_describe_class(explanation, row, k) for k in range(explanation.targets.shape[1])]


def _describe_class(explanation: Explanation, row: int, k: int) -> dict[str, Any]:
    evidence, probability = explanation.maps[row, k], explanation.probability(row, k)
    cells, against = shares(evidence)
    return {
        "name": class_name(explanation, row, k),
        "index": int(explanation.targets[row, k]),
        "probability": None if math.isnan(probability) else probability,
        "question": explanation.question(row, k),
        "rival": _describe_rival(explanation, row, k),
        "where": where(evidence, explanation.signed, isinstance(explanation.target(row, k), Contrast)),
        "cells": cells,
        "against": against,
    }


def _describe_rival(explanation: Explanation, row: int, k: int) -> dict[str, Any] | None:
    """The most likely rival of this class, if it has rivals."""
    found = explanation.likeliest_rival(row, k)
    return found and {"name": explanation.label(found[0]), "index": found[0], "probability": found[1]}


def summary(explanation: Explanation, row: int = 0) -> str:
    """The same as text: one line for each class.

    >>> print(summary(explanation))
      Egyptian cat (285)  14.9 %  top half 100 %, strongest in top-centre (39 %); 43 % of all evidence is against
    """
    classes = describe(explanation, row)
    names = [c["name"] if c["index"] < 0 else f"{c['name']} ({c['index']})" for c in classes]
    width = max(map(len, names))
    against = [f"{text}: " if (text := rival_text(explanation, row, k)) else "" for k in range(len(classes))]
    return "\n".join(
        f"  {name:{width}}  {probability_text(c['probability']):>6}  {rivals}{c['where']}"
        for name, rivals, c in zip(names, against, classes, strict=True)
    )


def probability_text(probability: float | None) -> str:
    """14.2 %, and for very unlikely classes <0.1 %; empty without a probability (None or NaN)."""
    if probability is None or math.isnan(probability):
        return ""
    return "<0.1 %" if probability < 0.0005 else f"{100 * probability:.1f} %"


def percent(share: float) -> str:
    """71 %; a positive share is never written as 0 %."""
    return "<1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"
