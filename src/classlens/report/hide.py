"""Hides a part of an image, to test on the network itself whether the maps are right."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from classlens.evaluate.tests.perturbation import blurred
from classlens.files import draw_key
from classlens.report.measure import Bools

_SEEN = 1e-3  # of the blur's weight; below it a hidden pixel is too far from anything visible
_REACH = 10  # the width of the blur, as a fraction of the shorter side of the image


def hide(images: Tensor, hidden: Tensor) -> Tensor:
    """Images (B,3,H,W) with the pixels of `hidden` (B,H,W) filled from their surroundings.

    The fill is a blur of only the visible pixels, so that no hidden colour shows through.

        >>> hide(images, mask[None] > 0)
    """
    visible = (~hidden)[:, None].to(images)
    sigma = min(images.shape[2:]) / _REACH
    weight = blurred(visible, sigma)
    mean = (images * visible).sum((2, 3), keepdim=True) / visible.sum((2, 3), keepdim=True).clamp(min=1)
    near = blurred(images * visible, sigma) / weight.clamp(min=_SEEN)
    fill = torch.where(weight > _SEEN, near, mean)
    return torch.where(hidden[:, None], fill, images)


def as_many_others(chosen: Bools, seed: int, name: str) -> Bools:
    """As many random cells from the rest as are chosen: a baseline for hiding."""
    rest = np.flatnonzero(~chosen)
    count = min(int(chosen.sum()), len(rest))
    drawn = np.random.default_rng(list(draw_key(seed, name)[:8])).choice(rest, count, replace=False)
    others = np.zeros(chosen.size, bool)
    others[drawn] = True
    return others.reshape(chosen.shape)
