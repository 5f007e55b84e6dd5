"""Attribution Guided Factorization: two streams, gradients and relevance, carried backwards together.

`agf-paper` is Algorithm 1 to the letter, `agf-release` what the authors' released code computes, `agf` our
balanced rule. All three share the terms in `methods.agf.terms` and the one loop in `rules.propagate`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from classlens.core.capture import Node, Tape, Value, folded
from classlens.core.ops import per_axis
from classlens.core.rules.generic import Shares, divide, magnitude, proportional
from classlens.core.rules.linear import (
    LINEAR_OPS,
    LinearMap,
    absolute,
    agnostic,
    boxed,
    by_blocks,
    linear_map,
    output_stride,
)
from classlens.core.rules.linear import only as only_input
from classlens.core.rules.propagate import Ledger, Rule, Sweep, propagate, rule_for
from classlens.core.targets import OfClass, picked
from classlens.errors import MethodError, TargetError
from classlens.methods.agf import terms
from classlens.methods.layers import (
    as_map,
    evidence_at,
    first_layers,
    gradient_values,
    head_layers,
    is_spatial_conv,
    last_layers,
    meets_activation_first,
    over_places,
    own_gradient,
    patch_layers,
    spatial_before_flatten,
)
from classlens.methods.registry import Case, LayerTrace, Result, balance, method, of_colours

PAPER = "Gur, Ali, Wolf: Visualization of Supervised and Self-Supervised Neural Networks via AGF, AAAI 2021"
TERMS = "A", "Fx", "Fdx", "M", "gate"
BALANCED_TERMS = (*TERMS, "coarse")


@dataclass
class Streams:
    """The two streams at the top of the network, and what the sweep collects."""

    tape: Tape
    gradients: dict[Value, Tensor]
    start: dict[Value, Tensor]
    trace: dict[Node, dict[str, Tensor]] | None
    ledger: Ledger
    seen: dict[tuple[int, ...], Tensor] = field(default_factory=dict)  # by resolution, relevance over places (K,B,h,w)

    def see(self, share: Tensor, grid: tuple[int, ...]) -> None:
        """A layer's relevance, beside that of the others of its resolution."""
        places = over_places(share, grid)
        self.seen[grid] = self.seen[grid] + places if grid in self.seen else places

    def note(self, node: Node, **values: Tensor) -> None:
        if self.trace is not None:
            self.trace.setdefault(node, {}).update(values)


def open_streams(case: Case, tape: Tape, top: list[Node], full: Iterable[Node], score: OfClass) -> Streams:
    """The score, evidence at the inputs of `top`, and the gradient stream: one backward pass a class for all layers."""
    logits = tape.logits.detach().requires_grad_()
    alone = logits.shape[1] == 1  # no other class to be compared with: the logit itself is the score
    if not alone and (logits == logits[:, :1]).all(1).any():
        row = int((logits == logits[:, :1]).all(1).nonzero()[0])
        raise TargetError(f"the logits of image {row} are all equal: the model finds no class, so there is no evidence")
    with torch.enable_grad():
        scores = case.scores(logits, picked if alone else score)  # of a callable, the number that it gives
        cotangents = torch.stack([torch.autograd.grad(s.sum(), logits, retain_graph=True)[0] for s in scores.unbind(1)])
    gradients = tape.gradients(cotangents, gradient_values(tape, [*top, *full]))
    start = evidence_at(tape, top, gradients)
    return Streams(tape, gradients, start, {} if case.trace else None, Ledger(len(case.images)))


def finish(streams: Streams, sweep: Sweep, relevance: Tensor) -> Result:
    """Pack a sweep's outcome; `relevance` (K,B,C,H,W) is summed over colours."""
    layers = tuple(LayerTrace(n.module, n.op, t) for n, t in (streams.trace or {}).items())
    packed = of_colours(relevance, balance(sweep, streams.start))
    return replace(packed, notes=tuple(sweep.notes), trace=layers)


# ------------------------------------------------------------------------------------------------------ balanced

SHARE_OF_A = 0.8  # mu: P = (1 - mu) C + mu A
RESIDUAL = 0.2, 1.0  # lambda, the residual's size beside P, in networks of many and of few layers; between,
FEW_LAYERS = 6.0  # (6 / how many layers have it)^2, so that a shallow network gets enough of it
RESIDUAL_FROM_STRIDE = 8  # the residual enters where feature maps are at least 8 times smaller than the image


