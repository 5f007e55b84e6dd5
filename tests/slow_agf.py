"""The balanced rule a second time: by the equations of docs/agf.md, for one image and one class, in float64.

Slow on purpose, and nothing of it comes from the package: convolutions are taken back by autograd, all else is loops
over places and units. Each equation is one function and each term one entry of a table, so a changed score or a
dropped term is a change of one line here.

    >>> model = Everything().double().eval()
    >>> slow = Slow(model, image, target=3)
    >>> slow.map.shape, slow.absorbed
    (torch.Size([32, 64]), 0.27)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FIVE = 5  # of the mean size of a position, beside a unit's own size
TENTH = 0.1  # the largest weight of a rival
FEW_LAYERS, LEAST, MOST = 6, 0.2, 1.0  # of lambda
DEEP = 8  # the stride from which on a layer has a residual
SHARPNESS, RIDGE, GUARD = 10.0, 1.0, 1e-9  # of the factorisation; the guard of its divisions
HALF = 0.5  # the weight of F(x) + M beside F(dx)
NEAR = 20  # a 20th of the shorter side, in each direction: where relevance counts as nearby
SMALLEST = torch.finfo(torch.float64).tiny ** 0.5


# ---------------------------------------------------------------------------------------------------- the network


class Everything(nn.Module):
    """What the rule has to deal with: BatchNorm, biases, strides, both kinds of max pools, sums, a dense head."""

    def __init__(self, seed: int = 170) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._build()
            for module in self.modules():
                if isinstance(module, nn.BatchNorm2d):
                    nn.init.normal_(module.running_mean, std=0.3)
                    nn.init.uniform_(module.running_var, 0.5, 1.5)
                    nn.init.uniform_(module.weight, 0.5, 1.5)
                elif isinstance(module, nn.Conv2d | nn.Linear):
                    nn.init.kaiming_normal_(module.weight)
                if getattr(module, "bias", None) is not None:
                    nn.init.normal_(module.bias, mean=0.1, std=0.2)
            with torch.no_grad():  # a channel that is pruned away: its bias is all it has
                self.again_norm.weight[2], self.again_norm.bias[2] = 0.0, 0.7

    def _build(self) -> None:
        self.stem, self.stem_norm = nn.Conv2d(3, 4, 3, 2, 1, bias=False), nn.BatchNorm2d(4)
        self.thin, self.thin_norm = nn.Conv2d(4, 4, 3, 2, 1, groups=4), nn.BatchNorm2d(4)
        self.overlapping = nn.MaxPool2d(3, 2, 1)
        self.narrow, self.narrow_norm = nn.Conv2d(4, 5, 1), nn.BatchNorm2d(5, eps=0.01)
        self.wide = nn.Conv2d(5, 4, 3, padding=1)
        self.mix = nn.Linear(4, 4)
        self.down, self.down_norm = nn.Conv2d(4, 6, 3, 2, 1, bias=False), nn.BatchNorm2d(6)
        self.again, self.again_norm = nn.Conv2d(6, 6, 3, padding=2, dilation=2), nn.BatchNorm2d(6)
        self.skip, self.skip_norm = nn.Conv2d(4, 6, 1, 2, bias=False), nn.BatchNorm2d(6)
        self.grouped = nn.Conv2d(6, 6, (1, 3), padding=(0, 1), groups=2)
        self.tiled = nn.MaxPool2d(2)
        self.last = nn.Conv2d(6, 6, (3, 1), padding=(1, 0))
        self.more = nn.Conv2d(6, 7, 1)
        self.head = nn.Sequential(nn.Linear(7 * 2, 10), nn.ReLU(), nn.Linear(10, 60))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem_norm(self.stem(x)))
        x = self.overlapping(F.relu6(self.thin_norm(self.thin(x))))
        x = F.relu(x + self.wide(F.relu(self.narrow_norm(self.narrow(x)))))
        x = F.relu(self.mix(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))
        y = self.again_norm(self.again(F.relu(self.down_norm(self.down(x)))))
        x = F.relu(y + self.skip_norm(self.skip(x)))
        x = self.tiled(F.relu(self.grouped(x)))
        x = F.relu(self.more(F.relu(self.last(x))))
        return self.head(torch.flatten(x, 1))


@dataclass(frozen=True)
class Step:
    """One operation of the forward pass: what it is, which values it reads, which one it makes."""

    op: str
    reads: tuple[str, ...]
    makes: str
    name: str = ""
    do: Callable[..., Tensor] | None = None
    undo: Callable[[Tensor], Tensor] | None = None  # of one that moves values


def steps(m: Everything) -> list[Step]:
    """`Everything.forward`, written out; BatchNorms belong to their convolution."""
    to_last, to_second = (lambda v: v.permute(0, 2, 3, 1)), (lambda v: v.permute(0, 3, 1, 2))
    return [
        Step("conv2d", ("image",), "a1", "stem"),
        Step("relu", ("a1",), "a2", do=F.relu),
        Step("conv2d", ("a2",), "b1", "thin"),
        Step("relu6", ("b1",), "b2", do=F.relu6),
        Step("max_pool2d", ("b2",), "b3", "overlapping", m.overlapping),
        Step("conv2d", ("b3",), "c1", "narrow"),
        Step("relu", ("c1",), "c2", do=F.relu),
        Step("conv2d", ("c2",), "c3", "wide"),
        Step("add", ("b3", "c3"), "c4", do=torch.add),
        Step("relu", ("c4",), "c5", do=F.relu),
        Step("permute", ("c5",), "d1", do=to_last, undo=to_second),
        Step("linear", ("d1",), "d2", "mix"),
        Step("permute", ("d2",), "d3", do=to_second, undo=to_last),
        Step("relu", ("d3",), "d4", do=F.relu),
        Step("conv2d", ("d4",), "e1", "down"),
        Step("relu", ("e1",), "e2", do=F.relu),
        Step("conv2d", ("e2",), "e3", "again"),
        Step("conv2d", ("d4",), "e4", "skip"),
        Step("add", ("e3", "e4"), "e5", do=torch.add),
        Step("relu", ("e5",), "e6", do=F.relu),
        Step("conv2d", ("e6",), "f1", "grouped"),
        Step("relu", ("f1",), "f2", do=F.relu),
        Step("max_pool2d", ("f2",), "f3", "tiled", m.tiled),
        Step("conv2d", ("f3",), "g1", "last"),
        Step("relu", ("g1",), "g2", do=F.relu),
        Step("conv2d", ("g2",), "g3", "more"),
        Step("relu", ("g3",), "g4", do=F.relu),
        Step("flatten", ("g4",), "g5", do=lambda v: v.flatten(1), undo=lambda r: r.unflatten(1, (7, 1, 2))),
    ]


# --------------------------------------------------------------------------------------------------- 1: the score


def above_rivals(y: Tensor, t: int) -> Tensor:
    """Where classes compete: y_t - sum_{k != t} p_k y_k, p = softmax(beta y) over the others, read as constants.

    beta is 1 / std(y), or smaller, until no p_k is larger than a tenth (0, if nothing is small enough).
    """
    values = y.tolist()
    rivals = [k for k in range(len(y)) if k != t]
    mean = sum(values) / len(values)
    beta = 1 / math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))
    if max(_softmax(values, rivals, beta)) > TENTH:
        low, high = 0.0, beta
        while high - low > 1e-15 * beta:
            middle = (low + high) / 2
            low, high = (low, middle) if max(_softmax(values, rivals, middle)) > TENTH else (middle, high)
        beta = low
    return y[t] - sum(p * y[k] for p, k in zip(_softmax(values, rivals, beta), rivals, strict=True))


def _softmax(values: list[float], of: list[int], beta: float) -> list[float]:
    sizes = [math.exp(beta * values[k]) for k in of]
    return [size / sum(sizes) for size in sizes]


def highlighted(y: Tensor, t: int) -> Tensor:
    """Where they do not: Eq. 7, with logits counted from the smallest where y_t < 0."""
    origin = min(y[k] for k in range(len(y))) if y[t] < 0 else torch.zeros(()).double()
    sigma = max(abs(y[k] - y[t]) for k in range(len(y)))
    bumps = [(y[t] - origin) * torch.exp(-(((y[k] - y[t]) / sigma) ** 2) / 2) for k in range(len(y))]
    return torch.exp(bumps[t]) / sum(torch.exp(bump) for bump in bumps)


SCORES = {"classes compete": above_rivals, "multilabel": highlighted}


# ------------------------------------------------------------------------------------------- 3 to 5: C, A, and P


@dataclass(frozen=True)
class Layer:
    """A convolution with its BatchNorm inside it, or a linear layer; W, b and how W is applied to an input."""

    weight: Tensor
    bias: Tensor | None
    apply: Callable[[Tensor, Tensor], Tensor]  # (x, W) -> W x

    def back(self, x: Tensor, w: Tensor, r: Tensor) -> Tensor:
        """W^T r."""
        with torch.enable_grad():
            at = torch.zeros_like(x).requires_grad_()
            (share,) = torch.autograd.grad(self.apply(at, w), at, r)
        return share

    def biases(self, out: Tensor) -> Tensor:
        """|b|, one for each unit of the output."""
        if self.bias is None:
            return torch.zeros_like(out)
        shape = (1, -1, 1, 1) if self.weight.dim() == 4 else (-1,)
        return self.bias.abs().reshape(shape).expand_as(out)


def layer_of(model: nn.Module, name: str) -> Layer:
    """BN(W x + b) with k = gamma / sqrt(var + eps) is (k W) x + (b - mean) k + beta."""
    module, norm = getattr(model, name), getattr(model, f"{name}_norm", None)
    weight, bias = module.weight.detach(), None if module.bias is None else module.bias.detach()
    if isinstance(module, nn.Linear):
        return Layer(weight, bias, lambda x, w: F.linear(x, w))
    if norm is not None:
        k = norm.weight.detach() / torch.sqrt(norm.running_var + norm.eps)
        weight = weight * k[:, None, None, None]
        bias = ((0 if bias is None else bias) - norm.running_mean) * k + norm.bias.detach()
    how = module.stride, module.padding, module.dilation, module.groups
    return Layer(weight, bias, lambda x, w: F.conv2d(x, w, None, *how))


def influence(layer: Layer, x: Tensor, r: Tensor) -> tuple[Tensor, float]:
    """C = v |W|^T [R / (|W| v + |b|)] where x != 0, v = |x| + 5 mean |x| of the place; and what falls to |b|, to units
    that are off, or nowhere."""
    w, v = layer.weight.abs(), x.abs()
    for i, j in itertools.product(*map(range, x.shape[2:])):
        v[:, :, i, j] += FIVE * x[:, :, i, j].abs().sum() / x.shape[1]
    total = layer.apply(v, w)
    total = total + layer.biases(total)
    per_unit = torch.where(total > 0, r / total, 0)
    share = torch.where(x != 0, v * layer.back(x, w, per_unit), 0)
    return share, float(r.sum() - share.sum())


# ------------------------------------------------------------------------------------------------ 6: the residual


def factorised(y: Tensor, partition: Tensor) -> Tensor:
    """F: H = sigmoid(s Y / max Y) = R W by ridge least squares, W >= 0, (W_f - W_b)+; y (C,h,w), partition (h,w)."""
    h = (
        torch.sigmoid(SHARPNESS * y / (y.max() + GUARD)).flatten(1)
        if y.max() != 0
        else torch.full_like(y, 0.5).flatten(1)
    )
    phi = partition.flatten()
    means = [h[:, places].mean(1) if places.any() else torch.zeros(len(h)).double() for places in (phi < 0, phi > 0)]
    r = torch.stack(means, 1)
    weights = torch.linalg.solve(r.T @ r + RIDGE * torch.eye(2).double(), r.T @ h).clamp(min=0)
    return (weights[1] - weights[0]).clamp(min=0).reshape(partition.shape)


def interaction(x: Tensor, gradient: Tensor) -> Tensor:
    """M: the positive part of the mean of x * gradient over channels, divided by its largest value."""
    mean = (x * gradient).mean(0).clamp(min=0)
    return mean / (mean.max() + GUARD)


def gradcam(x: Tensor, gradient: Tensor) -> Tensor:
    """In the place of F(x) + M: what Grad-CAM would show here, as a mean over channels."""
    return (x * gradient.mean((1, 2), keepdim=True)).mean(0).clamp(min=0)


def residual(x: Tensor, gradient: Tensor, c: Tensor, without: frozenset[str]) -> dict[str, Tensor]:
    """q = F(dx) + (F(x) + M) / 2 and its terms, each (h,w); x, gradient and C are (C,h,w)."""
    partition = c.mean(0)
    terms = {
        "F_dx": factorised(gradient, partition), "F_x": factorised(x, partition), "M": interaction(x, gradient),
    }  # fmt: skip
    if "all but Grad-CAM" in without:
        terms |= {"F_x": gradcam(x, gradient), "M": torch.zeros_like(partition)}
    terms = {name: 0 * t if name.replace("_", "") in without else t for name, t in terms.items()}
    return terms | {"q": terms["F_dx"] + HALF * (terms["F_x"] + terms["M"])}


def added_in_balance(carrier: Tensor, q: Tensor, weight: float) -> Tensor:
    """carrier + weight * q, with q brought to sum 0 and to the carrier's magnitude over the units that are on.

    carrier (C,h,w); q (h,w) has one value for all units of a place.
    """
    on = carrier != 0
    said = q.expand_as(carrier)[on]  # one entry for each unit that is on
    centred = said - said.mean()
    if not on.any() or centred.abs().sum() <= 1e-12 * said.abs().sum():  # the same everywhere: it says nothing
        return carrier
    out = carrier.clone()
    out[on] += weight * carrier.abs().sum() * centred / centred.abs().sum()
    return out


def weight_of_residual(layers: int) -> float:
    return min(max((FEW_LAYERS / layers) ** 2, LEAST), MOST)


# ------------------------------------------------------------------------------ 7: smoothing, and max pools' windows


def smoothed(t: Tensor, on: Tensor) -> Tensor:
    """[1 2 1]/4 along both axes: each unit hands its relevance to its neighbours that are on, in these proportions."""
    rows, columns = (neighbours(size) for size in t.shape[1:])
    out = torch.zeros_like(t)
    for c, i, j in zip(*t.nonzero(as_tuple=True), strict=True):
        weights = rows[i][:, None] * columns[j] * on[c]
        out[c] += t[c, i, j] * weights / weights.sum()
    return out


def neighbours(size: int) -> Tensor:
    """(size, size): how much each place of an axis gives to each, before what falls outside is left out."""
    return torch.tensor([[{0: 0.5, 1: 0.25}.get(abs(a - b), 0.0) for b in range(size)] for a in range(size)]).double()


def magnitude(x: Tensor) -> Tensor:
    """|x| and next to nothing, so that values that are all 0 share evenly."""
    return x.abs() + SMALLEST


def over_windows(pool: nn.MaxPool2d, x: Tensor, r: Tensor) -> Tensor:
    """Each window's relevance in proportion to |x|."""
    out = torch.zeros_like(x)
    channels, rows, columns = r.shape
    for c, i, j in itertools.product(range(channels), range(rows), range(columns)):
        top, left = i * pool.stride - pool.padding, j * pool.stride - pool.padding
        window = c, slice(max(top, 0), top + pool.kernel_size), slice(max(left, 0), left + pool.kernel_size)
        out[window] += r[c, i, j] * magnitude(x[window]) / magnitude(x[window]).sum()
    return out


