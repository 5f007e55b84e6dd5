"""Methods that multiply the attention of all blocks: how much of each patch reaches the token that is read.

With M_l, a matrix over tokens for each block, the product M_L ... M_1 tells how tokens flow into each other; its row of
the class token is the map. The methods differ in M_l.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from classlens.core.capture import Axis, Grid, Node, Tape, Value, image_index
from classlens.core.ops import LINEAR_OPS, Kind, of_kind
from classlens.core.rules.attention import fused_weights, layer_parts
from classlens.core.rules.generic import Shares, divide_released, transported
from classlens.core.rules.linear import linear_map, only, positive
from classlens.core.rules.propagate import Rule, propagate, rule_for
from classlens.errors import MethodError, UnsupportedOp
from classlens.methods.blocks import Attention, attentions, one_grid
from classlens.methods.places import enlarged
from classlens.methods.registry import Case, Result, method
from classlens.methods.relevance import released_clone

FAMILY = "attention"
_MATRIX_PRODUCTS = of_kind(Kind.PRODUCT) - {"mul"}
_ADDITIONS = of_kind(Kind.ADDITION)


@method(
    "attention-rollout", family=FAMILY, summary="how much of each patch reaches the class token through all attention",
    class_specific=False, signed=False, conserves=False, scalars=True, attention=True,
    paper="Abnar, Zuidema: Quantifying Attention Flow in Transformers, ACL 2020",
)  # fmt: skip
def attention_rollout(case: Case, start: int = 0) -> Result:
    """The product of (A + I) / 2, A the mean over heads, from block `start` on; the same for every class."""
    found, grid = _chain(case, "attention-rollout", start)
    at_outputs = case.tape.gradients(case.directions(), [found[-1].output])
    flows = [halved(one.weights.mean(1)) for one in found[start:]]
    flows = [flow.expand(case.targets.shape[1], *flow.shape) for flow in flows]
    return _on_image(case, flows, found, at_outputs[found[-1].output], grid)


def halved(attention: Tensor) -> Tensor:
    """(A + I) with rows that sum to 1; attention that pools the tokens has no identity."""
    flow = with_identity(attention)
    return flow / flow.sum(-1, keepdim=True)


def with_identity(flow: Tensor) -> Tensor:
    """M + I, for attention between the same tokens."""
    return flow if flow.shape[-1] != flow.shape[-2] else flow + torch.eye(flow.shape[-1]).to(flow)


@method(
    "generic-attention", family=FAMILY, summary="positive gradient times attention, multiplied over all blocks",
    class_specific=True, signed=False, conserves=False, scalars=True, attention=True,
    paper="Chefer, Gur, Wolf: Generic Attention-model Explainability, ICCV 2021",
)  # fmt: skip
def generic_attention(case: Case) -> Result:
    """R <- R + E_h[(G A)+] R, with G the gradient of the score at the attention A; R starts as the identity."""
    found, grid = _chain(case, "generic-attention")
    gradients = case.tape.gradients(case.directions(), [one.output for one in found])
    flows = [with_identity(positive_mean(one.gradient(gradients[one.output]), one.weights)) for one in found]
    return _on_image(case, flows, found, gradients[found[-1].output], grid)


def positive_mean(gradient: Tensor, relevance: Tensor) -> Tensor:
    """E_h[(G R)+] of (K,B,heads,queries,keys)."""
    return (gradient * relevance).clamp(min=0).mean(2)


def _chain(case: Case, name: str, start: int = 0) -> tuple[list[Attention], Grid]:
    found = attentions(case.tape, name)
    grid = one_grid(found, name)
    if not 0 <= start < len(found):
        raise MethodError(f"start={start} is not possible; this network has {len(found)} blocks with attention")
    return found, grid


def _on_image(case: Case, flows: Sequence[Tensor], found: Sequence[Attention], at_output: Tensor, grid: Grid) -> Result:
    """The product of flows (K,B,queries,keys), its rows that the head reads, on the grid, enlarged."""
    read = rows_read(found[-1].gradient(at_output))
    row = read[..., None, :]
    for flow in reversed(flows):
        row = row @ flow
    assert found[0].keys is not None
    place = found[0].keys.index.flatten().long()
    maps = row.new_zeros(*row.shape[:2], math.prod(grid))
    maps[..., place[place > 0] - 1] = row[..., 0, place > 0]
    size = case.images.shape[2:]
    return Result(enlarged(maps.unflatten(2, grid).transpose(0, 1), size))


def rows_read(gradient: Tensor) -> Tensor:
    """(K,B,queries): the tokens that the head reads, with equal weights that sum to 1.

    After the last attention each token goes its own way: only those that are read have a gradient. That is the class
    token alone, or all tokens under a mean.
    """
    found = (gradient != 0).any(-1).any(2)
    found |= ~found.any(-1, keepdim=True)  # a score without any gradient: no row is better than another
    read = found.to(gradient)
    return read / read.sum(-1, keepdim=True)


# ------------------------------------------------------------------------------------------ transformer attribution


@method(
    "transformer-attribution", family=FAMILY, summary="positive gradient times relevance of attention, over all blocks",
    class_specific=True, signed=False, conserves=False, scalars=True, attention=True,
    paper="Chefer, Gur, Wolf: Transformer Interpretability Beyond Attention Visualization, CVPR 2021",
)  # fmt: skip
def transformer_attribution(case: Case, start: int = 0) -> Result:
    """The product of I + E_h[(G R)+], with R the relevance of the attention by LRP, from block `start` on.

    As in the authors' code: relevance starts as 1 at the class, a product gives half of it to either factor, and a sum
    is scaled so that both summands keep their proportion. The sums are taken for each image.
    """
    found, grid = _chain(case, "transformer-attribution", start)
    gradients = case.tape.gradients(case.directions(), [one.output for one in found])
    relevance = attention_relevance(case.tape, case.directions(), found)
    flows = [
        with_identity(positive_mean(one.gradient(gradients[one.output]), one.by_head(relevance[one.node])))
        for one in found[start:]
    ]
    return _on_image(case, flows, found, gradients[found[-1].output], grid)


def attention_relevance(tape: Tape, start: Tensor, found: Sequence[Attention]) -> dict[Node, Tensor]:
    """The relevance of each attention's weights, (K, *shape in its layout)."""
    kept: dict[Node, Tensor] = {}
    axes = image_index(tape)
    rules: dict[str, Rule] = {
        **dict.fromkeys(LINEAR_OPS, _positive),
        **dict.fromkeys(_MATRIX_PRODUCTS, _halves),
        **dict.fromkeys(_ADDITIONS, functools.partial(_in_proportion, axes=axes)),
        "scaled_dot_product_attention": functools.partial(_through_fused, kept=kept),
        "multi_head_attention_forward": functools.partial(_through_layer, kept=kept),
    }
    softmaxes = {one.node for one in found if one.node.op == "softmax"}

    def watch(node: Node, arrived: Sequence[Tensor | None], shares: Shares) -> None:
        if node in softmaxes and arrived[0] is not None:
            kept[node] = arrived[0]

    propagate(
        tape, {tape.output: start}, lambda node: rules.get(node.op) or rule_for(node), released_clone, watch=watch
    )
    return kept


