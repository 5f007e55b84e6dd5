"""Rows of a measurement in a file of JSON lines, to which a stopped run adds, and their table with 95 % intervals."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from classlens.evaluate.stats import estimate, ratio


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows that are there."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write each row as it comes."""
    with path.open("a") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(row, file=sys.stderr)


def table(rows: list[dict[str, Any]], columns: Mapping[str, str], counted: str, empty: str = "") -> str:
    """Markdown: for each method the means of these columns in per cent, with intervals over pictures.

    `counted` names what a row is about; `empty` is the title of a last column that counts rows with `empty`.
    """
    heads = ["method", counted, *columns.values(), *([empty] if empty else [])]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for name in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == name]
        groups = np.array([row["picture"] for row in mine])
        cells = [f"{len(mine)} in {len(set(groups))} pictures"]
        for column in columns:
            values = np.array([row[column] for row in mine], float)
            there = ~np.isnan(values)
            found = estimate(np.stack([np.where(there, values, 0), there], 1), ratio, groups)
            count = f" (n {there.sum()})" if not there.all() else ""
            cells.append(f"{100 * found.value:.1f} [{100 * found.low:.1f}, {100 * found.high:.1f}]{count}")
        cells += [f"{sum(row['empty'] for row in mine):.0f}"] if empty else []
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def command(
    parser: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace], Iterable[dict[str, Any]]],
    shown: Callable[[list[dict[str, Any]]], str],
) -> None:
    """Measure, and add the rows to --out; with --table, show those that are there."""
    parser.add_argument("--table", action="store_true", help="print the rows as Markdown")
    options = parser.parse_args()
    if options.table:
        print(shown(rows_of(options.out)))
        return
    torch.set_num_threads(1)
    append(options.out, measure(options))
