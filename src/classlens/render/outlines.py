"""The region or box that a question is about, drawn on its overlay.

>>> overlay_of(explanation, row=0, k=0)         # (H,W,3) uint8
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from classlens.core.targets import Asked, Box
from classlens.render.colours import RGB, Scale, overlay

if TYPE_CHECKING:
    from classlens.core.targets.questions import Outline
    from classlens.explanation import Explanation

OUTLINE = (255, 212, 0)  # neither red nor blue, and bright on a grey picture
_LEAST = 7  # pixels: a smaller box is drawn larger, around its centre


def overlay_of(explanation: Explanation, row: int, k: int, scale: Scale | None = None) -> RGB:
    """The overlay of a map, with the boxes and regions of its question."""
    pixels = overlay(explanation.pictures[row], explanation.maps[row, k], explanation.signed, scale=scale)
    target = explanation.target(row, k)
    return outlined(pixels, target.found.outlines) if isinstance(target, Asked) and pixels.ndim == 3 else pixels


def outlined(pixels: RGB, outlines: Sequence[Outline]) -> RGB:
    """A picture with outlines drawn in."""
    drawn = pixels.copy()
    drawn[strokes(outlines, pixels.shape[:2])] = OUTLINE
    return drawn


def strokes(outlines: Sequence[Outline], size: tuple[int, ...]) -> NDArray[np.bool_]:
    """(H,W): the pixels of the lines, on a picture of the network's input size."""
    lines = np.zeros(size[:2], bool)
    for outline in outlines:
        lines |= edge(_filled(outline, size) if isinstance(outline, Box) else _array(outline))
    return lines


def edge(inside: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The pixels of a mask that have a neighbour outside of it, or lie at the border of the picture.

    >>> edge(np.ones((3, 3), bool)).sum()
    8
    """
    padded = np.pad(inside, 1)
    within = padded[1:-1, :-2] & padded[1:-1, 2:] & padded[:-2, 1:-1] & padded[2:, 1:-1]
    return inside & ~within


def _filled(box: Box, size: tuple[int, ...]) -> NDArray[np.bool_]:
    filled = np.zeros(size[:2], bool)
    (top, bottom), (left, right) = (_span(*ends) for ends in ((box.top, box.bottom), (box.left, box.right)))
    filled[max(top, 0) : max(bottom, 0), max(left, 0) : max(right, 0)] = True
    return filled


def _span(low: float, high: float) -> tuple[int, int]:
    start, stop = round(low), round(high)
    more = max(0, -(-(_LEAST - (stop - start)) // 2))
    return start - more, stop + more


def _array(mask: Tensor) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = mask.cpu().numpy().astype(bool)
    return found
