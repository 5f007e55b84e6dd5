"""curves.png: what the tables say, drawn. One panel for each curve or comparison, one colour for each method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from classlens.evaluate.panels import Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Told apart also without colour vision and on grey paper: Okabe and Ito's colours, then again with other strokes.
_COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8c6d1f")
_STROKES = ("-", "--", ":", "-.")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_WIDTH, _HEIGHT, _COLUMNS = 5.2, 3.7, 2  # inches of a panel


def draw(all_panels: Sequence[Panel], methods: Sequence[str]) -> Figure:
    """All panels, with one legend above them."""
    count = max(1, len(all_panels))
    rows = -(-count // _COLUMNS)
    legend_columns = min(4, len(methods))
    legend = 0.3 + 0.24 * -(-len(methods) // legend_columns)  # inches
    height = rows * _HEIGHT + legend
    layout = ConstrainedLayoutEngine(rect=(0, 0, 1, 1 - legend / height), hspace=0.06, wspace=0.04)
    figure = Figure(figsize=(_WIDTH * _COLUMNS, height), dpi=130, facecolor="white", layout=layout)
    styles = {method: _style(i) for i, method in enumerate(methods)}
    axes = list(figure.subplots(rows, _COLUMNS, squeeze=False).flat)
    for axis, panel in zip(axes, all_panels, strict=False):
        paint = _draw_lines if panel.lines is not None else _draw_points
        paint(axis, panel, styles)
    for axis in axes[len(all_panels) :]:
        axis.set_axis_off()
    handles = [Line2D([], [], label=method, lw=2, ms=6, **style) for method, style in styles.items()]
    figure.legend(
        handles=handles, loc="upper center", ncols=legend_columns, fontsize=11, frameon=False, handlelength=3.2
    )
    return figure


def _style(index: int) -> dict[str, Any]:
    turn = index // len(_COLOURS)
    return {
        "color": _COLOURS[index % len(_COLOURS)],
        "linestyle": _STROKES[(index + turn) % len(_STROKES)],
        "marker": _MARKERS[(index + turn) % len(_MARKERS)],
    }


def _draw_lines(axis: Axes, panel: Panel, styles: Mapping[str, dict[str, Any]]) -> None:
    for method, values in (panel.lines or {}).items():
        axis.plot(panel.x, values, lw=1.8, ms=4.5, **styles[method])
    axis.set_xlabel(panel.xlabel)
    axis.set_ylim(bottom=min(0.0, axis.get_ylim()[0]))
    if panel.ticks:
        axis.set_xticks(panel.x, list(panel.ticks))
    _finish(axis, panel)


def _draw_points(axis: Axes, panel: Panel, styles: Mapping[str, dict[str, Any]]) -> None:
    points = panel.points or {}
    step = 0.8 / max(1, len(points))
    for i, (method, estimates) in enumerate(points.items()):
        for group, found in enumerate(estimates):
            place, colour = group + (i - (len(points) - 1) / 2) * step, styles[method]["color"]
            axis.plot([place, place], [found.low, found.high], lw=2.2, alpha=0.5, color=colour)
            axis.plot([place], [found.value], ms=6.5, color=colour, marker=styles[method]["marker"])
    if panel.chance is not None:
        axis.axhline(panel.chance, color="#777777", lw=1, ls=(0, (4, 3)))
        axis.text(
            len(panel.groups) - 0.5, panel.chance, "chance ", ha="right", va="bottom", fontsize=9, color="#555555"
        )
    for group in range(1, len(panel.groups)):
        axis.axvline(group - 0.5, color="#bbbbbb", lw=0.8)
    axis.set_xticks(range(len(panel.groups)), list(panel.groups), fontsize=9.5)
    axis.set_xlim(-0.5, len(panel.groups) - 0.5)
    _finish(axis, panel)
    axis.grid(visible=False, axis="x")


def _finish(axis: Axes, panel: Panel) -> None:
    axis.set_title(panel.title, fontsize=11, loc="left", parse_math=False)
    axis.set_ylabel(panel.ylabel)
    axis.grid(color="#dddddd", lw=0.7)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
