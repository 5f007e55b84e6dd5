"""Attribution Guided Factorization: two streams, gradients and relevance, carried backwards together.

`agf-paper` is Algorithm 1 to the letter, `agf-release` what the authors' released code computes, `agf` our
balanced rule. All three share the terms in `rules.agf` and the one loop in `rules.propagate`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from classlens.capture import Node, Tape, Value, fold_batchnorm
from classlens.errors import MethodError, TargetError
from classlens.methods.layers import (
    first_layers,
    gradient_values,
    is_spatial_conv,
    last_layers,
    meets_activation_first,
    own_gradient,
    spatial_before_flatten,
)
from classlens.methods.registry import Case, LayerTrace, Result, method
from classlens.rules import agf as terms
from classlens.rules.generic import Shares, divide, proportional
from classlens.rules.linear import LINEAR_OPS, absolute, agnostic, boxed, linear_map, only, output_stride
from classlens.rules.propagate import Ledger, Rule, Sweep, propagate, rule_for

PAPER = "Gur, Ali, Wolf: Visualization of Supervised and Self-Supervised Neural Networks via AGF, AAAI 2021"
TERMS = ("A", "Fx", "Fdx", "M", "gate")


@dataclass
class Streams:
    """The two streams at the top of the network, and what the sweep collects."""

    tape: Tape
    gradients: dict[Value, Tensor]
    start: dict[Value, Tensor]
    trace: dict[Node, dict[str, Tensor]] | None
    ledger: Ledger = field(default_factory=Ledger)

    def note(self, node: Node, **values: Tensor) -> None:
        if self.trace is not None:
            self.trace.setdefault(node, {}).update(values)


def open_streams(case: Case, tape: Tape, full: Iterable[Node]) -> Streams:
    """Eq. 7 and the gradient stream: one backward pass a class gives the gradient at every layer."""
    logits = tape.logits.detach().requires_grad_()
    if (logits == logits[:, :1]).all(1).any():
        row = int((logits == logits[:, :1]).all(1).nonzero()[0])
        raise TargetError(f"the logits of image {row} are all equal: the model finds no class, so there is no evidence")
    with torch.enable_grad():
        scores = terms.highlighted(logits, case.targets)
        cotangents = torch.stack(
            [torch.autograd.grad(s.sum(), logits, retain_graph=True)[0] for s in scores.unbind(1)]
        )
    last = last_layers(tape)
    gradients = tape.gradients(cotangents, gradient_values([*last, *full]))
    start: dict[Value, Tensor] = {}
    for node in last:
        layer = linear_map(node)
        share = layer.x * layer.adjoint(gradients[node.outputs[0]], layer.weight)  # Phi^(1) = x * gradient
        start[layer.value] = start[layer.value] + share if layer.value in start else share
    return Streams(tape, gradients, start, {} if case.trace else None)


def finish(case: Case, streams: Streams, sweep: Sweep, maps: Tensor) -> Result:
    """Pack a sweep's outcome; `maps` is (K,B,H,W)."""
    started = sum(s.flatten(2).sum(2, dtype=torch.float64) for s in streams.start.values())
    assert isinstance(started, Tensor)
    layers = tuple(LayerTrace(n.module, n.op, t) for n, t in (streams.trace or {}).items())
    return Result(maps.transpose(0, 1), started.T, sweep.absorbed.T, tuple(sweep.notes), layers)


# ------------------------------------------------------------------------------------- paper and released code


@method(
    "agf-paper",
    family="attribution-guided factorisation",
    summary="Algorithm 1 of the paper to the letter",
    class_specific=True, signed=True, conserves=False, paper=PAPER,
)  # fmt: skip
def agf_paper(case: Case, without: str | Iterable[str] = (), only: str | None = None) -> Result:
    """Every convolution gets the full rule, also the first; residual sums by Def. 1."""
    tape = case.tape
    full = [node for node in tape.nodes if node.op == "conv2d" and node not in last_layers(tape)]
    return _published(case, terms.PAPER, full, frozenset(), _dropped(without, only), residual=None)


@method(
    "agf-release",
    family="attribution-guided factorisation",
    summary="what the authors' released code computes, numerically",
    class_specific=True, signed=True, conserves=True, paper=PAPER,
)  # fmt: skip
def agf_release(
    case: Case, without: str | Iterable[str] = (), only: str | None = None, residual: str | None = None
) -> Result:
    """The full rule at spatial convolutions that meet an activation before a sum, z^B at the image."""
    tape = case.tape
    boxes, last = first_layers(tape), last_layers(tape)
    full = [
        node for node in tape.nodes
        if is_spatial_conv(node) and node not in boxes and node not in last and meets_activation_first(tape, node)
    ]  # fmt: skip
    return _published(case, terms.RELEASE, full, boxes, _dropped(without, only), residual)


def _dropped(without: str | Iterable[str], only: str | None) -> frozenset[str]:
    dropped = frozenset([without] if isinstance(without, str) else without)
    if only is not None:
        if only != "C":
            raise MethodError(f"only={only!r} is not known; only=C drops every term of the residual")
        dropped |= {"A", "Fx", "Fdx", "M"}
    unknown = dropped - set(TERMS)
    if unknown:
        raise MethodError(f"without={sorted(unknown)[0]!r} is not known; the terms are {', '.join(TERMS)}")
    return dropped


