"""The tables of docs/results-truth.md: one for each test, with a cell for each method that holds all networks.

    classlens evaluate disconnected ... --half B --against agf --out RUN          # a run for each network
    python tools/truth_tables.py RUN [RUN ...]

▲ and ▼: better and worse than agf on the same pictures, beyond the 95 % interval of the difference.
The second line has the intervals of agf's own scores.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from ranked_tables import MINUS, marked

CUES = "sticker", "caption", "border"
CHANGES = "shift", "flip", "jpeg", "bright"
TABLES: dict[str, dict[str, tuple[str, str]]] = {  # test -> heading -> (settings, metric)
    "disconnected": {
        f"{kind}, {depth}": (f"{kind}, {depth}", "share in the cell")
        for kind in ("DiFull", "DiPart")
        for depth in ("input", "middle", "final")
    },
    "cue": {f"{cue}: {heading}": (f"Planted {cue}", metric)
            for heading, metric in (("on it", "on the cue"), ("other class on it", "other class on the cue"))
            for cue in CUES},
    "idsds": {"rank correlation": ("IDSDS", "rank correlation")},
    "road": {name: ("ROAD", name) for name in
             ("deletion", "insertion", "gain of blur, deletion", "gain of blur, insertion")},
    "repeatability": {change: ("Repeatability", f"correlation, {change}") for change in (*CHANGES, "network")},
    "ranked": {f"{measure}, {rank}": ("Ranked", f"{measure}, rank {rank}")
               for measure in ("AP", "accuracy", "detail", "change") for rank in (1, 2, 3)},
    "sanity": {},
    "quantus": {},
}  # fmt: skip
DIGITS = {"idsds": 2, "repeatability": 2, "quantus": 2, "sanity": 2}
Line = dict[str, str]
Key = tuple[str, str]  # settings, metric
Lines = dict[tuple[Key, str, str], Line]  # by key, method and network


def read(runs: list[Path]) -> dict[str, tuple[Lines, Lines]]:
    """For each test, the scores and the differences from agf."""
    tests: dict[str, tuple[Lines, Lines]] = {}
    for run in runs:
        with (run / "table.csv").open(newline="") as lines:
            for line in csv.DictReader(lines):
                key = line["settings"].removesuffix(MINUS), line["metric"]
                part = tests.setdefault(line["test"], ({}, {}))[line["settings"].endswith(MINUS)]
                part[key, line["method"], line["model"].split("@")[0]] = line
    return tests


def table(test: str, scores: Lines, differences: Lines) -> str:
    """One Markdown table; a cell has the networks in the order of the heading."""
    keys = list(dict.fromkeys(key for key, _, _ in scores))
    wanted = TABLES[test] or {metric: (title, metric) for title, metric in keys}
    columns = {
        heading: key for heading, (title, metric) in wanted.items()
        for key in keys if key[1] == metric and key[0].startswith(title)
    }  # fmt: skip
    models = list(dict.fromkeys(model for _, _, model in scores))
    counts = {model: max(int(line["n"]) for (_, _, m), line in scores.items() if m == model) for model in models}
    lines = [
        f"**{test}**: {', '.join(f'{model} ({n})' for model, n in counts.items())}", "",
        f"| method | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|",
    ]  # fmt: skip
    for method in dict.fromkeys(method for _, method, _ in scores):
        cells = [
            " ".join(_cell(scores.get(at), differences.get(at), DIGITS.get(test, 1)) for at in places)
            for places in ([(key, method, model) for model in models] for key in columns.values())
        ]
        lines.append(f"| {method} | {' | '.join(cells)} |")
        if method == "agf":
            ends = [" ".join(_interval(scores.get((key, method, model)), DIGITS.get(test, 1)) for model in models)
                    for key in columns.values()]  # fmt: skip
            lines.append(f"| … 95 % | {' | '.join(ends)} |")
    return "\n".join(lines)


def _cell(score: Line | None, difference: Line | None, digits: int) -> str:
    return "–" if score is None or score["value"] == "" else marked(score, difference, digits)


def _interval(score: Line | None, digits: int) -> str:
    if score is None or not score["low"]:
        return "–"
    return "{}…{}".format(*(f"{float(score[end]):.{digits}f}".replace("-", "−") for end in ("low", "high")))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders that classlens evaluate wrote")
    tests = read(parser.parse_args().runs)
    print("\n\n".join(table(test, *tests[test]) for test in TABLES if test in tests))
