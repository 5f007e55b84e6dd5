"""`agf`, our balanced rule: the paper's terms, with balanced magnitudes in each layer.

Read from top to bottom: the constants, `agf` (which layer gets which rule), then `Balanced`, whose methods are the
rules, in the order in which they are chosen.

    v  |x| + 5 mean of |x| over the channels of a position: the size of an input, and that of its position
    C  relevance by influence: v * |W|^T [R / (|W| v + |b|)], where units are on
    q  the residual: evidence from factorisation and gradient at each position (`terms.residual`)
    S  coarse evidence from deep layers: their relevance, upsampled to the image (`terms.coarse`)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from classlens.core.capture import Grid, Node, folded
from classlens.core.ops import LINEAR_OPS
from classlens.core.rules.generic import Shares
from classlens.core.rules.linear import LinearMap, boxed, by_blocks, linear_map, output_stride
from classlens.core.rules.linear import only as only_input
from classlens.core.rules.pools import MAX_POOLS, over_window
from classlens.core.rules.propagate import Ledger, Rule, propagate, rule_for
from classlens.methods.agf import terms
from classlens.methods.agf.streams import FAMILY, PAPER, Streams, open_streams
from classlens.methods.layers import Tokens, first_layers, head_layers, token_layers
from classlens.methods.places import convolution
from classlens.methods.registry import Case, Result, method

SCORE = terms.above_rivals  # the explained score of a class that competes with others
SCORE_OF_LABEL = terms.highlighted_from_lowest  # the explained score of a class with an independent probability
TERMS = "Fx", "Fdx", "M", "coarse"  # the terms that `without=` accepts
OF_POSITION = 5.0  # v = |x| + 5 mean_c |x|: how evenly the units of a position share its relevance
RESIDUAL = 0.2, 1.0  # lambda, the magnitude of the residual relative to C, with many and with few layers; in between,
FEW_LAYERS = 6.0  # (6 / number of layers with a residual)^2, so that a shallow network gets enough of it
RESIDUAL_FROM_STRIDE = 8  # the residual enters where feature maps are at least 8 times smaller than the image


@method(
    "agf", family=FAMILY, summary="balanced AGF: our rule, for modern networks too",
    class_specific=True, signed=True, conserves=True, scalars=True, linear={"only": "C"}, paper=PAPER,
)  # fmt: skip
def agf(case: Case, without: str | Iterable[str] = (), only: str | None = None, residual: str | None = None) -> Result:
    """The paper's terms, with balanced magnitudes in each layer.

    At every convolution relevance is shared by influence, C. Its denominator is |W| v + |b|: the share of a bias stays
    in the layer and is reported. In deep layers the residual q = F_dx + (F_x + M) / 2 is scaled to sum zero and to
    lambda times C's magnitude before it is added. At the image, coarse evidence from deep layers is added in the same
    way, where there is relevance nearby.
    """
    tape = folded(case.tape)
    options = terms.read_options(without, only, residual, TERMS)
    first, head = first_layers(tape), head_layers(tape)
    inside = [node for node in tape.nodes if node not in first and node not in head]
    tokens = token_layers(tape, inside)
    grids = {node: tuple(node.inputs[0].shape[2:]) for node in inside if node.op == convolution(tape)}
    grids |= {node: found.places.grid for node, found in tokens.items()}
    deep = {n for n, grid in grids.items() if output_stride(grid, case.images.shape[2:]) >= RESIDUAL_FROM_STRIDE}
    weight = residual_weight(len(deep)) if options.has_residual else 0.0
    score = SCORE_OF_LABEL if case.multilabel else SCORE
    streams = open_streams(case, tape, head, deep if weight else (), score)
    rules = Balanced(streams, options, first, grids, tokens, deep, weight)
    sweep = propagate(tape, streams.start, rules.choose, ledger=streams.ledger, watch=streams.watch, done=streams.done)
    if not deep and only is None:
        sweep.notes.append(
            f"no layer reads a feature map or a patch grid {RESIDUAL_FROM_STRIDE} times smaller than the image, so "
            "nothing could be factorised: the map is the relevance stream alone"
        )
    near = terms.nearby(sweep.relevance)
    if rules.seen:
        coarse = terms.coarse(rules.seen.values(), case.images.shape[2:])
        sweep.relevance = terms.with_coarse(sweep.relevance, coarse, near)
    if case.multilabel:
        sweep.relevance, taken = terms.at_odds(sweep.relevance, near, probabilities(case))
        sweep.absorbed = sweep.absorbed + taken.to(sweep.absorbed)
    return streams.result(sweep, sweep.relevance)


def probabilities(case: Case) -> Tensor:
    """(K,B): the independent probability of each class; 1 for targets that are not classes."""
    logits = case.tape.logits.detach()
    found = logits.gather(1, case.targets.clamp(min=0)).sigmoid()
    return torch.where(case.targets < 0, 1.0, found).T


def residual_weight(layers: int) -> float:
    """lambda, for a number of layers with a residual.

    >>> residual_weight(6), residual_weight(12), residual_weight(40)
    (1.0, 0.25, 0.2)
    """
    least, most = RESIDUAL
    return min(max((FEW_LAYERS / max(layers, 1)) ** 2, least), most)


@dataclass
class Balanced:
    """The rules of one explanation. Each takes a node and the relevance of its output, and returns shares."""

    streams: Streams
    options: terms.Options
    first: set[Node]  # layers that read the image
    grids: dict[Node, Grid]  # layers between image and head with spatial positions
    tokens: dict[Node, Tokens]  # those of them that read tokens
    deep: set[Node]  # the layers in `grids` that get the residual
    weight: float  # lambda
    seen: dict[Grid, Tensor] = field(default_factory=dict)  # by resolution, the deep layers' relevance (K,B,h,w)

    def choose(self, node: Node) -> Rule:
        """The rule of a node."""
        if node in self.first:
            return self.at_the_image
        if node in self.grids:
            return self.on_places
        if node.op in LINEAR_OPS:
            return self.elsewhere
        return over_window if node.op in MAX_POOLS else rule_for(node)

    def at_the_image(self, node: Node, relevance: Tensor) -> Shares:
        """z^B, then smoothing to remove the checkerboard pattern of a strided first layer."""
        layer = linear_map(node)
        share = boxed(layer, relevance)
        if layer.kernel:
            share = terms.smoothed(share, torch.ones_like(layer.x))
        return only_input(node, layer.value, share)

    def on_places(self, node: Node, relevance: Tensor) -> Shares:
        """C and, in deep layers, the residual; the relevance of deep layers is also kept for the coarse evidence."""
        layer = linear_map(node)
        sizes = Magnitudes.of(layer)
        active = sizes.x.sign() if sizes.x.numel() and sizes.x.amin() == 0 else None  # None: every unit is on
        phi = self.influence(sizes.with_position(), relevance, active)
        if layer.kernel:
            self.streams.note(node, C=phi)
        if node in self.deep and self.weight:
            phi = self.with_residual(node, phi)
        if _skips_places(node):
            phi = terms.smoothed(phi, torch.ones_like(sizes.x) if active is None else active)
        if node in self.deep and "coarse" not in self.options.dropped:
            self.see(node, phi)
        return only_input(node, layer.value, phi)

    def influence(self, sizes: Magnitudes, relevance: Tensor, active: Tensor | None) -> Tensor:
        """C. A unit that is off is no evidence: what it would get stays here."""
        ledger = self.streams.ledger
        c = sizes.share(relevance, ledger)
        if active is not None:
            ledger.absorb(c)
            c.mul_(active)
            ledger.absorb(c, -1.0)
        return c

    def with_residual(self, node: Node, c: Tensor) -> Tensor:
        """C + lambda q. On a patch grid, a token is a position."""
        x, gradient = node.inputs[0].tensor, self.streams.gradient(node)
        tokens = self.tokens.get(node)
        if tokens:
            x, gradient, c = tokens.as_map(x[None])[0], *map(tokens.as_map, (gradient, c))
        residual = terms.residual(x, gradient, c, terms.BALANCED, self.options)
        if not tokens:
            self.streams.note(node, **residual.named(), gradient=gradient)
        found = terms.balanced_residual(residual.q, c, self.weight)
        return tokens.restored(found) if tokens else found

    def see(self, node: Node, share: Tensor) -> None:
        """Add a layer's relevance over positions to that of the other layers of its resolution."""
        if node not in self.tokens and node.inputs[0].shape[0] != self.streams.ledger.images:
            return  # a convolution over pieces of images, stacked along the batch axis
        grid = self.grids[node]
        places = self.tokens[node].on_grid(share) if node in self.tokens else share.sum(2)
        self.seen[grid] = self.seen[grid] + places if grid in self.seen else places

    def elsewhere(self, node: Node, relevance: Tensor) -> Shares:
        """C with v = |x|, for layers without spatial positions: in heads, gates and squeezed layers."""
        layer = linear_map(node)
        return only_input(node, layer.value, _influence(layer, relevance, self.streams.ledger))


