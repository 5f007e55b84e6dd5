"""curves.png: what the tables say, drawn. One panel for each curve or comparison, one colour for each method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from classlens.evaluate import metrics, perturbation, pointing, sanity
from classlens.evaluate.stats import Estimate
from classlens.evaluate.tables import Table, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Told apart also without colour vision and on grey paper: Okabe and Ito's colours, then again with other strokes.
_COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8c6d1f")
_STROKES = ("-", "--", ":", "-.")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_WIDTH, _HEIGHT, _COLUMNS = 5.2, 3.7, 2  # inches of a panel


@dataclass(frozen=True)
class Panel:
    """One set of axes: a line over x for each method, or a value with its interval for each metric and method."""

    title: str
    ylabel: str
    xlabel: str = ""
    x: tuple[float, ...] = ()
    lines: Mapping[str, NDArray[np.float64]] | None = None  # method -> (len(x),)
    groups: tuple[str, ...] = ()
    points: Mapping[str, Sequence[Estimate]] | None = None  # method -> one for each group
    chance: float | None = None


def panels(table: Table, rows: Mapping[str, pa.Table]) -> list[Panel]:
    """What to draw of a test: curves where there are some, else its metrics side by side."""
    there = {method: found for method, found in rows.items() if len(found)}
    if not there or not table.metrics:
        return []
    if table.config.test == "perturbation":
        return _perturbation(table, there)
    if table.config.test == "sanity":
        return [*_sanity(table, there), _comparison(table, "other class")]
    return [_comparison(table)]


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


def _perturbation(table: Table, rows: Mapping[str, pa.Table]) -> list[Panel]:
    found = []
    shown = [
        against for against in ("accuracy", "agreement") if any(against in metric.name for metric in table.metrics)
    ]
    for against in shown:
        for direction in perturbation.DIRECTIONS:
            first = "least" if direction == "negative" else "most"
            lines = {method: np.nanmean(metrics.curves(part, direction, against), 0) for method, part in rows.items()}
            found.append(
                Panel(
                    f"{direction.capitalize()} perturbation ({table.config['fill']}): {table.data}",
                    f"{against}, %",
                    f"pixels removed, {first} relevant first, %",
                    (0.0, *(100 * fraction for fraction in perturbation.FRACTIONS)),
                    {method: 100 * line for method, line in lines.items()},
                )
            )
    return found


def _sanity(table: Table, rows: Mapping[str, pa.Table]) -> list[Panel]:
    names = {"ssim": "SSIM", "rank": "rank correlation", "hog": "HOG similarity"}
    x = (-10.0, *(100 * stage for stage in table.config["stages"]))
    found = []
    for measure in sanity.MEASURES:
        lines = {}
        for method, part in rows.items():
            values = metrics.stages(part, measure)
            there = ~np.isnan(values).all(0)
            means = np.full(values.shape[1], np.nan)
            means[there] = np.nanmean(values[:, there], 0)
            lines[method] = np.array([1.0, *means])
        found.append(
            Panel(f"Randomised layers: {table.data}", names[measure], "layers randomised from the top, %", x, lines)
        )
    return found


def _comparison(table: Table, only: str = "") -> Panel:
    """The table's metrics side by side (those whose name begins with `only`)."""
    chosen = [i for i, metric in enumerate(table.metrics) if metric.name.startswith(only)]
    names = [table.metrics[i].name.removeprefix(f"{only}, ") for i in chosen]
    chance = None
    if table.config.test == "pointing":
        rows, columns = pointing.cells(table.config["shape"])
        chance = 100 / (rows * columns)
    return Panel(
        f"{only.capitalize() or title(table.config)}: {table.data}",
        "similarity" if only else "%",
        groups=tuple(names),
        points={method: [found[i] for i in chosen] for method, found in table.rows.items()},
        chance=chance,
    )


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
    if panel.x[0] < 0:  # sanity: "nothing" and "the topmost layer alone" would both stand at 0
        axis.set_xticks(panel.x, ["none", "top", *(f"{x:.0f}" for x in panel.x[2:])])
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
