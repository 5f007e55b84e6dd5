"""BatchNorm after a linear layer, folded into it: on the tape, never in the user's model.

For y = BN(W x + b) with scale k = gamma / sqrt(var + eps):   y = (k W) x + (b - mean) k + beta.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from classlens.capture.tape import Node, Tape, Value

_FOLDABLE: dict[str, Any] = {"conv1d": F.conv1d, "conv2d": F.conv2d, "conv3d": F.conv3d, "linear": F.linear}


def fold_batchnorm(tape: Tape) -> Tape:
    """The same tape with each `batch_norm` that alone reads a convolution's (or linear layer's) output folded in."""
    folded: dict[Node, Node] = {}
    absorbed: set[Node] = set()
    for node in tape.nodes:
        layer = _layer_before(tape, node) if node.op == "batch_norm" else None
        if layer is not None:
            folded[node] = _folded(layer, node)
            absorbed.add(layer)
    return Tape(tuple(folded.get(n, n) for n in tape.nodes if n not in absorbed), tape.image, tape.output)


def batchnorm_affine(node: Node) -> tuple[Tensor, Tensor]:
    """Scale and offset (each (channels,)) of an evaluation-mode `batch_norm`."""
    a = node.arguments()
    mean, var = a["running_mean"], a["running_var"]
    scale = torch.rsqrt(var + a.get("eps", 1e-5))
    if a.get("weight") is not None:
        scale = scale * a["weight"]
    offset = -mean * scale
    if a.get("bias") is not None:
        offset = offset + a["bias"]
    return scale.detach(), offset.detach()


def _layer_before(tape: Tape, norm: Node) -> Node | None:
    value = norm.inputs[0]
    layer = tape.producer.get(value)
    if layer is None or layer.op not in _FOLDABLE or len(tape.consumers[value]) != 1 or value is tape.output:
        return None
    # Weights that depend on the image, or statistics taken from the batch, cannot be folded.
    constant = len(layer.inputs) == 1 and norm.arguments().get("running_mean") is not None
    return layer if constant else None


def _folded(layer: Node, norm: Node) -> Node:
    scale, offset = batchnorm_affine(norm)
    a = layer.arguments()
    weight, bias = a["weight"].detach(), a.get("bias")
    weight = weight * scale.reshape(-1, *[1] * (weight.dim() - 1))
    bias = offset if bias is None else offset + bias.detach() * scale
    kwargs = a | {"weight": weight, "bias": bias}
    value: Value = kwargs.pop("input")
    return Node(layer.op, _FOLDABLE[layer.op], (value,), kwargs, norm.outputs, layer.module)