@by_blocks
def _influence(layer: LinearMap, relevance: Tensor, ledger: Ledger) -> Tensor:
    return Magnitudes.of(layer).share(relevance, ledger)


def _skips_places(node: Node) -> bool:
    """Whether the output of a convolution is smaller than its input, so that it skips positions."""
    if node.op == "linear":
        return False
    sizes = zip(node.inputs[0].shape[2:], node.outputs[0].shape[2:], strict=True)
    return any(before > 1 and 2 * after <= before + 1 for before, after in sizes)


@dataclass(frozen=True)
class Magnitudes:
    """|x|, |W| and |b| of a linear layer.

    W and b are known up to a factor for each output, which cancels, because C is a share of that output's relevance.
    So the scale of a folded normalisation divides the few biases instead of multiplying the many weights.
    """

    layer: LinearMap
    x: Tensor
    w: Tensor
    b: Tensor | None

    @classmethod
    def of(cls, layer: LinearMap) -> Magnitudes:
        x, b = layer.x.abs(), None if layer.bias is None else layer.bias.abs()
        if layer.scale is None or not layer.scale.all():  # a unit scaled by 0 has only its bias
            return cls(layer, x, layer.weight.abs(), b)
        if b is not None:
            b = b / layer.scale.abs().reshape(b.shape)
        return cls(layer, x, layer.unscaled.abs(), b)

    def with_position(self) -> Magnitudes:
        """v in the place of |x|: every unit also has the mean size of its position.

        Where it is large, relevance follows the weights; the few strongest channels do not get everything.
        """
        mean = self.x.mean(1 if self.layer.kernel else -1, keepdim=True)
        return replace(self, x=torch.add(self.x, mean, alpha=OF_POSITION))

    def share(self, relevance: Tensor, ledger: Ledger) -> Tensor:
        """|x| |W|^T [R / (|W| |x| + |b|)]; the share of |b| is recorded as absorbed."""
        bias = None if self.b is None else self.b.flatten()
        per_unit = ledger.quotient(relevance, self.layer.forward(self.x, self.w, bias))
        if bias is not None:
            ledger.absorb((per_unit.flatten(3).sum(3) if self.layer.kernel else per_unit) @ bias)
        return self.layer.adjoint(per_unit, self.w).mul_(self.x)
