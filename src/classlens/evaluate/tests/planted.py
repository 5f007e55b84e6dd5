"""Planted: does the map lie on a known difference? A disc from another image is pasted into each image.

>>> planted, mask = plant(image, other, random)         # (3,H,W), and (H,W) with 1 where the disc is

The neighbour is the original image, and the disc is the only difference between the two. So there is a ground truth for
the map of the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from classlens.data.layouts import Item
from classlens.data.masks import Mask
from classlens.errors import DataError
from classlens.evaluate.registry import Config, NoOptions, Read, Seen, Subject, Unit, Values, register
from classlens.evaluate.tests import segmentation
from classlens.files import draw_key

RADIUS = 0.2  # of the shorter side: an eighth of a square image


def plant(image: Tensor, other: Tensor, random: np.random.Generator) -> tuple[Tensor, Mask]:
    """`image` with a disc from the same position of `other`, at a random position inside the image, and its mask."""
    height, width = image.shape[-2:]
    radius = RADIUS * min(height, width)
    y, x = (random.uniform(radius, side - radius) for side in (height, width))
    rows, columns = torch.arange(height) + 0.5, torch.arange(width) + 0.5
    disc = (rows[:, None] - y) ** 2 + (columns - x) ** 2 < radius**2
    if other.shape != image.shape:
        other = F.interpolate(other[None], (height, width), mode="bilinear", antialias=True)[0]
    return torch.where(disc, other, image), disc.numpy().astype(np.uint8)


def place(seed: int, name: str) -> np.random.Generator:
    """The random generator for the position of a disc; it depends only on the seed and the name of the image."""
    return np.random.default_rng(list(draw_key(seed, name)))


# ---------------------------------------------------------------------------------------------------------- the test


def _compose(subject: Subject, unit: Unit, config: Config, read: Read) -> Seen:
    (item,) = unit.items
    image, random = read(item).image, place(config["seed"], item.name)
    others = [other for other in subject.dataset.items if other.name != item.name]
    planted, mask = plant(image, read(others[random.integers(len(others))]).image, random)
    return Seen(planted, mask, plain=image)


def _notes(subject: Subject, items: Sequence[Item], config: Config) -> list[str]:
    if len(subject.dataset.items) < 2:
        raise DataError(f"{subject.dataset.name} has only one image; planting needs a disc from another one")
    return []


def _variants(options: NoOptions, subject: Subject) -> list[Values]:
    return [{segmentation.TASK: segmentation.OBJECT, "planted": True}]


register(
    replace(
        segmentation.TEST,  # a disc is an ordinary mask
        name="planted",
        question="does the map lie on a disc from another image, the only difference from the neighbour?",
        title=lambda config: "Planted disc",
        remark=lambda config: (
            "A disc from another image is pasted into each image; the neighbour is the original image. The map is "
            "compared with the disc, in per cent; the chance AP is about 12.6 on square images, the disc's "
            "share."
        ),
        rows_as=segmentation.TEST.name,
        chooses="",
        options=NoOptions,
        needs=frozenset({"neighbour"}),
        variants=_variants,
        compose=_compose,
        notes=_notes,
        place=50,
    )
)
