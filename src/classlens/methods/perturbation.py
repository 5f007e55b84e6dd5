"""Perturbation methods: how the probability of a class changes when parts of the image are removed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from classlens.core.capture.backward import gradients
from classlens.core.targets import scores
from classlens.methods.inputs import above_zero, gaussian_blur, generator, logits_at, precise, whole
from classlens.methods.places import enlarged, shortest_side
from classlens.methods.registry import Case, Result, method
from classlens.progress import ticker, track

_TOGETHER = 8  # images that go through the network at once
_PAPER_SIDE = 224  # lengths in pixels are given for images of this size
LEAST_CHANGE = 0.01  # of a score under RISE's masks; less says nothing about places


def probability(logits: Tensor, targets: Tensor) -> Tensor:
    """The probability of classes, (N,K), which these methods measure. For a callable they use its value."""
    return logits.softmax(1).gather(1, targets)


# --------------------------------------------------------------------------------------------------------------- RISE


def rise_masks(size: Sequence[int], count: int, cells: int, keep: float, source: torch.Generator) -> Iterator[Tensor]:
    """`count` masks (*size) in [0,1]: a coarse random grid, upsampled and cropped at a random offset."""
    cell = [math.ceil(side / cells) for side in size]
    whole = [(cells + 1) * c for c in cell]
    for _ in range(count):
        grid = (torch.rand(1, 1, *[cells] * len(size), generator=source) < keep).float()
        begin = [int(torch.randint(c, (), generator=source)) for c in cell]
        yield enlarged(grid, whole)[0, 0][_window(begin, size)]


@method(
    "rise", family="perturbation", summary="mean of random masks, weighted by the probability of the masked image",
    class_specific=True, signed=False, conserves=False, scalars=True, layers=False, holds="maps",
    paper="Petsiuk, Das, Saenko: RISE, BMVC 2018",
)  # fmt: skip
def rise(case: Case, n_masks: int = 2000, cells: int = 7, keep: float = 0.5, seed: int = 0) -> Result:
    """S = sum over masks M of p_t(x * M) M / (N keep); the paper uses N = 4000 to 8000 masks.

    Masked pixels become 0 in the network's units. All classes share the forward passes.
    """
    whole(1, n_masks=n_masks, cells=cells)
    above_zero(keep=keep)
    images, size = case.images.detach(), case.images.shape[2:]
    masks = rise_masks(size, n_masks, cells, keep, generator(seed))
    total = torch.zeros(*case.targets.shape, *size, dtype=precise(images), device=images.device)
    low, high = (total.new_full(case.targets.shape, end) for end in (torch.inf, -torch.inf))
    with torch.no_grad():
        for begin in track(range(0, n_masks, _TOGETHER), math.ceil(n_masks / _TOGETHER), "rise"):
            some = torch.stack([next(masks) for _ in range(min(_TOGETHER, n_masks - begin))]).to(total)
            # One image at a time, so that the result does not depend on the rest of the batch.
            for row, (image, targets) in enumerate(zip(images, case.targets, strict=True)):
                masked = (image * some[:, None]).to(images.dtype)
                logits = logits_at(case, masked).to(total.dtype)
                left = scores(logits, targets.expand(len(some), -1), case.scalars, probability)  # (n,K)
                total[row] += torch.einsum("nk,n...->k...", left, some)
                low[row], high[row] = low[row].minimum(left.amin(0)), high[row].maximum(left.amax(0))
    return Result(total / (n_masks * keep), notes=_unmoved(low, high))


def _unmoved(low: Tensor, high: Tensor) -> tuple[str, ...]:
    """Where a score is nearly the same under all masks, the map is their mean, whatever was asked."""
    largest = torch.maximum(high, -low)  # of their magnitudes
    if bool((high - low > LEAST_CHANGE * largest).all()):
        return ()
    return (f"the masks change a score by less than {LEAST_CHANGE:.0%}: the map shows the masks, not the target",)


# --------------------------------------------------------------------------------------------- meaningful perturbation


@method(
    "meaningful-perturbation", family="perturbation", summary="the smallest smooth blur that removes the class",
    class_specific=True, signed=False, conserves=False, scalars=True, layers=False, holds="maps",
    paper="Fong, Vedaldi: Interpretable Explanations of Black Boxes by Meaningful Perturbation, ICCV 2017",
)  # fmt: skip
def meaningful_perturbation(
    case: Case, steps: int = 300, rate: float = 0.1, area: float = 1e-4, variation: float = 1e-2, cell: int = 8,
    jitter: int = 4, seed: int = 0,
) -> Result:  # fmt: skip
    """1 - m for the mask m that minimises  area |1 - m|_1 + variation TV_3(m) + p_t(m x + (1 - m) blur(x)).

    Eq. 4 with the paper's settings: Adam, one mask cell per `cell` pixels, upsampled and smoothed; the image is shifted
    by up to `jitter` pixels (of 224) at each step.
    """
    whole(1, steps=steps, cell=cell)
    whole(0, jitter=jitter)
    size = case.images.shape[2:]
    settings = Settings(rate, area, variation, cell, shortest_side(case.images) / _PAPER_SIDE)
    reach = round(jitter * settings.scale)
    shifts = torch.randint(reach + 1, (steps, len(size)), generator=generator(seed)).tolist()
    tick = ticker(steps * case.targets.numel(), "meaningful-perturbation")
    # One mask at a time: hundreds of steps would amplify the rounding differences between a batch and one image.
    with torch.inference_mode(False), torch.enable_grad():
        removed = [
            1 - best_mask(case, image, target.reshape(1, 1), shifts, settings, tick)
            for image, targets in zip(case.images.detach().split(1), case.targets, strict=True)
            for target in targets
        ]
    return Result(torch.cat(removed).clamp(min=0).reshape(*case.targets.shape, *size))


@dataclass(frozen=True)
class Settings:
    """The settings of the optimisation."""

    rate: float
    area: float
    variation: float
    cell: int
    scale: float  # size of the image relative to the paper's


def best_mask(
    case: Case, image: Tensor, target: Tensor, shifts: list[list[int]], settings: Settings, tick: Callable[[], None]
) -> Tensor:
    """(1,1,*size): 1 where the image (1,C,*size) is kept, 0 where it is blurred."""
    size = image.shape[2:]
    reach = max(max(shift) for shift in shifts)
    sharp, blurred = (_wider(t, reach) for t in (image, gaussian_blur(image, 10 * settings.scale)))
    cells = [max(1, side // settings.cell) for side in size]
    mask = torch.ones(1, 1, *cells, dtype=precise(image), device=image.device)
    descent = Adam(settings.rate)
    for shift in shifts:
        window: tuple[Any, ...] = (..., *_window(shift, size))
        leaf = mask.clone().requires_grad_()
        large = enlarged_mask(leaf, size, 5 * settings.scale)
        mixed = large * sharp[window] + (1 - large) * blurred[window]
        logits = logits_at(case, mixed.to(image.dtype)).to(mask.dtype)
        case.tape.check_gradients()
        score = scores(logits, target, case.scalars, probability).sum()
        loss = settings.area * (1 - leaf).abs().sum() + settings.variation * total_variation(leaf) + score
        with case.tape.differentiating():
            (gradient,) = gradients([loss], [leaf], [torch.ones_like(loss)], case.tape.odd)
        mask = (mask + descent.step(gradient)).clamp(0, 1)
        tick()
    return enlarged_mask(mask, size, 5 * settings.scale)


@dataclass
class Adam:
    """Kingma, Ba 2015, Alg. 1; torch.optim would import torch's compiler first, which takes seconds."""

    rate: float
    mean: Tensor | float = 0.0
    square: Tensor | float = 0.0
    steps: int = 0

    def step(self, gradient: Tensor) -> Tensor:
        """The update of the parameters."""
        self.steps += 1
        self.mean = 0.9 * self.mean + 0.1 * gradient
        self.square = 0.999 * self.square + 0.001 * gradient**2
        mean, square = self.mean / (1 - 0.9**self.steps), self.square / (1 - 0.999**self.steps)
        return -self.rate * mean / (square.sqrt() + 1e-8)


def enlarged_mask(mask: Tensor, size: Sequence[int], sigma: float) -> Tensor:
    """(N,1,*cells) -> (N,1,*size), linear, then smoothed."""
    return gaussian_blur(enlarged(mask, size), sigma)


def total_variation(mask: Tensor, power: float = 3.0) -> Tensor:
    """sum over neighbours of |difference|^power."""
    return torch.stack([(mask.diff(dim=axis).abs() ** power).sum() for axis in range(2, mask.dim())]).sum()


def _wider(pictures: Tensor, by: int) -> Tensor:
    return F.pad(pictures, (0, by) * (pictures.dim() - 2), mode="replicate")


def _window(begin: Sequence[int], size: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(at, at + side) for at, side in zip(begin, size, strict=True))
