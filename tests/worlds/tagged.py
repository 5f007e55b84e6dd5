"""A small world: a coloured square in the middle, and in the corner a small tag of the same colour.

Two networks tell the colours apart and are right on every picture: one looks at the square, the other at the tag.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from classlens.models import LoadedModel, Preprocess

SIDE, TAG = 40, 4
COLOURS = {"red": (210, 50, 50), "green": (50, 210, 50), "blue": (50, 50, 210)}
SQUARE = (slice(12, 28), slice(12, 28))


class Reader(nn.Module):
    """How much of each colour there is in one place of the picture."""

    def __init__(self, rows: slice, columns: slice) -> None:
        super().__init__()
        self.colour = nn.Conv2d(3, 3, 1, bias=False)
        self.head = nn.Linear(3, 4)
        place = torch.zeros(1, 1, SIDE, SIDE)
        place[..., rows, columns] = 1
        self.register_buffer("place", place / place.sum())
        with torch.no_grad():
            # One colour against the mean of the others: grey gives nothing.
            self.colour.weight.copy_((1.5 * torch.eye(3) - 0.5)[:, :, None, None])
            self.head.weight.copy_(12 * torch.eye(4, 3))
            self.head.bias.copy_(torch.tensor([0.0, 0.0, 0.0, 4.0]))  # "nothing" wins where there is no colour

    def forward(self, x: Tensor) -> Tensor:
        return self.head((torch.relu(self.colour(x)) * self.place).sum((2, 3)))


def _loaded(name: str, network: nn.Module, labels: tuple[str, ...] | None = (*COLOURS, "nothing")) -> LoadedModel:
    plain = Preprocess(resize=(SIDE, SIDE), crop=None, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    return LoadedModel(name, network.eval(), plain, labels)


def make_honest() -> LoadedModel:
    """Looks at the square."""
    return _loaded("honest", Reader(*SQUARE))


def make_cheat() -> LoadedModel:
    """Looks at the tag."""
    return _loaded("cheat", Reader(slice(0, TAG), slice(0, TAG)))


def make_mistaken() -> LoadedModel:
    """Looks at the square, and calls green red."""
    network = Reader(*SQUARE)
    with torch.no_grad():
        network.head.weight.copy_(12 * torch.tensor([[1.0, 1.1, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0]]))
    return _loaded("mistaken", network)


def make_nameless() -> LoadedModel:
    """Looks at the square, and has no names for its outputs."""
    return _loaded("nameless", Reader(*SQUARE), None)


def draw_world(root: Path, count: int = 4) -> Path:
    """masked/{images,masks}/*.png with masks, classes/COLOUR/*.png with labels, plain/*.png with neither."""
    for folder in ("masked/images", "masked/masks", "plain", *(f"classes/{colour}" for colour in COLOURS)):
        (root / folder).mkdir(parents=True)
    mask = np.zeros((SIDE, SIDE), np.uint8)
    mask[SQUARE] = 255
    for colour, value in COLOURS.items():
        for seed in range(count):
            noise = np.random.default_rng([seed, *value]).integers(90, 110, (SIDE, SIDE, 1))
            pixels = np.repeat(noise, 3, 2).astype(np.uint8)
            pixels[SQUARE] = value
            pixels[:TAG, :TAG] = value
            picture = Image.fromarray(pixels)
            picture.save(root / "masked" / "images" / f"{colour}{seed}.png")
            Image.fromarray(mask).save(root / "masked" / "masks" / f"{colour}{seed}.png")
            picture.save(root / "classes" / colour / f"{seed}.png")
            picture.save(root / "plain" / f"{colour}{seed}.png")
    return root