def _positive(node: Node, relevance: Tensor) -> Shares:
    """Positive contributions alone; the bias is left out."""
    layer = linear_map(node)
    return only(node, layer.value, positive(layer, relevance, divide_released))


def _halves(node: Node, relevance: Tensor) -> Shares:
    """A product: x * dz/dx R / z, half for each factor."""
    shares = transported(node, [divide_released(relevance, node.outputs[0].tensor)])
    return [None if s is None else s * v.tensor / len(shares) for s, v in zip(shares, node.inputs, strict=True)]


def _in_proportion(node: Node, relevance: Tensor, axes: dict[Value, Axis]) -> Shares:
    """u + w: shares u R / (u + w) and w R / (u + w), each scaled so that their sums are in proportion to magnitude."""
    if len(node.inputs) == 1:
        return rule_for(node)(node, relevance)
    output = node.outputs[0]
    if any(value not in axes for value in (output, *node.inputs)):
        raise UnsupportedOp(f"the images cannot be told apart at {node.where}; explain one image at a time")
    axis = 1 + axes[output].axis if axes[output].image.any() else 0  # one image: the sums are over everything
    others = tuple(i for i in range(1, relevance.dim()) if i != axis)
    shares = transported(node, [divide_released(relevance, output.tensor)])
    parts = [s * v.tensor for s, v in zip(shares, node.inputs, strict=True) if s is not None]
    sums = [part.sum(others, keepdim=True) for part in parts]
    size, whole = torch.stack([s.abs() for s in sums]).sum(0), relevance.sum(others, keepdim=True)
    return [
        part * divide_released(divide_released(own.abs(), size) * whole, own)
        for part, own in zip(parts, sums, strict=True)
    ]


