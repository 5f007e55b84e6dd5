"""Layers that are written in other ways are recorded alike, so that a map does not depend on how they are written.

A product with a constant matrix is a linear layer: `x @ w` is recorded as `F.linear(x, w.T)`. `stack([a, b]).sum(0)` is
recorded as `a + b`. An interpolation that repeats values moves them, as `repeat_interleave` does. The maximum of a
value and 0 is a ReLU. torch's attention layer is recorded as what it calls: projections and
`scaled_dot_product_attention`, or softmax between two products. A bias that is added after a layer belongs to it.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from classlens.core.capture.tape import Node, Value
from classlens.core.ops import LINEAR_OPS, NEAREST, arguments


class Layer(NamedTuple):
    """A call of a linear layer."""

    op: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def as_layer(op: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Layer | None:
    """The linear layer that a `matmul` or `addmm` with a constant weight is; None if it is none.

    A constant on the left stays a product: it may be the queries of an attention.
    """
    if op not in ("matmul", "addmm"):
        return None
    named = arguments(op, func, args, kwargs)
    if op == "matmul":
        return _linear(named["input"], named["other"])
    bias = named["input"]
    plain = named.get("alpha", 1) == named.get("beta", 1) == 1
    return _linear(named["mat1"], named["mat2"], bias) if isinstance(bias, Tensor) and plain else None


def as_sum(op: str, func: Callable[..., Any], args: Any, kwargs: Any, makers: Mapping[Value, Node]) -> Layer | None:
    """The addition that a sum or a mean over two stacked values is: `stack([a, b]).sum(0)`; None if it is none."""
    value = args[0] if args else None
    if op not in ("sum", "mean") or not isinstance(value, Value):
        return None
    maker = makers.get(value)
    if maker is None or maker.op != "stack" or len(maker.inputs) != 2 or maker.constants:
        return None
    stacked, summed = maker.arguments().get("dim", 0), arguments(op, func, args, kwargs)
    axis, axes = summed.get("dim"), len(value.shape)
    axis = axis[0] if isinstance(axis, tuple | list) and len(axis) == 1 else axis
    plain = isinstance(axis, int) and axis % axes == stacked % axes and not summed.get("keepdim")
    if not plain or summed.get("dtype") is not None:
        return None
    return Layer("add", torch.add if op == "sum" else _mean_of_two, maker.inputs, {})


def as_biased(op: str, func: Callable[..., Any], args: Any, kwargs: Any, makers: Mapping[Value, Node]) -> Layer | None:
    """The layer with a bias that a layer and the addition of one constant for each channel are; None if they are none.

    `F.linear(x, w) + b` is `F.linear(x, w, b)`.
    """
    if op != "add":
        return None
    named = arguments(op, func, args, kwargs)
    pair = [named.get("input"), named.get("other")]
    maker = next((makers.get(one) for one in pair if isinstance(one, Value)), None)
    added = next((one for one in pair if isinstance(one, Tensor)), None)
    if maker is None or added is None or maker.op not in LINEAR_OPS or named.get("alpha", 1) != 1:
        return None
    own, shape = maker.arguments(), list(maker.outputs[0].shape)
    axis = len(shape) - 1 if maker.op == "linear" else len(shape) - 1 - int(maker.op[-2])
    each_channel = [size if i == axis else 1 for i, size in enumerate(shape)]
    weight, bias = own["weight"], own.get("bias")
    if not isinstance(weight, Tensor) or added.dtype != weight.dtype:
        return None
    if [1] * (len(shape) - added.dim()) + list(added.shape) != each_channel:
        return None
    added = added.detach().flatten()
    own["bias"] = added if bias is None else bias.detach() + added
    return Layer(maker.op, getattr(F, maker.op), (own.pop("input"),), own)


def as_move(op: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Layer | None:
    """The move that an interpolation by nearest neighbours is; None if it is none."""
    if op != "interpolate":
        return None
    repeats = arguments(op, func, args, kwargs).get("mode", "nearest") in ("nearest", "nearest-exact")
    return Layer(NEAREST, func, args, kwargs) if repeats else None


def as_limit(op: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Layer | None:
    """The activation that the maximum or minimum of a value and one number is; None if it is none."""
    if op not in ("maximum", "minimum", "max", "min"):
        return None
    named = arguments(op, func, args, kwargs)
    pair = [named.get("input"), named.get("other")]
    value = next((one for one in pair if isinstance(one, Value)), None)
    limit = next((one for one in pair if isinstance(one, Tensor)), None)
    if value is None or limit is None or not limit.numel() or not bool((limit == limit.flatten()[0]).all()):
        return None
    if torch.broadcast_shapes(value.shape, limit.shape) != value.shape:
        return None
    if op.startswith("max") and not limit.any():
        return Layer("relu", F.relu, (value,), {})
    return Layer("clamp", torch.clamp, (value,), {"min" if op.startswith("max") else "max": limit.detach()})


def _mean_of_two(a: Tensor, b: Tensor) -> Tensor:
    return (a + b) / 2


def _linear(x: Any, weight: Any, bias: Tensor | None = None) -> Layer | None:
    constant = isinstance(weight, Tensor) and weight.dim() == 2 and weight.is_floating_point()
    if bias is not None and bias.dim() != 1:
        return None
    if not constant or not isinstance(x, Value) or len(x.shape) < 2:
        return None
    return Layer("linear", F.linear, (x, weight.mT) if bias is None else (x, weight.mT, bias), {})


# The same function without its first question, whether a mode such as the recorder wants to see it as one operation.
_attention = F.multi_head_attention_forward
_opened_attention = types.FunctionType(
    _attention.__code__, vars(F) | {"has_torch_function": lambda *_: False}, None, _attention.__defaults__
)


def _opened_broadcast(*tensors: Tensor) -> tuple[Tensor, ...]:
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    return tuple(t.expand(shape) for t in tensors)


# Functions that are recorded as the operations that they consist of. (Of tensors that are broadcast together, only
# some may depend on the image.)
OPENED: dict[Callable[..., Any], Callable[..., Any]] = {
    _attention: _opened_attention, torch.broadcast_tensors: _opened_broadcast,
}  # fmt: skip

# Methods that take only the shape, the type or the device of their second tensor.
LIKE = frozenset((Tensor.to, Tensor.type_as, Tensor.expand_as, Tensor.view_as, Tensor.reshape_as))
