"""Gradients of a class's logit at the image, and averages of them over noise and along paths.

If the values of a method add up (attribution), its map is their sum over the colours. If its paper shows sensitivity,
the map holds magnitudes. SmoothGrad and GradientSHAP are our own short loops: captum's versions draw from the global
random states of torch and numpy, so the noise of an image depends on its position in the batch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from classlens.methods.inputs import (
    Baseline,
    asked,
    generator,
    gradients_at,
    logits_at,
    normal_noise,
    whole,
)
from classlens.methods.inputs import baseline as make_baseline
from classlens.methods.inputs import baselines as make_baselines
from classlens.methods.registry import Balance, Case, Result, is_release, method, of_colours
from classlens.progress import ticker, track

_TOGETHER = 8  # images that go through the network at once


def complete(shares: Tensor, difference: Tensor) -> Result:
    """Shares (K,B,C,H,W), and whether they add up to the difference of scores (B,K) that they explain."""
    result = of_colours(shares)
    flat = result.maps.detach().cpu().double().flatten(2)
    size = torch.maximum(flat.abs().sum(2), difference.abs())
    return replace(result, balance=Balance(difference, flat.sum(2), torch.zeros_like(difference), size))


def mean_gradient(case: Case, points: Iterable[Tensor], count: int, label: str) -> Tensor:
    """(K,B,C,H,W): the sum of the gradients at `points`, each (B,C,H,W), divided by `count`."""
    total = torch.zeros((), device=case.images.device)
    points = iter(track(points, count, label))
    while some := list(itertools.islice(points, max(1, _TOGETHER // len(case.images)))):
        repeated = replace(case, targets=case.targets.repeat(len(some), 1))
        total = total + gradients_at(repeated, torch.cat(some)).unflatten(1, (len(some), -1)).sum(1)
    return total / count


# ------------------------------------------------------------------------------------------------- at the image itself


@method(
    "gradient", family="gradients", summary="sensitivity of the logit to each pixel",
    class_specific=True, signed=False, conserves=False, scalars=True, layers=False,
    paper="Simonyan, Vedaldi, Zisserman: Deep Inside Convolutional Networks, 2013",
)  # fmt: skip
def gradient(case: Case) -> Result:
    """max over colours of |dy/dx|, as in the paper's Sec. 3.1."""
    return Result(_at_image(case).abs().amax(2).transpose(0, 1))


@method(
    "gradient-x-input", family="gradients", summary="gradient times pixel value",
    class_specific=True, signed=True, conserves=False, scalars=True, layers=False,
    paper="Shrikumar et al.: Not Just a Black Box, 2016",
)  # fmt: skip
def gradient_x_input(case: Case) -> Result:
    """sum over colours of x dy/dx."""
    return of_colours(_at_image(case) * case.tape.image.tensor)


def _at_image(case: Case) -> Tensor:
    image = case.tape.image
    return case.tape.gradients(case.directions(), [image], keep=not case.once)[image]


# ----------------------------------------------------------------------------------------------------- along a path


@method(
    "integrated-gradients", family="gradients", summary="gradients along a path from a baseline, times its length",
    class_specific=True, signed=True, conserves=False, scalars=True, layers=False,
    paper="Sundararajan, Taly, Yan: Axiomatic Attribution for Deep Networks, ICML 2017",
)  # fmt: skip
def integrated_gradients(
    case: Case, steps: int = 50, baseline: Baseline = "zero", seed: int = 0, variant: str = "default"
) -> Result:
    """(x - x0) * integral over a in [0,1] of dy/dx at x0 + a (x - x0), by the Gauss-Legendre rule, as in captum.

    The balance in the report is its completeness: with enough `steps`, the map sums to y(x) - y(x0). The release does
    not multiply by x - x0 and shows magnitudes.
    """
    whole(1, steps=steps)
    if is_release(variant):
        return of_colours(released_path(case).abs())
    start = make_baseline(case.images, baseline, seed)
    with torch.no_grad():
        difference = asked(case, case.tape.logits) - asked(case, logits_at(case, start))
    return complete(_on_the_path(case, start, steps), difference)


