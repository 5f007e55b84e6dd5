"""Measures where the evidence lies: on the object, on the border, how spread out, and how two maps differ.

All measures use the positive evidence of one map, as shares that sum to 1:

    >>> share = positive_shares(np.array([[3.0, -2.0], [1.0, 0.0]]))
    >>> share.tolist()
    [[0.75, 0.0], [0.25, 0.0]]
    >>> inside(share, np.array([[1, 0], [0, 0]]))
    0.75
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from classlens.data.masks import IGNORE, Mask

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

FRAME = 0.1  # of each side: the border of the image
# Spread is measured on cells, not pixels; otherwise noise would look concentrated.
CELLS = 16  # along each side
HALF = 0.5


def positive_shares(evidence: NDArray[Any]) -> Floats | None:
    """The evidence for the class (H,W) as shares of its sum; None if there is none."""
    positive = np.maximum(np.asarray(evidence, np.float64), 0)
    total = positive.sum()
    return positive / total if total > 0 else None


def against(evidence: NDArray[Any]) -> float:
    """The share of all evidence that is against the class."""
    values = np.asarray(evidence, np.float64)
    size = np.abs(values).sum()
    return float(-np.minimum(values, 0).sum() / size) if size > 0 else 0.0


# ------------------------------------------------------------------------------------------- object and border


def inside(share: Floats, mask: Mask) -> float | None:
    """The share of the evidence on labelled pixels that lies on the object (mask > 0); None without such evidence."""
    labelled = mask != IGNORE
    total = share[labelled].sum()
    return float(share[labelled & (mask > 0)].sum() / total) if total > 0 else None


def area(mask: Mask) -> float | None:
    """The share of the labelled pixels that the object covers: the `inside` of an evenly spread map."""
    labelled = mask != IGNORE
    return float((labelled & (mask > 0)).sum() / labelled.sum()) if labelled.any() else None


def covered(mask: Mask) -> Floats:
    """Which share of the labelled pixels of each cell (16,16) the object covers."""
    known = mask != IGNORE
    labelled, found = cells(known.astype(float)), cells((known & (mask > 0)).astype(float))
    return np.asarray(np.divide(found, labelled, out=np.zeros_like(found), where=labelled > 0))


def frame(height: int, width: int, width_of_frame: float = FRAME) -> Bools:
    """The border of the image: the outer tenth of its height above and below, and of its width left and right.

    >>> frame(10, 10).sum()
    36
    """
    rows, columns = (max(1, round(width_of_frame * n)) for n in (height, width))
    found = np.ones((height, width), bool)
    found[rows : height - rows, columns : width - columns] = False
    return found


# ------------------------------------------------------------------------------------------------------ spread


def cells(share: Floats, count: int = CELLS) -> Floats:
    """The shares of a grid's cells, at most `count` along each side."""
    height, width = (min(count, n) for n in share.shape)
    grid = np.zeros((height, width))
    np.add.at(grid, _cell_of(share.shape, (height, width)), share)
    return grid


def pixels(grid: Bools, shape: tuple[int, int]) -> Bools:
    """Selected cells as selected pixels: the inverse of `cells`."""
    found: Bools = grid[_cell_of(shape, grid.shape)]
    return found


def half_cells(grid: Floats) -> Bools:
    """The fewest cells that hold half of the evidence; their share of all cells measures the spread.

    >>> half_cells(np.array([[0.6, 0.2], [0.1, 0.1]])).tolist()
    [[True, False], [False, False]]
    """
    order = np.argsort(-grid, axis=None, kind="stable")
    held = np.cumsum(grid.ravel()[order])
    chosen = np.zeros(grid.size, bool)
    chosen[order[: int(np.searchsorted(held, HALF * held[-1] - 1e-12)) + 1]] = True
    return chosen.reshape(grid.shape)


def _cell_of(shape: tuple[int, ...], grid: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    rows, columns = (np.arange(n) * count // n for n, count in zip(shape, grid, strict=True))
    return rows[:, None], columns[None, :]


# -------------------------------------------------------------------------------------------------- two maps


def overlap(one: Floats, other: Floats) -> float:
    """The share of two maps' positive evidence that lies in the same cells: 1 if all of it does, 0 if none does."""
    return float(np.minimum(cells(one), cells(other)).sum())


def difference(one: NDArray[Any], other: NDArray[Any]) -> Floats:
    """The difference of two maps, each scaled to the same total first.

    >>> difference(np.array([[1.0, 1.0]]), np.array([[4.0, 0.0]])).tolist()
    [[-0.5, 0.5]]
    """
    return _unit(one) - _unit(other)


def _unit(evidence: NDArray[Any]) -> Floats:
    values = np.asarray(evidence, np.float64)
    size = np.abs(values).sum()
    return values / size if size > 0 else values
