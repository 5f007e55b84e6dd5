"""The interface of all kinds of targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Protocol

from torch import Tensor

Scalar = Callable[[Tensor], Tensor]  # the logits (classes,) of one image -> the number to explain
LabelOf = Callable[[int], str]  # class index -> name


class Target(Protocol):
    """One thing to explain about one image."""

    kind: ClassVar[str]  # "class", "number", "contrast"

    def words(self, label: LabelOf) -> str:
        """The target in words, for figures and reports: "tabby rather than Egyptian cat"."""
        ...

    def fits(self, outputs: int, label: LabelOf) -> None:
        """Raise `TargetError` if this target does not exist for a network with this many outputs."""
        ...

    def value(self, logits: Tensor) -> Tensor:
        """The number to explain, computed from the logits (classes,) of one image."""
        ...
