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
from classlens.core.rules.attention import by_argument, fused_weights
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
    row = rows_read(found[-1].gradient(at_outputs[found[-1].output]))[..., None, :]
    for flow in reversed(flows):
        row = row @ flow
    return _on_image(case, row, found[0], grid)


def halved(attention: Tensor) -> Tensor:
    """(A + I) with rows that sum to 1; attention that pools the tokens has no identity."""
    flow = attention + torch.eye(attention.shape[-1]).to(attention) if _between_tokens(attention) else attention
    return flow / flow.sum(-1, keepdim=True)


def _between_tokens(flow: Tensor) -> bool:
    """Whether attention is between the same tokens, which also skip it; otherwise it pools them."""
    return flow.shape[-1] == flow.shape[-2]


def gained(read: Tensor, flows: Sequence[Tensor]) -> Tensor:
    """read (M_L ... M_1 - I) with M = I + E, for the flows E: what the read tokens gain from others.

    I is a token's own way past all attention: 1 at every token that is read, whatever it shows. The papers read the
    class token, whose own place is not drawn. Under a mean of tokens, I would add the same constant to every patch,
    and where E is small nothing else would be seen. It is left out before it is added, so no digit of E is lost.
    """
    own, found = read[..., None, :], torch.zeros_like(read[..., None, :])
    for flow in reversed(flows):
        step = (own + found) @ flow
        own, found = (own, found + step) if _between_tokens(flow) else (torch.zeros_like(step), step)
    return found


@method(
    "generic-attention", family=FAMILY, summary="positive gradient times attention, multiplied over all blocks",
    class_specific=True, signed=False, conserves=False, scalars=True, attention=True,
    paper="Chefer, Gur, Wolf: Generic Attention-model Explainability, ICCV 2021",
)  # fmt: skip
def generic_attention(case: Case) -> Result:
    """R <- R + E_h[(G A)+] R, with G the gradient of the score at the attention A; R starts as the identity."""
    found, grid = _chain(case, "generic-attention")
    gradients = case.tape.gradients(case.directions(), [one.output for one in found])
    flows = [positive_mean(one.gradient(gradients[one.output]), one.weights) for one in found]
    read = rows_read(found[-1].gradient(gradients[found[-1].output]))
    return _on_image(case, gained(read, flows), found[0], grid)


def positive_mean(gradient: Tensor, relevance: Tensor) -> Tensor:
    """E_h[(G R)+] of (K,B,heads,queries,keys)."""
    return (gradient * relevance).clamp(min=0).mean(2)


def _chain(case: Case, name: str, start: int = 0) -> tuple[list[Attention], Grid]:
    found = attentions(case.tape, name)
    grid = one_grid(found, name)
    if not 0 <= start < len(found):
        raise MethodError(f"start={start} is not possible; this network has {len(found)} blocks with attention")
    return found, grid


def _on_image(case: Case, row: Tensor, first: Attention, grid: Grid) -> Result:
    """A row (K,B,1,keys) over the tokens of the first attention, on the grid, enlarged."""
    assert first.keys is not None
    place = first.keys.index.flatten().long()
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
        positive_mean(one.gradient(gradients[one.output]), one.by_head(relevance[one.node])) for one in found[start:]
    ]
    read = rows_read(found[-1].gradient(gradients[found[-1].output]))
    return _on_image(case, gained(read, flows), found[0], grid)


def attention_relevance(tape: Tape, start: Tensor, found: Sequence[Attention]) -> dict[Node, Tensor]:
    """The relevance of each attention's weights, (K, *shape in its layout)."""
    kept: dict[Node, Tensor] = {}
    axes = image_index(tape)
    rules: dict[str, Rule] = {
        **dict.fromkeys(LINEAR_OPS, _positive),
        **dict.fromkeys(_MATRIX_PRODUCTS, _halves),
        **dict.fromkeys(_ADDITIONS, functools.partial(_in_proportion, axes=axes)),
        "scaled_dot_product_attention": functools.partial(_through_fused, kept=kept),
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
    return by_argument(node, dict(zip(("query", "key", "value"), shares, strict=True)))


def _tensor(argument: Any) -> Any:
    return argument.tensor if isinstance(argument, Value) else argument
