"""Attention: softmax(q k^T) v, as one operation.

Attention weights decide *where* to look, the values *what* is seen: the weights are treated as constants and the values
get all of the relevance (Ali et al.: XAI for Transformers: Better Explanations through Conservative Propagation,
ICML 2022).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
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
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        given = _tensor(mask)
        scores = scores.masked_fill(~given, -torch.inf) if given.dtype == torch.bool else scores + given
    return scores.softmax(-1)


@register("multi_head_attention_forward")
def multi_head_attention(node: Node, relevance: list[Tensor | None]) -> Shares:
    """torch's whole attention layer: back through the output projection, the weights, the value projection."""
    named = node.arguments()
    r, value = relevance[0], named["value"]
    if r is None or named["bias_k"] is not None or named["add_zero_attn"]:
        raise UnsupportedOp(f"no rule for attention whose weights are its output, or with bias_k ({node.where})")
    if not isinstance(value, Value):
        raise UnsupportedOp(f"no rule for attention whose values do not depend on the image ({node.where})")
    parts = layer_parts(node)
    r = _dense(parts.seen, parts.out_weight, r)
    r_v = parts.merged(through_weights(parts.weights, parts.values, parts.by_head(r)))
    return only(node, value, _dense(value.tensor, parts.value_weight, r_v))


@dataclass(frozen=True, eq=False)
class LayerParts:
    """What happens inside of a recorded `multi_head_attention_forward`."""

    weights: Tensor  # (N, heads, L, S)
    values: Tensor  # (N, heads, S, E / heads)
    queries: Tensor  # (N, heads, L, E / heads)
    keys: Tensor  # (N, heads, S, E / heads)
    projections: tuple[Tensor, Tensor, Tensor]  # the weights that make queries, keys and values
    out_weight: Tensor

    @property
    def seen(self) -> Tensor:
        """(L, N, E): what the output projection reads."""
        return (self.weights @ self.values).permute(2, 0, 1, 3).flatten(-2)

    @property
    def value_weight(self) -> Tensor:
        return self.projections[2]

    def by_head(self, t: Tensor) -> Tensor:
        """(..., L, N, E) -> (..., N, heads, L, E / heads)."""
        found: Tensor = t.unflatten(-1, (self.weights.shape[1], -1)).movedim(-4, -2)
        return found

    def merged(self, t: Tensor) -> Tensor:
        """(..., N, heads, L, E / heads) -> (..., L, N, E)."""
        return t.movedim(-2, -4).flatten(-2)


def layer_parts(node: Node) -> LayerParts:
    """The parts of torch's whole attention layer, computed again."""
    a: dict[str, Any] = {name: _tensor(given) for name, given in node.arguments().items()}
    _, weights = F.multi_head_attention_forward(**a | {"need_weights": True, "average_attn_weights": False})
    assert weights is not None
    heads = int(a["num_heads"])
    if a.get("use_separate_proj_weight"):
        projections = a["q_proj_weight"], a["k_proj_weight"], a["v_proj_weight"]
    else:
        projections = a["in_proj_weight"].chunk(3)
    biases = (None, None, None) if a["in_proj_bias"] is None else a["in_proj_bias"].chunk(3)
    q, k, v = (
        F.linear(x, w.detach(), b).unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)
        for x, w, b in zip((a["query"], a["key"], a["value"]), projections, biases, strict=True)
    )
    weights = weights.reshape(-1, *weights.shape[-3:])
    return LayerParts(weights, v, q, k, tuple(w.detach() for w in projections), a["out_proj_weight"].detach())


def _tensor(argument: Any) -> Any:
    return argument.tensor if isinstance(argument, Value) else argument


def _dense(x: Tensor, weight: Tensor, relevance: Tensor) -> Tensor:
    """Absolute influence through a linear layer."""
    size, w = magnitude(x), weight.detach().abs()
    return size * ((relevance / F.linear(size, w)) @ w)
