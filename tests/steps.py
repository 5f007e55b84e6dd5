"""One function as a network, and relevance taken back through it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from classlens.core.capture import record
from classlens.core.rules import propagate, rule_for


class Does(nn.Module):
    """A module that calls a function."""

    def __init__(self, do: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.do = do

    def forward(self, x: Tensor) -> Tensor:
        return self.do(x)


def back(do: Callable[[Tensor], Tensor], x: Tensor, relevance: Tensor) -> Tensor:
    """Relevance at the input of a function, by the default rules, for one class."""
    tape = record(Does(do).eval(), x)
    return propagate(tape, {tape.output: relevance[None]}, rule_for).relevance[0]
