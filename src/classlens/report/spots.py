"""Places on the grid of 16 x 16 cells: connected parts, their names, and as much elsewhere.

>>> cells = np.zeros((16, 16), bool)
>>> cells[13:, :3] = True
>>> ninth(cells), central(cells)
('bottom-left', False)
"""

from __future__ import annotations

import numpy as np

from classlens.report.measure import Bools, Floats

_THIRDS = ("top", "centre", "bottom"), ("left", "centre", "right")


def smoothed(grid: Floats) -> Floats:
    """The mean over each cell (of the last two axes) and its eight neighbours: maps are coarse."""
    padded = np.pad(grid, [(0, 0)] * (grid.ndim - 2) + [(1, 1), (1, 1)], mode="edge")
    height, width = grid.shape[-2:]
    return np.asarray(sum(padded[..., y : y + height, x : x + width] for y in range(3) for x in range(3)) / 9)


def connected(chosen: Bools) -> list[Bools]:
    """The groups of cells that touch at a side."""
    left = {(int(y), int(x)) for y, x in np.argwhere(chosen)}
    parts = []
    while left:
        part, edge = np.zeros_like(chosen), [left.pop()]
        while edge:
            y, x = edge.pop()
            part[y, x] = True
            for near in ((y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)):
                if near in left:
                    left.remove(near)
                    edge.append(near)
        parts.append(part)
    return parts


def ninth(cells: Bools) -> str:
    """The ninth of the picture in which a place has its middle: `bottom-left`."""
    middle = (np.argwhere(cells).mean(0) + 0.5) / np.array(cells.shape) * 3
    row, column = (names[min(2, int(x))] for names, x in zip(_THIRDS, middle, strict=True))
    return row if row == column else f"{row}-{column}"


def central(cells: Bools) -> bool:
    """Whether the middle of a place lies in the middle half of the picture, where objects usually are."""
    middle = np.argwhere(cells).mean(0) + 0.5
    return bool((abs(middle - np.array(cells.shape) / 2) < np.array(cells.shape) / 4).all())


def elsewhere(chosen: Bools, count: int, seed: int) -> list[Bools]:
    """The same shape at other places: moved (around the border) or mirrored, with the least overlap.

    As many single cells would be a weaker test: their neighbours tell what they held.
    """
    rows, columns = chosen.shape
    moves = np.random.default_rng(seed).permutation(2 * rows * columns)  # equal overlaps: in random order
    places = [np.roll(chosen[:, :: 1 - 2 * (m % 2)], (m // 2 // columns, m // 2 % columns), (0, 1)) for m in moves]
    return sorted(places, key=lambda place: int((place & chosen).sum()))[:count]
