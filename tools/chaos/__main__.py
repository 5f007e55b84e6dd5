"""Attacks on the real command: nothing may be silently wrong.

    python tools/chaos                              # ten minutes
    python tools/chaos --seconds 60 --only disk

Each attempt ends as it should, is killed, or is refused with one line. Afterwards the result has to be that of a fresh
run; otherwise the attack is named here, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

import arena  # first: it finds the world of the tests
import fuzz  # noqa: F401  (the modules with attacks)
import kills  # noqa: F401
import surroundings  # noqa: F401
from registry import ATTACKS


def main() -> None:
    """Run the attacks, each for its share of the time, and print a table."""
    args = _arguments()
    chosen = {name: run for name, run in ATTACKS.items() if args.only in name}
    print(
        "| attack | attempts | as it should | killed | refused | silently wrong |\n|---|---|---|---|---|---|",
        flush=True,
    )
    found = []
    for name, run in chosen.items():
        counts: Counter[str] = Counter()
        wrong = ""
        with arena.arena(args.seed, args.seconds / len(chosen)) as place:
            try:
                for outcome in run(place):
                    counts[outcome] += 1
            except arena.Wrong as error:
                wrong = str(error)
                found.append(f"{name}: {error}")
        cells = [counts.total(), counts["done"], counts["killed"], counts["refused"], int(bool(wrong))]
        print(f"| {name} | {' | '.join(map(str, cells))} |", flush=True)
    for line in found:
        print(f"wrong: {line}", flush=True)
    sys.exit(bool(found))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/chaos", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="for all attacks together")
    parser.add_argument("--only", default="", help="attacks whose name contains this")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


main()
