"""From measures to one verdict in words. The limits were chosen on half A (benchmarks/trust.py, docs/trust.md).

Every measure has two limits. Beyond the first a map may be trusted, beyond the second it may not; between them it is
doubtful. The worst measure decides, and a test that could not be run leaves at best a doubtful map.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from classlens.methods.registry import POOR
from classlens.trust.measures import Measures

TRUST, DOUBTFUL, NEVER = "trust", "doubtful", "do not trust"
VERDICTS = (TRUST, DOUBTFUL, NEVER)  # the better, the earlier


@dataclass(frozen=True)
class Limits:
    """Where a measure is good and where it is bad. `good > bad` means that more is better."""

    good: float
    bad: float

    def judge(self, value: float) -> str:
        """The verdict on one number.

        >>> Limits(good=0.2, bad=0.0).judge(0.1)
        'doubtful'
        """
        sign = 1 if self.good >= self.bad else -1
        if sign * value >= sign * self.good:
            return TRUST
        return NEVER if sign * value <= sign * self.bad else DOUBTFUL


@dataclass(frozen=True)
class Criterion:
    """A measure with its limits, and what it says in words."""

    limits: Limits
    value: Callable[[Measures], float]
    words: Callable[[Measures], str]
    applies: Callable[[Measures], bool] = lambda measures: True


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


EXCESS = Limits(good=2.0, bad=math.inf)  # never the reason to call a map bad: it is the tests that say little then
CORRESPONDENCE = Limits(good=0.29, bad=0.07)


def _of_quarters(m: Measures) -> str:
    found = f"(correlation {m.correspondence:.2f})"
    if CORRESPONDENCE.judge(m.correspondence) == TRUST:
        return f"the more evidence a quarter of the picture holds, the more hiding it costs {found}"
    return f"the {m.missed} matters more to the class than what the map shows there {found}"


CRITERIA: dict[str, Criterion] = {
    "signal": Criterion(
        Limits(good=1.0, bad=0.0),
        lambda m: m.signal,
        lambda m: (
            "the network finds no more of the class here than in pictures without content"
            if m.signal <= 0
            else f"the logit of the class is {m.signal:.1f} higher here than in pictures without content"
        ),
    ),
    "spread": Criterion(
        Limits(good=0.27, bad=0.39),
        lambda m: m.spread,
        lambda m: f"half of the evidence takes up {_percent(m.spread)} of the picture",
    ),
    "removal": Criterion(
        Limits(good=0.14, bad=0.04),
        lambda m: m.removal,
        lambda m: (
            f"without the marked places {_percent(m.removed)} of the class is left, without as much elsewhere "
            f"{_percent(m.removed_elsewhere)}"
        ),
    ),
    "sufficiency": Criterion(
        Limits(good=0.39, bad=0.10),
        lambda m: m.sufficiency,
        lambda m: (
            f"the marked places alone hold {_percent(m.kept)} of the class, as much elsewhere "
            f"{_percent(m.kept_elsewhere)}"
        ),
    ),
    "excess": Criterion(
        EXCESS,
        lambda m: m.excess,
        lambda m: (
            f"no picture with hidden parts holds more than {_percent(max(1.0, m.excess))} of the class"
            if m.excess <= EXCESS.good
            else f"a picture with hidden parts holds {_percent(m.excess)} of the class, so hiding proves little here"
        ),
    ),
    "correspondence": Criterion(CORRESPONDENCE, lambda m: m.correspondence, _of_quarters),
    "stability": Criterion(
        Limits(good=0.91, bad=0.23),
        lambda m: m.stability,
        lambda m: (
            f"the maps of slightly changed pictures correlate with this one by {m.stability:.2f} "
            f"(least: {min(m.changes, key=m.changes.__getitem__)}, {min(m.changes.values()):.2f})"
        ),
    ),
    "shuffled": Criterion(
        Limits(good=0.64, bad=0.82),
        lambda m: m.shuffled,
        lambda m: f"the map of a network with shuffled weights correlates with this one by {m.shuffled:.2f}",
    ),
    "agreement": Criterion(
        Limits(good=0.66, bad=0.16),
        lambda m: m.agreement,
        lambda m: "other methods agree by " + ", ".join(f"{value:.2f} ({name})" for name, value in m.others.items()),
    ),
    "conservation": Criterion(
        Limits(good=POOR, bad=0.5),
        lambda m: m.conservation,
        lambda m: f"{_percent(m.conservation)} of the relevance is unaccounted for",
        applies=lambda m: not math.isnan(m.conservation),
    ),
}
"""Every criterion by the name of its measure, in the order of the card."""


@dataclass(frozen=True)
class Reason:
    """What one measure says: its verdict, and a sentence."""

    measure: str
    verdict: str
    text: str


def reasons(measures: Measures) -> tuple[Reason, ...]:
    """What each measure says, in the order of the card."""
    if math.isnan(measures.spread):
        return (Reason("spread", NEVER, "the map holds no evidence for the class"),)
    return tuple(_reason(name, one, measures) for name, one in CRITERIA.items() if one.applies(measures))


def _reason(name: str, criterion: Criterion, measures: Measures) -> Reason:
    value = criterion.value(measures)
    if math.isnan(value):
        why = measures.missing.get(name) or "the class has no signal to test with"
        return Reason(name, DOUBTFUL, f"{name} could not be measured: {why}")
    return Reason(name, criterion.limits.judge(value), criterion.words(measures))


def verdict(found: tuple[Reason, ...]) -> str:
    """The worst of all.

    >>> verdict((Reason("removal", "trust", ""), Reason("shuffled", "do not trust", "")))
    'do not trust'
    """
    return max((reason.verdict for reason in found), key=VERDICTS.index)
