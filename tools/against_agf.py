"""The tables of docs/results.md that set `agf` against every method: one for each model.

    classlens evaluate all ... --half B --against agf --out RUN
    python tools/against_agf.py RUN [RUN ...]

Each cell has a method's score and, in brackets, the 95 % interval of its difference from agf's on the same pictures.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

COLUMNS = {  # (test, metric) -> heading
    ("perturbation", "negative AUC, accuracy"): "negative AUC",
    ("segmentation", "pixel accuracy"): "pixel accuracy",
    ("segmentation", "mAP (paper)"): "mAP",
    ("segmentation", "AP (soft)"): "AP (soft)",
    ("pointing", "share in the right cell"): "2x2 share",
}
MINUS = ", method − agf"
Key = tuple[str, str]
Row = dict[str, str]
Table = dict[str, dict[Key, Row]]  # by method and column


def read(run: Path) -> tuple[str, Table, Table]:
    """The model, and by method and column the scores and the differences from agf."""
    scores: Table = {}
    differences: Table = {}
    model = ""
    with (run / "table.csv").open(newline="") as lines:
        for row in csv.DictReader(lines):
            key = row["test"], row["metric"]
            if key not in COLUMNS or (key[0] == "pointing" and "2x2" not in row["settings"]):
                continue
            model = row["model"].split("@")[0]
            cells = (differences if row["settings"].endswith(MINUS) else scores).setdefault(row["method"], {})
            if key in cells:
                raise SystemExit(f"{run} has {key[1]} more than once; evaluate on one data set of each kind")
            cells[key] = row
    if not differences:
        raise SystemExit(f"{run} has no differences from agf; evaluate with --against agf")
    return model, scores, differences


def tables(runs: list[Path]) -> str:
    """One Markdown table for each model; the runs of one model are put side by side."""
    models: dict[str, tuple[Table, Table]] = {}
    for run in runs:
        model, *found = read(run)
        for whole, part in zip(models.setdefault(model, ({}, {})), found, strict=True):
            for method, row in part.items():
                whole.setdefault(method, {}).update(row)
    return "\n\n".join(_table(model, *of_model) for model, of_model in models.items())


def _table(model: str, scores: Table, differences: Table) -> str:
    """Bold: the best of a column; ▲: better than agf, beyond the interval; =: not told apart from it."""
    columns = [key for key in COLUMNS if key in scores["agf"]]
    best = {key: max(float(row[key]["value"]) for row in scores.values() if key in row) for key in columns}
    counts = ", ".join(f"{COLUMNS[key]} {scores['agf'][key]['n']}" for key in columns)
    lines = [
        f"**{model}** (number of images or cells: {counts})", "",
        "| method | " + " | ".join(COLUMNS[key] for key in columns) + " |", "|---" * (len(columns) + 1) + "|",
    ]  # fmt: skip
    for method, row in scores.items():
        cells = [_cell(row.get(key), differences.get(method, {}).get(key), best[key]) for key in columns]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(score: Row | None, difference: Row | None, best: float) -> str:
    if score is None:
        return "–"
    value = f"{float(score['value']):.1f}"
    if float(score["value"]) == best:
        value = f"**{value}**"
    if difference is None:  # agf itself
        return f"{value} [{float(score['low']):.1f}, {float(score['high']):.1f}]"
    low, high = float(difference["low"]), float(difference["high"])
    mark = " ▲" if low > 0 else "" if high < 0 else " ="
    return f"{value} [{low:+.1f}, {high:+.1f}]{mark}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders that classlens evaluate wrote")
    print(tables(parser.parse_args().runs))
