"""Classes: one by index or name, the most likely ones, or those above a probability."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar

from torch import Tensor

from classlens.core.names import match
from classlens.core.targets.base import LabelOf
from classlens.errors import TargetError


@dataclass(frozen=True)
class Class:
    """Evidence for one class: `Class(281).value(y)` is `y[281]`."""

    index: int
    kind: ClassVar[str] = "class"

    def words(self, label: LabelOf) -> str:
        return label(self.index)

    def fits(self, outputs: int, label: LabelOf = str) -> None:
        if not 0 <= self.index < outputs:
            raise TargetError(f"class {self.index} is out of range; the model has classes 0..{outputs - 1}")

    def value(self, logits: Tensor) -> Tensor:
        return logits[self.index]


def class_index(item: Any, outputs: int, labels: Sequence[str] | None) -> int:
    """The class that a user's index or name refers to."""
    if isinstance(item, str) and labels is not None:
        return match(labels, item)
    if isinstance(item, str) and item.strip().isdigit():
        item = int(item)
    if isinstance(item, str):
        raise TargetError(f"the model has no class names, so {item!r} cannot be found; give an index 0..{outputs - 1}")
    if isinstance(item, bool) or not isinstance(item, Integral):
        raise TargetError(f"a class is an index or a name, not {item!r}")
    index = int(item)  # of NumPy's whole numbers too
    Class(index).fits(outputs)
    return index


@dataclass(frozen=True)
class Top:
    """The k classes with the largest logits."""

    k: int

    def indices(self, logits: Tensor) -> Tensor:
        """(B,k), the most likely first."""
        if self.k > logits.shape[1]:
            raise TargetError(f"top({self.k}) asks for more classes than the model has ({logits.shape[1]})")
        return logits.topk(self.k, dim=1).indices


def top(k: int) -> Top:
    """Explain the k most likely classes of each image: `explain(model, images, targets=top(3))`."""
    if not isinstance(k, int) or k < 1:
        raise TargetError(f"top({k!r}) explains nothing; give a positive integer")
    return Top(k)


@dataclass(frozen=True)
class Above:
    """The classes of a multi-label network whose probability (sigmoid) is above a threshold."""

    threshold: float

    def indices(self, logits: Tensor) -> Tensor:
        """(B,K), the most likely first; each image must have the same number."""
        probability = logits.detach().double().sigmoid()
        counts = (probability > self.threshold).sum(1)
        if counts.min() == 0:
            row = int(counts.argmin())
            raise TargetError(
                f"no class of image {row} has a probability above {self.threshold:g}, the most likely has "
                f"{float(probability[row].max()):.2g}: give a lower threshold"
            )
        if counts.min() != counts.max():
            raise TargetError(
                f"the images have {int(counts.min())} to {int(counts.max())} classes above {self.threshold:g}: explain "
                "them one by one"
            )
        return logits.topk(int(counts[0]), dim=1).indices


def above(threshold: float = 0.5) -> Above:
    """Explain every class that a multi-label network predicts: `explain(model, "photo.jpg", targets=above(0.5))`."""
    if not 0 < threshold < 1:
        raise TargetError(f"above({threshold!r}) makes no sense; give a probability between 0 and 1")
    return Above(threshold)
