"""Operations on 8-bit integers, and what they compute in floating point with the same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_CONV: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def _same(x: Tensor, *_: Any, **__: Any) -> Tensor:
    """Rounding to the grid of 8-bit values is left out."""
    return x


def _linear(x: Tensor, packed: Any, *_: Any, **__: Any) -> Tensor:
    weight, bias = packed.unpack()
    return F.linear(x, weight.dequantize().float(), bias)


def _conv(n: int) -> Callable[..., Tensor]:
    def conv(x: Tensor, packed: Any, *_: Any, **__: Any) -> Tensor:
        weight, bias = packed.unpack()
        weight = weight.dequantize()
        if weight.dim() > n + 2:  # torch keeps 1-D convolutions as 2-D ones
            weight = weight.squeeze(2)
        sizes = (list(size())[-n:] for size in (packed.stride, packed.padding, packed.dilation))
        return _CONV[n](x, weight, bias, *sizes, packed.groups())

    return conv


def _two(combine: Callable[[Tensor, Any], Tensor]) -> Callable[..., Tensor]:
    return lambda a, b, *_, **__: combine(a, b)


def _cat(tensors: list[Tensor], *_: Any, dim: int = 0, **__: Any) -> Tensor:
    return torch.cat(tensors, dim)


def _leaky_relu(x: Tensor, slope: float, *_: Any, **__: Any) -> Tensor:
    return F.leaky_relu(x, slope)


def _softmax(x: Tensor, dim: int, *_: Any, **__: Any) -> Tensor:
    return x.softmax(dim)


def _then_relu(operation: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: F.relu(operation(*args, **kwargs))


_WITH_RELU: dict[str, Callable[..., Tensor]] = {
    "linear": _linear, "conv1d": _conv(1), "conv2d": _conv(2), "conv3d": _conv(3), "add": _two(torch.add),
    "mul": _two(torch.mul), "add_scalar": _two(torch.add), "mul_scalar": _two(torch.mul), "cat": _cat,
}  # fmt: skip
IN_FLOAT: dict[str, Callable[..., Any]] = {
    **_WITH_RELU,
    **{f"{name}_relu": _then_relu(operation) for name, operation in _WITH_RELU.items()},
    "linear_dynamic": _linear,
    "linear_dynamic_fp16": _linear,
    "linear_relu_dynamic": _then_relu(_linear),
    "matmul": _two(torch.matmul),
    "relu6": lambda x, *_: F.relu6(x),
    "hardswish": lambda x, *_: F.hardswish(x),
    "sigmoid": lambda x, *_: x.sigmoid(),
    "leaky_relu": _leaky_relu,
    "softmax": _softmax,
}
ROUNDINGS = frozenset(
    f"{name}{how}" for name in ("quantize", "dequantize", "fake_quantize")
    for how in ("", "_per_tensor", "_per_channel", "_per_tensor_dynamic", "_per_tensor_affine", "_per_channel_affine")
)  # fmt: skip


def in_float(name: str, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """The floating-point form of a quantised operation on these arguments; None if there is none.

    >>> in_float("linear_dynamic", (x, packed)).__name__
    '_linear'
    """
    if name in ROUNDINGS:
        return _same if args and isinstance(args[0], Tensor) and args[0].is_floating_point() else None
    return IN_FLOAT.get(name)
