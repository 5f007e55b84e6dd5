"""A class rather than others: the evidence for it over its rivals.

>>> Contrast(281, (285,)).value(y)      # y[281] - y[285]
>>> Contrast(281).words(labels.__getitem__)
'tabby rather than its rivals'
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from classlens.core.targets.base import LabelOf
from classlens.core.targets.classes import Class, class_index
from classlens.errors import TargetError

RIVALS = "rivals"  # as rather_than: all other classes
RatherThan = None | int | str | Sequence[int | str]


@dataclass(frozen=True)
class Contrast:
    """y_t - T log sum_r exp(y_r / T) over the rivals r; for a single rival this is y_t - y_r for every T.

    With T = 1 and all classes as rivals this is the softmax's log odds, which the most likely rival dominates. With T
    the spread of the image's logits, the class is compared with many rivals.
    """

    index: int
    rivals: tuple[int, ...] | None = None  # None: all other classes
    temperature: float = 1.0
    kind: ClassVar[str] = "contrast"

    def words(self, label: LabelOf) -> str:
        return f"{label(self.index)} {self.than(label)}"

    def than(self, label: LabelOf) -> str:
        """The rivals in words: "rather than Egyptian cat or lynx"."""
        if self.rivals is None:
            return "rather than its rivals"
        *most, last = map(label, self.rivals)
        return f"rather than {', '.join(most)} or {last}" if most else f"rather than {last}"

    def fits(self, outputs: int, label: LabelOf) -> None:
        for index in (self.index, *(self.rivals or ())):
            Class(index).fits(outputs)
        if self.rivals is not None and self.index in self.rivals:
            raise TargetError(
                f"{label(self.index)} cannot be explained rather than itself; name another rival, or {RIVALS!r} for "
                "all other classes"
            )

    def among(self, outputs: int) -> list[int]:
        """The indices of the rivals."""
        return [i for i in range(outputs) if i != self.index] if self.rivals is None else list(self.rivals)

    def value(self, logits: Tensor) -> Tensor:
        others = logits[self.among(len(logits))] / self.temperature
        return logits[self.index] - self.temperature * others.logsumexp(0)


def named_rivals(rather_than: RatherThan, outputs: int, labels: Sequence[str] | None) -> tuple[int, ...] | None:
    """The rivals that a user named; None means all other classes."""
    if outputs == 1:
        raise TargetError("the network has one output, so its class has no rivals; omit rather_than")
    if rather_than == RIVALS:
        return None
    given: list[Any] = list(rather_than) if isinstance(rather_than, list | tuple) else [rather_than]
    if not given:
        raise TargetError(f"rather_than names no rival; give a class, several, or {RIVALS!r} for all other classes")
    if RIVALS in given:
        raise TargetError(f"{RIVALS!r} already means all other classes; do not combine it with others")
    return tuple(dict.fromkeys(class_index(item, outputs, labels) for item in given))


def spread(logits: Tensor) -> float:
    """The standard deviation of one image's logits, the temperature of its contrasts; 1 if all logits are equal.

    It is a constant for the image, not a function of the logits. So methods that run the network on other inputs
    explain the same function there, and its gradient is exact.
    """
    found = float(logits.detach().double().std(correction=0))
    return found if found > 0 else 1.0


def contrasts(indices: Tensor, rivals: tuple[int, ...] | None, logits: Tensor) -> list[list[Contrast]]:
    """(B,K) contrasts of classes with their rivals, each with the temperature of its image."""
    temperatures = [1.0 if rivals is not None and len(rivals) == 1 else spread(y) for y in logits]
    rows = zip(indices.tolist(), temperatures, strict=True)
    return [[Contrast(index, rivals, temperature) for index in row] for row, temperature in rows]
