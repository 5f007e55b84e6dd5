"""The trust card of one map."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from classlens.explanation import Explanation
from classlens.trust.measures import Measures, measured
from classlens.trust.subject import subject_of
from classlens.trust.verdict import CRITERIA, DOUBTFUL, TRUST, Reason, reasons, verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class Trust:
    """How far to trust a map. `print(trust)` shows the card; in a notebook it shows its figure.

    >>> t = e.trust()
    >>> t.verdict
    'doubtful'
    >>> t.because
    'other methods agree by 0.41 (gradcam), -0.12 (lrp)'
    """

    verdict: str  # "trust", "doubtful", "do not trust"
    reasons: tuple[Reason, ...]
    measures: Measures
    explanation: Explanation
    row: int = 0
    k: int = 0

    @property
    def because(self) -> str:
        """The reasons that decided: those of the worst measures."""
        return "; ".join(reason.text for reason in self.reasons if reason.verdict == self.verdict)

    @property
    def where(self) -> str:
        """The summary of the map, each share with its range over the changed pictures; empty if there are none.

        >>> t.where
        '71 % of the evidence in top half (66 to 74 %), 38 % of the evidence in top-centre (35 to 41 %)'
        """
        return ", ".join(
            f"{100 * value:.0f} % of {'all evidence' if name == 'against' else 'the evidence in'} {name} "
            f"({100 * low:.0f} to {100 * high:.0f} %)"
            for name, (value, low, high) in self.measures.where.items()
            if name != "against" or self.explanation.signed
        )

    def to_json(self) -> dict[str, Any]:
        """The card as a JSON object; a number that could not be measured is null."""
        found = self.measures
        numbers = {name: _number(criterion.value(found)) for name, criterion in CRITERIA.items()}
        parts = {name: _number(getattr(found, name)) for name in _PARTS}
        return {
            "question": self.explanation.question(self.row, self.k),
            "verdict": self.verdict,
            "reasons": [vars(reason) for reason in self.reasons],
            "measures": numbers | parts,
            "changes": found.changes,
            "others": found.others,
            "where": {name: dict(zip(("value", "low", "high"), x, strict=True)) for name, x in found.where.items()},
            "places": None if found.places is None else {
                "low": found.places.low.tolist(), "high": found.places.high.tolist()
            },
        }  # fmt: skip

    def __str__(self) -> str:
        marks = {TRUST: "+", DOUBTFUL: "?"}
        lines = [f"{marks.get(reason.verdict, '-')} {reason.text}" for reason in self.reasons]
        lines += [f"  {self.where}"] if self.where else []
        return "\n".join([f"{self.verdict}: {self.explanation.question(self.row, self.k)}", *(f"  {x}" for x in lines)])

    def __repr__(self) -> str:
        return f"<Trust in the {self.explanation.question(self.row, self.k)}: {self.verdict}>"

    def figure(self) -> Figure:
        """The map, the map with uncertain places faded, and the card."""
        from classlens.render.trust import figure

        return figure(self)

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        from classlens import render

        return render.notebook_png(self.figure())


_PARTS = ("removed", "removed_elsewhere", "kept", "kept_elsewhere", "arrived")


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def judge(explanation: Explanation, row: int = 0, k: int = 0, *, seed: int = 0) -> Trust:
    """Test a map on its network; `e.trust()` calls this.

    >>> judge(classlens.explain(m, "photo.jpg", "tabby")).verdict
    'trust'

    Fewer than 40 forward passes, besides those that the method itself needs for six more maps.
    """
    with torch.inference_mode(False):  # methods need gradients, which the caller's inference mode would forbid
        found = measured(subject_of(explanation, row, k), seed)
    why = reasons(found)
    return Trust(verdict(why), why, found, explanation, row, k)
