"""Volumes and videos in figures: a strip of slices or frames, along the first axis.

>>> strip(explanation.maps[0])          # of 32 slices, the strongest of each sixth
[3, 8, 12, 17, 22, 30]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from classlens.render.colours import RGB, pixels_of
from classlens.render.outlines import overlay_of
from classlens.render.panels import draw, head, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from classlens.explanation import Explanation

_ABREAST = 6  # slices of a strip
_PANEL = 2.0  # inches


def strip(maps: Tensor, count: int = _ABREAST) -> list[int]:
    """The slices that a figure of maps (K,D,H,W) shows: the depth in equal parts, of each the strongest slice."""
    strength = maps.detach().cpu().double().abs().flatten(2)
    strength = strength / strength.sum((1, 2), keepdim=True).clamp(min=1e-300)  # each class counts the same
    of_slice = strength.sum((0, 2)).numpy()
    parts = np.array_split(np.arange(len(of_slice)), min(count, len(of_slice)))
    return [int(part[of_slice[part].argmax()]) for part in parts]


def strongest(evidence: Tensor) -> int:
    """The slice of a map (D,H,W) with the most evidence for the class; without any, the middle one."""
    positive = evidence.detach().cpu().double().clamp(min=0).flatten(1).sum(1)
    return int(positive.argmax()) if positive.any() else len(positive) // 2


def flat(explanation: Explanation, row: int, k: int, at: int | None = None) -> tuple[RGB, RGB]:
    """The picture and the overlay of a map (H,W,3); of a volume, slice `at`."""
    pixels, colours = pixels_of(explanation.pictures[row]), overlay_of(explanation, row, k)
    return (pixels, colours) if at is None else (pixels[at], colours[at])


def side_by_side(explanation: Explanation, row: int, k: int) -> RGB:
    """The overlay of a map; of a volume, the slices of its strip from left to right."""
    _, colours = flat(explanation, row, k)
    if colours.ndim == 3:
        return colours
    return np.concatenate(list(colours[strip(explanation.maps[row])]), axis=1)


def strips(explanation: Explanation, names: list[list[tuple[str, str]]]) -> Figure:
    """For each image a strip of slices of the picture, then one for each class; `names` are their headings."""
    rows, classes, depth, height, width = explanation.maps.shape
    shown = [strip(explanation.maps[row]) for row in range(rows)]
    fig, axes = panels(rows * (1 + classes), len(shown[0]), height / width, panel=_PANEL)
    lines = iter(axes)
    for row, chosen in enumerate(shown):
        pictures = pixels_of(explanation.pictures[row])[chosen]
        _line(next(lines), pictures, "picture", [f"{i + 1} of {depth}" for i in chosen])
        for k, (name, chance) in enumerate(names[row]):
            _line(next(lines), flat(explanation, row, k)[1][chosen], name, ["" for _ in chosen[1:]] + [chance])
    return fig


def _line(panels_of_line: list[Axes], pictures: RGB, name: str, remarks: list[str]) -> None:
    """Fill a line of panels; its name is above the first one."""
    for i, (panel, picture, remark) in enumerate(zip(panels_of_line, pictures, remarks, strict=True)):
        draw(panel, picture)
        head(panel, "" if i else name, remark)
