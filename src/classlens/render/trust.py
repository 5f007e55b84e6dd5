"""The figure of a trust card: the map, the same map with uncertain places faded, and the reasons.

>>> figure(explanation.trust()).savefig("trust.png")
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from classlens.render.colours import RGB, Scale, legend, overlay, pixels_of, shared_scale
from classlens.render.outlines import overlay_of
from classlens.render.panels import QUIET, draw, foot, head, panels
from classlens.render.words import class_name, probability_text, question_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from classlens.trust import Trust

_COLOURS = {"trust": "#1b7f3b", "doubtful": "#b26a00", "do not trust": "#b3141e"}
_MARKS = {"trust": "+", "doubtful": "?", "do not trust": "−"}
_WIDTH = 50  # characters of a line of the card


def figure(trust: Trust) -> Figure:
    """The picture, its map, the map faded, and the card."""
    e, row, k = trust.explanation, trust.row, trust.k
    height, width = e.maps.shape[-2:]
    fig, ((photo, plain, sure, card),) = panels(1, 4, height / width)
    draw(photo, pixels_of(e.pictures[row]))
    head(photo, "picture")
    draw(plain, overlay_of(e, row, k))
    head(plain, class_name(e, row, k), probability_text(e.probability(row, k)))
    if trust.measures.places is None:
        sure.set_axis_off()
    else:
        draw(sure, faded(trust))
        head(sure, "uncertain places faded")
    _card(card, trust)
    foot(fig, question_text(e), (e.method, e.model), legend(e.signed), ("against" if e.signed else "none", "for"))
    return fig


def faded(trust: Trust) -> RGB:
    """The overlay of a map whose colours fade where its evidence varies over slightly changed pictures."""
    e = trust.explanation
    evidence, scale = fading(trust)
    return overlay(e.pictures[trust.row], evidence, e.signed, scale=scale)


def fading(trust: Trust) -> tuple[Tensor, Scale]:
    """The evidence of a map, weaker where it varies over slightly changed pictures, and the scale of the map's colours.

    >>> evidence, scale = fading(e.trust())
    """
    e, places = trust.explanation, trust.measures.places
    evidence = e.maps[trust.row, trust.k].double().cpu()
    scale = shared_scale(evidence, e.signed)
    if places is not None:
        certainty = torch.from_numpy(np.ascontiguousarray(places.certainty))[None, None]
        smooth = F.interpolate(certainty, tuple(evidence.shape), mode="bilinear", align_corners=False)[0, 0]
        evidence = scale[0] + (evidence - scale[0]) * smooth
    return evidence, scale


def _card(axes: Axes, trust: Trust) -> None:
    axes.set_axis_off()
    axes.set(xlim=(0, 1), ylim=(0, 1))
    axes.set_title(trust.verdict, loc="left", fontsize=12, fontweight="bold", color=_COLOURS[trust.verdict], pad=5)
    y, step = 0.99, 0.039
    for reason in trust.reasons:
        axes.text(
            0.0, y, _MARKS[reason.verdict], va="top", fontsize=8, fontweight="bold", color=_COLOURS[reason.verdict]
        )
        for line in textwrap.wrap(reason.text, _WIDTH):
            axes.text(0.06, y, line, va="top", fontsize=7.5, parse_math=False)
            y -= step
        y -= step / 3
    for line in textwrap.wrap(trust.where, _WIDTH):
        axes.text(0.06, y, line, va="top", fontsize=7.5, color=QUIET, parse_math=False)
        y -= step
