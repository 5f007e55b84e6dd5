"""Draw the curves of `classlens evaluate removal`, and print their areas: one panel and one row for each network.

    python tools/removal_curves.py run-lite0 run-mobilenet --method lrp-epsilon-plus-flat --out curves.png

Bands are 95 % intervals of the mean over images (bootstrap).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from matplotlib.figure import Figure
from numpy.typing import NDArray

from classlens.evaluate.tests.removal import FRACTIONS, ORDERS, under

COLOURS = ("#D55E00", "#E69F00", "#0072B2", "#009E73", "#CC79A7", "#777777")
WORDS = {
    "evidence": "by evidence (concepts)",
    "relevance": "by relevance (method)",
    "product": "activation x gradient",
    "random": "random order",
}


def curves(run: Path, method: str, order: str) -> NDArray[np.float64]:
    """(n,1+fractions): the probability of the class in % of the clean one."""
    tables = [pq.read_table(file) for file in sorted((run / "rows" / "removal").rglob("*.parquet"))]
    rows = [row[order] for table in tables for row in table.to_pylist() if row["method"] == method]
    found = np.array(rows, float)
    return 100 * found / found[:, :1]


def row(run: Path, method: str) -> str:
    """A row of a table: the area under the curve by evidence in %, and how much larger it is in every other order."""
    areas = {order: 100 * under(curves(run, method, order)) for order in ORDERS}
    by_evidence = areas.pop("evidence")
    shown = [by_evidence, *(area - by_evidence for area in areas.values())]
    cells = [f"{one.mean():.1f} [{low:.1f}, {high:.1f}]" for one in shown for low, high in [interval(one)]]
    return f"| {run.name} | {' | '.join(cells)} | {len(by_evidence)} |"


def interval(found: NDArray[np.float64], seed: int = 0) -> NDArray[np.float64]:
    """(2,...): the interval of the mean over images (n,...)."""
    random = np.random.default_rng(seed)
    means = [found[random.integers(0, len(found), len(found))].mean(0) for _ in range(1000)]
    return np.percentile(means, [2.5, 97.5], axis=0)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--method", default="lrp-epsilon-plus-flat")
    parser.add_argument("--out", type=Path, default=Path("curves.png"))
    given = parser.parse_args()
    figure = Figure(figsize=(4.2 * len(given.runs), 3.9), dpi=110, layout="constrained")
    x = 100 * np.array([0.0, *FRACTIONS])
    print(f"| network | by evidence | {' | '.join(f'{order} less evidence' for order in ORDERS[1:])} | n |")
    print("|---" * (len(ORDERS) + 2) + "|")
    for axis, run in zip(figure.subplots(1, len(given.runs), sharey=True, squeeze=False)[0], given.runs, strict=True):
        for order, colour in zip(ORDERS, COLOURS, strict=True):
            found = curves(run, given.method, order)
            axis.plot(x, found.mean(0), color=colour, lw=2, label=WORDS.get(order, f"by {order}"))
            axis.fill_between(x, *interval(found), color=colour, alpha=0.15, lw=0)
        print(row(run, given.method))
        axis.set_title(f"{run.name} ({len(found)} images)", loc="left", fontsize=11)
        axis.set_xlabel("channels removed, %")
        axis.grid(color="#dddddd", lw=0.7)
        axis.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("probability of the class, % of the clean one")
    figure.axes[-1].legend(frameon=False, fontsize=9)
    figure.savefig(given.out)
    print(f"-> {given.out}")


if __name__ == "__main__":
    main()
