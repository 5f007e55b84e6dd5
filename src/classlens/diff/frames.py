"""Where two networks look at the same picture: maps of different crops and sizes on one grid.

    >>> frame = Frame.of(before.preprocess, after.preprocess, photo)
    >>> frame.cells(0, share).shape, frame.cells(1, other_share).shape
    ((16, 16), (16, 16))

If both networks have the same preprocessing, the grid covers their input. Otherwise it covers the part of the picture
that both see; evidence elsewhere is counted apart (`outside`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from classlens.models import Preprocess
from classlens.report.measure import CELLS, FRAME, Bools, Floats, pixels

_DRAWN = 224  # pixels of a drawn map


@dataclass(frozen=True)
class Window:
    """A part of a picture, in shares of its height and width."""

    top: float = 0.0
    bottom: float = 1.0
    left: float = 0.0
    right: float = 1.0

    def shrunk(self, share: float) -> Window:
        """Without the outer `share` of each side."""
        high, wide = share * (self.bottom - self.top), share * (self.right - self.left)
        return Window(self.top + high, self.bottom - high, self.left + wide, self.right - wide)

    def __and__(self, other: Window) -> Window:
        return Window(
            max(self.top, other.top), min(self.bottom, other.bottom),
            max(self.left, other.left), min(self.right, other.right),
        )  # fmt: skip


@dataclass(frozen=True)
class Frame:
    """One picture as two networks see it."""

    preprocesses: tuple[Preprocess, Preprocess] | None  # None: both have the same, and the frame is their input
    size: tuple[int, int]  # (height, width) of the picture
    window: Window

    @classmethod
    def of(cls, one: Preprocess, other: Preprocess, picture: Image.Image) -> Frame:
        """The frame of a picture for two preprocessings."""
        size = (picture.height, picture.width)
        if same_view(one, other):
            return cls(None, size, Window())
        return cls((one, other), size, _seen(one, size) & _seen(other, size))

    # ----------------------------------------------------------------------------------------------------- measures

    def cells(self, which: int, values: NDArray[Any]) -> Floats:
        """Values (H,W) of a network's input, summed over the cells of a grid of 16 x 16."""
        return _pooled(self._whole(which, values), self.window, CELLS)

    def border(self, which: int, share: Floats) -> float:
        """Of the evidence in the window, the share in its outer tenth."""
        whole = self._whole(which, share)
        total = _pooled(whole, self.window, 1).item()
        return 1 - _pooled(whole, self.window.shrunk(FRAME), 1).item() / total if total > 0 else 0.0

    def outside(self, which: int, share: Floats) -> float:
        """The share of the evidence outside of the window, where the other network does not look."""
        if self.preprocesses is None:
            return 0.0
        return max(0.0, 1 - _pooled(self._whole(which, share), self.window, 1).item())

    # ------------------------------------------------------------------------------------------------------ pictures

    def hidden(self, which: int, grid: Bools, shape: tuple[int, int]) -> Bools:
        """The pixels (H,W) of a network's input that chosen cells of the grid cover."""
        if self.preprocesses is None:
            return pixels(grid, shape)
        height, width = self.size
        rows = _edges(height, self.window.top, self.window.bottom)
        columns = _edges(width, self.window.left, self.window.right)
        painted = np.zeros(self.size, np.uint8)
        for y, x in np.argwhere(grid):
            painted[rows[y] : rows[y + 1], columns[x] : columns[x + 1]] = 255
        nearest = replace(self.preprocesses[which], interpolation="nearest", fill=(0,))
        return np.asarray(nearest.frame(Image.fromarray(painted))) > 0

    def drawn(self, which: int, evidence: NDArray[Any]) -> Floats:
        """A map on the window, for drawing beside that of the other network."""
        if self.preprocesses is None:
            return np.asarray(evidence, np.float64)
        return _pooled(self._whole(which, evidence), self.window, _DRAWN)

    def photo(self, picture: Image.Image) -> Tensor:
        """The window of a picture (3,224,224) in [0,1]; only for networks with different preprocessing."""
        left, right = (round(x * picture.width) for x in (self.window.left, self.window.right))
        top, bottom = (round(y * picture.height) for y in (self.window.top, self.window.bottom))
        image = picture.convert("RGB").crop((left, top, right, bottom)).resize((_DRAWN, _DRAWN))
        return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1) / 255

    def _whole(self, which: int, values: NDArray[Any]) -> Floats:
        """Values of a network's input on the whole picture; unchanged if the frame is the input."""
        if self.preprocesses is None:
            return np.asarray(values, np.float64)
        height, width = self.size
        maps = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float64))
        whole: Floats = self.preprocesses[which].unframe(maps, height, width).numpy()
        return whole


def same_view(one: Preprocess, other: Preprocess) -> bool:
    """Whether the inputs of two networks show the same part of every picture in the same size."""
    return bool(_geometry(one) == _geometry(other))


def _geometry(preprocess: Preprocess) -> Any:
    """What decides which part of a picture an input shows."""
    return (preprocess.resize, preprocess.crop, preprocess.fit, type(preprocess), getattr(preprocess, "function", None))


def _seen(preprocess: Preprocess, size: tuple[int, int]) -> Window:
    """The part of a picture that its input shows."""
    _, height, width = preprocess.shape
    if preprocess.crop is None:
        return Window()
    seen = preprocess.unframe(torch.ones(height, width), *size) > 0
    (top, bottom), (left, right) = (_ends(seen.any(axis)) for axis in (1, 0))
    return Window(top, bottom, left, right)


def _ends(seen: Tensor) -> tuple[float, float]:
    places = seen.nonzero()[:, 0]
    return float(places[0]) / len(seen), float(places[-1] + 1) / len(seen)


def _pooled(values: Floats, window: Window, count: int) -> Floats:
    """Sums over the cells of a grid on a window; a pixel that lies in two cells is divided between them."""
    rows = _overlaps(values.shape[0], window.top, window.bottom, count)
    columns = _overlaps(values.shape[1], window.left, window.right, count)
    return np.asarray(rows @ values @ columns.T)


def _overlaps(length: int, low: float, high: float, count: int) -> Floats:
    """(count, length): which share of each pixel lies in each cell."""
    edges = length * np.linspace(low, high, count + 1)
    starts, ends = edges[:-1, None], edges[1:, None]
    pixel = np.arange(length)[None]
    return np.asarray(np.clip(np.minimum(pixel + 1, ends) - np.maximum(pixel, starts), 0, 1))


def _edges(length: int, low: float, high: float) -> list[int]:
    return [round(edge) for edge in length * np.linspace(low, high, CELLS + 1)]
