"""Explains many random small networks and prints a table: how many maps were right, refused or wrong.

    python tools/fuzz.py --networks 10000

Each network is drawn by hypothesis, written in an awkward way (in-place writes, views, wrappers, low precisions) and
explained by a random method. tests/fuzzing.py says what "right" means. A wrong map is printed with the network that
gives it, and the exit code is then 1. Ctrl-C prints the table of what was done.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter, defaultdict
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import fuzzing
from classlens.methods import METHODS
from classlens.progress import ticker

Counts = defaultdict[str, Counter[str]]


def fuzz(networks: int, counts: Counts) -> None:
    """Explain `networks` random networks and count the verdicts by method."""
    tick = ticker(networks, "networks")

    @settings(
        max_examples=networks, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(fuzzing.plans, st.sampled_from(sorted(METHODS)))
    def one(plan: fuzzing.Plan, method: str) -> None:
        found = fuzzing.verdict(plan, method)
        counts[method][found.split(" ")[0]] += 1
        if found.startswith("off"):
            print(f"{method} is {found}: {plan}")
        tick()

    one()


def table(counts: Counts) -> str:
    """A row for each method and one for all."""
    rows = [*sorted(counts.items()), ("all", sum(counts.values(), Counter()))]
    lines = ["| method | checked against | equal | refused | wrong |", "|---|---|---|---|---|"]
    for name, found in rows:
        how = "" if name == "all" else "second derivation" if name in fuzzing.INDEPENDENT else "plain float64 network"
        lines.append(f"| {name} | {how} | {found['equal']} | {found['refused']} | {found['off']} |")
    return "\n".join(lines)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Explain many random small networks.")
    parser.add_argument("--networks", type=int, default=10_000, help="how many networks")
    counts: Counts = defaultdict(Counter)
    warnings.simplefilter("ignore")  # torch's, for some wrappers
    try:
        fuzz(parser.parse_args().networks, counts)
    except KeyboardInterrupt:
        print("stopped")
    print(table(counts))
    return 1 if any(found["off"] for found in counts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
