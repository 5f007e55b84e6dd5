"""Random small networks, each written in an awkward way and again plainly, and slow maps of the plain one in float64.

>>> plan = Plan((("conv", 0, 3), ("relu", 2), ("skip", 1, 3)), head="pool", dtype="bfloat16", wrap="hooks", seed=1)
>>> verdict(plan, "lrp")
'equal'

The awkward form uses in-place writes, views, buffers, wrappers and low precisions. Its map must equal that of the plain
form, or be refused. For gradients and LRP the slow map is derived a second time: by autograd on plain functions, and by
an interpreter that walks the steps with explicit matrices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

import classlens
import reference
from classlens.errors import ClasslensError
from quick import QUICK

SIDE, WIDTH, CLASSES = 8, 4, 3
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WRAPS = ("none", "hooks", "traced", "checkpoint", "autocast", "no_grad", "identity", "frozen")
Step = tuple[Any, ...]


@dataclass(frozen=True)
class Plan:
    """A network: the steps after its first convolution, its head, its precision, what is around it, and its weights."""

    steps: tuple[Step, ...]
    head: str
    dtype: str
    wrap: str
    seed: int


_how = st.integers(0, 3)
_STEPS = st.one_of(
    st.tuples(st.sampled_from(["conv", "norm", "skip", "join"]), _how, st.sampled_from([1, 3])),
    st.tuples(st.sampled_from(["relu", "leaky", "max", "mean", "same"]), _how),
)
plans = st.builds(
    Plan,
    steps=st.lists(_STEPS, min_size=1, max_size=6).map(tuple),
    head=st.sampled_from(["pool", "flat"]),
    dtype=st.sampled_from([*DTYPES, "float64", "float32"]),
    wrap=st.sampled_from(WRAPS),
    seed=st.integers(0, 2**31 - 1),
)


# ----------------------------------------------------------------------------------------------------- the weights


def weights_of(plan: Plan) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """The weights of each step (the first is the convolution at the image), and those of the last linear layer."""
    source = torch.Generator().manual_seed(plan.seed)
    channels, side, found = WIDTH, SIDE, [_conv(3, WIDTH, 3, False, source)]
    for step in plan.steps:
        made: dict[str, Tensor] = {}
        if step[0] in ("conv", "norm", "skip", "join"):
            made = _conv(channels, channels if step[0] == "skip" else WIDTH, step[2], step[0] == "norm", source)
            channels = {"skip": channels, "join": channels + WIDTH}.get(step[0], WIDTH)
        elif step[0] in ("max", "mean") and side >= 4:
            side //= 2
        found.append(made)
    inputs = channels * (side * side if plan.head == "flat" else 1)
    last = {"w": _normal(source, CLASSES, inputs) / inputs**0.5, "b": 0.1 * _normal(source, CLASSES)}
    rounded = [{k: t.to(DTYPES[plan.dtype]) for k, t in made.items()} for made in (*found, last)]
    return rounded[:-1], rounded[-1]


def _normal(source: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=source, dtype=torch.float64)


def _conv(inputs: int, outputs: int, k: int, norm: bool, source: torch.Generator) -> dict[str, Tensor]:
    made = {"w": _normal(source, outputs, inputs, k, k) / (inputs * k * k) ** 0.5, "b": 0.1 * _normal(source, outputs)}
    if norm:
        made |= {"mean": 0.1 * _normal(source, outputs), "var": _normal(source, outputs).abs() + 0.5}
        made |= {"gain": _normal(source, outputs).abs() + 0.5, "shift": 0.1 * _normal(source, outputs)}
    return made


def image_of(plan: Plan) -> Tensor:
    return torch.randn(1, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(plan.seed + 1))


# ------------------------------------------------------------------------------------------------- the plain form


def _convolve(t: Tensor, made: dict[str, Tensor]) -> Tensor:
    t = F.conv2d(t, made["w"], made["b"], padding=made["w"].shape[-1] // 2)
    if "gain" in made:
        t = F.batch_norm(t, made["mean"], made["var"], made["gain"], made["shift"])
    return t


def _halves(t: Tensor) -> bool:
    return t.shape[-1] >= 4


def plain_step(t: Tensor, kind: str, made: dict[str, Tensor]) -> Tensor:
    """One step, written as simply as possible."""
    if kind in ("conv", "norm"):
        return _convolve(t, made)
    if kind == "skip":
        return _convolve(t, made) + t
    if kind == "join":
        return torch.cat([_convolve(t, made), t], 1)
    if kind in ("max", "mean"):
        pool = F.max_pool2d if kind == "max" else F.avg_pool2d
        return pool(t, 2) if _halves(t) else t
    return {"relu": F.relu, "leaky": lambda t: F.leaky_relu(t, 0.1), "same": lambda t: t}[kind](t)


class Plain(nn.Module):
    """The network in float64, written plainly."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        steps, last = weights_of(plan)
        self.plan = plan
        self.steps = [{k: t.double() for k, t in made.items()} for made in steps]
        self.last = {k: t.double() for k, t in last.items()}
        self.eval()

    def pooled(self, t: Tensor) -> Tensor:
        return t.mean((2, 3)) if self.plan.head == "pool" else t.flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        t = _convolve(x, self.steps[0])
        for step, made in zip(self.plan.steps, self.steps[1:], strict=True):
            t = plain_step(t, step[0], made)
        return F.linear(self.pooled(t), self.last["w"], self.last["b"])


