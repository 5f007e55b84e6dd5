"""A difference that is known: a disc out of another picture, planted into a picture.

>>> planted, mask = plant(image, other, random)         # (3,H,W), and (H,W) with 1 where the disc is

The picture as it was is the nearest neighbour that could be, and the disc is all that sets the two apart. So here, and
only here, there is a truth about what a map of the difference has to show.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from classlens.data.masks import Mask
from classlens.files import draw_key

RADIUS = 0.2  # of the shorter side: an eighth of a square picture


def plant(image: Tensor, other: Tensor, random: np.random.Generator) -> tuple[Tensor, Mask]:
    """`image` with a disc of `other` at the same place, wherever the whole disc fits, and where it is."""
    height, width = image.shape[-2:]
    radius = RADIUS * min(height, width)
    y, x = (random.uniform(radius, side - radius) for side in (height, width))
    rows, columns = torch.arange(height) + 0.5, torch.arange(width) + 0.5
    disc = (rows[:, None] - y) ** 2 + (columns - x) ** 2 < radius**2
    if other.shape != image.shape:
        other = F.interpolate(other[None], (height, width), mode="bilinear", antialias=True)[0]
    return torch.where(disc, other, image), disc.numpy().astype(np.uint8)


def place(seed: int, name: str) -> np.random.Generator:
    """What decides where the disc of a picture lies: the seed and the picture's name alone."""
    return np.random.default_rng(list(draw_key(seed, name)))
