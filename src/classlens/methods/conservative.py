"""Gradient times input in a network whose backward pass is altered so that the products add up: AttnLRP and LibraGrad.

The forward pass is unchanged. Going back, the weights of attention, the standard deviation of a normalisation and the
gate of an activation are constants: what is left of the network is piecewise linear.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from classlens.core.capture import Grid, Node, Tape, Value, image_index, place_index
from classlens.core.capture.norm import is_fixed, through_norm
from classlens.core.ops import LINEAR_OPS, Kind, of_kind
from classlens.core.rules.attention import fused_weights, repeated_heads
from classlens.core.rules.generic import Shares, transported, unbroadcast
from classlens.core.rules.linear import linear_map, only
from classlens.core.rules.products import divided_among
from classlens.core.rules.propagate import MULTI_OUTPUT, propagate
from classlens.core.rules.table import pasted
from classlens.errors import MethodError, UnsupportedOp
from classlens.methods.blocks import Attention, attentions, block_inputs, find_attentions, projections
from classlens.methods.places import enlarged
from classlens.methods.registry import Case, Result, method, of_colours

FAMILY = "attention"
_ACTIVATIONS, _PRODUCTS = of_kind(Kind.ACTIVATION), of_kind(Kind.PRODUCT)
_TINY, _STABLE = 1e-10, 1e-6  # the authors' stabilisers


@dataclass
class Altered:
    """The altered backward pass of one network: a rule that takes a gradient back through each node."""

    tape: Tape
    gamma: dict[Node, float] = field(default_factory=dict)  # layers that get the gamma rule
    stabiliser: float = 0.0  # of an activation's gate
    found: Sequence[Attention] = ()
    at: dict[Value, Tensor] = field(default_factory=dict)  # gradients at outputs of nodes, filled by `run`

    def run(self, start: Tensor, wanted: Sequence[Value] = ()) -> Tensor:
        """(K,B,C,H,W): the gradient at the image; those at `wanted` are kept in `at`."""
        self.tape.check_attached()
        keep = set(wanted)
        weights = {one.node.outputs[0] for one in self.found if one.node.op == "softmax"}

        def watch(node: Node, arrived: Sequence[Tensor | None], shares: Shares) -> None:
            for value, gradient in zip(node.outputs, arrived, strict=True):
                if value in keep and gradient is not None:
                    self.at[value] = gradient

        def choose(node: Node) -> Callable[[Node, Any], Shares]:
            return lambda node, arrived: self._back(node, arrived, weights)

        return propagate(self.tape, {self.tape.output: start}, choose, watch=watch).relevance

    def _back(self, node: Node, arrived: Any, weights: set[Value]) -> Shares:
        if arrived is None:
            raise UnsupportedOp(f"no rule for {node.where}, of which a later output is used")
        if node.op == "detach" or node.cut:  # a constant for gradients, as the network wants it
            return [None] * len(node.inputs)
        if node in self.gamma:
            return gamma_back(node, arrived, self.gamma[node])
        if node.op in _ACTIVATIONS and len(node.inputs) == 1:
            return [arrived * gate(node, self.stabiliser)]
        if node.op == "batch_norm" and is_fixed(node.arguments()):
            return only(node, node.inputs[0], through_norm(node.arguments(), arrived))
        if node.op in _RULES:
            return _RULES[node.op](node, arrived)
        if node.op == "mul" and len(node.inputs) == 2:
            return _multiplied(node, arrived)
        outputs = list(arrived) if node.op in MULTI_OUTPUT else [arrived, *[None] * (len(node.outputs) - 1)]
        shares = transported(node, outputs)
        if node.op in _PRODUCTS and len(node.inputs) == 2:
            if any(_made_of(self.tape, value, weights) for value in node.inputs):  # attention: to the values alone
                return [
                    None if _made_of(self.tape, v, weights) else s for v, s in zip(node.inputs, shares, strict=True)
                ]
            return [None if share is None else share / 2 for share in shares]
        return shares


def _made_of(tape: Tape, value: Value, weights: set[Value]) -> bool:
    """Whether a value is attention weights, possibly scaled or reshaped."""
    while value not in weights:
        node = tape.producer.get(value)
        if node is None or len(node.inputs) != 1 or node.op in LINEAR_OPS or node.op == "softmax":
            return False
        value = node.inputs[0]
    return True


def gate(node: Node, stabiliser: float) -> Tensor:
    """y / x of an activation; where x is 0, its derivative."""
    x, y = node.inputs[0].tensor, node.outputs[0].tensor
    if stabiliser:
        return y / (x + stabiliser)
    (slope,) = transported(node, [torch.ones_like(y)[None]])
    assert slope is not None
    return torch.where(x == 0, slope[0], y / torch.where(x == 0, 1, x))


def normalised_back(node: Node, gradient: Tensor) -> Shares:
    """Layer norm (x - mean) / std * w + b with a constant std: the mean takes part."""
    named = node.arguments()
    x, weight = node.inputs[0].tensor, named.get("weight")
    axes = tuple(range(-len(named["normalized_shape"]), 0))
    scaled = gradient if weight is None else gradient * weight.detach()
    centred = x if node.op == "rms_norm" else x - x.mean(axes, keepdim=True)
    eps = named.get("eps")
    eps = (torch.finfo(x.dtype).eps if node.op == "rms_norm" else 1e-5) if eps is None else eps
    scaled = scaled * torch.rsqrt(centred.square().mean(axes, keepdim=True) + eps)
    return only(node, node.inputs[0], scaled if node.op == "rms_norm" else scaled - scaled.mean(axes, keepdim=True))


def grouped_back(node: Node, gradient: Tensor) -> Shares:
    """Group norm, likewise."""
    named = node.arguments()
    x, weight, groups = node.inputs[0].tensor, named.get("weight"), int(named["num_groups"])
    wide = [-1] + [1] * (x.dim() - 2)
    scaled = gradient if weight is None else gradient * weight.detach().reshape(wide)
    parts, scaled = x.unflatten(1, (groups, -1)), scaled.unflatten(2, (groups, -1))
    axes = tuple(range(2, parts.dim()))
    variance = parts.var(axes, unbiased=False, keepdim=True)
    scaled = scaled * torch.rsqrt(variance + named.get("eps", 1e-5))
    after = tuple(axis + 1 for axis in axes)
    return only(node, node.inputs[0], (scaled - scaled.mean(after, keepdim=True)).flatten(2, 3))


def _fused_back(node: Node, gradient: Tensor) -> Shares:
    value = node.arguments()["value"]
    if not isinstance(value, Value):
        raise UnsupportedOp(f"no rule for attention whose values do not depend on the image ({node.where})")
    share = fused_weights(node).mT @ gradient
    if repeated_heads(node, value.tensor).shape != value.shape:
        share = share.unflatten(-3, (value.shape[-3], -1)).sum(-3)
    return only(node, value, unbroadcast(share, value.shape))


def _multiplied(node: Node, gradient: Tensor) -> Shares:
    """A gate is a constant; two plain signals share the product, so each gets half of the gradient."""
    a, b = node.inputs
    full = [unbroadcast(gradient * other.tensor, value.shape) for value, other in ((a, b), (b, a))]
    return divided_among(full, node.inputs)


_RULES: dict[str, Callable[[Node, Any], Shares]] = {
    "layer_norm": normalised_back, "rms_norm": normalised_back, "group_norm": grouped_back,
    "scaled_dot_product_attention": _fused_back, "as_strided_scatter": pasted,
}  # fmt: skip


def gamma_back(node: Node, gradient: Tensor, gamma: float) -> Shares:
    """The gamma rule as a gradient: relevance R = g y goes back by contributions that agree with y, 1 + gamma times.

    The bias takes its share. As in the authors' code, denominators are kept 1e-6 away from 0.
    """
    layer = linear_map(node)
    x, w, y = layer.x, layer.weight, node.outputs[0].tensor
    bias = torch.zeros((), dtype=x.dtype, device=x.device) if layer.bias is None else layer.bias
    x_pos, x_neg = x.clamp(min=0), x.clamp(max=0)
    more, less = w + gamma * w.clamp(min=0), w + gamma * w.clamp(max=0)
    total = torch.zeros((), dtype=x.dtype, device=x.device)
    for side, first, second, extra in ((y > 0, more, less, bias.clamp(min=0)), (y < 0, less, more, bias.clamp(max=0))):
        z = layer.forward(x_pos, first) + layer.forward(x_neg, second) + bias + gamma * extra
        per_unit = gradient * y * side / torch.where(z < 0, z - _STABLE, z + _STABLE)
        total = total + x_pos * layer.adjoint(per_unit, first) + x_neg * layer.adjoint(per_unit, second)
    return only(node, layer.value, total / torch.where(x < 0, x - _TINY, x + _TINY))


# ----------------------------------------------------------------------------------------------------------- methods


@method(
    "attnlrp", family=FAMILY, summary="LRP for transformers: conservative gradients, gamma in convolutions and MLPs",
    class_specific=True, signed=True, conserves=False, scalars=True,
    paper="Achtibat et al.: AttnLRP, ICML 2024; the variant that the authors' package uses for vision transformers",
)  # fmt: skip
def attnlrp(case: Case, conv_gamma: float = 0.25, linear_gamma: float = 0.05) -> Result:
    """Input times altered gradient; gamma rules in convolutions and in linear layers outside of attention."""
    tape = case.tape
    found = find_attentions(tape)
    plain = projections(tape, found)
    layers = [node for node in tape.nodes if node.op in LINEAR_OPS and node not in plain]
    gamma = {node: linear_gamma if node.op == "linear" else conv_gamma for node in layers}
    altered = Altered(tape, gamma, _TINY, found)
    return of_colours(altered.run(case.directions()) * tape.image.tensor)


@method(
    "libragrad", family=FAMILY, summary="conservative gradient times input of every block, plus the shares of biases",
    class_specific=True, signed=True, conserves=False, scalars=True, attention=True,
    paper="Mehri et al.: LibraGrad: Balancing Gradient Flow for Vision Transformer Attributions, CVPR 2025",
)  # fmt: skip
def libragrad(case: Case, start: int = 0) -> Result:
    """FullGrad+: sum over blocks, from `start` on, of input times altered gradient, plus bias times gradient."""
    tape = case.tape
    found = attentions(tape, "libragrad")
    blocks = block_inputs(tape, found)
    if not 0 <= start < len(blocks):
        raise MethodError(f"start={start} is not possible; {len(blocks)} blocks with a skip connection were found")
    begins = next(i for i, node in enumerate(tape.nodes) if blocks[start] in node.outputs)
    nodes = tape.nodes[begins + 1 :]
    biases = {node.outputs[0]: bias for node in nodes if (bias := bias_at(node)) is not None}
    altered = Altered(tape, found=found)
    altered.run(case.directions(), [*blocks, *biases])
    shares = [(value, altered.at[value] * value.tensor) for value in blocks[start:] if value in altered.at]
    shares += [(value, altered.at[value] * bias) for value, bias in biases.items() if value in altered.at]
    return _on_image(case, shares)


def bias_at(node: Node) -> Tensor | None:
    """The constant that a norm or a linear layer adds, shaped to be added to its output."""
    if node.op in LINEAR_OPS:
        return linear_map(node).bias
    bias: Any = node.arguments().get("bias") if node.op in ("layer_norm", "group_norm") else None
    if bias is None or isinstance(bias, Value):
        return None
    wide = [-1] + [1] * (len(node.outputs[0].shape) - 2)
    constant: Tensor = bias.detach()
    return constant if node.op == "layer_norm" else constant.reshape(wide)


def _is_pooled(value: Value) -> bool:
    """Whether a value holds one position for each image: (B,C), (B,C,1,1), (B,1,C)."""
    return math.prod(value.shape[2:]) == 1 or math.prod(value.shape[1:-1]) == 1


def _on_image(case: Case, shares: Sequence[tuple[Value, Tensor]]) -> Result:
    """Shares (K, *shape), each on the grid of its tokens, enlarged and added. A pooled value has no place."""
    images, places = image_index(case.tape), place_index(case.tape)
    size = case.images.shape[2:]
    by_grid: dict[Grid, Tensor] = {}
    for value, share in shares:
        where = places.get(value)
        if _is_pooled(value) if where is None else math.prod(where.grid) == 1:
            continue
        if where is not None and value in images:
            at = where.on_grid(share, images[value], len(case.images))
            by_grid[where.grid] = by_grid[where.grid] + at if where.grid in by_grid else at
        else:  # without it, the map would lack its share
            raise MethodError(
                f"the places of a value of shape {tuple(value.shape)} cannot be read, so its share cannot be drawn; "
                "use attnlrp or agf"
            )
    if not by_grid:
        raise MethodError("the tokens of this network are in no order on a grid that can be read; use attnlrp or agf")
    return Result(torch.stack([enlarged(maps.transpose(0, 1), size) for maps in by_grid.values()]).sum(0))
