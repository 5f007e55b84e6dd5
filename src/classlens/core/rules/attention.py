"""Attention: softmax(q k^T) v, as one operation.

Attention weights decide *where* to look, the values *what* is seen: the weights are treated as constants and the values
get all of the relevance (Ali et al.: XAI for Transformers: Better Explanations through Conservative Propagation,
ICML 2022).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from classlens.core.capture import Node, Value
from classlens.core.rules.generic import Shares, magnitude, unbroadcast
from classlens.core.rules.linear import only
from classlens.core.rules.propagate import register
from classlens.errors import UnsupportedOp


def through_weights(weights: Tensor, values: Tensor, relevance: Tensor) -> Tensor:
    """R_v = |v| a^T [R / (a |v|)] for attention weights a (..., L, S) and values v (..., S, E)."""
    size = magnitude(values)
    return size * (weights.mT @ (relevance / (weights @ size)))


@register("scaled_dot_product_attention")
def fused_attention(node: Node, relevance: Tensor) -> Shares:
    """softmax(q k^T) v: everything to v."""
    named = node.arguments()
    if not isinstance(named["value"], Value):
        raise UnsupportedOp(f"no rule for attention whose values do not depend on the image ({node.where})")
    v = named["value"].tensor
    weights, values = fused_weights(node), repeated_heads(node, v)
    share = through_weights(weights, values, relevance)
    if values.shape != v.shape:  # a group of heads reads the same values
        share = share.unflatten(-3, (v.shape[-3], -1)).sum(-3)
    # Heads may share their values: these then get the sum over the heads.
    return only(node, named["value"], unbroadcast(share, v.shape))


def fused_weights(node: Node) -> Tensor:
    """The attention weights (..., L, S) of a recorded `scaled_dot_product_attention`."""
    named = node.arguments()
    q, k = _tensor(named["query"]), repeated_heads(node, _tensor(named["key"]))
    return attention_weights(q, k, named.get("attn_mask"), bool(named.get("is_causal")), named.get("scale"))


def repeated_heads(node: Node, t: Tensor) -> Tensor:
    """Keys or values (..., heads, S, E), repeated for the heads of the queries that share them (`enable_gqa`)."""
    named = node.arguments()
    if not named.get("enable_gqa"):
        return t
    return t.repeat_interleave(_tensor(named["query"]).shape[-3] // t.shape[-3], -3)


def attention_weights(q: Tensor, k: Tensor, mask: Any, causal: bool, scale: float | None) -> Tensor:
    """softmax(scale q k^T + mask), (..., L, S)."""
    return _scores(q, k, mask, causal, scale).softmax(-1)


def _scores(q: Tensor, k: Tensor, mask: Any, causal: bool, scale: float | None) -> Tensor:
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        given = _tensor(mask)
        scores = scores.masked_fill(~given, -torch.inf) if given.dtype == torch.bool else scores + given
    return scores


def opened(node: Node) -> tuple[Node, Node, Node]:
    """A recorded `scaled_dot_product_attention` as three operations: scores, softmax, and weights times values."""
    named = node.arguments()
    q, k, v, mask = named["query"], named["key"], named["value"], named.get("attn_mask")

    def score(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        found = _scores(q, repeated_heads(node, k), mask, bool(named.get("is_causal")), named.get("scale"))
        return found.clamp(min=torch.finfo(found.dtype).min / 4)  # finite, so that differences are

    def mix(weights: Tensor, v: Tensor) -> Tensor:
        return weights @ repeated_heads(node, v)

    scores = score(_tensor(q), _tensor(k), _tensor(mask))
    of_scores, of_weights = (Value(t, None, t.shape) for t in (scores, scores.softmax(-1)))
    return (
        Node("baddbmm", score, (q, k, mask), {}, (of_scores,), node.module),
        Node("softmax", torch.softmax, (of_scores, -1), {}, (of_weights,), node.module),
        Node("matmul", mix, (of_weights, v), {}, node.outputs, node.module),
    )


def by_argument(node: Node, shares: Mapping[str, Tensor | None]) -> Shares:
    """Shares by the names of arguments, in the order of the inputs; a value may be several arguments."""
    named: dict[str, Any] = node.arguments()
    left = dict(shares)
    found: list[Tensor | None] = []
    for value in node.inputs:
        name = next((name for name in left if named.get(name) is value), "")
        found.append(left.pop(name, None))
    return found


def _tensor(argument: Any) -> Any:
    return argument.tensor if isinstance(argument, Value) else argument