def _published(
    case: Case, formula: terms.Formula, full: list[Node], boxes: set[Node] | frozenset[Node],
    dropped: frozenset[str], residual: str | None,
) -> Result:  # fmt: skip
    tape = case.tape
    flattened = {
        node: shape for node in tape.nodes
        if node.op == "linear" and (shape := spatial_before_flatten(tape, linear_map(node).value))
    }  # fmt: skip
    streams = open_streams(case, tape, [*full, *flattened])
    special: dict[Node, Rule] = {node: functools.partial(_boxed, formula=formula) for node in boxes}
    for node in full:
        special[node] = functools.partial(
            _full, streams=streams, formula=formula, dropped=dropped, residual=residual
        )
    for node, shape in flattened.items():
        special[node] = functools.partial(_after_flatten, streams=streams, formula=formula, shape=shape)
    table: dict[str, Rule] = {
        **{op: functools.partial(_flat, formula=formula) for op in LINEAR_OPS},
        "relu": functools.partial(_relu, formula=formula),
        "relu6": functools.partial(_relu, formula=formula),
        "add": functools.partial(_signed_add, formula=formula),
        **{
            op: functools.partial(proportional, modify=_same, quotient=formula.quotient)
            for op in ("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "mean")
        },
    }

    def choose(node: Node) -> Rule:
        return special.get(node) or table.get(node.op) or rule_for(node)

    def merge(value: Value, shares: list[Tensor]) -> Tensor:
        x = value.tensor  # the released "clone": relevance of a unit that is exactly 0 is dropped
        return x * sum(formula.quotient(share, x) for share in shares)

    watch = None if streams.trace is None else functools.partial(_watch, streams)
    sweep = propagate(tape, streams.start, choose, merge, streams.ledger, watch)
    relevance = sweep.relevance
    if formula is terms.RELEASE:  # the released map is divided by its largest value over colours and places
        relevance = divide(relevance, terms.per_image_max(relevance))
    return finish(case, streams, sweep, relevance.sum(2))


def _watch(streams: Streams, node: Node, arrived: Any, shares: Shares) -> None:
    for value, share in zip(node.inputs, shares, strict=True):
        if share is not None:
            name = "Phi" if node.inputs.index(value) == 0 else f"Phi_{node.inputs.index(value)}"
            streams.note(node, **{name: share})


def _same(x: Tensor) -> Tensor:
    return x


def _flat(node: Node, relevance: Tensor, formula: terms.Formula) -> Shares:
    layer = linear_map(node)
    return only(node, layer.value, absolute(layer, relevance, formula.quotient))


def _boxed(node: Node, relevance: Tensor, formula: terms.Formula) -> Shares:
    layer = linear_map(node)
    return only(node, layer.value, boxed(layer, relevance, formula.quotient))


def _relu(node: Node, relevance: Tensor, formula: terms.Formula) -> Shares:
    x = node.inputs[0].tensor
    return [torch.where(x > 0, x * formula.quotient(relevance, x), 0)]


def _signed_add(node: Node, relevance: Tensor, formula: terms.Formula) -> Shares:
    """R_a = a R / (a + b): Def. 1 for a sum."""
    if len(node.inputs) == 1:
        return rule_for(node)(node, relevance)
    return proportional(node, relevance, _same, formula.quotient)


def _after_flatten(
    node: Node, relevance: Tensor, streams: Streams, formula: terms.Formula, shape: tuple[int, ...]
) -> Shares:
    """The first linear layer: C with the residual M, computed on the feature map as it was before flattening."""
    layer = linear_map(node)
    c = absolute(layer, relevance, formula.quotient)
    gradient = own_gradient(streams.tape, node, streams.gradients)
    product = layer.x.unflatten(-1, shape) * gradient.unflatten(-1, shape)
    m = product.mean(2, keepdim=True).clamp(min=0).expand_as(product)
    if not formula.shift_everywhere:
        m = m * (c != 0).reshape(m.shape)
    m = terms.normalised(m, formula.quotient).reshape(c.shape)
    streams.note(node, C=c, M=m, gradient=gradient)
    return only(node, layer.value, terms.shifted(c, m, formula.shift_everywhere))


def _full(
    node: Node, relevance: Tensor, streams: Streams, formula: terms.Formula, dropped: frozenset[str],
    residual: str | None,
) -> Shares:  # fmt: skip
    """r = A + F_dx + (F_x + M) / (1 + exp(-C)), then the shift."""
    layer = linear_map(node)
    gradient = own_gradient(streams.tape, node, streams.gradients)
    c = absolute(layer, relevance, formula.quotient)
    partition = c.mean(2, keepdim=True)
    zero = c.new_zeros(())
    a = zero if "A" in dropped else agnostic(layer, relevance, formula.quotient)
    f_dx = zero if "Fdx" in dropped else terms.factorised(gradient, partition, formula)
    gate = 1.0 if "gate" in dropped else torch.sigmoid(c)
    if residual == "gradcam":
        f_x, m = terms.gradcam_residual(layer.x, gradient), zero
    elif residual is None:
        f_x = zero if "Fx" in dropped else terms.factorised(layer.x, partition, formula)
        m = zero if "M" in dropped else terms.interaction(layer.x, gradient, formula.quotient)
    else:
        raise MethodError(f"residual={residual!r} is not known; there is residual=gradcam")
    r = a + f_dx + (f_x + m) * gate
    streams.note(node, C=c, A=a, F_x=f_x, F_dx=f_dx, M=m, r=r * (c != 0), gradient=gradient)
    return only(node, layer.value, terms.shifted(c, r.expand_as(c), formula.shift_everywhere))
