"""Pointing: does the map of a class lie where the class is? A grid of pictures of different classes tells.

Pictures that the network classifies confidently are put side by side (2x1), in a square (2x2) or 3x3. Each cell's
class is explained in the whole grid. Two scores: the share of the positive relevance that lies in the right cell,
and whether the maximum does. A map that knows nothing of the class gets 1 / cells.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

SHAPES = ("2x1", "2x2", "3x3")  # columns x rows


@dataclass(frozen=True)
class Cell:
    """One picture of a grid, by its name in the data set, and the class the network gives it."""

    image: str
    target: int


Grid = tuple[Cell, ...]  # row by row


def cells(shape: str) -> tuple[int, int]:
    """'2x1' -> (1 row, 2 columns)."""
    columns, rows = shape.split("x")
    return int(rows), int(columns)


def plan(confident: Iterable[Cell], shape: str) -> list[Grid]:
    """Grids from pictures in their order: each goes into the first open grid that lacks its class, and is used once.

    Pictures that come later never change the grids that are full, so a longer list only adds some.
    """
    rows, columns = cells(shape)
    full: list[Grid] = []
    open_grids: list[list[Cell]] = []
    for cell in confident:
        grid = next((g for g in open_grids if all(cell.target != other.target for other in g)), None)
        if grid is None:
            grid = []
            open_grids.append(grid)
        grid.append(cell)
        if len(grid) == rows * columns:
            full.append(tuple(grid))
            open_grids.remove(grid)
    return full


def compose(pictures: Sequence[Tensor], shape: str, size: tuple[int, int]) -> Tensor:
    """Pictures (3,h,w) -> one (3,H,W). Each is scaled to cover its cell and cut to it, the middle kept."""
    rows, columns = cells(shape)
    vertical, horizontal = edges(size[0], rows), edges(size[1], columns)
    canvas = pictures[0].new_empty(3, *size)
    for index, picture in enumerate(pictures):
        row, column = divmod(index, columns)
        top, bottom = vertical[row], vertical[row + 1]
        left, right = horizontal[column], horizontal[column + 1]
        canvas[:, top:bottom, left:right] = _cover(picture, bottom - top, right - left)
    return canvas


def edges(length: int, parts: int) -> list[int]:
    """Where the cells begin and end: 224 in 3 parts -> [0, 75, 149, 224]."""
    return [round(i * length / parts) for i in range(parts + 1)]


def scores(maps: Tensor, shape: str) -> tuple[Tensor, Tensor]:
    """Maps (cells,H,W), the k-th of the class in cell k -> share of positive relevance there, and hit; each (cells,).

    Of several equal maxima the share that lies in the cell counts, so a constant map hits by chance and not by
    where memory begins. A map without anything positive points nowhere: 0.
    """
    rows, columns = cells(shape)
    vertical, horizontal = edges(maps.shape[1], rows), edges(maps.shape[2], columns)
    share, hit = maps.new_zeros(len(maps), dtype=torch.float64), maps.new_zeros(len(maps), dtype=torch.float64)
    for k, evidence in enumerate(maps.double()):
        row, column = divmod(k, columns)
        inside = (slice(vertical[row], vertical[row + 1]), slice(horizontal[column], horizontal[column + 1]))
        positive, highest = evidence.clamp(min=0), evidence == evidence.max()
        if positive.any():
            share[k] = positive[inside].sum() / positive.sum()
            hit[k] = highest[inside].sum().double() / highest.sum()
    return share, hit


def _cover(picture: Tensor, height: int, width: int) -> Tensor:
    scale = max(height / picture.shape[1], width / picture.shape[2])
    size = (max(height, round(picture.shape[1] * scale)), max(width, round(picture.shape[2] * scale)))
    if size != picture.shape[1:]:
        picture = F.interpolate(picture[None], size=size, mode="bilinear", antialias=True, align_corners=False)[0]
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    return picture[:, top : top + height, left : left + width]