# ----------------------------------------------------------------------------------------------- the awkward form


def _rectified(t: Tensor, how: int) -> Tensor:
    if how == 1:
        return F.relu(t, inplace=True)
    if how == 2:
        t.view(t.shape).relu_()  # a write to a view
        return t
    return t.clamp(min=0) if how == 3 else torch.relu(t)


def _leaky(t: Tensor, how: int) -> Tensor:
    return F.leaky_relu_(t, 0.1) if how % 2 else nn.LeakyReLU(0.1, inplace=how == 2)(t)


def _sum(a: Tensor, b: Tensor, how: int) -> Tensor:
    if how == 1:
        a += b
        return a
    if how == 2:
        return torch.stack([a, b]).sum(0)
    return torch.add(b, a) if how == 3 else a + b


def _joined(a: Tensor, b: Tensor, how: int) -> Tensor:
    if how == 1:
        out = a.new_empty(len(a), a.shape[1] + b.shape[1], *a.shape[2:])
        out[:, : a.shape[1]], out[:, a.shape[1] :] = a, b
        return out
    if how == 2:
        return torch.cat([a.mT, b.mT], dim=-3).mT
    return torch.concat((a, b), dim=1) if how == 3 else torch.hstack([a, b])


def _unchanged(t: Tensor, how: int) -> Tensor:
    if how == 1:
        return F.dropout(t.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2), 0.5, training=False)
    if how == 2:
        return t.flatten(2).unflatten(2, t.shape[2:])
    return torch.cat(t.split(1, dim=1), 1) if how == 3 else t.clone()


