"""Pictures of things that are made of known parts, and a network whose concepts were set by hand.

A thing is a red and a green cell of 8x8 pixels; every second picture also has a blue tag in the lower right corner, a
shortcut that the network uses too.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from classlens.models import LoadedModel, Preprocess

SIDE, CELL = 64, 8
COLOURS = ((220, 20, 20), (20, 220, 20), (20, 20, 220))
TAG = (SIDE // CELL - 1, SIDE // CELL - 1)  # the cell of the tag


class Parts(nn.Module):
    """One channel for each colour, at one eighth of the size; all of them speak for the thing."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.Conv2d(3, 3, CELL, stride=CELL)
        self.mix = nn.Conv2d(3, 4, 1, bias=False)
        self.head = nn.Linear(4, 2)
        with torch.no_grad():
            self.cells.weight.copy_((2 * torch.eye(3) - 1)[:, :, None, None].expand(3, 3, CELL, CELL) / CELL**2)
            self.cells.bias.zero_()
            self.mix.weight.zero_()[range(3), range(3)] = 1.0
            self.head.weight.copy_(torch.tensor([[90.0, 60.0, 120.0, 0.0], [0.0, 0.0, 0.0, 0.0]]))
            self.head.bias.copy_(torch.tensor([0.0, 0.5]))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.mix(torch.relu(self.cells(x)))).mean((2, 3)))


def make() -> LoadedModel:
    """For load("parts:make")."""
    preprocess = Preprocess(resize=(SIDE, SIDE), crop=None, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    return LoadedModel("parts", Parts().eval(), preprocess, ("thing", "nothing"))


def picture(seed: int) -> NDArray[np.uint8]:
    """(H,W,3) on noisy grey: a red and a green cell, and a tag if the seed is odd."""
    pixels = picture_of(seed, COLOURS[:2])
    if seed % 2:
        _paint(pixels, TAG, COLOURS[2])
    return pixels


def picture_of(seed: int, colours: Sequence[Sequence[int]]) -> NDArray[np.uint8]:
    """(H,W,3) on noisy grey: a cell of each colour, at random places."""
    random = np.random.default_rng(seed)
    pixels = np.repeat(random.integers(90, 110, (SIDE, SIDE, 1)), 3, 2).astype(np.uint8)
    chosen = random.choice((SIDE // CELL) ** 2 - 1, len(colours), replace=False)
    for number, colour in zip(chosen, colours, strict=True):
        _paint(pixels, divmod(int(number), SIDE // CELL), colour)
    return pixels


def file(seed: int) -> bytes:
    """The same as a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(picture(seed)).save(buffer, "PNG")
    return buffer.getvalue()


def _paint(pixels: NDArray[np.uint8], cell: tuple[int, int], colour: Sequence[int]) -> None:
    row, column = cell
    pixels[CELL * row : CELL * (row + 1), CELL * column : CELL * (column + 1)] = colour


def draw_parts(root: Path, count: int = 12, nothing: int = 2) -> Path:
    """Pictures of things, and a few of nothing, in one folder."""
    root.mkdir(parents=True)
    for seed in range(count):
        Image.fromarray(picture(seed)).save(root / f"thing{seed:02}.png")
    for seed in range(nothing):
        Image.fromarray(np.full((SIDE, SIDE, 3), 100 + seed, np.uint8)).save(root / f"nothing{seed}.png")
    return root