def through_attention(q: Tensor, k: Tensor, v: Tensor, weights: Tensor, relevance: Tensor) -> tuple[Tensor, ...]:
    """(R_A, R_q, R_k, R_v) of A v with A = softmax(q k^T): half for either factor; softmax passes it on."""
    per_unit = divide_released(relevance, weights @ v)
    r_weights, r_v = weights * (per_unit @ v.mT) / 2, v * (weights.mT @ per_unit) / 2
    scores = divide_released(r_weights, q @ k.mT)
    return r_weights, q * (scores @ k) / 2, k * (scores.mT @ q) / 2, r_v


def _through_fused(node: Node, relevance: Tensor, kept: dict[Node, Tensor]) -> Shares:
    named = node.arguments()
    q, k, v = (_tensor(named[name]) for name in ("query", "key", "value"))
    if named.get("enable_gqa"):
        raise UnsupportedOp(f"transformer-attribution has no rule for heads that share keys ({node.where})")
    kept[node], *shares = through_attention(q, k, v, fused_weights(node), relevance)
    return _to_inputs(node, dict(zip(("query", "key", "value"), shares, strict=True)))


def _through_layer(node: Node, relevance: Sequence[Tensor | None], kept: dict[Node, Tensor]) -> Shares:
    r, parts = relevance[0], layer_parts(node)
    if r is None:
        raise UnsupportedOp(f"transformer-attribution needs the output of {node.where}, not only its weights")
    r = parts.by_head(_dense(parts.seen, parts.out_weight, r))
    kept[node], *shares = through_attention(parts.queries, parts.keys, parts.values, parts.weights, r)
    named = node.arguments()
    names = ("query", "key", "value")
    found = {
        name: _dense(_tensor(named[name]), weight, parts.merged(share))
        for name, weight, share in zip(names, parts.projections, shares, strict=True)
    }
    return _to_inputs(node, found)


def _dense(x: Tensor, weight: Tensor, relevance: Tensor) -> Tensor:
    """`_positive` for a projection inside of an operation."""
    w_pos, w_neg = weight.clamp(min=0), weight.clamp(max=0)
    x_pos, x_neg = x.clamp(min=0), x.clamp(max=0)
    per_unit = divide_released(relevance, x_pos @ w_pos.mT + x_neg @ w_neg.mT)
    return x_pos * (per_unit @ w_pos) + x_neg * (per_unit @ w_neg)


def _to_inputs(node: Node, shares: dict[str, Tensor]) -> Shares:
    """Shares by the names of arguments, in the order of the inputs; a value may be several arguments."""
    named: dict[str, Any] = node.arguments()
    left = {name: share for name, share in shares.items() if isinstance(named[name], Value)}
    found: list[Tensor | None] = []
    for value in node.inputs:
        name = next((name for name in left if named[name] is value), None)
        found.append(None if name is None else left.pop(name))
    return found


def _tensor(argument: Any) -> Any:
    return argument.tensor if isinstance(argument, Value) else argument
