"""Any number that a callable computes from the logits of one image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from classlens.core.targets.base import LabelOf, Scalar
from classlens.errors import TargetError


@dataclass(frozen=True, eq=False)
class Number:
    """Evidence for a number: `Number(lambda y: y[281:286].logsumexp(0))` is any cat."""

    function: Scalar
    kind: ClassVar[str] = "number"

    # By identity: a callable may hold tensors, whose comparison has no single truth value.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Number) and other.function is self.function

    def __hash__(self) -> int:
        return id(self.function)

    @property
    def name(self) -> str:
        """The name of the callable, or of its type."""
        name = getattr(self.function, "__name__", type(self.function).__name__)
        return "function of the logits" if name == "<lambda>" else name.replace("_", " ")

    def words(self, label: LabelOf) -> str:
        return self.name

    def fits(self, outputs: int, label: LabelOf) -> None:
        """Nothing to check: a callable raises its own errors when it is called."""

    def value(self, logits: Tensor) -> Tensor:
        value = self.function(logits)
        if not isinstance(value, Tensor) or value.numel() != 1:
            what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise TargetError(
                f"the target {self.name!r} gives {what} for the logits {tuple(logits.shape)} of one image; "
                "it must give one number, as a tensor"
            )
        if logits.requires_grad and not value.requires_grad:
            raise TargetError(
                f"the target {self.name!r} has no gradient; compute it from the logits with torch operations"
            )
        return value.reshape(())

    def picked_class(self, logits: Tensor) -> int | None:
        """The class whose logit it returns, both here and at the opposite point (where a maximum returns another)."""
        with torch.enable_grad():
            leaf = logits.detach().clone().requires_grad_()
            value = self.value(leaf)
            (direction,) = torch.autograd.grad(value, leaf)
        chosen = int(direction.argmax())
        one_hot = direction[chosen] == 1 and direction.count_nonzero() == 1
        with torch.no_grad():
            same = one_hot and value == leaf[chosen] and self.value(-leaf) == -leaf[chosen]
        return chosen if same else None
