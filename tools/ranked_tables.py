"""The tables of docs/results.md on ranked classes: one for each model, with the three ranks in one cell.

    classlens evaluate ranked ... --half B --against agf --out RUN
    python tools/ranked_tables.py RUN [RUN ...]

▲ and ▼: better and worse than agf on the same images, beyond the 95 % interval of the difference.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

MEASURES = ("AP", "accuracy", "detail", "change", "own", "correlation")
MINUS = ", method − agf"
FEW = 6  # five differences have the same sign by chance in 6 % of all cases
Cells = dict[str, dict[str, dict[str, str]]]  # method -> metric -> line of table.csv


def read(run: Path) -> tuple[str, Cells, Cells]:
    """The model, the scores, and the differences from agf."""
    scores: Cells = {}
    differences: Cells = {}
    model = ""
    with (run / "table.csv").open(newline="") as lines:
        for line in csv.DictReader(lines):
            if line["test"] == "ranked":
                model = line["model"].split("@")[0]
                part = differences if line["settings"].endswith(MINUS) else scores
                part.setdefault(line["method"], {})[line["metric"]] = line
    if not differences:
        raise SystemExit(f"{run} has no differences from agf; evaluate ranked with --against agf")
    return model, scores, differences


def table(run: Path) -> str:
    """One Markdown table."""
    model, scores, differences = read(run)
    first = next(iter(scores["agf"].values()))
    lines = [f"**{model}** ({first['n']} images)", "", f"| method | {' | '.join(MEASURES)} |", "|---" * 7 + "|"]
    for method, row in scores.items():
        cells = []
        for measure in MEASURES:
            names = [name for name in row if name.startswith(f"{measure}, ")]
            cells.append(" ".join(_cell(row[name], differences.get(method, {}).get(name)) for name in names))
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(score: dict[str, str], difference: dict[str, str] | None) -> str:
    return marked(score, difference, 1 if score["metric"].startswith(MEASURES[:3]) else 2)


def marked(score: dict[str, str], difference: dict[str, str] | None, digits: int) -> str:
    """The value, with ▲ or ▼ where it is better or worse than agf's, beyond the interval of the difference."""
    value = f"{float(score['value']):.{digits}f}".replace("-", "−")
    if difference is None or not score["better"] or int(difference["n"]) < FEW:
        return value
    low, high = float(difference["low"]), float(difference["high"])
    return value + ("" if low <= 0 <= high else "▲" if (low > 0) == (score["better"] == "more") else "▼")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders that classlens evaluate wrote")
    print("\n\n".join(table(run) for run in parser.parse_args().runs))
