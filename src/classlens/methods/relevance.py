"""Relevance propagation: LRP and its relatives. Each consists of a start, a recipe of rules, and one sweep."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from classlens.core.capture import Node, Value, folded, image_index
from classlens.core.ops import LINEAR_OPS
from classlens.core.rules.generic import Quotient, Shares, divide, divide_released, proportional
from classlens.core.rules.linear import (
    LinearMap,
    absolute,
    boxed,
    by_sign,
    epsilon,
    flat,
    linear_map,
    only,
    positive,
)
from classlens.core.rules.linear import gamma as gamma_rule
from classlens.core.rules.propagate import Ledger, Merge, Rule, add_shares, forgetting, propagate, rule_for
from classlens.errors import MethodError
from classlens.methods.layers import SIGNED_SUMS, evidence_at, first_layers, gradient_points, last_layers
from classlens.methods.registry import UNRELIABLE, Case, Result, balance, is_release, method, of_colours, total

LayerRule = Callable[[LinearMap, Tensor, Quotient], Tensor]
FAMILY = "relevance propagation"
LRP_PAPER = "Bach et al.: On Pixel-Wise Explanations by Layer-Wise Relevance Propagation, PLoS ONE 2015"
COMPOSITE_PAPER = "Montavon et al.: Layer-Wise Relevance Propagation: An Overview, 2019"


@dataclass(frozen=True)
class Recipe:
    """The rule for each layer: a relevance method without its start."""

    layers: LayerRule  # convolutions, and all other linear maps
    image: LayerRule = boxed  # the layer that reads the image
    dense: LayerRule | None = None  # fully connected layers, if they differ
    table: Mapping[str, Rule] = field(default_factory=dict)  # other operations, if they differ from the default
    merge: Merge = add_shares
    fold: bool = True
    quotient: Quotient | None = None  # None: a division that records the relevance of biases as absorbed


def sweep(case: Case, start: Mapping[Value, Tensor], recipe: Recipe) -> tuple[Tensor, Result]:
    """One sweep from `start`; returns (relevance (K,B,C,H,W), result)."""
    tape = folded(case.tape) if recipe.fold else case.tape
    firsts, images = first_layers(tape), image_index(tape)
    ledger = Ledger(len(case.images), axes=images)
    quotient = recipe.quotient or ledger.quotient

    def on(rule: LayerRule) -> Rule:
        def apply(node: Node, relevance: Tensor) -> Shares:
            layer = replace(linear_map(node), images=images.get)
            return only(node, layer.value, rule(layer, relevance, quotient))

        return apply

    def choose(node: Node) -> Rule:
        if node in firsts:
            return on(recipe.image)
        if node.op == "linear" and recipe.dense is not None:
            return on(recipe.dense)
        if node.op in LINEAR_OPS:
            return on(recipe.layers)
        return recipe.table.get(node.op) or rule_for(node)

    done = forgetting(case.tape) if case.once else None
    swept = propagate(tape, start, choose, recipe.merge, ledger, done=done)
    result = of_colours(swept.relevance, balance(swept, start))
    # Rules for dense layers divide by signed sums. Other rules that grow, such as alpha-beta, do so evenly.
    notes = () if recipe.dense is None else grown(start, swept.relevance)
    return swept.relevance, replace(result, notes=notes)


MUCH, TOO_MUCH = 10.0, 1e6  # how many times larger relevance may become: a note, and a refusal (float32 has 7 digits)


def grown(start: Mapping[Value, Tensor], relevance: Tensor) -> tuple[str, ...]:
    """A note if relevance became much larger on its way, an error if nothing but that growth can be seen.

    Rules that divide by signed sums do this where many such layers follow each other, as in transformers: positive and
    negative shares grow together, so the balance still holds.
    """
    began = torch.stack([total(share.abs()) for share in start.values()]).sum(0)
    # Maps that are not finite are refused image by image, after the sweep.
    growth = divide(total(relevance.abs()), began).nan_to_num().max().item()
    if growth <= MUCH:
        return ()
    words = "times larger on its way: layers divide by sums near 0"
    if growth >= TOO_MUCH:
        raise MethodError(
            f"relevance became {growth:.3g} {words}, so the map would be noise; use a method without that division, "
            "such as lrp or agf"
        )
    # Without the number: parts of the classes (`classlens.chunks`) say it in the same words, which are then said once.
    return (f"relevance became more than {MUCH:.0f} {words}; {UNRELIABLE}",)


def from_logit(case: Case) -> dict[Value, Tensor]:
    """The start of LRP: the logit at the class, 0 elsewhere; in general, logits times the gradient of the score."""
    return {case.tape.output: case.directions() * case.tape.logits}


# ------------------------------------------------------------------------------------- as in the released code


def released_alpha_beta(layer: LinearMap, relevance: Tensor, quotient: Quotient, alpha: float) -> Tensor:
    """alpha-beta as released: the parts of x+ and x- are each divided by their own sum, so both get all of R."""
    w_pos, w_neg = layer.weight.clamp(min=0), layer.weight.clamp(max=0)
    x_pos, x_neg = layer.x.clamp(min=0), layer.x.clamp(max=0)

    def part(x: Tensor, w: Tensor) -> Tensor:
        return x * layer.adjoint(quotient(relevance, layer.forward(x, w)), w)

    share = alpha * (part(x_pos, w_pos) + part(x_neg, w_neg))
    beta = alpha - 1
    return share - beta * (part(x_pos, w_neg) + part(x_neg, w_pos)) if beta else share


def released_norm(node: Node, relevance: Tensor) -> Shares:
    """BatchNorm as released: relevance passes where x is not 0 (the guarded division's 1e-9 included)."""
    a = node.arguments()
    x: Tensor = node.inputs[0].tensor
    # The released code squares the variance; it cancels except for the guard.
    scale = a["weight"].detach() / torch.sqrt(a["running_var"] ** 2 + a.get("eps", 1e-5))
    z = x * scale.reshape(-1, *[1] * (x.dim() - 2))
    return [z * divide_released(relevance, z)]


def released_clone(value: Value, shares: list[Tensor]) -> Tensor:
    """A value used twice: x * sum of R / x."""
    x = value.tensor
    return x * torch.stack([divide_released(share, x) for share in shares]).sum(0)


_AS_RELEASED = functools.partial(proportional, modify=lambda x: x, quotient=divide_released)
RELEASED: dict[str, Rule] = {
    **dict.fromkeys(SIGNED_SUMS, _AS_RELEASED),
    "batch_norm": released_norm,
}


def _unguarded(a: Tensor, b: Tensor) -> Tensor:
    return a / (b + 1e-9)


def _released_box(layer: LinearMap, relevance: Tensor, quotient: Quotient) -> Tensor:
    return boxed(layer, relevance, _unguarded)


def _lrp(alpha: float, variant: str) -> Recipe:
    if is_release(variant):
        rule = functools.partial(released_alpha_beta, alpha=alpha)
        return Recipe(rule, _released_box, None, RELEASED, released_clone, fold=False, quotient=divide_released)
    return Recipe(functools.partial(positive, alpha=alpha))


@method(
    "lrp", family=FAMILY, summary="positive contributions only (alpha 1, beta 0), z^B at the image",
    class_specific=False, signed=False, linear={}, conserves=True, scalars=True, paper=LRP_PAPER,
)  # fmt: skip
def lrp(case: Case, variant: str = "default") -> Result:
    """Corrected: contributions of x+ and of x- share one denominator."""
    return sweep(case, from_logit(case), _lrp(1.0, variant))[1]


@method(
    "lrp-ab", family=FAMILY, summary="contributions for (alpha 2) minus contributions against (beta 1)",
    class_specific=False, signed=True, linear={}, conserves=True, scalars=True, paper=LRP_PAPER,
)  # fmt: skip
def lrp_ab(case: Case, variant: str = "default") -> Result:
    """Corrected in the same way as `lrp`."""
    return sweep(case, from_logit(case), _lrp(2.0, variant))[1]


@method(
    "lrp-epsilon-plus-flat", family=FAMILY,
    summary="composite: epsilon in dense layers, positive contributions in convolutions, flat at the image",
    class_specific=True, signed=True, linear={}, conserves=True, scalars=True, paper=COMPOSITE_PAPER,
)  # fmt: skip
def lrp_epsilon_plus_flat(case: Case) -> Result:
    """The sign comes from the dense layers; convolutions distribute it without cancellation."""
    return sweep(case, from_logit(case), Recipe(positive, flat, epsilon))[1]


@method(
    "lrp-epsilon-gamma-box", family=FAMILY,
    summary="composite: epsilon in dense layers, gamma in convolutions, z^B at the image",
    class_specific=True, signed=True, linear={}, conserves=True, scalars=True, paper=COMPOSITE_PAPER,
)  # fmt: skip
def lrp_epsilon_gamma_box(case: Case, gamma: float = 0.25) -> Result:
    """`gamma` = 0 is epsilon; a large `gamma` keeps only positive contributions."""
    return sweep(case, from_logit(case), Recipe(functools.partial(gamma_rule, weight=gamma), boxed, epsilon))[1]


# ------------------------------------------------------------------------------------------------ contrastive LRP


def _contrast(case: Case, target: Tensor, rest: Tensor, variant: str) -> Result:
    """LRP from the target minus LRP from the rest, scaled to the same total."""
    relevance, _ = sweep(case, {case.tape.output: torch.cat([target, rest])}, _lrp(1.0, variant))
    of_target, of_rest = relevance.chunk(2)
    axes = tuple(range(2, relevance.dim()))
    totals = (r.sum(axes, keepdim=True, dtype=torch.float64) for r in (of_target, of_rest))
    difference = of_target - of_rest * divide(*totals).to(of_rest)
    return of_colours(difference)


@method(
    "clrp", family=FAMILY, summary="LRP of the class minus LRP of all other classes",
    class_specific=True, signed=True, contrastive=True, conserves=False,
    paper="Gu, Yang, Tresp: Understanding Individual Decisions of CNNs via Contrastive Backpropagation, ACCV 2018",
)  # fmt: skip
def clrp(case: Case, variant: str = "default") -> Result:
    """The rest starts from the class's own logit, spread evenly over all others.

    (It does not start from their own logits: these often sum to almost 0, and scaling them to the total of the class
    would make them dominate.)
    """
    hot, logits = case.one_hot(), case.tape.logits
    target = hot * logits
    rest = (1 - hot) * target.sum(2, keepdim=True) / (logits.shape[1] - 1)
    return _contrast(case, target, rest, variant)


@method(
    "sglrp", family=FAMILY, summary="LRP of the class minus LRP of the others, weighted by their probability",
    class_specific=True, signed=True, contrastive=True, conserves=False,
    paper="Iwana, Kuroki, Uchida: Explaining CNNs using Softmax Gradient LRP, ICCV-W 2019",
)  # fmt: skip
def sglrp(case: Case, variant: str = "default") -> Result:
    """Starts from the gradient of the softmax: p_t (1 - p_t) at the class, p_t p_i at the others."""
    hot = case.one_hot()
    p = case.tape.logits.softmax(1)
    p_t = (hot * p).sum(2, keepdim=True)
    # Without the offset, the start of a class with probability 1 would be 0.
    return _contrast(case, hot * (p_t * (1 - p_t) + 1e-8), (1 - hot) * p_t * p, variant)


# ------------------------------------------------------------------------------------------------------------- RAP


def relative(layer: LinearMap, relevance: Tensor, quotient: Quotient = divide, split: bool = True) -> Tensor:
    """RAP: R goes through the contributions that agree (P) and, in proportion, through those that oppose (Q).

    P and Q sum |z| over the contributions of either sign. With `split`, relevance against the class goes through Q
    alone. What this adds in total is then taken off evenly, so that units of little influence turn negative.
    """
    parts = list(by_sign(layer))
    p = torch.stack([layer.forward(x, w) for x, w, _ in parts]).sum(0)
    q = torch.stack([layer.forward(x, v) for x, _, v in parts]).sum(0)
    r_p, r_q = (relevance.clamp(min=0), relevance.clamp(max=0)) if split else (relevance, 0)
    s_p = quotient(r_p, p)
    s_q = quotient(relevance * quotient(q, p + q) + r_q, q)
    share = torch.stack([x * (layer.adjoint(s_p, w) + layer.adjoint(s_q, v)) for x, w, v in parts]).sum(0)
    # Units that are 0 get a tiny share of sums, so that none is divided by 0: they are not active.
    size = share.abs()
    peak = layer.of_each_image(size, lambda rows: rows.amax(1))
    active = (size > torch.finfo(share.dtype).eps ** 2 * peak).to(share)
    added, before, count = (layer.of_each_image(t, lambda rows: rows.sum(1)) for t in (share, relevance, active))
    return share - active * divide(added - before.reshape(added.shape), count)


def _released_rap(layer: LinearMap, relevance: Tensor, quotient: Quotient) -> Tensor:
    if layer.kernel and all(k == 1 for k in layer.kernel):
        return absolute(layer, relevance, quotient)
    return relative(layer, relevance, quotient, split=bool(layer.kernel))


@method(
    "rap", family=FAMILY, summary="relative attributing propagation: even shifts turn weak units negative",
    class_specific=False, signed=True, conserves=True, scalars=True,
    paper="Nam et al.: Relative Attributing Propagation, AAAI 2020",
)  # fmt: skip
def rap(case: Case, variant: str = "default") -> Result:
    """Corrected: linear layers and 1x1 convolutions get the rule of the other convolutions."""
    recipe = (
        Recipe(_released_rap, boxed, None, RELEASED, fold=False, quotient=divide_released)
        if is_release(variant)
        else Recipe(relative, quotient=divide)
    )
    return sweep(case, from_logit(case), recipe)[1]


# --------------------------------------------------------------------------------------------- excitation backprop


def excited(layer: LinearMap, relevance: Tensor, quotient: Quotient = divide) -> Tensor:
    """P(j) = sum_i P(i) a_j w_ij+ / sum_j a_j w_ij+, with responses a minus the smallest one of each image."""
    a = layer.x - layer.of_each_image(layer.x[None], lambda rows: rows.amin(1))[0].clamp(max=0)
    w = layer.weight.clamp(min=0)
    return a * layer.adjoint(quotient(relevance, layer.forward(a, w)), w)


EXCITATION_PAPER = "Zhang et al.: Top-Down Neural Attention by Excitation Backprop, IJCV 2018"


@method(
    "excitation-bp", family=FAMILY, summary="probability that a top-down walk over positive weights ends at a pixel",
    class_specific=False, signed=False, linear={}, conserves=True, scalars=True, paper=EXCITATION_PAPER,
)  # fmt: skip
def excitation_bp(case: Case) -> Result:
    """Starts from probability 1 at the class."""
    return sweep(case, {case.tape.output: case.directions()}, Recipe(excited, excited))[1]


@method(
    "contrastive-excitation-bp", family=FAMILY,
    summary="excitation of the class minus excitation of its opposite (the last layer's weights negated)",
    class_specific=True, signed=True, contrastive=True, linear={}, conserves=True, scalars=True,
    paper=EXCITATION_PAPER,
)  # fmt: skip
def contrastive_excitation_bp(case: Case) -> Result:
    """The two walks differ only in their first step, so one sweep from there propagates the difference."""
    tape = case.tape
    last = last_layers(tape)
    gradients = tape.gradients(case.directions(), gradient_points(tape, last))
    start: dict[Value, Tensor] = {}
    for value, evidence in evidence_at(tape, last, gradients).items():
        axes = tuple(range(2, evidence.dim()))
        for_it, against = evidence.clamp(min=0), (-evidence).clamp(min=0)
        start[value] = divide(for_it, for_it.sum(axes, keepdim=True)) - divide(against, against.sum(axes, keepdim=True))
    return sweep(case, start, Recipe(excited, excited))[1]
