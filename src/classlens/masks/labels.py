"""From seeds to labels: a background threshold and, if wanted, a random walk that follows the edges of the picture.

>>> thresholded(np.array([[[0.9, 0.2]], [[0.1, 0.3]]]), 0.25)
array([[1, 2]])
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image

from classlens.errors import ClasslensError, MissingPackage

WALK, NONE = "walk", "none"
REFINEMENTS = (NONE, WALK)
THRESHOLDS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7)
SIGNED, UNSIGNED = 0.05, 0.35  # thresholds if there are no drawn masks: a signed map is below 0 on background
_FACTOR = 2  # pixels above twice the threshold, or below half of it, are certain; the walk decides the others
_SIDE = 128  # the longer side of the picture on which the walk runs
_BETA = 130.0  # how hard the walk crosses edges: scikit-image's default

Scores = NDArray[Any]  # (K,H,W) in [0,1]


@dataclass(frozen=True)
class Setting:
    """How seeds become labels."""

    threshold: float
    refine: str = NONE

    def __post_init__(self) -> None:
        if not 0 < self.threshold < 1:
            raise ClasslensError(f"the threshold {self.threshold} must lie between 0 and 1")
        if self.refine not in REFINEMENTS:
            raise ClasslensError(f"there is no refinement {self.refine!r}; choose from {', '.join(REFINEMENTS)}")

    @classmethod
    def of(cls, signed: bool, threshold: float | None = None, refine: str | None = None) -> Setting:
        """With the defaults for what is not given: those without drawn masks, for signed or unsigned maps."""
        usual = SIGNED if signed else UNSIGNED
        return cls(usual if threshold is None else threshold, refine or NONE)

    def __str__(self) -> str:
        return f"threshold {self.threshold:g}" + (", random walk" if self.refine == WALK else "")


def labels(scores: Scores, picture: Image.Image, setting: Setting) -> NDArray[np.uint8]:
    """(H,W) of the picture: 0 background, 1..K the classes of the scores."""
    if not len(scores):
        return np.zeros((picture.height, picture.width), np.uint8)
    if setting.refine == WALK:
        return walked(scores, picture, setting.threshold)
    return thresholded(_resized(scores, (picture.height, picture.width)), setting.threshold)


def thresholded(scores: Scores, threshold: float) -> NDArray[np.uint8]:
    """The class with the highest score, where it is above the threshold; of equals, background or the first."""
    return np.asarray(_with_background(scores, threshold).argmax(0), np.uint8)


def walked(scores: Scores, picture: Image.Image, threshold: float) -> NDArray[np.uint8]:
    """Certain pixels keep their label; a random walker (Grady, 2006) carries the labels to the others."""
    size = (picture.height, picture.width)
    shrunk = min(1.0, _SIDE / max(size))
    small = max(1, round(size[0] * shrunk)), max(1, round(size[1] * shrunk))
    lower = _resized(scores, small)
    sure = certain(lower, threshold)
    present = np.unique(sure[sure > 0])
    if len(present) < 2 or (sure > 0).all():  # there is nothing to walk between
        return thresholded(_resized(scores, size), threshold)
    pixels = np.asarray(picture.convert("RGB").resize(small[::-1], Image.Resampling.BILINEAR), np.float64) / 255
    ranks = np.searchsorted(present, sure) + 1  # the walker wants 1, 2, ... without gaps
    found = _walk(pixels, np.where(sure > 0, ranks, 0))
    shares = np.zeros((len(scores) + 1, *small))
    shares[present - 1] = found
    return np.asarray(_resized(shares, size).argmax(0), np.uint8)


def certain(scores: Scores, threshold: float) -> NDArray[np.int64]:
    """0 unknown, 1 background, 2.. the classes: pixels far enough from the threshold (at most half-way to 1)."""
    best, least = scores.max(0), min(_FACTOR * threshold, (1 + threshold) / 2)
    label = np.where(best >= least, scores.argmax(0) + 2, 0)
    result: NDArray[np.int64] = np.where(best <= threshold / _FACTOR, 1, label)
    return result


def _walk(pixels: NDArray[np.float64], sure: NDArray[np.int64]) -> NDArray[np.float64]:
    """The probability that a walk from each pixel first meets each label."""
    try:
        from skimage.segmentation import random_walker
    except ImportError:
        raise MissingPackage("the random walk needs scikit-image: pip install 'classlens[masks]'") from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its solvers: none of them changes the result
        found = random_walker(pixels, sure, beta=_BETA, mode="cg_j", tol=1e-3, channel_axis=-1, return_full_prob=True)
    return np.asarray(found, np.float64)


def _with_background(scores: Scores, threshold: float) -> Scores:
    return np.concatenate([np.full((1, *scores.shape[1:]), threshold, scores.dtype), scores])


def _resized(scores: Scores, size: tuple[int, int]) -> Scores:
    tensor = torch.from_numpy(np.ascontiguousarray(scores, np.float32))[None]
    found: Scores = F.interpolate(tensor, size=size, mode="bilinear", antialias=True)[0].numpy()
    return found
