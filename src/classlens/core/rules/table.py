"""The default rule of every operation: absolute influence throughout, so that shares are never unbounded.

Reading guide: what only moves data is followed (`transported`); what sums is split in proportion to |x| (Def. 1);
what squashes or normalises passes relevance on; what gates gives all of it to the gated signal.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from classlens.core.capture import Node, Value
from classlens.core.rules.generic import Shares, magnitude, proportional, transported, unbroadcast
from classlens.core.rules.linear import LINEAR_OPS, absolute, linear_map, only
from classlens.core.rules.propagate import register
from classlens.errors import UnsupportedOp

ACTIVATIONS = (
    "relu", "relu6", "leaky_relu", "prelu", "rrelu", "elu", "selu", "celu", "gelu", "silu", "mish", "hardswish",
    "hardtanh", "hardsigmoid", "sigmoid", "tanh", "softplus", "softsign", "threshold", "clamp", "logsigmoid",
    "tanhshrink", "softshrink", "hardshrink",
)  # fmt: skip
UNARY = (
    "square", "pow", "sqrt", "rsqrt", "reciprocal", "exp", "expm1", "log", "log1p", "log2", "sin", "cos", "erf",
)  # fmt: skip
NORMS = (
    "batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm", "local_response_norm", "normalize",
)  # fmt: skip
MOVES = (
    "view", "reshape", "flatten", "unflatten", "permute", "transpose", "transpose_all", "transpose_last", "t",
    "squeeze", "unsqueeze", "expand", "expand_as", "repeat", "tile", "repeat_interleave", "contiguous", "clone",
    "alias", "to", "getitem", "narrow", "select", "index_select", "gather", "cat", "stack", "hstack", "vstack",
    "pad", "roll", "flip", "rot90", "movedim", "diagonal", "unfold", "pixel_shuffle", "pixel_unshuffle",
    "channel_shuffle", "native_channel_shuffle", "as_strided", "masked_select", "where",
    "max_pool1d", "max_pool2d", "max_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d",
    "amax", "maximum", "minimum", "masked_fill", "broadcast_to", "atleast_2d", "setitem", "copy",
)  # fmt: skip
MOVES_MANY = ("split", "chunk", "unbind", "max", "min", "hsplit", "vsplit", "dsplit", "broadcast_tensors")
SUMS = (
    "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d",
    "mean", "sum", "interpolate", "cumsum", "grid_sample", "fold",
)  # fmt: skip


@register(*LINEAR_OPS)
def linear(node: Node, relevance: Tensor) -> Shares:
    """Absolute influence, C of Eq. 8."""
    layer = linear_map(node)
    return only(node, layer.value, absolute(layer, relevance))


@register(*MOVES)
def moved(node: Node, relevance: Tensor) -> Shares:
    """Relevance goes back to where each value came from; a constant that was moved in keeps what it drew."""
    return transported(node, [relevance, *[None] * (len(node.outputs) - 1)])


@register(*MOVES_MANY, multi_output=True)
def moved_many(node: Node, relevance: Sequence[Tensor | None]) -> Shares:
    """As `moved`, for operations with several outputs."""
    return transported(node, relevance)


@register("as_strided_scatter")
def pasted(node: Node, relevance: Tensor) -> Shares:
    """A tensor whose view was overwritten: the view's places belong to what was written, the rest to what was there.

    (Written out: the operation's own autograd formula gives a wrong gradient for the tensor written into.)
    """
    size, stride, offset = node.args[2:]
    rest = relevance.clone(memory_format=torch.contiguous_format)
    written = []
    for one in rest.unbind(0):
        region = one.as_strided(size, stride, one.storage_offset() + offset)
        written.append(region.clone())
        region.zero_()
    shares = [rest, torch.stack(written)]
    return [s for s, arg in zip(shares, node.args[:2], strict=True) if isinstance(arg, Value)]


@register(*SUMS)
def summed(node: Node, relevance: Tensor) -> Shares:
    """Def. 1 with X = |x|."""
    return proportional(node, relevance)


@register(*ACTIVATIONS, *UNARY, *NORMS, "softmax", "log_softmax", "softmin", "dropout", "dropout1d", "dropout2d",
          "dropout3d", "alpha_dropout", "feature_dropout", "detach", "identity", "neg", "abs")  # fmt: skip
def passed(node: Node, relevance: Tensor) -> Shares:
    """Unit by unit, the relevance of the output is the relevance of the input."""
    return only(node, node.inputs[0], relevance)


@register("add", "sub", "rsub")
def added(node: Node, relevance: Tensor) -> Shares:
    """R_a = |a| / (|a| + |b|) R, and b the rest. A constant summand is a bias and takes no share."""
    if len(node.inputs) == 1:
        return [unbroadcast(relevance, node.inputs[0].shape)]
    a, b = (magnitude(v.tensor) for v in node.inputs)
    per_unit = relevance / (a + b)
    return [unbroadcast(t * per_unit, t.shape) for t in (a, b)]


@register("mul")
def multiplied(node: Node, relevance: Tensor) -> Shares:
    """A gate decides how much passes, the signal what passes: the signal gets all of it.

    The gate is the operand that was broadcast over the other. Of two equal ones it is the one made by a squashing
    function; of two plain ones each gets half.
    """
    if len(node.inputs) == 1:
        return [unbroadcast(relevance, node.inputs[0].shape)]
    a, b = node.inputs
    if a.tensor.numel() != b.tensor.numel():
        signal = max(node.inputs, key=lambda v: v.tensor.numel())
        return only(node, signal, unbroadcast(relevance, signal.shape))
    squashed = [looks_like_gate(v) for v in (a, b)]
    if squashed[0] != squashed[1]:
        return [None if squashed[0] else relevance, None if squashed[1] else relevance]
    return [relevance / 2, relevance / 2]


def looks_like_gate(value: Value) -> bool:
    """Whether all of a value lies within [0,1], as what a sigmoid or a softmax makes does."""
    low, high = value.tensor.aminmax()
    return bool(low >= 0 and high <= 1)


@register("div")
def divided(node: Node, relevance: Tensor) -> Shares:
    """What is divided is the signal; the divisor only sets its scale."""
    numerator = node.arguments()["input"]
    if not isinstance(numerator, Value):
        raise UnsupportedOp(f"no rule for a constant divided by a live value ({node.where}); register one")
    return only(node, numerator, unbroadcast(relevance, numerator.shape))


@register("addcmul")
def added_product(node: Node, relevance: Tensor) -> Shares:
    """input + value * a * b: a live input and the product share by magnitude; of two live factors, as `mul` does."""
    named = dict(zip(("input", "tensor1", "tensor2"), node.args, strict=False)) | node.kwargs
    factors = [t for t in (named["tensor1"], named["tensor2"]) if isinstance(t, Value)]
    signal = max(factors, key=lambda v: (not looks_like_gate(v), v.tensor.numel()), default=None)
    if signal is None or not isinstance(named["input"], Value):
        return only(node, signal or named["input"], unbroadcast(relevance, (signal or named["input"]).shape))
    summand = magnitude(named["input"].tensor)
    product = magnitude(node.outputs[0].tensor - named["input"].tensor)
    per_unit = relevance / (summand + product)
    to_summand, to_signal = (
        only(node, value, unbroadcast(size * per_unit, value.shape))
        for value, size in ((named["input"], summand), (signal, product))
    )
    return [a if b is None else b for a, b in zip(to_summand, to_signal, strict=True)]
