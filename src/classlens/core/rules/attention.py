"""Products of two live values, and attention.

Attention weights decide *where* to look, the values *what* is seen: the weights are read as constants and the values
get all of the relevance (Ali et al.: XAI for Transformers: Better Explanations through Conservative Propagation,
ICML 2022).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from classlens.core.capture import Node, Value
from classlens.core.rules.generic import Shares, magnitude, transported, unbroadcast
from classlens.core.rules.linear import only
from classlens.core.rules.propagate import register
from classlens.core.rules.table import looks_like_gate
from classlens.errors import UnsupportedOp


@register("matmul", "rmatmul", "einsum", "baddbmm", "addmm", "addbmm", "inner", "outer", "tensordot", "bilinear")
def product(node: Node, relevance: Tensor) -> Shares:
    """Def. 1 with X = |x|. Of two live operands one within [0,1] is a gate; two plain ones get half each."""
    points = [magnitude(v.tensor) for v in node.inputs]
    (total,) = node.call(*points, constants=torch.abs)
    shares = transported(node, [relevance / total.clamp(min=torch.finfo(total.dtype).tiny)], points, torch.abs)
    full = [p * s for p, s in zip(points, shares, strict=True) if s is not None]
    gates = [looks_like_gate(v) for v in node.inputs]
    if any(gates) and not all(gates):
        return [None if gate else share for gate, share in zip(gates, full, strict=True)]
    return [share / len(full) for share in full]


def through_weights(weights: Tensor, values: Tensor, relevance: Tensor) -> Tensor:
    """R_v = |v| a^T [R / (a |v|)] for attention weights a (..., L, S) and values v (..., S, E)."""
    size = magnitude(values)
    return size * (weights.mT @ (relevance / (weights @ size)))


@register("scaled_dot_product_attention")
def fused_attention(node: Node, relevance: Tensor) -> Shares:
    """softmax(q k^T) v: everything to v."""
    named = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), node.args, strict=False))
    named |= node.kwargs
    if named.get("enable_gqa"):
        raise UnsupportedOp(f"no rule for attention whose queries share keys ({node.where})")
    q, k, v = (named[name].tensor for name in ("query", "key", "value"))
    weights = attention_weights(q, k, named.get("attn_mask"), bool(named.get("is_causal")), named.get("scale"))
    # Heads may share their values: then these get what all heads send.
    return only(node, named["value"], unbroadcast(through_weights(weights, v, relevance), v.shape))


def attention_weights(q: Tensor, k: Tensor, mask: Any, causal: bool, scale: float | None) -> Tensor:
    """softmax(scale q k^T + mask), (..., L, S)."""
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        given = mask.tensor if isinstance(mask, Value) else mask
        scores = scores.masked_fill(~given, -torch.inf) if given.dtype == torch.bool else scores + given
    return scores.softmax(-1)


@register("multi_head_attention_forward", multi_output=True)
def multi_head_attention(node: Node, relevance: list[Tensor | None]) -> Shares:
    """torch's whole attention layer: back through the output projection, the weights, the value projection."""
    names = (
        "query", "key", "value", "embed_dim", "heads", "in_weight", "in_bias", "bias_k", "bias_v", "add_zero",
        "dropout", "out_weight", "out_bias",
    )  # fmt: skip
    a = dict(zip(names, node.args, strict=False))
    r, heads, value = relevance[0], int(a["heads"]), a["value"]
    if r is None or a["bias_k"] is not None or a["add_zero"]:
        raise UnsupportedOp(f"no rule for attention whose weights are its output, or with bias_k ({node.where})")
    kwargs: dict[str, Any] = {k: v.tensor if isinstance(v, Value) else v for k, v in node.kwargs.items()}
    inputs: list[Any] = [v.tensor if isinstance(v, Value) else v for v in node.args]
    kwargs |= {"need_weights": True, "average_attn_weights": False}
    _, weights = F.multi_head_attention_forward(*inputs, **kwargs)  # (N,heads,L,S)
    assert weights is not None
    x = value.tensor  # (S,N,E)
    size = x.shape[-1]
    w_v = kwargs["v_proj_weight"] if kwargs.get("use_separate_proj_weight") else a["in_weight"][2 * size :]
    b_v = None if a["in_bias"] is None else a["in_bias"][2 * size :]
    v = F.linear(x, w_v, b_v)
    by_head = v.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)  # (N,heads,S,E/heads)
    seen = (weights @ by_head).permute(2, 0, 1, 3).flatten(-2)  # (L,N,E), what the output projection reads
    r = _dense(seen, a["out_weight"], r)
    r_seen = r.unflatten(-1, (heads, -1)).permute(0, 2, 3, 1, 4)  # (K,N,heads,L,E/heads)
    r_v = through_weights(weights, by_head, r_seen).permute(0, 3, 1, 2, 4).flatten(-2)  # (K,S,N,E)
    return only(node, value, _dense(x, w_v, r_v))


def _dense(x: Tensor, weight: Tensor, relevance: Tensor) -> Tensor:
    """Absolute influence through a linear layer."""
    size, w = magnitude(x), weight.detach().abs()
    return size * ((relevance / F.linear(size, w)) @ w)
