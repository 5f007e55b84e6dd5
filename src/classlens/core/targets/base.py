"""What every kind of target has."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Protocol

from torch import Tensor

Scalar = Callable[[Tensor], Tensor]  # the logits (classes,) of one image -> the number to explain
LabelOf = Callable[[int], str]  # a class's index -> its name


class Target(Protocol):
    """One thing that can be asked of one image."""

    kind: ClassVar[str]  # "class", "number", "contrast"

    def words(self, label: LabelOf) -> str:
        """What figures and reports call it: "tabby rather than Egyptian cat"."""
        ...

    def fits(self, outputs: int, label: LabelOf) -> None:
        """Raises `TargetError` where a network with so many outputs cannot be asked this."""
        ...

    def value(self, logits: Tensor) -> Tensor:
        """The number to explain, of the logits (classes,) of one image."""
        ...
