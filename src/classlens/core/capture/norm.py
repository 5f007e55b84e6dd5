"""Batch norms with fixed statistics: y = scale * x + offset.

torch keeps the input of such a norm for the gradients of its weights, which nobody asks for here. For large pictures
that is half of the memory of a forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

# What says whether autograd hands tensors over to someone else: checkpointing does that.
_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def is_fixed(named: Mapping[str, Any]) -> bool:
    """Whether a `batch_norm` with these arguments uses statistics that were fixed before."""
    return named.get("running_mean") is not None and not named.get("training")


def affine(named: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Scale and offset (each (channels,)) of a `batch_norm` with fixed statistics.

    >>> affine({"running_mean": torch.ones(1), "running_var": torch.full((1,), 4.0), "eps": 0.0})
    (tensor([0.5000]), tensor([-0.5000]))
    """
    scale = torch.rsqrt(named["running_var"] + named.get("eps", 1e-5))
    if named.get("weight") is not None:
        scale = scale * named["weight"]
    offset = -named["running_mean"] * scale
    if named.get("bias") is not None:
        offset = offset + named["bias"]
    return scale.detach(), offset.detach()


def through_norm(named: Mapping[str, Any], gradients: Tensor) -> Tensor:
    """The gradients (K,B,C,...) at the input of a `batch_norm` with fixed statistics, from those at its output."""
    scale, _ = affine(named)
    return gradients * scale.reshape(-1, *[1] * (gradients.dim() - 3))


def may_be_lean() -> bool:
    """Whether autograd keeps tensors itself. A checkpointed part runs again later, and must keep the same tensors."""
    return _hooks is not None and _hooks(True) is None


def run_lean(named: Mapping[str, Any], run: Callable[[], Tensor]) -> Tensor:
    """Run a `batch_norm` with fixed statistics and these arguments so that autograd keeps nothing but its weights."""
    rest = {name: argument for name, argument in named.items() if name != "input"}
    output: Tensor = _LeanNorm.apply(named["input"], run, rest)  # type: ignore[no-untyped-call]
    return output


class _LeanNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[], Tensor], named: Mapping[str, Any]) -> Tensor:
        ctx.named = named
        return run()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        # torch's own function, so that every bit is as without this class. It does not read its second argument, which
        # would be the input, but takes its memory layout.
        named, gradient = ctx.named, gradient.contiguous()
        at_input, _, _ = torch.ops.aten.native_batch_norm_backward(
            gradient, gradient, named.get("weight"), named["running_mean"], named["running_var"], None, None, False,
            named.get("eps", 1e-5), [True, False, False],
        )  # fmt: skip
        return at_input, None, None
