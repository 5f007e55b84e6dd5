"""From scores to a choice: mean ranks on half A, paired differences on half B. Pure functions of numbers.

>>> mean_ranks({"masks": {"agf": 95.0, "gradcam": 83.3}, "stability": {"agf": 70.0, "gradcam": 70.0}})
{'agf': 1.25, 'gradcam': 1.75}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from classlens.evaluate.stats import Estimate


def mean_ranks(scores: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """test -> method -> score in per cent, higher is better -> method -> its mean rank over the tests, the best first.

    Methods with equal scores (to a tenth of a point) share the mean of their ranks. Every test counts the
    same, whatever its scale.
    """
    methods = list(next(iter(scores.values())))
    means = {
        method: sum(_rank(found, method) for found in scores.values()) / len(scores) for method in methods
    }  # fmt: skip
    return dict(sorted(means.items(), key=lambda entry: entry[1]))  # stable: of equals, the method named first leads


def _rank(scores: Mapping[str, float], method: str) -> float:
    """1 + the methods ahead + half of the equal ones."""
    mine = round(scores[method], 1)
    others = [round(score, 1) for name, score in scores.items() if name != method]
    return 1 + sum(score > mine for score in others) + sum(score == mine for score in others) / 2


LEAST = 0.1  # percentage points: smaller differences are level, since rounding alone may make them


@dataclass(frozen=True)
class Duel:
    """One method against another on half B: its paired difference in each test, in percentage points."""

    method: str
    against: str
    differences: Mapping[str, Estimate]

    @property
    def ahead(self) -> tuple[str, ...]:
        """The tests in which the method is ahead for certain: the 95 % interval lies above 0, by more than rounding."""
        return tuple(test for test, found in self.differences.items() if found.low > 0 and found.value >= LEAST)

    @property
    def behind(self) -> tuple[str, ...]:
        """The tests in which it is behind for certain."""
        return tuple(test for test, found in self.differences.items() if found.high < 0 and found.value <= -LEAST)

    @property
    def wins(self) -> bool:
        """Whether it is ahead for certain in more tests than it is behind."""
        return len(self.ahead) > len(self.behind)


def decide(leader: str, default: str | None, duels: Sequence[Duel]) -> str:
    """The leader of half A if it is the default, or if half B confirms that it beats it; else the default.

    Without a default (it cannot explain the network), the leader; without a duel (no maps on half B), the default.
    """
    if default is None or leader == default:
        return leader
    duel = next((duel for duel in duels if (duel.method, duel.against) == (leader, default)), None)
    return leader if duel is not None and duel.wins else default
