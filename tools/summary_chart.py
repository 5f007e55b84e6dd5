"""One chart of many runs: how much better or worse than agf each method is, in every test and on every network.

    classlens evaluate ... --half B --against agf --out RUN
    python tools/summary_chart.py RUN [RUN ...] --out docs/images/summary.png

A dot is the difference of a method from agf on the same pictures, a line its 95 % interval: on the left of 0 agf is
better. A line that does not touch 0 is significant.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

PANELS = {  # (test, beginning of its settings, metric) -> heading
    ("ranked", "", "AP, rank 1"): "soft AP, likeliest class",
    ("ranked", "", "AP, rank 2"): "soft AP, second class",
    ("ranked", "", "AP, rank 3"): "soft AP, third class",
    ("ranked", "", "detail, rank 1"): "detail at outlines",
    ("ranked", "", "accuracy, rank 1"): "pixel accuracy",
    ("ranked", "", "change, rank 1"): "fall of the logit (in logits)",
    ("pointing", "", "share in the right cell"): "2x2 share",
    ("perturbation", "", "negative AUC, accuracy"): "negative AUC",
    ("disconnected", "DiFull, input", "share in the cell"): "DiFull, input",
    ("disconnected", "DiPart, input", "share in the cell"): "DiPart, input",
    ("cue", "Planted sticker", "on the cue"): "evidence on a planted sticker",
    ("cue", "Planted caption", "on the cue"): "evidence on a planted caption",
    ("cue", "Planted border", "on the cue"): "evidence on a planted border",
    ("idsds", "", "rank correlation"): "IDSDS (correlation)",
    ("road", "", "deletion"): "ROAD, deletion",
    ("repeatability", "", "correlation, shift"): "repeatability, shift (correlation)",
}
COLOURS = {
    "agf-release": "#8c6bb1", "gradcam": "#e6550d", "finer-cam": "#fdae6b", "fullgrad": "#3182bd", "clrp": "#31a354",
    "contrastive-excitation-bp": "#a1d99b", "lrp-epsilon-plus-flat": "#636363", "gradient-x-input": "#bdbdbd",
}  # fmt: skip
MINUS = ", method − agf"
FEW = 6  # fewer pictures have no interval to trust


@dataclass(frozen=True)
class Difference:
    """A method less agf; more is better."""

    panel: tuple[str, str, str]
    model: str
    method: str
    value: float
    low: float
    high: float


def differences(run: Path) -> Iterator[Difference]:
    """The rows of a run that belong to a panel."""
    with (run / "table.csv").open(newline="") as lines:
        for row in csv.DictReader(lines):
            panel = next(
                (p for p in PANELS if p[::2] == (row["test"], row["metric"]) and row["settings"].startswith(p[1])), None
            )
            if panel and row["settings"].endswith(MINUS) and row["method"] in COLOURS and int(row["n"]) >= FEW:
                ends = [float(row[name]) for name in ("value", "low", "high")]
                if row["better"] == "less":
                    ends = [-ends[0], -ends[2], -ends[1]]
                yield Difference(panel, row["model"].split("@")[0], row["method"], *ends)


def draw(place: Axes, found: list[Difference], models: list[str]) -> None:
    """One panel: networks below each other, the methods of each beside each other."""
    place.axvline(0, color="#444444", linewidth=1)
    for d in found:
        offset = (list(COLOURS).index(d.method) - (len(COLOURS) - 1) / 2) / (len(COLOURS) + 2)
        y = models.index(d.model) + offset
        place.plot([d.low, d.high], [y, y], color=COLOURS[d.method], linewidth=1.6, solid_capstyle="round")
        place.plot(d.value, y, "o", color=COLOURS[d.method], markersize=4)
    place.set_ylim(len(models) - 0.5, -0.5)
    place.set_yticks(range(len(models)), models)
    place.tick_params(length=0, labelsize=8)
    place.xaxis.set_major_locator(MaxNLocator(5, integer=any(abs(d.value) > 1 for d in found)))
    place.grid(axis="x", color="#dddddd", linewidth=0.6)
    for y in range(1, len(models)):
        place.axhline(y - 0.5, color="#eeeeee", linewidth=0.8)
    for edge in place.spines.values():
        edge.set_visible(False)


def main() -> None:
    """Read the runs and write the chart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of `classlens evaluate --against agf`")
    parser.add_argument("--out", type=Path, required=True, help="the chart")
    options = parser.parse_args()
    found = [d for run in options.runs for d in differences(run)]
    if not found:
        raise SystemExit("no run has differences from agf; evaluate with --against agf")
    models = sorted({d.model for d in found})
    panels = {panel: heading for panel, heading in PANELS.items() if any(d.panel == panel for d in found)}
    rows = -(-len(panels) // 4)
    figure, grid = plt.subplots(
        rows, 4, figsize=(12.5, 0.4 + 3.1 * rows), sharey=True, layout="constrained", squeeze=False
    )
    for place in grid.flat[len(panels) :]:
        place.set_axis_off()
    for place, (panel, heading) in zip(grid.flat, panels.items(), strict=False):
        draw(place, [d for d in found if d.panel == panel], models)
        place.set_title(heading, fontsize=9.5)
    shown = [method for method in COLOURS if any(d.method == method for d in found)]
    marks = [plt.Line2D([], [], color=COLOURS[method], marker="o", markersize=4) for method in shown]
    figure.legend(marks, shown, loc="outside lower center", ncols=len(shown), frameon=False, fontsize=9)
    figure.suptitle("Difference from agf on the same pictures, in points: on the left, agf is better", fontsize=11)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out, dpi=110)


if __name__ == "__main__":
    main()
