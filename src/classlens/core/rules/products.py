"""Products, quotients, and sums with a product: which operand is the signal, and which only scales it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from classlens.core.capture import Axis, Node, Value
from classlens.core.ops import Kind, of_kind
from classlens.core.rules.generic import Shares, magnitude, transported, unbroadcast
from classlens.core.rules.linear import only
from classlens.core.rules.propagate import images_in, register, rule_for
from classlens.errors import UnsupportedOp


@register("mul")
def multiplied(node: Node, relevance: Tensor) -> Shares:
    """A gate decides how much passes, the signal what passes: the signal gets all of the relevance.

    The gate is the operand that is broadcast over the other. For operands of equal shape, it is the one within [0,1];
    two plain signals get half each.
    """
    if len(node.inputs) == 1:
        return [unbroadcast(relevance, node.inputs[0].shape)]
    a, b = node.inputs
    if a.tensor.numel() != b.tensor.numel():
        signal = max(node.inputs, key=lambda v: v.tensor.numel())
        return only(node, signal, unbroadcast(relevance, signal.shape))
    return divided_among([unbroadcast(relevance, v.shape) for v in (a, b)], (a, b))


def divided_among(shares: Sequence[Tensor], factors: Sequence[Value]) -> Shares:
    """What each factor of a product gets, from what each would get alone.

    A gate lies within [0,1], like the output of a sigmoid or a softmax. If some factors are gates and some are not,
    gates get nothing; otherwise all get the same part. Each image of a batch is looked at alone, as its map is its own.
    """
    axes = [images_in(value) for value in factors]
    known = all(axis is not None for axis in axes)
    gates = torch.stack(
        [_gates(value.tensor, axis if known else None) for value, axis in zip(factors, axes, strict=True)]
    )
    mixed = gates.any(0) & ~gates.all(0)
    parts = torch.where(mixed, (~gates).double(), 1 / len(factors))  # (factors, images)
    if bool((parts == parts[:, :1]).all()):
        return [share * part if part else None for share, part in zip(shares, parts[:, 0].tolist(), strict=True)]
    return [
        share * _along(part, axis, share)
        for share, part, axis in zip(shares, parts, axes, strict=True)
        if axis is not None
    ]


def _gates(t: Tensor, axis: Axis | None) -> Tensor:
    """(images,): whether all of a factor lies within [0,1], in each image; (1,) if they are not told apart."""
    if not t.numel():  # a level of a feature pyramid without proposals
        return torch.zeros(1, dtype=torch.bool)
    if axis is None:
        low, high = t.aminmax()
        return ((low >= 0) & (high <= 1)).cpu().reshape(1)
    low, high = t.movedim(axis.axis, 0).reshape(t.shape[axis.axis], -1).aminmax(dim=1)
    beyond = (~((low >= 0) & (high <= 1))).double().cpu()
    return beyond.new_zeros(int(axis.image.max()) + 1).index_add_(0, axis.image.cpu(), beyond) == 0


def _along(part: Tensor, axis: Axis, share: Tensor) -> Tensor:
    """A number for each image, to multiply a share (K, *shape) with."""
    shape = [1] * share.dim()
    shape[1 + axis.axis] = -1
    return part.to(share)[axis.image.to(share.device)].reshape(shape)


@register(*of_kind(Kind.PRODUCT) - {"mul"})
def product(node: Node, relevance: Tensor) -> Shares:
    """Def. 1 with X = |x|. If one of two live operands is within [0,1], it is a gate; two plain ones get half each."""
    points = [magnitude(v.tensor) for v in node.inputs]
    (total,) = node.call(*points, constants=torch.abs)
    shares = transported(node, [relevance / total.clamp(min=torch.finfo(total.dtype).tiny)], points, torch.abs)
    full = [p * s for p, s in zip(points, shares, strict=True) if s is not None]
    return divided_among(full, node.inputs)


@register("div")
def divided(node: Node, relevance: Tensor) -> Shares:
    """The dividend is the signal; the divisor only scales it."""
    numerator = node.arguments()["input"]
    if not isinstance(numerator, Value):
        raise UnsupportedOp(f"no rule for a constant divided by a live value ({node.where}); register one")
    return only(node, numerator, unbroadcast(relevance, numerator.shape))


# c + a b: the names of a and b, and their product as a separate operation.
_INSIDE: dict[str, tuple[str, str, Callable[..., Tensor]]] = {
    "addcmul": ("tensor1", "tensor2", torch.mul),
    "addmm": ("mat1", "mat2", torch.mm),
    "addmv": ("mat", "vec", torch.mv),
    "addr": ("vec1", "vec2", torch.outer),
    "baddbmm": ("batch1", "batch2", torch.bmm),
    "addbmm": ("batch1", "batch2", lambda a, b: torch.bmm(a, b).sum(0)),
}


@register(*of_kind(Kind.ADDED_PRODUCT))
def added_product(node: Node, relevance: Tensor) -> Shares:
    """c + a b: a live c and the product get shares by magnitude, a and b as in a product. A constant c gets none."""
    named = node.arguments()
    a, b, multiply = _INSIDE[node.op]
    inside = Node(_name_of_product(node), multiply, (named[a], named[b]), {}, node.outputs, node.module)
    summand = named["input"]
    if not isinstance(summand, Value):
        return _placed(node, inside, rule_for(inside)(inside, relevance))
    if not inside.inputs:
        return only(node, summand, unbroadcast(relevance, summand.shape))
    c = summand.tensor * named.get("beta", 1)
    sizes = magnitude(c), magnitude(node.outputs[0].tensor - c)
    per_unit = relevance / (sizes[0] + sizes[1])
    to_summand = unbroadcast(sizes[0] * per_unit, summand.shape)
    return _placed(node, inside, rule_for(inside)(inside, sizes[1] * per_unit), (summand, to_summand))


def _name_of_product(node: Node) -> str:
    return "mul" if node.op == "addcmul" else "matmul"


def _placed(node: Node, inside: Node, shares: Shares, *more: tuple[Value, Tensor]) -> Shares:
    """Shares of the product's operands, and others, in the order of the node's inputs; one value may be several."""
    found: list[Any] = [None] * len(node.inputs)
    for value, share in (*zip(inside.inputs, shares, strict=True), *more):
        if share is not None:
            at = node.inputs.index(value)
            found[at] = share if found[at] is None else found[at] + share
    return found
