"""Planted: does the map lie on the one thing that differs? A disc out of another picture, planted into a picture.

>>> planted, mask = plant(image, other, random)         # (3,H,W), and (H,W) with 1 where the disc is

The picture as it was is the nearest neighbour that could be, and the disc is all that sets the two apart. So here, and
only here, there is a truth about what a map of the difference has to show.
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


# ---------------------------------------------------------------------------------------------------------- the test


def _compose(subject: Subject, unit: Unit, config: Config, read: Read) -> Seen:
    (item,) = unit.items
    image, random = read(item).image, place(config["seed"], item.name)
    others = [other for other in subject.dataset.items if other.name != item.name]
    planted, mask = plant(image, read(others[random.integers(len(others))]).image, random)
    return Seen(planted, mask, plain=image)


def _notes(subject: Subject, items: Sequence[Item], config: Config) -> list[str]:
    if len(subject.dataset.items) < 2:
        raise DataError(f"{subject.dataset.name} has one picture; planting takes a disc out of another")
    return []


def _variants(options: NoOptions, subject: Subject) -> list[Values]:
    return [{"reading": segmentation.OBJECT, "planted": True}]


register(
    replace(
        segmentation.TEST,  # a disc is a mask like others
        name="planted",
        question="does the map lie on a disc of another picture, the one thing that differs from the neighbour?",
        title=lambda config: "What was planted",
        remark=lambda config: (
            "A disc of another picture is planted into each; its neighbour is the picture as it was. The map against "
            "the disc, in per cent; a map that knows nothing has an AP of about 12.6 on square pictures, the disc's "
            "share."
        ),
        rows_as=segmentation.TEST.name,
        options=NoOptions,
        needs=frozenset({"neighbour"}),
        variants=_variants,
        compose=_compose,
        notes=_notes,
        place=50,
    )
)
