"""The published rules: `agf-paper`, exactly Algorithm 1, and `agf-release`, what the authors' code computes.

Both share one set of rules; their differences are data (`terms.PAPER`, `terms.RELEASE`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from classlens.core.capture import Node, Tape, Value, fold_paddings
from classlens.core.ops import LINEAR_OPS, Kind, of_kind
from classlens.core.rules.generic import Shares, divide, proportional
from classlens.core.rules.linear import absolute, agnostic, boxed, linear_map
from classlens.core.rules.linear import only as only_input
from classlens.core.rules.propagate import Rule, propagate, rule_for
from classlens.methods.agf import terms
from classlens.methods.agf.streams import FAMILY, PAPER, Streams, open_streams
from classlens.methods.layers import (
    SIGNED_SUMS,
    first_layers,
    is_spatial_conv,
    last_layers,
    meets_activation_first,
    spatial_before_flatten,
)
from classlens.methods.places import convolution
from classlens.methods.registry import Case, Result, method

_ADDITIONS = of_kind(Kind.ADDITION)
_UNIT_BY_UNIT = of_kind(Kind.ACTIVATION, Kind.POINTWISE, Kind.DIVISION) | {"mul"}


@method(
    "agf-paper", family=FAMILY, summary="exactly Algorithm 1 of the paper",
    class_specific=True, signed=True, conserves=False, scalars=True, paper=PAPER,
)  # fmt: skip
def agf_paper(case: Case, without: str | Iterable[str] = (), only: str | None = None) -> Result:
    """Every convolution gets the full rule, including the first; residual sums use Def. 1."""
    tape = fold_paddings(case.tape)
    last = last_layers(tape)
    full = {node for node in tape.nodes if node.op == convolution(tape) and node not in last}
    return _run(case, tape, terms.PAPER, full, set(), terms.read_options(without, only))


@method(
    "agf-release", family=FAMILY, summary="numerically what the authors' released code computes",
    class_specific=True, signed=True, conserves=False, scalars=True, paper=PAPER,
)  # fmt: skip
def agf_release(
    case: Case, without: str | Iterable[str] = (), only: str | None = None, residual: str | None = None
) -> Result:
    """The full rule at spatial convolutions that are followed by an activation before a sum, z^B at the image."""
    tape = fold_paddings(case.tape)
    first, last = first_layers(tape), last_layers(tape)
    inside = [node for node in tape.nodes if node not in first and node not in last]
    full = {node for node in inside if is_spatial_conv(tape, node) and meets_activation_first(tape, node)}
    return _run(case, tape, terms.RELEASE, full, first, terms.read_options(without, only, residual))


def _run(
    case: Case, tape: Tape, formula: terms.Formula, full: set[Node], boxes: set[Node], options: terms.Options
) -> Result:
    flattened = {
        node: shape for node in tape.nodes
        if node.op == "linear" and (shape := spatial_before_flatten(tape, linear_map(node).value))
    }  # fmt: skip
    streams = open_streams(case, tape, last_layers(tape), [*full, *flattened], terms.highlighted)
    rules = Published(streams, formula, options, full, boxes, flattened)
    sweep = propagate(tape, streams.start, rules.choose, rules.merge, streams.ledger, streams.watch, streams.done)
    relevance = sweep.relevance
    if formula is terms.RELEASE:  # the released map is divided by its maximum over colours and positions
        relevance = divide(relevance, terms.per_image_max(relevance))
    return streams.result(sweep, relevance)


@dataclass(frozen=True)
class Published:
    """The rules of one explanation. Each takes a node and the relevance of its output, and returns shares."""

    streams: Streams
    formula: terms.Formula
    options: terms.Options
    full: set[Node]  # convolutions with the full rule
    boxes: set[Node]  # layers that read the image, with z^B
    flattened: dict[Node, tuple[int, ...]]  # linear layers that read a flattened map, and its shape (C,h,w)

    def choose(self, node: Node) -> Rule:
        """The rule of a node."""
        if node in self.flattened:
            return self.after_flatten
        if node in self.full:
            return self.with_residual
        if node in self.boxes:
            return self.boxed
        if node.op in LINEAR_OPS:
            return self.influence
        if node.op in ("relu", "relu6"):
            return self.relu
        if node.op in _UNIT_BY_UNIT:
            return self.active
        return self.signed_sum if node.op in SIGNED_SUMS else rule_for(node)

    def after_flatten(self, node: Node, relevance: Tensor) -> Shares:
        """The first linear layer: C with the residual M, computed on the feature map before flattening."""
        layer, shape, formula = linear_map(node), self.flattened[node], self.formula
        c = absolute(layer, relevance, formula.quotient)
        gradient = self.streams.gradient(node)
        product = layer.x.unflatten(-1, shape) * gradient.unflatten(-1, shape)
        m = product.mean(2, keepdim=True).clamp(min=0).expand_as(product)
        if not formula.shift_everywhere:
            m = m * (c != 0).reshape(m.shape)
        m = terms.normalised(m, formula.quotient).reshape(c.shape)
        self.streams.note(node, C=c, M=m, gradient=gradient)
        return only_input(node, layer.value, _reached(terms.shifted(c, m, formula.shift_everywhere), relevance))

    def with_residual(self, node: Node, relevance: Tensor) -> Shares:
        """The full rule: r = A + F_dx + (F_x + M) / (1 + exp(-C)), then the shift."""
        layer, formula = linear_map(node), self.formula
        c, gradient = absolute(layer, relevance, formula.quotient), self.streams.gradient(node)
        residual = terms.residual(layer.x, gradient, c, formula, self.options)
        r = residual.q
        if "A" not in self.options.dropped:
            a = agnostic(layer, relevance, formula.quotient)
            r = r + a
            self.streams.note(node, A=a)
        self.streams.note(node, **residual.named(), gradient=gradient, C=c, r=r * (c != 0))
        shifted = terms.shifted(c, r.expand_as(c), formula.shift_everywhere)
        return only_input(node, layer.value, _reached(shifted, relevance))

    def boxed(self, node: Node, relevance: Tensor) -> Shares:
        """z^B, at the image."""
        layer = linear_map(node)
        return only_input(node, layer.value, boxed(layer, relevance, self.formula.quotient))

    def influence(self, node: Node, relevance: Tensor) -> Shares:
        """C alone."""
        layer = linear_map(node)
        return only_input(node, layer.value, absolute(layer, relevance, self.formula.quotient))

    def relu(self, node: Node, relevance: Tensor) -> Shares:
        """Relevance passes where the unit is active."""
        x = node.inputs[0].tensor
        return [torch.where(x > 0, x * self.formula.quotient(relevance, x), 0)]

    def active(self, node: Node, relevance: Tensor) -> Shares:
        """Any other activation or product: likewise, nothing passes where its output is exactly 0."""
        return rule_for(node)(node, torch.where(node.outputs[0].tensor != 0, relevance, 0))

    def signed_sum(self, node: Node, relevance: Tensor) -> Shares:
        """R_a = a R / (a + b): Def. 1 for sums, means and pools, with signed values. A constant gets no share."""
        if len(node.inputs) == 1 and node.op in _ADDITIONS:
            return rule_for(node)(node, relevance)
        return proportional(node, relevance, lambda x: x, self.formula.quotient)

    def merge(self, value: Value, shares: list[Tensor]) -> Tensor:
        """The released "clone": the relevance of a value with two uses is dropped where the unit is exactly 0."""
        x = value.tensor
        return x * sum(self.formula.quotient(share, x) for share in shares)


def _reached(share: Tensor, relevance: Tensor) -> Tensor:
    """A share (K,B,...) without the images in which no relevance reaches the layer: no rule applies there."""
    reached = relevance.flatten(2).any(2)
    return share if bool(reached.all()) else share * reached.reshape(*reached.shape, *[1] * (share.dim() - 2))