def _pooled(t: Tensor, kind: str, how: int) -> Tensor:
    if not _halves(t):
        return t
    if kind == "max":
        return F.max_pool2d(t, 2, return_indices=True)[0] if how % 2 else nn.MaxPool2d(2)(t)
    return F.adaptive_avg_pool2d(t, t.shape[-1] // 2) if how % 2 else nn.AvgPool2d(2)(t)


class Awkward(nn.Module):
    """The same network in its own precision, written as real networks are."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        steps, last = weights_of(plan)
        self.steps = nn.ModuleList(
            nn.ParameterDict({k: nn.Parameter(t, requires_grad=plan.wrap != "frozen") for k, t in made.items()})
            for made in steps
        )
        self.last = nn.ParameterDict({k: nn.Parameter(t) for k, t in last.items()})
        self.eval()
        if plan.wrap == "identity":
            self.extra = nn.Identity()  # after eval(): in training mode

    def _layer(self, t: Tensor, made: nn.ParameterDict, how: int) -> Tensor:
        k = made["w"].shape[-1] // 2
        if how == 1:
            t = F.conv2d(F.pad(t, (k, k, k, k)), made["w"], made["b"])
        elif how == 2:
            t = torch.conv2d(t, weight=made["w"], bias=made["b"], padding=(k, k))
        else:
            t = F.conv2d(t, made["w"], made["b"], 1, "same" if how == 3 else k)
        if "gain" in made:
            t = F.batch_norm(t, made["mean"], made["var"], made["gain"], made["shift"])
        return t

    def _step(self, t: Tensor, step: Step, made: nn.ParameterDict) -> Tensor:
        kind, how = step[:2]
        if kind in ("conv", "norm", "skip", "join"):
            out = self._layer(t, made, how)
            return _sum(out, t, how) if kind == "skip" else _joined(out, t, how) if kind == "join" else out
        if kind in ("max", "mean"):
            return _pooled(t, kind, how)
        return {"relu": _rectified, "leaky": _leaky, "same": _unchanged}[kind](t, how)

    def _body(self, t: Tensor) -> Tensor:
        for step, made in zip(self.plan.steps, list(self.steps)[1:], strict=True):
            t = self._step(t, step, made)
        return t

    def forward(self, x: Tensor) -> Tensor:
        off = torch.no_grad() if self.plan.wrap == "no_grad" else contextlib.nullcontext()
        with off:
            t = self._layer(x, self.steps[0], 0)
        if self.plan.wrap == "checkpoint":
            t = torch.utils.checkpoint.checkpoint(lambda t: self._body(t.clone()), t, use_reentrant=False)
        else:
            t = self._body(t)
        if self.plan.wrap == "identity":
            t = self.extra(t)
        t = F.adaptive_avg_pool2d(t, 1).flatten(1) if self.plan.head == "pool" else t.reshape(len(t), -1)
        return F.linear(t, self.last["w"], self.last["b"])


def awkward(plan: Plan) -> nn.Module:
    model: nn.Module = Awkward(plan)
    if plan.wrap == "hooks":
        model.register_full_backward_hook(lambda module, into, out: tuple(3 * g for g in into))
    return torch.fx.symbolic_trace(_Traceable(plan)) if plan.wrap == "traced" else model


class _Traceable(Plain):
    """For torch.fx: no Python test of a shape, so nothing but the plain form, in the plan's precision."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        dtype, sides = DTYPES[plan.dtype], [SIDE]
        for i, made in enumerate((*self.steps, self.last)):
            for key, tensor in made.items():
                self.register_parameter(f"p{i}{key}", nn.Parameter(tensor.to(dtype)))
        for step in plan.steps:
            sides.append(sides[-1] // 2 if step[0] in ("max", "mean") and sides[-1] >= 4 else sides[-1])
        self.sides = sides

    def forward(self, x: Tensor) -> Tensor:
        made = [{key: getattr(self, f"p{i}{key}") for key in m} for i, m in enumerate((*self.steps, self.last))]
        t = F.conv2d(x, made[0]["w"], made[0]["b"], padding=1)
        for i, (step, own) in enumerate(zip(self.plan.steps, made[1:], strict=False)):
            if step[0] in ("max", "mean"):
                pool = F.max_pool2d if step[0] == "max" else F.avg_pool2d
                t = pool(t, 2) if self.sides[i] >= 4 else t
            else:
                t = plain_step(t, step[0], own)
        return F.linear(self.pooled(t), made[-1]["w"], made[-1]["b"])


# -------------------------------------------------------------------------------------------------- the slow maps


def by_autograd(plan: Plan, target: int, method: str) -> Tensor:
    """(H,W) by plain autograd in float64."""
    model, x = Plain(plan), image_of(plan).double()

    def gradient(at: Tensor) -> Tensor:
        leaf = at.clone().requires_grad_()
        return torch.autograd.grad(model(leaf)[0, target], leaf)[0][0]

    if method == "gradient":
        return gradient(x).abs().amax(0)
    if method == "gradient-x-input":
        return (x[0] * gradient(x)).sum(0)
    places, weights = np.polynomial.legendre.leggauss(QUICK["integrated-gradients"]["steps"])
    parts = [0.5 * w * gradient((0.5 + 0.5 * p) * x) for p, w in zip(places, weights, strict=True)]
    return (x[0] * torch.stack(parts).sum(0)).sum(0)


def by_interpreter(plan: Plan, target: int, alpha: float) -> Tensor:
    """(H,W) of LRP alpha-beta with z^B at the image: every layer as an explicit matrix, one step after the other."""
    model, x = Plain(plan), image_of(plan).double()
    values = [x, _convolve(x, model.steps[0])]
    for step, made in zip(plan.steps, model.steps[1:], strict=True):
        values.append(plain_step(values[-1], step[0], made))
    last = model.pooled(values[-1])
    logits = F.linear(last, model.last["w"], model.last["b"])[0]
    relevance = np.zeros(CLASSES)
    relevance[target] = float(logits[target])
    relevance = reference.alpha_beta(_flat(last), model.last["w"].numpy(), relevance, alpha)
    if plan.head == "pool":
        relevance = _proportional(model.pooled, values[-1], relevance)
    for step, made, t in reversed(list(zip(plan.steps, model.steps[1:], values[1:-1], strict=True))):
        relevance = _back(step[0], made, t, relevance, alpha)
    w = reference.matrix(lambda t: _convolve(t, model.steps[0]), x)
    return torch.from_numpy(reference.zbox(_flat(x), w, relevance).reshape(x.shape[1:]).sum(0))


def _back(kind: str, made: dict[str, Tensor], t: Tensor, relevance: np.ndarray, alpha: float) -> np.ndarray:
    def layer(part: np.ndarray) -> np.ndarray:
        w = reference.matrix(lambda t: _convolve(t, made), t)
        return reference.alpha_beta(_flat(t), w, part, alpha)

    if kind in ("conv", "norm"):
        return layer(relevance)
    if kind == "skip":
        a, b = np.abs(_flat(_convolve(t, made))) + 1e-150, np.abs(_flat(t)) + 1e-150
        return layer(relevance * a / (a + b)) + relevance * b / (a + b)
    if kind == "join":
        own = made["w"].shape[0] * t.shape[2] * t.shape[3]
        return layer(relevance[:own]) + relevance[own:]
    if kind == "mean" and _halves(t):
        return _proportional(lambda t: F.avg_pool2d(t, 2), t, relevance)
    if kind == "max" and _halves(t):
        return _to_winners(t[0].numpy(), relevance)
    return relevance


def _to_winners(t: np.ndarray, relevance: np.ndarray) -> np.ndarray:
    share = np.zeros_like(t)
    rows = relevance.reshape(t.shape[0], t.shape[1] // 2, t.shape[2] // 2)
    for c, i, j in np.ndindex(rows.shape):
        window = t[c, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2]
        di, dj = np.unravel_index(window.argmax(), (2, 2))
        share[c, 2 * i + di, 2 * j + dj] += rows[c, i, j]
    return share.ravel()


def _proportional(operation: Callable[[Tensor], Tensor], t: Tensor, relevance: np.ndarray) -> np.ndarray:
    return reference.generic_rule(np.abs(_flat(t)) + 1e-150, reference.matrix(operation, t), relevance)


def _flat(t: Tensor) -> np.ndarray:
    return t.detach().numpy().ravel()


# ------------------------------------------------------------------------------------------------------ the verdict

# The published equations share a sum by a / (a + b), which has no bound: in float32, rounding decides their maps.
PUBLISHED = {"agf-paper", "agf-release"}
INDEPENDENT = {"gradient", "gradient-x-input", "integrated-gradients", "lrp", "lrp-ab"}


def expected(plan: Plan, method: str, target: int) -> Tensor:
    """The map (H,W) of the plain network in float64: by the slow derivation if there is one."""
    if method in ("lrp", "lrp-ab"):
        return by_interpreter(plan, target, 1.0 if method == "lrp" else 2.0)
    if method in INDEPENDENT:
        return by_autograd(plan, target, method)
    options = QUICK.get(method, {})
    return classlens.explain(Plain(plan), image_of(plan).double(), target, method, **options).maps[0, 0]


def verdict(plan: Plan, method: str) -> str:
    """'equal', 'refused', or what is wrong: the distance of the maps."""
    target = plan.seed % CLASSES
    if method in PUBLISHED:
        plan = replace(plan, dtype="float64")
    try:
        wanted = expected(plan, method, target)
        around = torch.autocast(
            "cpu", dtype=torch.bfloat16, enabled=plan.wrap == "autocast" and plan.dtype != "float64"
        )
        with around:
            e = classlens.explain(awkward(plan), image_of(plan), target, method, **QUICK.get(method, {}))
    except ClasslensError:
        return "refused"
    found = e.maps[0, 0].double()
    size = float(wanted.norm())
    distance = float((found - wanted).norm()) / size if size > 1e-12 else float(found.norm())
    limit = 1e-6 if plan.dtype == "float64" else 1e-2
    return "equal" if distance <= limit else f"off by {distance:.2g}"
