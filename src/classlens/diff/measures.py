"""MEASURES: what a diff measures, each with a paired bootstrap interval, and the conditions of --fail-if.

    >>> condition("border > 0.1").holds(measured)
    False
    >>> condition("border.low>0.1")         # the lower end of the 95 % interval
    Condition(text='border.low>0.1', measure='border', end='low', sign='>', limit=0.1)

Every value is B minus A, or a likeness of both. The rows of one picture are drawn together.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from classlens.diff.collect import Row
from classlens.errors import ClasslensError, DataError
from classlens.evaluate.stats import Estimate, estimate, ratio

Value = Callable[[Row], float | None]


@dataclass(frozen=True)
class Measure:
    """A number of each row, or of each picture; None where it cannot be measured."""

    value: Value
    words: str
    per_picture: bool = False  # the same for all rows of a picture
    needs: str = ""  # what the data lack if no row has it


def _off(row: Row) -> float | None:
    return None if row.a.inside is None or row.b.inside is None else row.a.inside - row.b.inside


def _accuracy(row: Row) -> float | None:
    return None if row.right is None else float(row.right[1]) - float(row.right[0])


MEASURES: dict[str, Measure] = {
    "moved": Measure(lambda row: row.moved, "share of the evidence that lies elsewhere in B than in A"),
    "correlation": Measure(lambda row: row.correlation, "correlation of the two maps"),
    "border": Measure(lambda row: row.b.border - row.a.border, "change of the share in the outer tenth of the picture"),
    "off_object": Measure(_off, "change of the share off the object", needs="masks"),
    "spread": Measure(lambda row: row.b.half - row.a.half, "change of the area that holds half of the evidence"),
    "against": Measure(lambda row: row.b.against - row.a.against, "change of the share against the class"),
    "probability": Measure(lambda row: row.b.probability - row.a.probability, "change of the probability of the class"),
    "predictions": Measure(
        lambda row: float(row.predicted[0] != row.predicted[1]), "share of the pictures with another prediction", True
    ),
    "accuracy": Measure(
        _accuracy, "change of the share of right predictions", True, "labels that are classes of both networks"
    ),
}
"""The measures of the rows, by the names that --fail-if takes."""

COUNTED = {
    "appeared": "number of classes with a shortcut that A did not have",
    "gone": "number of classes with a shortcut that B has no longer",
}
"""Numbers that have no interval."""

NAMES = (*MEASURES, *COUNTED)
_ENDS = {"": "value", "low": "low", "high": "high"}
_SIGNS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
_CONDITION = re.compile(r"\s*([\w-]+)(?:\.([\w]+))?\s*(>=|<=|>|<)\s*(\S+)\s*")


def measured(rows: Sequence[Row], seed: int = 0) -> dict[str, Estimate]:
    """Every measure of these rows with its 95 % interval; n is 0 where it cannot be measured."""
    return {name: estimated(rows, one.value, one.per_picture, seed) for name, one in MEASURES.items()}


def estimated(rows: Sequence[Row], value: Value, per_picture: bool = False, seed: int = 0) -> Estimate:
    """The mean over rows with its interval; the rows of a picture are drawn together."""
    found = {row.item.name: row for row in reversed(rows)}.values() if per_picture else rows
    pairs = [(row.item.name, number) for row in found if (number := value(row)) is not None]
    if not pairs:
        return Estimate(math.nan, math.nan, math.nan, 0)
    names, numbers = zip(*pairs, strict=True)
    columns = np.stack([np.array(numbers), np.ones(len(numbers))], 1)
    return estimate(columns, ratio, np.array(names), seed)


# ------------------------------------------------------------------------------------------------------ conditions


@dataclass(frozen=True)
class Condition:
    """A condition of --fail-if."""

    text: str
    measure: str
    end: str  # value, low or high
    sign: str
    limit: float

    def holds(self, found: Mapping[str, Estimate]) -> bool:
        """Whether it holds; refused if the measure is not known for these data."""
        estimated = found[self.measure]
        number = getattr(estimated, self.end)
        if math.isnan(number):
            why = "one picture has no interval" if not math.isnan(estimated.value) else _lacking(self.measure)
            raise DataError(f"--fail-if {self.text!r} cannot be checked: {why}")
        return bool(_SIGNS[self.sign](number, self.limit))


def condition(text: str) -> Condition:
    """Parse `NAME > NUMBER`; refused with the list of measures."""
    parts = _CONDITION.fullmatch(text)
    if parts is None:
        raise ClasslensError(
            f"--fail-if {text!r} is not a condition; write a measure, a sign ({' '.join(_SIGNS)}) and a number, such "
            f"as border>0.1; the measures are {', '.join(NAMES)}"
        )
    name, end, sign, number = parts[1], parts[2] or "", parts[3], parts[4]
    if name not in NAMES:
        raise ClasslensError(f"--fail-if {text!r}: there is no measure {name}; the measures are {', '.join(NAMES)}")
    if end not in _ENDS:
        raise ClasslensError(f"--fail-if {text!r}: {name} has no {end}; write {name}, {name}.low or {name}.high")
    if end and name in COUNTED:
        raise ClasslensError(f"--fail-if {text!r}: {name} is counted and has no interval; write {name}")
    try:
        limit = float(number)
    except ValueError:
        limit = math.nan
    if not math.isfinite(limit):
        raise ClasslensError(f"--fail-if {text!r}: {number} is not a number; shares are written as 0.1, not 10 %")
    return Condition(text, name, _ENDS[end], sign, limit)


def _lacking(name: str) -> str:
    return f"the data have no {MEASURES[name].needs}" if name in MEASURES else "it was not counted"
