"""Slow maps of random small networks, in float64, and the verdict on the maps of classlens.

>>> plan = Plan((("conv", 0, 3), ("relu", 2, 1), ("skip", 1, 3)), head="pool", dtype="bfloat16", wrap="hooks", seed=1)
>>> verdict(plan, "lrp")
'equal'

The map of the awkward form must equal that of the plain form, or be refused (`fuzz_networks` has both). For gradients
and LRP the slow map is derived a second time: by autograd on plain functions, and by an interpreter that walks the
steps with explicit matrices. Of several images, each must get the map that it gets alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import classlens
import fuzz_networks
import reference
from classlens.errors import ClasslensError
from classlens.methods import METHODS
from fuzz_networks import CLASSES, Plain, Plan, Step, awkward, convolve, image_of, side_after
from quick import QUICK

# -------------------------------------------------------------------------------------------------- the slow maps


def by_autograd(plan: Plan, x: Tensor, target: int, method: str) -> Tensor:
    """(H,W) of one image by plain autograd in float64."""
    model = Plain(plan)

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


def by_interpreter(plan: Plan, x: Tensor, target: int, alpha: float) -> Tensor:
    """(H,W) of LRP alpha-beta with z^B at the image: every layer as an explicit matrix, one step after the other."""
    model = Plain(plan)
    values = model.walk(x, model.steps[0], model.steps[1:])
    last = model.pooled(values[-1])
    logits = F.linear(last, model.last["w"], model.last["b"])[0]
    relevance = np.zeros(CLASSES)
    relevance[target] = float(logits[target])
    relevance = reference.alpha_beta(_flat(last), model.last["w"].numpy(), relevance, alpha)
    if plan.head == "pool":
        relevance = _proportional(model.pooled, values[-1], relevance)
    for step, made, t in reversed(list(zip(plan.steps, model.steps[1:], values[:-1], strict=True))):
        relevance = _back(step, made, t, relevance, alpha)
    w = reference.matrix(lambda t: convolve(t, model.steps[0]), x)
    return torch.from_numpy(reference.zbox(_flat(x), w, relevance).reshape(x.shape[1:]).sum(0))


def _back(step: Step, made: dict[str, Tensor], t: Tensor, relevance: np.ndarray, alpha: float) -> np.ndarray:
    """The relevance of a step's input; activations, gates and everything that changes nothing pass it on."""
    kind, resized = step[0], side_after(step[0], t.shape[-1]) != t.shape[-1]

    def layer(part: np.ndarray) -> np.ndarray:
        groups = made["w"].shape[0] if kind == "depthwise" else 1
        w = reference.matrix(lambda t: convolve(t, made, 2 if resized else 1, groups), t)
        return reference.alpha_beta(_flat(t), w, part, alpha)

    if kind in ("conv", "norm", "strided", "depthwise"):
        return layer(relevance)
    if kind in ("skip", "minus"):
        a, b = np.abs(_flat(convolve(t, made))) + 1e-150, np.abs(_flat(t)) + 1e-150
        return layer(relevance * a / (a + b)) + relevance * b / (a + b)
    if kind == "times":
        factor = fuzz_networks.factor(t, made)
        gates = [bool((x >= 0).all() and (x <= 1).all()) for x in (t, factor)]
        parts = [1.0 - gate for gate in gates] if gates[0] != gates[1] else [0.5, 0.5]
        return relevance * parts[0] + layer(relevance * parts[1])
    if kind == "join":
        own = made["w"].shape[0] * t.shape[2] * t.shape[3]
        return layer(relevance[:own]) + relevance[own:]
    if kind == "max" and resized:
        return _to_winners(t[0].numpy(), relevance)
    if kind in ("mean", "up") and resized:
        resize = {"mean": lambda t: F.avg_pool2d(t, 2), "up": lambda t: F.interpolate(t, scale_factor=2)}[kind]
        return _proportional(resize, t, relevance)
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
# The release also adds 1e-9 to each divisor, so that a mean and a sum divided by the number are not quite the same.
PUBLISHED = {"agf-paper", "agf-release"}
INDEPENDENT = {"gradient", "gradient-x-input", "integrated-gradients", "lrp", "lrp-ab"}
# attnlrp has one gamma for convolutions and another for linear layers: a 1x1 convolution that is written as a linear
# layer is another network to it.
ONE_GAMMA = {"conv_gamma": 0.1, "linear_gamma": 0.1}
OPTIONS: dict[str, dict[str, Any]] = QUICK | {"legrad": {"last": 0}, "attnlrp": ONE_GAMMA}
DRAWN = {name for name in QUICK if name != "integrated-gradients"}


def expected(plan: Plan, method: str, target: int) -> Tensor:
    """The maps (B,H,W) of the plain network in float64, image by image: by the slow derivation if there is one."""
    images = image_of(plan).double().split(1)
    if method in ("lrp", "lrp-ab") and not any(step[0] == "attend" for step in plan.steps):
        return torch.stack([by_interpreter(plan, x, target, 1.0 if method == "lrp" else 2.0) for x in images])
    if method in INDEPENDENT - {"lrp", "lrp-ab"}:
        return torch.stack([by_autograd(plan, x, target, method) for x in images])
    options, model = OPTIONS.get(method, {}), Plain(plan)
    return torch.cat([classlens.explain(model, x, target, method, **options).maps[:, 0] for x in images])


def verdict(plan: Plan, method: str) -> str:
    """'equal', 'refused: why', or what is wrong: the distance of the maps."""
    target = plan.seed % CLASSES
    if METHODS[method].attention and not any(step[0] == "attend" for step in plan.steps):
        plan = replace(plan, steps=(("attend", plan.seed % 4, plan.seed // 4 % 2 * 2 + 1), *plan.steps))
    if method in PUBLISHED:
        plan = replace(plan, dtype="float64")
    if method in DRAWN:  # other images would draw other samples
        plan = replace(plan, images=1)
    low = plan.wrap == "autocast" and plan.dtype != "float64"
    images = image_of(plan)
    if plan.wrap == "channels_last":
        images = images.contiguous(memory_format=torch.channels_last)
    try:
        wanted = expected(plan, method, target)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
            e = classlens.explain(awkward(plan), images, target, method, **OPTIONS.get(method, {}))
    except ClasslensError as error:
        return f"refused: {error}"
    limit = 1e-2 if plan.dtype != "float64" else 1e-4 if method == "agf-release" else 1e-6
    distance = max(_distance(found, own) for found, own in zip(e.maps[:, 0].double(), wanted, strict=True))
    return "equal" if distance <= limit else f"off by {distance:.2g}"


def _distance(found: Tensor, wanted: Tensor) -> float:
    size = float(wanted.norm())
    return float((found - wanted).norm()) / (size if size > 1e-12 else 1.0)
