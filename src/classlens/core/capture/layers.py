"""Layers that are written in other ways are recorded alike, so that a map does not depend on how they are written.

A product with a constant matrix is a linear layer: `x @ w` is recorded as `F.linear(x, w.T)`. torch's attention layer
is recorded as what it calls: projections and `scaled_dot_product_attention`, or softmax between two products.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from classlens.core.capture.tape import Value
from classlens.core.ops import arguments


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


def _linear(x: Any, weight: Any, bias: Tensor | None = None) -> Layer | None:
    constant = isinstance(weight, Tensor) and weight.dim() == 2 and weight.is_floating_point()
    if bias is not None and bias.dim() != 1:
        return None
    if not constant or not isinstance(x, Value) or len(x.shape) < 2:
        return None
    return Layer("linear", F.linear, (x, weight.mT) if bias is None else (x, weight.mT, bias), {})


# The same function without its first question, whether a mode such as the recorder wants to see it as one operation.
_attention = F.multi_head_attention_forward
opened_attention = types.FunctionType(
    _attention.__code__, vars(F) | {"has_torch_function": lambda *_: False}, None, _attention.__defaults__
)
