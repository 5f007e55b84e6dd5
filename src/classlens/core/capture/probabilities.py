"""Networks that return probabilities: the logits that their last softmax or sigmoid reads.

A softmax hides what a class has for itself: its output says how classes compare, and where it is near 0 or 1 it has no
gradient. A log-probability is negative even for the winning class, so relevance that starts from it has the wrong sign.
So if a network returns the output of a softmax or sigmoid over its classes, the logits before it are explained.

    >>> record(nn.Sequential(network, nn.Softmax(1)).eval(), images).ends         # the logits are those of `network`
    'softmax'
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from classlens.core import ops

_ENDS = frozenset(("softmax", "log_softmax", "sigmoid", "logsigmoid"))


class Ending:
    """The last softmax or sigmoid over classes in a forward pass: what it read and what it made."""

    def __init__(self) -> None:
        self.op = ""
        self._read: Tensor | None = None
        self._made: Tensor | None = None

    def see(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> None:
        """Look at an operation that the network called."""
        if not isinstance(made, Tensor) or made.dim() != 2:
            return
        op = ops.canonical(func)
        if op == "log" and args and args[0] is self._made:
            self._made = made
        elif op in _ENDS:
            named = ops.arguments(op, func, args, kwargs)
            read = named["input"]
            if read is not made and named.get("dim", -1) in (1, -1, None):
                self.op, self._read, self._made = op, read, made

    def before(self, made: Tensor) -> tuple[Tensor, str]:
        """The logits, and what made probabilities of them; any other tensor as it is, and ""."""
        if made is self._made and self._read is not None:
            return self._read, self.op
        return made, ""


def of_labels(ends: str, logits: Tensor) -> bool:
    """Whether each of several classes has an independent probability: the network ends with a sigmoid.

    >>> of_labels("sigmoid", torch.zeros(1, 20)), of_labels("softmax", torch.zeros(1, 20))
    (True, False)
    """
    return "sigmoid" in ends and logits.dim() == 2 and logits.shape[1] > 1


def looks_like_probabilities(logits: Tensor) -> bool:
    """Whether the outputs (B,C) of each image add up to 1: something follows the softmax that is not looked through.

    >>> looks_like_probabilities(torch.tensor([[0.2, 0.8]])), looks_like_probabilities(torch.tensor([[2.0, -1.0]]))
    (True, False)
    """
    if logits.dim() != 2 or logits.shape[1] < 2 or logits.min() < 0:
        return False
    return bool(((logits.sum(1) - 1).abs() < 1e-3).all())


class WatchesEnding(TorchFunctionMode):
    """Shows each operation of a forward pass to an `Ending`."""

    def __init__(self) -> None:
        super().__init__()
        self.ending = Ending()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        self.ending.see(func, args, kwargs or {}, made)
        return made
