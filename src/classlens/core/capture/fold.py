"""Folds BatchNorm and padding into the adjacent linear layer: on the tape, never in the user's model.

BatchNorm after it: y = BN(W x + b) with scale k = gamma / sqrt(var + eps) is y = (k W) x + (b - mean) k + beta.
A separate operation that pads the layer's input with zeros becomes the layer's own padding. As inputs, the zeros would
receive relevance and lose it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from classlens.core.capture.norm import affine, is_fixed
from classlens.core.capture.tape import Node, Tape, Value
from classlens.core.ops import per_axis

_CONV: dict[str, Any] = {"conv1d": F.conv1d, "conv2d": F.conv2d, "conv3d": F.conv3d}


def folded(tape: Tape) -> Tape:
    """The same tape, with paddings and normalisations folded into their linear layers where this is exact."""
    return _fold_norms(fold_paddings(tape))


def _rewrite(tape: Tape, new: dict[Node, Node], gone: set[Node]) -> Tape:
    return replace(tape, nodes=tuple(new.get(node, node) for node in tape.nodes if node not in gone))


def _sole_producer(tape: Tape, value: Value) -> Node | None:
    """The node that produced a value, if the value has a single use."""
    return tape.producer.get(value) if len(tape.consumers[value]) == 1 else None


# -------------------------------------------------------------------------------------------------------- BatchNorm


def _fold_norms(tape: Tape) -> Tape:
    new: dict[Node, Node] = {}
    gone: set[Node] = set()
    for node in tape.nodes:
        layer = _sole_producer(tape, node.inputs[0]) if node.op == "batch_norm" else None
        if layer is not None and _takes_norm(layer, node):
            new[node] = _with_norm(layer, node)
            gone.add(layer)
    return _rewrite(tape, new, gone)


def _takes_norm(layer: Node, norm: Node) -> bool:
    # Weights that depend on the image, and statistics of the batch, cannot be folded.
    constant = len(layer.inputs) == 1 and is_fixed(norm.arguments())
    return constant and (layer.op in _CONV or layer.op == "linear")


def _with_norm(layer: Node, norm: Node) -> Node:
    scale, offset = affine(norm.arguments())
    bias = layer.arguments().get("bias")
    bias = offset if bias is None else offset + bias.detach() * scale
    # The weight is scaled on use. Scaling all weights of a network at once would need new memory, and allocating it
    # takes longer than filling it.
    return _changed(layer, norm.outputs, bias=bias, scale=scale)


def scaled(weight: Tensor, scale: Tensor | None) -> Tensor:
    """A layer's weight with the scale of the normalisation folded into it."""
    return weight if scale is None else weight * scale.reshape(-1, *[1] * (weight.dim() - 1))


def _changed(layer: Node, outputs: tuple[Value, ...], **changes: Any) -> Node:
    kwargs = layer.arguments() | changes
    value = kwargs.pop("input")
    func: Callable[..., Tensor] = _scaled_linear if layer.op == "linear" else _padded_conv
    return Node(layer.op, func, (value,), kwargs, outputs, layer.module)


# ---------------------------------------------------------------------------------------------------------- padding


def fold_paddings(tape: Tape) -> Tape:
    """The same tape, with zeros that a separate operation pads as the padding of the convolution after it."""
    new: dict[Node, Node] = {}
    gone: set[Node] = set()
    for node in tape.nodes:
        pad = _sole_producer(tape, node.inputs[0]) if node.op in _CONV else None
        if pad is not None and pad.op == "pad" and (around := _zeros_around(pad, node)) is not None:
            new[node] = _changed(node, node.outputs, input=pad.inputs[0], padding=around)
            gone.add(pad)
    return _rewrite(tape, new, gone)


def _zeros_around(pad: Node, conv: Node) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The zeros that `pad` and `conv` together add (before, after) each axis; None if they add other values."""
    given = pad.arguments()
    own, n = conv.arguments().get("padding", 0), int(conv.op[-2])
    sizes = list(given["pad"])
    plain = given.get("mode", "constant") == "constant" and not given.get("value") and not isinstance(own, str)
    if not plain or len(sizes) > 2 * n or any(size < 0 for size in sizes):
        return None
    sizes += [0] * (2 * n - len(sizes))
    own = per_axis(own, n)
    # F.pad counts axes from the last one.
    before = tuple(sizes[2 * (n - 1 - axis)] + own[axis] for axis in range(n))
    after = tuple(sizes[2 * (n - 1 - axis) + 1] + own[axis] for axis in range(n))
    return before, after


def pad_sizes(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """Sizes in the order of F.pad: pairs, the last axis first.

    >>> pad_sizes((1, 2), (3, 4))
    [2, 4, 1, 3]
    """
    return [p for pair in zip(reversed(before), reversed(after), strict=True) for p in pair]


def _scaled_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
    return F.linear(x, scaled(weight, scale), bias)


def _padded_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, padding: Any = 0, scale: Tensor | None = None, **rest: Any
) -> Tensor:
    """A convolution with an optional weight scale and with padding (before, after) for each axis."""
    conv = _CONV[f"conv{weight.dim() - 2}d"]
    if isinstance(padding, tuple) and isinstance(padding[0], tuple):
        before, after = padding
        x, padding = F.pad(x, pad_sizes(before, after)), 0
    result: Tensor = conv(x, scaled(weight, scale), bias, padding=padding, **rest)
    return result