@method(
    "agf",
    family="attribution-guided factorisation",
    summary="balanced AGF: our rule, for modern networks too",
    class_specific=True, signed=True, conserves=True, scalars=True, paper=PAPER,
)  # fmt: skip
def agf(case: Case, without: str | Iterable[str] = (), only: str | None = None, residual: str | None = None) -> Result:
    """The paper's terms with each layer's energies in balance.

    At every convolution P = (1 - mu) C + mu A, with |b| beside |W| * |x| in C's denominator: what a bias caused
    stays there and is reported. In deep layers the residual q = F_dx + gate(C) (F_x + M) is brought to sum zero and
    to lambda times P's magnitude before it is added. At the image, what the deep layers saw is added in the same way.
    """
    tape = folded(case.tape)
    first, head, dropped = first_layers(tape), head_layers(tape), _dropped(without, only, BALANCED_TERMS)
    inside = [n for n in tape.nodes if n not in first and n not in head]
    grids = {n: tuple(n.inputs[0].shape[2:]) for n in inside if n.op == "conv2d"} | patch_layers(tape, inside)
    deep = {n for n, grid in grids.items() if output_stride(grid, case.images.shape[2:]) >= RESIDUAL_FROM_STRIDE}
    weight = 0.0 if {"Fx", "Fdx", "M"} <= dropped else _weight(len(deep))
    score = terms.highlighted_from_lowest if case.multilabel else terms.log_odds  # do classes compete?
    streams = open_streams(case, tape, head, deep if weight else (), score)
    on_convs = functools.partial(_balanced, streams=streams, dropped=dropped, residual=residual)
    # A layer that reads windows of images, cut up along the batch, does not see whole pictures.
    whole = [n for n in deep if n.inputs[0].shape[0] == len(case.images)]
    seen_on = {} if "coarse" in dropped else {n: grids[n] for n in whole}
    balanced: dict[Node, Rule] = {
        n: functools.partial(on_convs, weight=weight, grid=seen_on.get(n)) if n in deep else on_convs for n in grids
    }
    with_bias = functools.partial(_with_bias, streams=streams)

    def choose(node: Node) -> Rule:
        if node in first:
            return _at_the_image
        if node in balanced:
            return balanced[node]
        if node.op == "max_pool2d":
            return _over_window
        return with_bias if node.op in LINEAR_OPS else rule_for(node)

    watch = None if streams.trace is None else functools.partial(_watch, streams)
    sweep = propagate(tape, streams.start, choose, ledger=streams.ledger, watch=watch)
    if not deep and only is None:
        sweep.notes.append(
            f"no layer reads a feature map or a patch grid {RESIDUAL_FROM_STRIDE} times smaller than the image, so "
            "there was nothing to factorise: this is the relevance stream alone"
        )
    if streams.seen:
        seen = terms.coarse(streams.seen.values(), case.images.shape[2:])
        sweep.relevance = terms.balanced_residual(seen, sweep.relevance, 1.0)
    return finish(streams, sweep, sweep.relevance)


def _weight(layers: int) -> float:
    """lambda, for so many layers with the residual."""
    least, most = RESIDUAL
    return min(max((FEW_LAYERS / max(layers, 1)) ** 2, least), most)


def _at_the_image(node: Node, relevance: Tensor) -> Shares:
    """z^B, then the checkerboard of a strided first layer taken out."""
    layer = linear_map(node)
    share = boxed(layer, relevance)
    if layer.x.dim() == 4:
        share = terms.smoothed(share, torch.ones_like(layer.x))
    return only_input(node, layer.value, share)


def _over_window(node: Node, relevance: Tensor) -> Shares:
    """A max pool's relevance in proportion to |x| over its window: what nearly won is evidence too.

    Handed to the winners alone it leaves a speckled map.
    """
    average = replace(node, func=_average_like)
    if not _tiled(node):
        return proportional(average, relevance)
    # Windows that tile the map: a window's ratio goes to each of its places, for all classes at once.
    x = magnitude(node.inputs[0].tensor)
    (mean,) = average.call(x)
    of_window = divide(relevance, mean * (math.prod(x.shape[2:]) / math.prod(mean.shape[2:])))
    large = F.interpolate(of_window.flatten(0, 1), x.shape[2:], mode="nearest")
    return [large.unflatten(0, relevance.shape[:2]).mul_(x)]


def _tiled(pool: Node) -> bool:
    """Whether a pool's windows lie side by side and leave nothing out."""
    a = pool.arguments()
    kernel, padding = per_axis(a["kernel_size"], 2), per_axis(a.get("padding", 0), 2)
    stride = per_axis(a.get("stride") or kernel, 2)
    if len(pool.outputs[0].shape) != 4 or stride != kernel or padding != (0, 0):
        return False
    (high, wide), (rows, columns) = kernel, pool.outputs[0].shape[2:]
    return pool.inputs[0].shape[2:] == (rows * high, columns * wide)


