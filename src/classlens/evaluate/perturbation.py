"""Perturbation: take pixels away in the order a map ranks them, and see how long the network still recognises.

*Negative*: the least relevant pixels go first; a good map keeps the accuracy high. *Positive*: the most relevant go
first; a good map makes it fall at once. The score is the area under the curve over 0..90 % removed.

    >>> auc([1, 1, 1, 1, 1, 1, 1, 1, 1, 1])     # nothing was ever lost: the most there is
    90.0
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from classlens.methods.inputs import filtered
from classlens.models.preprocess import Preprocess

FRACTIONS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
DIRECTIONS = ("negative", "positive")
FILLS = ("black", "blur", "mean")

Forward = Callable[[Tensor], Tensor]  # (n,3,H,W) -> (n,classes), without gradients


def auc(curve: Sequence[float] | NDArray[np.float64]) -> float:
    """Trapezoid over 0, 0.1, ..., 0.9 of an accuracy whose first value is the clean one, times 100."""
    return float(areas(np.asarray(curve, float)))


def areas(curves: NDArray[np.float64]) -> NDArray[np.float64]:
    """The same for many curves (..., 10) at once. The mean of the areas is the area of the mean."""
    widths = np.diff(np.array((0.0, *FRACTIONS)))
    result: NDArray[np.float64] = 100 * ((curves[..., 1:] + curves[..., :-1]) / 2 * widths).sum(-1)
    return result


def ranks(maps: Tensor, seed: int = 0) -> Tensor:
    """(B,H,W) -> the place of every pixel in its map's ascending order, 0..HW-1.

    Equal values (Grad-CAM is zero on half the picture) are put in one random order for every method: the order of
    memory would take the top rows first, which favours whoever thinks that objects stand below.
    """
    flat = maps.detach().flatten(1).cpu().numpy()
    shuffled = _permutation(flat.shape[1], seed)
    result = np.empty(flat.shape, np.int64)
    for row, values in enumerate(flat):
        result[row, shuffled[np.argsort(values[shuffled], kind="stable")]] = np.arange(flat.shape[1])
    return torch.from_numpy(result).view(maps.shape)


def replacement(images: Tensor, kind: str, preprocess: Preprocess) -> Tensor:
    """What removed pixels become, as network input: `black` (the paper), the `blur`red picture, its `mean` colour."""
    if kind == "black":
        return preprocess.normalise(torch.zeros_like(images[:, :, :1, :1])).expand_as(images)
    if kind == "mean":
        return images.mean((2, 3), keepdim=True).expand_as(images)
    if kind == "blur":
        return blurred(images, sigma=min(images.shape[2:]) / 20)
    raise ValueError(kind)


def blurred(images: Tensor, sigma: float) -> Tensor:
    """A Gaussian blur with mirrored borders. Stored rows depend on the rounding of its kernel: it stays as it is."""
    reach = min(int(3 * sigma) + 1, *(side - 1 for side in images.shape[2:]))
    x = torch.arange(-reach, reach + 1, dtype=images.dtype, device=images.device)
    kernel = torch.exp(-0.5 * (x / sigma) ** 2)
    return filtered(images, kernel / kernel.sum(), "reflect")


@dataclass(frozen=True)
class Curves:
    """What the network said at each step; the first axis is the direction, the second the fraction."""

    predicted: Tensor  # (2,9,B) class
    probability: Tensor  # (2,9,B) of the explained class


def measure(
    forward: Forward,
    images: Tensor,
    maps: Tensor,
    fill: Tensor,
    explained: Tensor,
    at_once: int,
    seed: int = 0,
    fractions: Sequence[float] = FRACTIONS,
) -> Curves:
    """Run all steps of a batch: images (B,3,H,W) as the network takes them, maps (B,H,W), fill as images.

    Every step starts from the unperturbed image; `at_once` is how many go through the network together.
    """
    order = ranks(maps, seed).to(images.device)
    found = [
        _read(forward(batch), explained[rows.to(explained.device)])
        for batch, rows in _perturbed(images, order, fill, fractions, at_once)
    ]
    shape = (len(DIRECTIONS), len(fractions), len(images))
    predicted, probability = (torch.cat(parts).view(shape) for parts in zip(*found, strict=True))
    return Curves(predicted, probability)


def _perturbed(
    images: Tensor, order: Tensor, fill: Tensor, fractions: Sequence[float], at_once: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """The perturbed images, direction by direction, fraction by fraction, in blocks; with each one's row."""
    pixels = order[0].numel()
    counts = torch.tensor([int(pixels * fraction) for fraction in fractions], device=images.device)
    kinds = torch.arange(len(DIRECTIONS) * len(fractions) * len(images), device=images.device)
    for block in kinds.split(at_once):
        rows, steps = block % len(images), block // len(images)
        place, count = order[rows], counts[steps % len(fractions)].view(-1, 1, 1)
        positive = (steps // len(fractions) == 1).view(-1, 1, 1)
        gone = torch.where(positive, place >= pixels - count, place < count)
        yield torch.where(gone[:, None], fill[rows], images[rows]), rows


def _read(logits: Tensor, explained: Tensor) -> tuple[Tensor, Tensor]:
    logits = logits.double().cpu()
    return logits.argmax(1), logits.softmax(1).gather(1, explained.cpu()[:, None])[:, 0]


@cache
def _permutation(count: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).permutation(count)
