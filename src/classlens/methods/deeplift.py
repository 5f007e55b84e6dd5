"""DeepLIFT on the tape: differences from a baseline, propagated back operation by operation.

Between a baseline x0 and the image x, the output of an operation changes by

    dy = [integral over a in [0,1] of J(x0 + a dx)] dx,

so multipliers go back as m_x = (mean Jacobian)^T m_y, and sum(m_x dx) = sum(m_y dy) holds exactly. The mean Jacobian
is J itself for a linear operation, J at the midpoint for a product, and dy / dx for an activation, which is DeepLIFT's
rescale rule. For the rest (layer norm, softmax, attention) it is computed at Gauss-Legendre points. It works on the
tape and needs no modules: reused and functional activations are ordinary nodes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from classlens.core.capture import Node, Tape, Value, record
from classlens.core.capture.norm import is_fixed, through_norm
from classlens.core.ops import LINEAR_OPS, Kind, of_kind
from classlens.core.rules.attention import by_argument, opened
from classlens.core.rules.generic import Shares, divide, transported
from classlens.core.rules.linear import linear_map, only
from classlens.core.rules.propagate import MULTI_OUTPUT, propagate
from classlens.core.rules.table import pasted
from classlens.errors import CaptureError, UnsupportedOp
from classlens.methods.gradient import complete
from classlens.methods.inputs import Baseline, asked, refuse_one_pass
from classlens.methods.inputs import baselines as make_baselines
from classlens.methods.registry import Case, Result, method
from classlens.progress import track

POINTS = 16  # Gauss-Legendre points if the mean Jacobian has no closed form

_UNIT_BY_UNIT = of_kind(Kind.ACTIVATION, Kind.POINTWISE)
_MAXIMA, _MINIMA = of_kind(Kind.MAX_POOL, Kind.MAXIMUM), of_kind(Kind.MINIMUM)
_UNCHANGED = of_kind(Kind.SAME)
# The Jacobian is constant, or linear in the inputs: the midpoint is exact.
_LINEAR = of_kind(
    Kind.LINEAR, Kind.COPY, Kind.RESHAPE, Kind.MOVE, Kind.JOIN, Kind.CHOICE, Kind.SUM, Kind.AVERAGE_POOL, Kind.ADDITION
)
_PRODUCTS, _ADDED_PRODUCTS = of_kind(Kind.PRODUCT), of_kind(Kind.ADDED_PRODUCT)


@method(
    "deeplift-shap", family="gradients", summary="difference from baselines, propagated back by the rescale rule",
    class_specific=True, signed=True, conserves=True, scalars=True,
    paper="Shrikumar et al.: DeepLIFT, ICML 2017; Lundberg, Lee: SHAP, NeurIPS 2017",
)  # fmt: skip
def deeplift_shap(case: Case, baselines: str | Sequence[Baseline] = "zero+dark+blur+noise", seed: int = 0) -> Result:
    """Mean over baselines of (x - x0) * multiplier.

    Baselines: 0 (the mean colour), the image's darkest colour, the blurred image, seeded noise. Complete: the map sums
    to the mean difference of logits; the report gives the error.
    """
    refuse_one_pass(case)
    asked_here, total = asked(case, case.tape.logits), torch.zeros((), device=case.images.device)
    difference = torch.zeros_like(asked_here)
    with torch.inference_mode(False):
        starts = make_baselines(case.images, baselines, seed)
        for start in track(starts, len(starts), "deeplift-shap"):
            other = record(case.model, start, case.output)
            top = mean_direction(case, other.logits)
            total = total + multipliers(case.tape, other, top) * (case.images.detach() - start)
            difference = difference + asked_here - asked(case, other.logits)
    return complete(total / len(starts), difference / len(starts))


def mean_direction(case: Case, other: Tensor) -> Tensor:
    """(K,B,classes): m with m . (y - y0) = score(y) - score(y0), for the image's logits y and a baseline's y0."""
    if not case.scalars:  # the logit of a class: the same gradient everywhere
        return case.directions()
    points = zip(*_quadrature(POINTS), strict=True)
    found = [weight * case.directions(torch.lerp(other, case.tape.logits, place)) for place, weight in points]
    return torch.stack(found).sum(0)


def multipliers(tape: Tape, other: Tape, start: Tensor) -> Tensor:
    """m (K,B,C,H,W) with sum(m (x - x0)) = start . (y - y0), for the tapes of x and of a baseline x0."""
    if [node.op for node in tape.nodes] != [node.op for node in other.nodes]:
        raise CaptureError(
            "the model runs different operations for the baseline and for the image, so they cannot be compared"
        )
    twins = dict(zip(tape.nodes, other.nodes, strict=True))
    return propagate(tape, {tape.output: start}, lambda node: functools.partial(_hand_back, twin=twins[node])).relevance


def _hand_back(node: Node, arrived: Any, twin: Node) -> Shares:
    """The rule of every operation: m_x = (mean Jacobian)^T m_y."""
    if arrived is None:
        raise UnsupportedOp(f"deeplift-shap needs the first output of {node.where}, but the model uses another")
    single = len(node.inputs) == 1
    if node.op in _UNCHANGED:
        return only(node, node.inputs[0], arrived)
    if node.op == "as_strided_scatter":  # torch's own formula for its gradient is wrong
        return pasted(node, arrived)
    if node.op in LINEAR_OPS and single:
        layer = linear_map(node)
        return only(node, layer.value, layer.adjoint(arrived, layer.weight))
    if node.op in _UNIT_BY_UNIT and single and node.inputs[0].shape == node.outputs[0].shape:
        return [arrived * slope(node, twin)]
    if node.op == "batch_norm" and is_fixed(node.arguments()):
        return only(node, node.inputs[0], through_norm(node.arguments(), arrived))
    if node.op == "scaled_dot_product_attention":
        return _through_attention(node, twin, arrived)
    outputs = list(arrived) if node.op in MULTI_OUTPUT else [arrived, *[None] * (len(node.outputs) - 1)]
    if node.op in _MAXIMA | _MINIMA:
        return _extreme(node, twin, outputs)
    return _mean_jacobian(node, twin, outputs, 1 if _up_to_quadratic(node) else POINTS)


def _up_to_quadratic(node: Node) -> bool:
    """Whether the Jacobian is constant, or linear in the inputs: then the midpoint is exact."""
    if node.op in ("div", "grid_sample"):  # linear in what is divided or sampled, not in the divisor or the positions
        return len(node.inputs) == 1 and isinstance(node.arguments()["input"], Value)
    products = node.op in _ADDED_PRODUCTS or (node.op in _PRODUCTS and len(node.inputs) <= 2)
    return node.op in _LINEAR or products


def slope(node: Node, twin: Node) -> Tensor:
    """Rescale: dy / dx for each unit; where dx is nearly 0, the mean derivative between x0 and x."""
    x, x0 = node.inputs[0].tensor, twin.inputs[0].tensor
    dx, dy = x - x0, node.outputs[0].tensor - twin.outputs[0].tensor
    # With a relative difference d, the error of the quotient is eps / d, that of two Gauss-Legendre points d^4.
    near = dx.abs() <= torch.finfo(x.dtype).eps ** 0.25 * (x.abs() + x0.abs())
    (derivative,) = _mean_jacobian(node, twin, [torch.ones_like(dy)[None]], 2)
    assert derivative is not None
    return torch.where(near, derivative[0], dy / torch.where(near, 1, dx))


def _through_attention(node: Node, twin: Node, arrived: Tensor) -> Shares:
    """Fused attention in its three steps, so that it gets the multipliers of attention that is written out."""
    (score, score0), (soft, soft0), (mix, mix0) = zip(opened(node), opened(twin), strict=True)
    at_weights, *to_values = _hand_back(mix, arrived, mix0)
    to_scores = _hand_back(soft, at_weights, soft0)[0]
    shares = [*to_values, *(_hand_back(score, to_scores, score0) if score.inputs else ())]
    named = node.arguments()
    live = [name for name in ("value", "query", "key", "attn_mask") if isinstance(named.get(name), Value)]
    return by_argument(node, dict(zip(live, shares, strict=True)))


def _extreme(node: Node, twin: Node, arrived: list[Tensor | None]) -> Shares:
    """A maximum that rose is due to the image's largest input, one that fell to the baseline's; |dy| <= |dx| at both.

    For a minimum it is the other way round.
    """
    multiplier, *rest = arrived
    assert multiplier is not None
    x, x0 = [v.tensor for v in node.inputs], [v.tensor for v in twin.inputs]
    dy = node.outputs[0].tensor - twin.outputs[0].tensor
    risen, fallen = multiplier * dy.clamp(min=0), multiplier * dy.clamp(max=0)
    of_image, of_baseline = (fallen, risen) if node.op in _MINIMA else (risen, fallen)
    at_both = transported(node, [of_image, *rest], x), transported(node, [of_baseline, *rest], x0)
    shares = map(_sum, *at_both)
    return [None if s is None else divide(s, p - p0) for s, p, p0 in zip(shares, x, x0, strict=True)]


def _mean_jacobian(node: Node, twin: Node, arrived: Sequence[Tensor | None], points: int) -> list[Tensor | None]:
    """sum over points a of w_a J(x0 + a dx)^T m."""
    ends = [(v.tensor, v0.tensor) for v, v0 in zip(node.inputs, twin.inputs, strict=True)]
    total: list[Tensor | None] = [None] * len(ends)
    for place, weight in zip(*_quadrature(points), strict=True):
        at = [torch.lerp(x0, x, place) if x.is_floating_point() else x for x, x0 in ends]
        shares = transported(node, arrived, at)
        total = [_sum(a, None if b is None else weight * b) for a, b in zip(total, shares, strict=True)]
    return total


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


@functools.cache
def _quadrature(points: int) -> tuple[list[float], list[float]]:
    """Gauss-Legendre nodes and weights on [0,1]."""
    places, weights = np.polynomial.legendre.leggauss(points)
    return [float(p) for p in (places + 1) / 2], [float(w) for w in weights / 2]