def released_path(case: Case) -> Tensor:
    """As released: the sum of the gradients at 101 points from 0 to the image, divided by 100, not times the input."""
    points = (case.images.detach() * (i / 100) for i in range(101))
    return mean_gradient(case, points, 101, "integrated-gradients") * (101 / 100)


def _on_the_path(case: Case, start: Tensor, steps: int) -> Tensor:
    """(K,B,C,H,W): the integral of the gradients from `start` to the images, times the difference."""
    images = case.images.detach()
    way = images - start
    places, weights = (torch.from_numpy(0.5 * values) for values in np.polynomial.legendre.leggauss(steps))
    at_once = max(1, _TOGETHER // len(images))
    tick = ticker(math.ceil(steps / at_once), "integrated-gradients")
    total = torch.zeros((), device=images.device)
    for some, lengths in zip((0.5 + places).split(at_once), weights.split(at_once), strict=True):
        points = torch.cat([start + place * way for place in some.tolist()])
        found = gradients_at(replace(case, targets=case.targets.repeat(len(some), 1)), points)
        total = total + way * torch.einsum("n,kn...->k...", lengths.to(found), found.unflatten(1, (len(some), -1)))
        tick()
    return total


@method(
    "gradient-shap", family="gradients", summary="gradients between image and baselines, times the difference",
    class_specific=True, signed=True, conserves=False, scalars=True, layers=False,
    paper="Lundberg, Lee: A Unified Approach to Interpreting Model Predictions, NeurIPS 2017",
)  # fmt: skip
def gradient_shap(
    case: Case,
    samples: int = 20,
    baselines: str | Sequence[Baseline] = "zero+dark+blur+noise",
    noise: float = 0.0,
    seed: int = 0,
) -> Result:
    """Mean over samples of (x - x0) dy/dx at x0 + a (x - x0), with random a; x0 cycles through the baselines.

    `noise` is the standard deviation of normal noise added to x, in the network's units. The balance compares the sum
    of the map with the mean difference of the logit from the baselines; the error shrinks with more samples.
    """
    whole(1, samples=samples)
    source, images = generator(seed), case.images.detach()
    starts = make_baselines(images, baselines, seed)[:samples]
    # Stratified: one random number from each of `samples` equal parts of [0,1].
    fractions = (torch.arange(samples) + torch.rand(samples, generator=source)) / samples
    order = torch.randperm(samples, generator=source)
    total = torch.zeros((), device=images.device)
    for i in track(range(samples), samples, "gradient-shap"):
        start = starts[i % len(starts)]
        way = images + noise * normal_noise(images, source) - start
        total = total + way * gradients_at(case, start + float(fractions[order[i]]) * way)
    with torch.no_grad():
        values = [asked(case, logits_at(case, start)) for start in starts]
    used = torch.stack([values[i % len(starts)] for i in range(samples)]).mean(0)
    return complete(total / samples, asked(case, case.tape.logits) - used)


# ------------------------------------------------------------------------------------------------------- over noise


@method(
    "smoothgrad", family="gradients", summary="mean gradient over noisy copies of the image",
    class_specific=True, signed=False, conserves=False, scalars=True, layers=False,
    paper="Smilkov et al.: SmoothGrad: removing noise by adding noise, 2017",
)  # fmt: skip
def smoothgrad(case: Case, samples: int = 50, noise: float = 0.15, seed: int = 0, variant: str = "default") -> Result:
    """sum over colours of |mean over noise of dy/dx|; `noise` is its standard deviation relative to the image's range.

    The release sets the deviation to s^2 with s = 4 / (largest - smallest value), so flat images get more noise.
    """
    whole(1, samples=samples)
    images, source = case.images.detach(), generator(seed)
    axes = tuple(range(1, images.dim()))
    spread = images.amax(axes, keepdim=True) - images.amin(axes, keepdim=True)
    deviation = (4 / spread) ** 2 if is_release(variant) else noise * spread
    draws = (deviation * normal_noise(images, source) for _ in range(samples))
    return of_colours(smoothed(case, draws, samples).abs())


def smoothed(case: Case, noises: Iterable[Tensor], count: int) -> Tensor:
    """(K,B,C,H,W): the mean gradient over `count` noisy copies of the images."""
    return mean_gradient(case, (case.images.detach() + n for n in noises), count, "smoothgrad")
