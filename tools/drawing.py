"""One image of a figure: shared by `ranked_classes.py` and `two_class_scenes.py`."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes


def draw(place: Axes, pixels: np.ndarray, head: str = "", below: str = "", side: str = "") -> None:
    """An image without a frame, with text above it, below it and on its left."""
    place.axis("on")
    place.imshow(pixels)
    place.set_xticks([])
    place.set_yticks([])
    for edge in place.spines.values():
        edge.set_visible(False)
    place.set_title(head, fontsize=8, pad=3)
    place.set_xlabel(below, fontsize=6.5, labelpad=2)
    place.set_ylabel(side, fontsize=8, labelpad=2)
