"""The terms of Attribution Guided Factorization, each a small function of tensors.

Shapes: x (B,C,H,W) is the input of a layer and does not depend on the class. Its gradient, relevance and every term
have a leading axis for the classes, (K,B,C,H,W); maps are (K,B,1,H,W). All sums and maxima are per class and image.
Volumes and videos have three axes of positions instead of two, and the same equations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from classlens.core.rules.generic import Quotient, divide, divide_released
from classlens.errors import MethodError
from classlens.methods.places import enlarged, shortest_side

TERMS = "A", "Fx", "Fdx", "M", "gate"  # the terms that `without=` accepts


@dataclass(frozen=True)
class Formula:
    """The differences between the paper, the released code and our rule, as data."""

    sharpness: float  # H = sigmoid(sharpness * Y)
    ridge: float  # W = (R'R + ridge I)^-1 R'H
    zero_is_background: bool  # the background is phi <= 0, or phi < 0
    normalise_factors: bool  # divide F by its maximum
    shift_everywhere: bool  # the shift is subtracted everywhere, or only where C != 0
    gate: float | None  # the weight of F_x + M; None: 1 / (1 + exp(-C))
    quotient: Quotient


PAPER = Formula(1.0, 0.0, True, True, True, None, divide)
RELEASE = Formula(10.0, 1.0, False, False, False, None, divide_released)
BALANCED = replace(RELEASE, gate=0.5)  # C is small beside 1, so the published gate is 1/2 to a few digits


@dataclass(frozen=True)
class Options:
    """The terms that an explanation uses."""

    dropped: frozenset[str] = frozenset()  # names of omitted terms
    gradcam: bool = False  # use Grad-CAM of the layer instead of F_x + M

    @property
    def has_residual(self) -> bool:
        """Whether anything is left of F_dx + gate (F_x + M)."""
        return not {"Fx", "Fdx", "M"} <= self.dropped


def read_options(
    without: str | Iterable[str] = (), only: str | None = None, residual: str | None = None,
    known: tuple[str, ...] = TERMS,
) -> Options:  # fmt: skip
    """Parse the options of a method as the user wrote them.

    >>> sorted(read_options(without=["M", "gate"]).dropped)
    ['M', 'gate']
    """
    dropped = frozenset([without] if isinstance(without, str) else without)
    if only is not None:
        if only != "C":
            raise MethodError(f"unknown only={only!r}; only=C drops every term of the residual")
        dropped |= set(known) - {"gate"}
    unknown = dropped - set(known)
    if unknown:
        raise MethodError(f"unknown without={sorted(unknown)[0]!r}; the terms are {', '.join(known)}")
    if residual not in (None, "gradcam"):
        raise MethodError(f"unknown residual={residual!r}; the only choice is residual=gradcam")
    return Options(dropped, residual == "gradcam")


def per_image_max(t: Tensor) -> Tensor:
    """Largest value of each class and image of t (K,B,...), shaped to divide by: (K,B,1,...,1)."""
    return t.amax(tuple(range(2, t.dim())), keepdim=True)


def normalised(t: Tensor, quotient: Quotient = divide) -> Tensor:
    """N_max: divided by its largest value (not its largest magnitude)."""
    return quotient(t, per_image_max(t))


def highlighted(logits: Tensor, targets: Tensor) -> Tensor:
    """Eq. 7: softmax of the logits, weighted by closeness to the target's logit; the target's own entry, (B,K).

    sigma = max_i |y_i - y_t|;  yhat = softmax(y_t exp(-((y - y_t) / sigma)^2 / 2)).
    """
    return _highlighted(logits, targets, logits.new_zeros(()))


def highlighted_from_lowest(logits: Tensor, targets: Tensor) -> Tensor:
    """Eq. 7, extended to classes that the network does not predict.

    A softmax is invariant to a shift of the logits. Eq. 7 multiplies by y_t and is not: for a negative y_t, evidence
    for other classes would count for this one. There, logits are measured relative to the smallest one.
    """
    y_t, lowest = logits.gather(1, targets), logits.amin(1, keepdim=True)
    # The least likely class would be measured relative to itself, and its gradient would vanish.
    lowest = torch.where(y_t > lowest, lowest, lowest.detach())
    return _highlighted(logits, targets, torch.where(y_t < 0, lowest, 0)[:, :, None])


def _highlighted(logits: Tensor, targets: Tensor, origin: Tensor) -> Tensor:
    y_t = logits.gather(1, targets)[:, :, None]  # (B,K,1)
    distance = logits[:, None, :] - y_t  # (B,K,C)
    sigma = distance.abs().amax(2, keepdim=True)
    scores = torch.softmax((y_t - origin) * torch.exp(-0.5 * (distance / sigma) ** 2), dim=2)
    return scores.gather(2, targets[:, :, None]).squeeze(2)


LARGEST_WEIGHT = 0.1  # of a single rival
_STEPS = 60  # of Newton's method, at most: it takes about ten


def above_rivals(logits: Tensor, targets: Tensor) -> Tensor:
    """The class above its rivals, none of which dominates: y_t - sum_{k != t} p_k y_k; (B,K).

    p = softmax(beta y) over the other classes, treated as a constant. beta is 1 / std(y) or, if a single rival would
    then weigh more than a tenth, smaller, so that it weighs a tenth. So a second dog breed is one rival among many:
    what the two have in common stays evidence for both, and another object in the picture is still evidence against.
    Like the softmax, and unlike Eq. 7, the score is invariant to a shift of the logits.
    """
    every = logits[:, None, :].expand(-1, targets.shape[1], -1)  # (B,K,C)
    rivals = every.detach().double().scatter(2, targets[:, :, None], -torch.inf)
    below = rivals - rivals.amax(2, keepdim=True)
    spread = logits.detach().double().std(1, correction=0)[:, None, None]
    weights = _weights(_sharpness(below, 1 / spread), below)
    p = (weights / weights.sum(2, keepdim=True)).to(logits)
    return logits.gather(1, targets) - (p * every).sum(2)


def _weights(beta: Tensor, below: Tensor) -> Tensor:
    """exp(beta (y_k - y_max)): 1 for the most likely rival, 0 for the class itself (-inf)."""
    return torch.exp(beta * below).nan_to_num(0.0)  # 0 * -inf


def _sharpness(below: Tensor, most: Tensor) -> Tensor:
    """beta (B,K,1): the largest value up to `most` for which no rival weighs more than LARGEST_WEIGHT.

    The most likely rival weighs 1 / sum_k exp(beta (y_k - y_max)). The sum falls with beta, and is convex: Newton's
    method from beta = 0 finds where it is 1 / LARGEST_WEIGHT, without overshooting. With so few rivals that each weighs
    more even at beta = 0, beta is 0, and the mean of the others is subtracted.
    """
    finite, beta = torch.where(below > -torch.inf, below, 0), torch.zeros_like(below[..., :1])
    for _ in range(_STEPS):
        weights = _weights(beta, below)
        spare = weights.sum(2, keepdim=True) - 1 / LARGEST_WEIGHT
        step = divide(spare.clamp(min=0), -(weights * finite).sum(2, keepdim=True))
        reached = beta + torch.where((step > 0) | (spare <= 0), step, most)  # rivals that all tie are no limit
        if torch.equal(reached := reached.clamp(max=most), beta):
            break
        beta = reached
    return beta


def interaction(x: Tensor, gradient: Tensor, quotient: Quotient = divide) -> Tensor:
    """M: the positive part of the channel mean of x * gradient, divided by its maximum (Eq. 11)."""
    return normalised((x * gradient).mean(2, keepdim=True).clamp(min=0), quotient)


def gradcam_residual(x: Tensor, gradient: Tensor) -> Tensor:
    """Ablation: Grad-CAM of this layer."""
    weights = gradient.mean(tuple(range(3, gradient.dim())), keepdim=True)
    return (x * weights).mean(2, keepdim=True).clamp(min=0)


@dataclass(frozen=True)
class Residual:
    """Evidence from factorisation and gradient at the positions of a layer; F_x, F_dx and M are (K,B,1,H,W)."""

    f_x: Tensor
    f_dx: Tensor
    m: Tensor
    gate: Tensor | float

    @property
    def q(self) -> Tensor:
        """F_dx + gate (F_x + M)."""
        return self.f_dx + (self.f_x + self.m) * self.gate

    def named(self) -> dict[str, Tensor]:
        """The terms by their names in a trace."""
        return {"F_x": self.f_x, "F_dx": self.f_dx, "M": self.m}


def residual(x: Tensor, gradient: Tensor, c: Tensor, formula: Formula, options: Options) -> Residual:
    """F_dx, F_x, M and the gate of a layer's input x, its gradient and its C.

    C, averaged over channels, separates the foreground (positive) from the background.
    """
    partition, nothing, dropped = c.mean(2, keepdim=True), c.new_zeros([1] * c.dim()), options.dropped
    features = {} if "Fdx" in dropped else {"Fdx": gradient}
    if "Fx" not in dropped and not options.gradcam:
        features["Fx"] = x
    found = dict(zip(features, factors(list(features.values()), partition, formula), strict=True))
    f_x, f_dx = found.get("Fx", nothing), found.get("Fdx", nothing)
    gate = 1.0 if "gate" in dropped else torch.sigmoid(c) if formula.gate is None else formula.gate
    if options.gradcam:
        return Residual(gradcam_residual(x, gradient), f_dx, nothing, gate)
    m = nothing if "M" in dropped else interaction(x, gradient, formula.quotient)
    return Residual(f_x, f_dx, m, gate)


def factorised(y: Tensor, partition: Tensor, formula: Formula) -> Tensor:
    """F+: how much closer each position is to the mean feature of the foreground than of the background (Eq. 10).

    `y` is (B,C,H,W), shared by the classes, or (K,B,C,H,W); `partition` (K,B,1,H,W) is positive on the foreground.
    H = sigmoid(s Y) = R W with R = [R_b R_f], the two means; W by (ridge) least squares, non-negative;
    F = (W_f - W_b)+.
    """
    return factors([y], partition, formula)[0]


def factors(features: Sequence[Tensor], partition: Tensor, formula: Formula) -> list[Tensor]:
    """`factorised` of several features Y, with the small algebra of all of them in one go.

    The two means are nearly parallel, so the 2x2 solve and the difference of its rows use float64, and the difference
    is computed before the long dot product with H. With W_b and W_f clamped at 0, (W_f - W_b)+ = min(W_f, W_f - W_b)+.
    """
    if not features:
        return []
    phi = partition.flatten(2)  # (K,B,N)
    back = phi <= 0 if formula.zero_is_background else phi < 0
    sets = torch.stack([back, phi > 0], 2).to(phi)  # (K,B,2,N)
    h = [_squashed(y.flatten(3 - partition.dim()), formula) for y in features]  # ([K,]B,C,N)
    sizes = sets.sum(3, keepdim=True).clamp(min=1).double()
    means = torch.stack([_product(sets, one.mT) for one in h]) / sizes  # (Y,K,B,2,C) float64
    gram = means @ means.mT
    inverse = torch.linalg.pinv(gram, hermitian=True) if formula.ridge == 0 else _ridge_inverse(gram, formula.ridge)
    to_rows = inverse.new_tensor([[0.0, 1.0], [-1.0, 1.0]])  # W_f, and W_f - W_b
    rows = ((to_rows @ inverse) @ means).to(phi)
    found = torch.stack([_product(row, one) for row, one in zip(rows, h, strict=True)]).amin(3).clamp_(min=0)
    if formula.ridge == 0:  # nothing tells equal means apart, but rounding would, and the division by the maximum
        found = found * ~_equal_means(means, phi.dtype)
    maps = [factor.reshape(partition.shape) for factor in found]
    return [normalised(factor) for factor in maps] if formula.normalise_factors else maps


def _squashed(y: Tensor, formula: Formula) -> Tensor:
    """H = sigmoid(s Y / max Y) of features ([K,]B,C,N), with the small factor divided first: one pass less."""
    top = y.amax((-2, -1), keepdim=True)
    return (y * formula.quotient(torch.full_like(top, formula.sharpness), top)).sigmoid_()


def _equal_means(means: Tensor, dtype: torch.dtype) -> Tensor:
    """(..., 1): whether background and foreground have the same mean feature (..., 2, C), up to a dtype's rounding.

    So it is with the gradient of a layer whose output is averaged over positions: it is the same everywhere.
    """
    back, front = means.unbind(-2)
    size, difference = front.norm(dim=-1, keepdim=True), (front - back).norm(dim=-1, keepdim=True)
    equal: Tensor = difference <= 64 * torch.finfo(dtype).eps * size
    return equal


def _ridge_inverse(gram: Tensor, ridge: float) -> Tensor:
    """(G + ridge I)^-1 of 2x2 matrices: the adjugate over the determinant, which is at least ridge * trace."""
    b, off, _, f = gram.flatten(-2).unbind(-1)
    b, f = b + ridge, f + ridge
    adjugate: Tensor = torch.stack([f, -off, -off, b], -1).unflatten(-1, (2, 2))
    return adjugate / (b * f - off * off)[..., None, None]


def _product(rows: Tensor, h: Tensor) -> Tensor:
    """rows (K,B,R,M) times h ([K,]B,M,N) -> (K,B,R,N), without copying h for each class when it is shared."""
    if h.dim() == rows.dim():
        return torch.matmul(rows, h)
    k, r = rows.shape[0], rows.shape[2]
    sums: Tensor = torch.matmul(rows.transpose(0, 1).flatten(1, 2), h).unflatten(1, (k, r))  # (B,K*R,N)
    return sums.transpose(0, 1)


def shifted(c: Tensor, residual: Tensor, everywhere: bool) -> Tensor:
    """Delta-shift (Def. 2): C + r, minus what r adds in total, spread evenly over the places where C != 0."""
    axes = tuple(range(2, c.dim()))
    active = c != 0
    count = active.sum(axes, keepdim=True).clamp(min=1)
    if everywhere:
        return c + residual - residual.sum(axes, keepdim=True) / count
    residual = residual * active
    return c + residual - active * (residual.sum(axes, keepdim=True) / count)


# ------------------------------------------------------------------------------------------------------- balanced


NEARBY = 1 / 20  # of the shorter side: how far the relevance at the image reaches as a weight of S


def balanced_residual(residual: Tensor, carrier: Tensor, weight: float) -> Tensor:
    """carrier + weight * residual over the active units, with the residual scaled to sum 0 and the carrier's magnitude.

    This works in deep and shallow layers alike: the sum of the carrier is conserved (Def. 2), and the residual neither
    dominates the class evidence nor vanishes. `residual` has one value per position, (K,B,1,H,W): its sums over all
    units are sums over positions, weighted by the number of active units.
    """
    active = carrier.abs()
    size = active.sum(tuple(range(2, carrier.dim())), keepdim=True).double()
    active.sign_()  # 1 where a unit is active: floats, since booleans are slow on a CPU
    count = active.sum(2, keepdim=True).double()
    return torch.addcmul(carrier, active, (weight * size * _centred(residual, count)).to(carrier))


def _centred(residual: Tensor, count: Tensor) -> Tensor:
    """A residual (K,B,1,H,W) over `count` units at each position: sum 0, magnitude 1; float64."""
    axes = tuple(range(2, residual.dim()))
    whole = (count * residual.abs()).sum(axes, keepdim=True)
    centred = residual - divide((count * residual).sum(axes, keepdim=True), count.sum(axes, keepdim=True))
    own = (count * centred.abs()).sum(axes, keepdim=True)
    # A constant residual carries no information; after centring, only rounding errors remain.
    says_something = own > 100 * torch.finfo(residual.dtype).eps * whole
    return divide(centred, own) * says_something


def coarse(seen: Iterable[Tensor], size: Sequence[int]) -> Tensor:
    """S: coarse evidence from deep layers, at the size of the image; (K,B,1,H,W), float64.

    `seen` has the relevance over positions (K,B,h,w) for each resolution. Each is upsampled and scaled to sum 0 and
    magnitude 1, so that no resolution outweighs another.
    """
    large = [enlarged(places, size)[:, :, None] for places in seen]  # classes take the place of channels
    return torch.stack([_centred(one, torch.ones_like(one, dtype=torch.float64)) for one in large]).sum(0)


def nearby(relevance: Tensor) -> Tensor:
    """a: the mean of |R| over a square around each pixel, for relevance at the image (K,B,C,H,W); (K,B,1,H,W), float64.

    The square reaches a twentieth of the shorter side in each direction. At the border it is cut off. In a volume it is
    a cube.
    """
    found = relevance.sum(2, keepdim=True).double().abs()
    reach = round(shortest_side(relevance[0]) * NEARBY)
    for axis in range(3, found.dim()):  # one axis at a time; differences of running sums cost the same for any reach
        size = found.shape[axis]
        middle = torch.arange(size, device=found.device)
        below, upto = (middle - reach).clamp(min=0), (middle + reach + 1).clamp(max=size)
        running = torch.cat([torch.zeros_like(found.narrow(axis, 0, 1)), found.cumsum(axis)], axis)
        sums = running.index_select(axis, upto) - running.index_select(axis, below)
        found = sums / (upto - below).reshape(-1, *[1] * (found.dim() - 1 - axis))
    return found.clamp_(min=0)  # rounding, beside large values


def with_coarse(relevance: Tensor, coarse: Tensor, near: Tensor) -> Tensor:
    """Relevance at the image (K,B,C,H,W) plus S (K,B,1,H,W), weighted by a, the relevance nearby.

    R + a (S - sum(a S) / sum(a)), the second part at R's magnitude. S says which regions count for and against the
    class; a is small where R found nothing, so R keeps its outlines. The sum of R is conserved. The colours share
    equally.
    """
    fine = relevance.sum(2, keepdim=True).double()
    size = fine.abs().sum(tuple(range(2, fine.dim())), keepdim=True)
    return relevance + (size * near * _centred(coarse, near) / relevance.shape[2]).to(relevance)


def at_odds(relevance: Tensor, near: Tensor, probability: Tensor) -> tuple[Tensor, Tensor]:
    """Relevance at the image (K,B,C,H,W), lowered if the class is unlikely; and how much was taken off in all (K,B).

    A class with the probability p (K,B) has evidence for and against it at odds of at most p / (1 - p): the positive
    pixels have at most p of the map's magnitude. Otherwise t a is subtracted from every pixel, with the relevance
    nearby, a: where the network found nothing, nothing is subtracted. Pixels in the order of v / a, largest first,
    give t exactly: with i pixels above it, these hold P = sum_{j <= i} (v_j - t a_j), the whole map has the magnitude
    2 P - sum (v - t a), and P is to be p of that.
    """
    v, a = (t.flatten(2) for t in (relevance.sum(2).double(), near))  # (K,B,N)
    ratio, order = divide(v, a).sort(-1, descending=True)
    above, near_above = (t.gather(-1, order).cumsum(-1) for t in (v, a))
    p, total, near_total = probability.double()[..., None], above[..., -1:], near_above[..., -1:]
    positive = above - ratio * near_above  # P for a level at each of the pixels
    fits = (positive <= p * (2 * positive - total + ratio * near_total)).sum(-1, keepdim=True)
    i = fits.clamp(min=1) - 1  # the first always fits, but for rounding
    level = divide(
        (1 - 2 * p) * above.gather(-1, i) + p * total, (1 - 2 * p) * near_above.gather(-1, i) + p * near_total
    )
    level = torch.where((level > 0) & (p < 1), level, 0)
    taken = level.reshape(*level.shape, *[1] * (relevance.dim() - 3)) * near
    return relevance - (taken / relevance.shape[2]).to(relevance), (level * near_total)[..., 0]


def smoothed(t: Tensor, active: Tensor) -> Tensor:
    """A [1 2 1]/4 filter along each axis over the active units of each channel; the sum is conserved.

    Strided convolutions pass relevance only to every second position; this removes the checkerboard. `t` is 0 where
    `active` is 0; elsewhere the norm is at least the centre of the filter, 1/4 with two axes.
    """
    axes = t.dim() - 3
    norm = _blur(active.to(t), axes).clamp_(min=0.5**axes)
    return _blur(t / norm, axes).mul_(active)


def _blur(t: Tensor, axes: int) -> Tensor:
    for axis in range(-axes, 0):  # sums of shifted slices: a single-channel convolution would be far slower
        out = 0.5 * t
        size = t.shape[axis]
        out.narrow(axis, 1, size - 1).add_(t.narrow(axis, 0, size - 1), alpha=0.25)
        out.narrow(axis, 0, size - 1).add_(t.narrow(axis, 1, size - 1), alpha=0.25)
        t = out
    return t
