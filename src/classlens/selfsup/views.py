"""Views of pictures: crops, mirror images, other colours, quarter turns; on whole batches, drawn from a generator.

>>> views = crops(pixels, 96, (0.5, 1.0), generator)       # pixels (B,3,120,120) uint8 -> (B,3,96,96) in [0,1]
>>> turned, labels = quarter_turns(views)                  # (4B,3,96,96), 0 0 .. 1 1 .. 2 2 .. 3 3 ..
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

TURNS = ("upright", "turned left", "upside down", "turned right")
"""What the four rotations are called: by 0, 90, 180, 270 degrees against the clock."""


def quarter_turns(images: Tensor) -> tuple[Tensor, Tensor]:
    """All images in all four rotations, and by how many quarter turns (RotNet; Gidaris et al., 2018)."""
    turned = torch.cat([torch.rot90(images, turn, (2, 3)) for turn in range(4)])
    return turned, torch.arange(4, device=images.device).repeat_interleave(len(images))


def centre(pixels: Tensor, side: int) -> Tensor:
    """The middle of stored pictures, as the network sees a picture when it is used; in [0,1]."""
    start = round((pixels.shape[-1] - side) / 2)
    return pixels[..., start : start + side, start : start + side].float() / 255


def crops(pixels: Tensor, side: int, scale: tuple[float, float], generator: Generator) -> Tensor:
    """A random square of each picture, an edge of `scale` of it, mirrored half of the time, brought to `side`."""
    batch = len(pixels)
    low, high = scale
    edge = low + (high - low) * _uniform(batch, generator)
    x, y = ((2 * _uniform(batch, generator) - 1) * (1 - edge) for _ in range(2))
    flip = 1 - 2 * (_uniform(batch, generator) < 0.5).float()
    zero = torch.zeros(batch)
    theta = torch.stack([torch.stack([edge * flip, zero, x], 1), torch.stack([zero, edge, y], 1)], 1)  # (B,2,3)
    grid = F.affine_grid(theta.to(pixels.device), [batch, 3, side, side], align_corners=False)
    return F.grid_sample(pixels.float() / 255, grid, padding_mode="reflection", align_corners=False)


def other_colours(images: Tensor, generator: Generator, strength: float = 0.4, grey: float = 0.2) -> Tensor:
    """Another brightness, contrast and saturation for each image, and some of them without colour."""
    batch, device = len(images), images.device

    def factor() -> Tensor:
        return (1 + strength * (2 * _uniform(batch, generator) - 1)).to(device).view(-1, 1, 1, 1)

    images = images * factor()
    mean = images.mean((1, 2, 3), keepdim=True)
    images = mean + (images - mean) * factor()
    saturation = torch.where((_uniform(batch, generator) < grey).to(device).view(-1, 1, 1, 1), 0.0, factor())
    luminance = images.mean(1, keepdim=True)
    return (luminance + (images - luminance) * saturation).clamp(0, 1)


def _uniform(count: int, generator: Generator) -> Tensor:
    return torch.rand(count, generator=generator)
