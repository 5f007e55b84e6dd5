"""Make src/classlens/assets/demo.jpg: a cat behind a table with an espresso, from two CC0 photographs.

    python tools/demo_scene.py src/classlens/assets/demo.jpg

Needs scikit-image, which brings the photographs along. The numbers below were chosen by eye, and so that
EfficientNet-Lite0 finds both classes about equally likely in the centre it looks at.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from skimage import data

EDGE = 512
CAT = (0.94, 0, 0)  # scale, left, top
COFFEE = (0.70, 72, 226)
# The table's far edge: its angle, how far it is from the middle of the scene, over how many pixels it fades.
TABLE = (72.0, 5.0, 40.0)
# What stands in front of the cat, as ellipses in the coffee photograph: centre x and y, radii.
CUP, SAUCER = (289, 112, 118, 97), (279, 231, 201, 158)

Pixels = NDArray[np.float64]


def scene() -> Image.Image:
    """The composed picture, always the same."""
    cat, coffee = _place(data.chelsea(), *CAT), _place(data.coffee(), *COFFEE)
    y, x = np.mgrid[:EDGE, :EDGE].astype(float)
    front = np.maximum.reduce([_table(x, y), _ellipse(x, y, *CUP), _ellipse(x, y, *SAUCER)])[..., None]
    return Image.fromarray((cat * (1 - front) + coffee * front).round().clip(0, 255).astype(np.uint8))


def _place(photo: NDArray[np.uint8], scale: float, left: int, top: int) -> Pixels:
    """The photograph, scaled and put at a place of the scene; its borders are mirrored to fill the rest."""
    height, width = (round(n * scale) for n in photo.shape[:2])
    small = np.asarray(Image.fromarray(photo).resize((width, height), Image.Resampling.LANCZOS), dtype=float)
    rest = [(top, max(0, EDGE - top - height)), (left, max(0, EDGE - left - width)), (0, 0)]
    return np.pad(small, rest, mode="symmetric")[:EDGE, :EDGE]


def _table(x: Pixels, y: Pixels) -> Pixels:
    angle, offset, fade = TABLE
    direction = np.deg2rad(angle)
    distance = (x - EDGE / 2) * np.cos(direction) + (y - EDGE / 2) * np.sin(direction) - offset
    t = np.clip(distance / fade + 0.5, 0, 1)
    return t * t * (3 - 2 * t)


def _ellipse(x: Pixels, y: Pixels, centre_x: float, centre_y: float, radius_x: float, radius_y: float) -> Pixels:
    scale, left, top = COFFEE
    reach = np.hypot((x - left - centre_x * scale) / radius_x, (y - top - centre_y * scale) / radius_y) / scale
    return np.clip((1 - reach) * radius_x * scale / 5 + 0.5, 0, 1)  # the rim is five pixels soft


if __name__ == "__main__":
    scene().save(Path(sys.argv[1]), quality=92, optimize=True)
