"""The figure of a contrast: image, neighbour, map without and with the neighbour."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from classlens.data.images import to_image
from classlens.render.colours import RGB, legend, overlay
from classlens.render.panels import QUIET, draw, foot, head, panels
from classlens.render.words import probability_text, question_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

    from classlens.explanation import Explanation
    from classlens.selfsup.contrast import Contrast

_PANEL = 2.3  # inches
_SIZE = 8  # font size of a heading: a class and its probability fit above a panel
_ASKED = {
    "difference": ", in what differs from the neighbour",
    "sum": ", in what it shares with the neighbour",
    "none": "",
}
_WITH = {"difference": "differs", "sum": "shared", "none": "alone"}
_ALIKE = {"cosine": "alike"}  # the same heading in every mode


def figure(contrast: Contrast) -> Figure:
    """One row for each image, with the map of its first target.

    >>> figure(explain(model, images, bank)).savefig("neighbours.png")
    """
    maps: list[tuple[str, Explanation]] = [(_WITH[contrast.mode], contrast)]
    if contrast.without is not None:
        maps.insert(0, (_WITH["none"], contrast.without))
    rows, _, height, width = contrast.maps.shape
    fig, axes = panels(rows, 2 + len(maps), height / width, panel=_PANEL)
    for row, (photo, neighbour, *rest) in enumerate(axes):
        draw(photo, _pixels(contrast.pictures[row]))
        head(photo, "image", size=_SIZE)
        _neighbour(neighbour, contrast, row)
        for panel, (words, found) in zip(rest, maps, strict=True):
            draw(panel, overlay(found.pictures[row], found.maps[row, 0], found.signed))
            name = found.name(row, 0)
            head(panel, f"{_ALIKE.get(name, words)}: {name}", probability_text(found.probability(row, 0)), size=_SIZE)
    about = (contrast.method, contrast.model, f"{contrast.metric} distance")
    question = f"{question_text(contrast)}{_ASKED[contrast.mode]}"
    foot(fig, question, about, legend(contrast.signed), ("against" if contrast.signed else "none", "for"))
    return fig


def _neighbour(panel: Axes, contrast: Contrast, row: int) -> None:
    picture = contrast.neighbour_pictures[row]
    head(panel, "nearest neighbour", f"{float(contrast.distances[row]):.3g}", size=_SIZE)
    if picture is not None:
        draw(panel, _pixels(picture))
        return
    panel.set_axis_off()
    panel.text(0.5, 0.5, "its file was deleted", ha="center", va="center", fontsize=8, color=QUIET)


def _pixels(picture: Tensor) -> RGB:
    return np.asarray(to_image(picture))