def _average_like(
    x: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor:  # fmt: skip
    """A max pool's call, with the mean of each window; by what it divides cancels in a share."""
    if dilation not in (1, (1, 1), [1, 1]):  # an average has no windows with gaps: these stay with the winners
        return F.max_pool2d(x, kernel_size, stride or None, padding, dilation, ceil_mode)
    return F.avg_pool2d(x, kernel_size, stride or None, padding, ceil_mode)


def _with_bias(node: Node, relevance: Tensor, streams: Streams) -> Shares:
    """C = G(|x|, |W|, R), in which the bias takes part."""
    layer = linear_map(node)
    return only_input(node, layer.value, _absolute_with_bias(layer, relevance, streams.ledger))


@by_blocks
def _absolute_with_bias(layer: LinearMap, relevance: Tensor, ledger: Ledger) -> Tensor:
    x = layer.x.abs()
    w, b = _magnitudes(layer)
    return x * layer.adjoint(_per_unit(layer, relevance, x, w, b, ledger), w)


def _magnitudes(layer: LinearMap) -> tuple[Tensor, Tensor | None]:
    """|W| and |b| up to a factor for each output, which cancels: C and A take shares of that output's relevance.

    So a folded normalisation's scale is taken out of the few biases instead of being put into the many weights.
    """
    bias = None if layer.bias is None else layer.bias.abs()
    if layer.scale is None or not layer.scale.all():  # scaled by 0, a unit has its bias alone
        return layer.weight.abs(), bias
    if bias is not None:
        bias = bias / layer.scale.abs().reshape(bias.shape)
    return layer.unscaled.abs(), bias


def _per_unit(
    layer: LinearMap, relevance: Tensor, x: Tensor, w: Tensor, size: Tensor | None, ledger: Ledger,
    weight: float = 1.0, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """R / (|W| |x| + |b|); what of R falls to |b| is written down, `weight` times."""
    z = layer.forward(x, w)
    if size is None:
        return ledger.quotient(relevance, z, weight, out)
    per_unit = ledger.quotient(relevance, z.add_(size), weight, out)
    over_places = per_unit.flatten(3).sum(3) if layer.kernel else per_unit
    ledger.absorb(over_places * size.flatten(), weight)
    return per_unit


def _balanced(
    node: Node, relevance: Tensor, streams: Streams, dropped: frozenset[str], residual: str | None,
    weight: float = 0.0, grid: tuple[int, ...] | None = None,
) -> Shares:  # fmt: skip
    """P = (1 - mu) C + mu A and, with a weight, the residual; with a grid, its sum over channels is kept."""
    layer = linear_map(node)
    x, classes = layer.x.abs(), relevance.shape[0]
    w, b = _magnitudes(layer)
    active = x.sign()
    mu = 0.0 if "A" in dropped else SHARE_OF_A
    # C and A use the same |W|: one adjoint on a stacked batch.
    per_unit = relevance.new_empty(2 * classes, *relevance.shape[1:])
    _per_unit(layer, relevance, x, w, b, streams.ledger, 1 - mu, per_unit[:classes])
    divide(relevance, layer.of_ones(w), per_unit[classes:])
    both = layer.adjoint(per_unit, w)
    c, a = both[:classes].mul_(x), both[classes:]
    streams.ledger.absorb(a, mu)
    a.mul_(active)  # a unit that is off is no evidence
    streams.ledger.absorb(a, -mu)
    phi = torch.lerp(c, a, mu)
    if layer.kernel:
        streams.note(node, C=c, A=a)
    if weight:
        phi = _with_residual(node, c, phi, streams, dropped, residual, weight)
    if _halves(node):
        phi = terms.smoothed(phi, active)
    if grid:
        streams.see(phi, grid)
    return only_input(node, layer.value, phi)


def _with_residual(
    node: Node, c: Tensor, phi: Tensor, streams: Streams, dropped: frozenset[str], residual: str | None, weight: float
) -> Tensor:
    """phi + lambda q, q = F_dx + gate(C) (F_x + M). On a patch grid a token is a place."""
    tokens = phi.dim() == 4  # (K,B,tokens,C)
    if tokens:
        c, phi = as_map(c), as_map(phi)
    q = _residual(node, c, streams, terms.BALANCED, dropped, residual)
    found = terms.balanced_residual(q, phi, weight)
    return found[..., 0].mT if tokens else found


def _halves(node: Node) -> bool:
    """Whether a convolution gives a smaller feature map than it takes, so that it skips places."""
    if node.op != "conv2d":
        return False
    sizes = zip(node.inputs[0].shape[2:], node.outputs[0].shape[2:], strict=True)
    return any(before > 1 and 2 * after <= before + 1 for before, after in sizes)


# ------------------------------------------------------------------------------------- paper and released code


@method(
    "agf-paper",
    family="attribution-guided factorisation",
    summary="Algorithm 1 of the paper to the letter",
    class_specific=True, signed=True, conserves=False, scalars=True, paper=PAPER,
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
    class_specific=True, signed=True, conserves=False, scalars=True, paper=PAPER,
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


def _dropped(without: str | Iterable[str], only: str | None, known: tuple[str, ...] = TERMS) -> frozenset[str]:
    dropped = frozenset([without] if isinstance(without, str) else without)
    if only is not None:
        if only != "C":
            raise MethodError(f"only={only!r} is not known; only=C drops every term of the residual")
        dropped |= set(known) - {"gate"}
    unknown = dropped - set(known)
    if unknown:
        raise MethodError(f"without={sorted(unknown)[0]!r} is not known; the terms are {', '.join(known)}")
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
    streams = open_streams(case, tape, last_layers(tape), [*full, *flattened], terms.highlighted)
    special: dict[Node, Rule] = {node: functools.partial(_boxed, formula=formula) for node in boxes}
    for node in full:
        special[node] = functools.partial(_full, streams=streams, formula=formula, dropped=dropped, residual=residual)
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
    return finish(streams, sweep, relevance)


def _watch(streams: Streams, node: Node, arrived: Any, shares: Shares) -> None:
    for value, share in zip(node.inputs, shares, strict=True):
        if share is not None:
            name = "Phi" if node.inputs.index(value) == 0 else f"Phi_{node.inputs.index(value)}"
            streams.note(node, **{name: share})


def _same(x: Tensor) -> Tensor:
    return x


def _flat(node: Node, relevance: Tensor, formula: terms.Formula) -> Shares:
    layer = linear_map(node)
    return only_input(node, layer.value, absolute(layer, relevance, formula.quotient))


def _boxed(node: Node, relevance: Tensor, formula: terms.Formula) -> Shares:
    layer = linear_map(node)
    return only_input(node, layer.value, boxed(layer, relevance, formula.quotient))


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
    return only_input(node, layer.value, terms.shifted(c, m, formula.shift_everywhere))


def _full(
    node: Node, relevance: Tensor, streams: Streams, formula: terms.Formula, dropped: frozenset[str],
    residual: str | None,
) -> Shares:  # fmt: skip
    """r = A + F_dx + (F_x + M) / (1 + exp(-C)), then the shift."""
    layer = linear_map(node)
    c = absolute(layer, relevance, formula.quotient)
    r = _residual(node, c, streams, formula, dropped, residual)
    if "A" not in dropped:
        a = agnostic(layer, relevance, formula.quotient)
        r = r + a
        streams.note(node, A=a)
    streams.note(node, C=c, r=r * (c != 0))
    return only_input(node, layer.value, terms.shifted(c, r.expand_as(c), formula.shift_everywhere))


def _residual(
    node: Node, c: Tensor, streams: Streams, formula: terms.Formula, dropped: frozenset[str], residual: str | None
) -> Tensor:
    """F_dx + (F_x + M) / (1 + exp(-C)), the part of r that the factorisation and the gradient give."""
    x, tokens = node.inputs[0].tensor, node.inputs[0].tensor.dim() == 3
    gradient = own_gradient(streams.tape, node, streams.gradients)
    if tokens:
        x, gradient = as_map(x), as_map(gradient)
    partition, zero = c.mean(2, keepdim=True), c.new_zeros(1, 1, 1, 1, 1)
    f_dx = zero if "Fdx" in dropped else terms.factorised(gradient, partition, formula)
    if residual == "gradcam":
        f_x, m = terms.gradcam_residual(x, gradient), zero
    elif residual is None:
        f_x = zero if "Fx" in dropped else terms.factorised(x, partition, formula)
        m = zero if "M" in dropped else terms.interaction(x, gradient, formula.quotient)
    else:
        raise MethodError(f"residual={residual!r} is not known; there is residual=gradcam")
    if not tokens:
        streams.note(node, F_x=f_x, F_dx=f_dx, M=m, gradient=gradient)
    gate = 1.0 if "gate" in dropped else torch.sigmoid(partition if formula.gate_by_place else c)
    return f_dx + (f_x + m) * gate
