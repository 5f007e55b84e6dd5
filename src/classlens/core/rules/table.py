"""The default rule of every operation: absolute influence throughout, so that shares are always bounded.

Operations that move data pass relevance to where each value came from (`transported`). Sums divide it in proportion to
|x| (Def. 1). Activations and normalisations pass it on unchanged. `products` and `attention` have the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from classlens.core.capture import Node, Value
from classlens.core.ops import LINEAR_OPS, SEVERAL_OUTPUTS, UNRULED, Kind, of_kind
from classlens.core.rules.generic import Shares, magnitude, proportional, transported, unbroadcast
from classlens.core.rules.linear import absolute, linear_map, only
from classlens.core.rules.propagate import register

_MOVES = of_kind(
    Kind.COPY, Kind.RESHAPE, Kind.MOVE, Kind.JOIN, Kind.CHOICE, Kind.MAX_POOL, Kind.MAXIMUM, Kind.MINIMUM
)  # fmt: skip


@register(*LINEAR_OPS)
def linear(node: Node, relevance: Tensor) -> Shares:
    """Absolute influence, C of Eq. 8."""
    layer = linear_map(node)
    return only(node, layer.value, absolute(layer, relevance))


@register(*_MOVES - SEVERAL_OUTPUTS - UNRULED)
def moved(node: Node, relevance: Tensor) -> Shares:
    """Relevance goes back to where each value came from; a constant among the inputs keeps its share."""
    return transported(node, [relevance, *[None] * (len(node.outputs) - 1)])


@register(*_MOVES & SEVERAL_OUTPUTS)
def moved_many(node: Node, relevance: Sequence[Tensor | None]) -> Shares:
    """Like `moved`, for operations with several outputs."""
    return transported(node, relevance)


@register("as_strided_scatter")
def pasted(node: Node, relevance: Tensor) -> Shares:
    """A tensor whose view was overwritten: the view's part goes to what was written, the rest to the old value.

    (Written out, because autograd's own formula gives a wrong gradient for the old value.)
    """
    named = node.arguments()
    size, stride, offset = (named[name] for name in ("size", "stride", "storage_offset"))
    base = node.outputs[0].tensor
    rest, written = [torch.empty_like(base).copy_(one) for one in relevance], []  # laid out as the view expects
    for one in rest:
        region = one.as_strided(size, stride, offset)
        written.append(region.clone())
        region.zero_()
    shares = [torch.stack(rest), torch.stack(written)]
    return [s for s, name in zip(shares, ("input", "src"), strict=True) if isinstance(named[name], Value)]


@register(*of_kind(Kind.SUM, Kind.AVERAGE_POOL))
def summed(node: Node, relevance: Tensor) -> Shares:
    """Def. 1 with X = |x|."""
    return proportional(node, relevance)


@register(*of_kind(Kind.ACTIVATION, Kind.POINTWISE, Kind.NORM, Kind.SOFTMAX, Kind.SAME))
def passed(node: Node, relevance: Tensor) -> Shares:
    """Element by element, the relevance of the input is that of the output."""
    return only(node, node.inputs[0], relevance)


@register(*of_kind(Kind.ADDITION))
def added(node: Node, relevance: Tensor) -> Shares:
    """R_a = |a| / (|a| + |b|) R, and b gets the rest. A constant summand is a bias and gets no share.

    `torch.add(a, b, alpha=2)` is a + 2 b: b counts twice. Whole numbers, such as places, are decisions of the network
    and constants too.
    """
    signals = [value for value in node.inputs if value.tensor.is_floating_point()]
    if len(signals) == 1:
        return only(node, signals[0], unbroadcast(relevance, signals[0].shape))
    a, b = (magnitude(v.tensor) for v in node.inputs)
    if node.kwargs.get("alpha", 1) != 1:
        (a if node.op == "rsub" else b).mul_(abs(node.kwargs["alpha"]))
    per_unit = relevance / (a + b)
    return [unbroadcast(t * per_unit, t.shape) for t in (a, b)]