# -------------------------------------------------------------------------------- 8 to 10: sums, the image, regions


def split(a: Tensor, b: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """R_a = |a| / (|a| + |b|) R."""
    whole = magnitude(a) + magnitude(b)
    return magnitude(a) / whole * r, magnitude(b) / whole * r


def boxed(layer: Layer, x: Tensor, r: Tensor) -> Tensor:
    """z^B: R = x W^T s - l W+^T s - h W-^T s with s = R / (W x - W+ l - W- h), l and h the image's extremes."""
    low, high = torch.full_like(x, float(x.min())), torch.full_like(x, float(x.max()))
    parts = [(x, layer.weight), (-low, layer.weight.clamp(min=0)), (-high, layer.weight.clamp(max=0))]
    z = sum(layer.apply(v, w) for v, w in parts)
    return sum(v * layer.back(x, w, r / z) for v, w in parts)


def enlarged(t: Tensor, size: tuple[int, int]) -> Tensor:
    """Bilinear, centres of places on centres; t (h,w)."""
    rows, columns = (between(small, large) for small, large in zip(t.shape, size, strict=True))
    return rows @ t @ columns.T


def between(small: int, large: int) -> Tensor:
    """(large, small): of which places each place of the enlarged axis is made."""
    weights = torch.zeros(large, small).double()
    for i in range(large):
        at = min(max((i + 0.5) * small / large - 0.5, 0), small - 1)
        weights[i, int(at)] += 1 - (at - int(at))
        weights[i, min(int(at) + 1, small - 1)] += at - int(at)
    return weights


def regions(seen: dict[tuple[int, int], Tensor], size: tuple[int, int]) -> Tensor:
    """S: for each resolution what its layers saw, enlarged and brought to sum 0 and magnitude 1, together."""
    total = torch.zeros(size).double()
    for places in seen.values():
        large = enlarged(places, size)
        large = large - large.mean()
        total += large / large.abs().sum()
    return total


def nearby(fine: Tensor) -> Tensor:
    """a: the mean of |R| over the pixels around, for R (H,W)."""
    rows, columns = fine.shape
    reach = round(min(rows, columns) / NEAR)
    a = torch.zeros_like(fine)
    for i, j in itertools.product(range(rows), range(columns)):
        around = fine[max(i - reach, 0) : i + reach + 1, max(j - reach, 0) : j + reach + 1]
        a[i, j] = around.abs().mean()
    return a


def added(fine: Tensor, s: Tensor, a: Tensor) -> Tensor:
    """R + a (S - its mean, weighted by a) at R's magnitude."""
    q = a * (s - (a * s).sum() / a.sum())
    return fine + q * fine.abs().sum() / q.abs().sum()


def at_odds(fine: Tensor, a: Tensor, p: float) -> Tensor:
    """Lowered where there is relevance nearby until at most p of the magnitude is positive; by bisection."""

    def share(level: float) -> float:
        left = fine - level * a
        return float(left.clamp(min=0).sum() / left.abs().sum())

    low, high = 0.0, float((fine / a)[a > 0].max())
    if share(low) <= p:
        return fine
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if share(middle) > p else (low, middle)
    return fine - high * a


# ------------------------------------------------------------------------------------------------------- the walk


@dataclass
class Slow:
    """Relevance of every step (`layers`, in the order of the walk), the map, and what stayed on the way."""

    model: Everything
    image: Tensor  # (1,3,H,W)
    target: int
    score: Callable[[Tensor, int], Tensor] = above_rivals
    without: frozenset[str] = frozenset()
    layers: list[tuple[Step, dict[str, Tensor]]] = field(default_factory=list)
    absorbed: float = 0.0

    def __post_init__(self) -> None:
        self.steps = steps(self.model)
        self._forward()
        layers = [s for s in self.steps if s.op in ("conv2d", "linear") and s.name != "stem"]
        self.deep = [s for s in layers if self._stride(s) >= DEEP]
        self.seen: dict[tuple[int, int], Tensor] = {}
        start = (self.values["g5"] * self.gradients["g5"]).detach()
        self.started = float(start.sum())
        relevance = {"g5": start}
        for step in reversed(self.steps):
            terms = self._back(step, relevance.pop(step.makes))
            self.layers.append((step, terms))
            for name, share in zip(step.reads, (terms["Phi"], terms.get("Phi_1")), strict=False):
                relevance[name] = relevance[name] + share if name in relevance else share
        self.map = relevance["image"][0].sum(0)
        near = nearby(self.map)
        if "coarse" not in self.without:
            self.map = added(self.map, regions(self.seen, self.map.shape), near)
        if self.score is SCORES["multilabel"]:
            before, self.map = self.map, at_odds(self.map, near, float(self.logits[self.target].detach().sigmoid()))
            self.absorbed += float((before - self.map).sum())

    def _forward(self) -> None:
        """Every value, and the score's gradient at the input of each convolution *through that convolution*."""
        self.values = {"image": self.image.clone().requires_grad_()}
        own: dict[str, Tensor] = {}
        for step in self.steps:
            inputs = [self.values[name] for name in step.reads]
            if step.do is None:
                layer = layer_of(self.model, step.name)
                own[step.name] = inputs[0] * 1  # a copy that this layer alone reads
                out = layer.apply(own[step.name], layer.weight)
                if layer.bias is not None:
                    out = out + layer.bias.reshape((1, -1, 1, 1) if step.op == "conv2d" else (-1,))
                self.values[step.makes] = out
            else:
                self.values[step.makes] = step.do(*inputs)
        self.logits = self.model.head(self.values["g5"])[0]
        wanted = own | {"g5": self.values["g5"]}
        found = torch.autograd.grad(self.score(self.logits, self.target), list(wanted.values()))
        self.gradients = dict(zip(wanted, found, strict=True))
        self.values = {name: value.detach() for name, value in self.values.items()}

    def _stride(self, step: Step) -> float:
        x = self.values[step.reads[0]]
        rows, columns = x.shape[1:3] if step.op == "linear" else x.shape[2:]
        return math.sqrt(self.image.shape[2] * self.image.shape[3] / (rows * columns))

    def _back(self, step: Step, r: Tensor) -> dict[str, Tensor]:
        x = self.values[step.reads[0]]
        if step.op == "conv2d":
            return self._at_image(step, x, r) if step.name == "stem" else self._at_convolution(step, x, r)
        if step.op == "linear":
            return self._at_places(step, x, r)
        if step.op == "max_pool2d":
            return {"Phi": over_windows(step.do, x[0], r[0])[None]}
        if step.op == "add":
            a, b = split(x, self.values[step.reads[1]], r)
            return {"Phi": a, "Phi_1": b}
        return {"Phi": step.undo(r) if step.undo else r}

    def _at_image(self, step: Step, x: Tensor, r: Tensor) -> dict[str, Tensor]:
        share = boxed(layer_of(self.model, step.name), x, r)
        return {"Phi": smoothed(share[0], torch.ones_like(share[0]))[None]}

    def _at_places(self, step: Step, x: Tensor, r: Tensor) -> dict[str, Tensor]:
        """A linear layer at every place, (1,H,W,C), is a 1x1 convolution."""
        layer = layer_of(self.model, step.name)
        as_convolution = Layer(layer.weight[:, :, None, None], layer.bias, lambda x, w: F.conv2d(x, w))
        x, r, gradient = (t.permute(0, 3, 1, 2) for t in (x, r, self.gradients[step.name]))
        phi = self._in_balance(step, as_convolution, x, gradient, r)["Phi"]
        return {"Phi": phi.permute(0, 2, 3, 1)}

    def _at_convolution(self, step: Step, x: Tensor, r: Tensor) -> dict[str, Tensor]:
        return self._in_balance(step, layer_of(self.model, step.name), x, self.gradients[step.name], r)

    def _in_balance(self, step: Step, layer: Layer, x: Tensor, gradient: Tensor, r: Tensor) -> dict[str, Tensor]:
        c, kept = influence(layer, x, r)
        self.absorbed += kept
        phi, terms = c[0], {"C": c}
        if step in self.deep:
            terms |= residual(x[0], gradient[0], c[0], self.without)
            phi = added_in_balance(phi, terms["q"], weight_of_residual(len(self.deep)))
        rows, columns = x.shape[2:]
        if r.shape[2] < rows or r.shape[3] < columns:
            phi = smoothed(phi, x[0] != 0)
        if step in self.deep:
            self.seen[rows, columns] = self.seen.get((rows, columns), 0) + phi.sum(0)
        return terms | {"Phi": phi[None]}
