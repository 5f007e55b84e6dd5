"""Explains many random small networks and prints a table: how many maps were right, refused or wrong.

    python tools/fuzz.py --networks 10000

Network i is drawn from the seed --seed + i, written in an awkward way (in-place writes, views, other spellings,
wrappers, low precisions) and explained by several methods, which take turns. tests/fuzzing.py says what "right" means.
A wrong map is printed with the network that gives it, and the exit code is then 1. The counts are kept in --state after
every hundred networks: the same command goes on from there. Ctrl-C prints the table of what was done.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import fuzz_networks
import fuzzing
from classlens.cli.bar import Bar
from classlens.files import write_json
from classlens.methods import METHODS
from classlens.progress import Progress

Counts = Counter[tuple[str, str]]  # (method, verdict) -> how many


def methods_of(seed: int, each: int, names: list[str]) -> list[str]:
    """The methods that explain a network: they take turns, so all get the same number of networks."""
    return [names[(seed * each + i) % len(names)] for i in range(min(each, len(names)))]


def verdicts(seed: int, each: int, names: list[str]) -> Iterator[tuple[str, str]]:
    """(method, verdict) for one network; a wrong map is printed."""
    plan = fuzz_networks.drawn(random.Random(seed))
    for method in methods_of(seed, each, names):
        try:
            found = fuzzing.verdict(plan, method)
        except Exception as error:  # anything but a ClasslensError is a failure of ours
            found = f"crash: {type(error).__name__}: {error}"
        if found.startswith(("off", "crash")):
            print(f"\n{method} {found}: network {seed}, {plan}", flush=True)
        yield method, found


def table(counts: Counts, names: list[str]) -> str:
    """A row for each method and one for all."""
    lines = ["| method | checked against | equal | refused | wrong |", "|---|---|---|---|---|"]
    kinds = {key: sum(n for (_, v), n in counts.items() if v.startswith(key)) for key in ("equal", "refused", "")}
    for name in names:
        own = Counter({v: n for (method, v), n in counts.items() if method == name})
        equal, refused = own["equal"], sum(n for v, n in own.items() if v.startswith("refused"))
        how = "second derivation" if name in fuzzing.INDEPENDENT else "plain float64 network"
        lines.append(f"| {name} | {how} | {equal} | {refused} | {own.total() - equal - refused} |")
    wrong = kinds[""] - kinds["equal"] - kinds["refused"]
    return "\n".join([*lines, f"| all | | {kinds['equal']} | {kinds['refused']} | {wrong} |"])


def reasons(counts: Counts) -> str:
    """Why maps were refused, most frequent first."""
    found: Counter[str] = Counter()
    for (_, verdict), n in counts.items():
        if verdict.startswith("refused"):
            found[verdict.partition(": ")[2]] += n
    return "\n".join([f"| {n} | {text} |" for text, n in found.most_common()])


def load(path: Path, seed: int) -> tuple[int, Counts]:
    """Networks done and their counts; none of another seed."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    if kept.get("seed") != seed:
        return 0, Counter()
    return kept["networks"], Counter({(method, verdict): n for method, verdict, n in kept["counts"]})


def save(path: Path, seed: int, done: int, counts: Counts) -> None:
    """Keep what was done, to go on from there."""
    rows = [[*key, n] for key, n in sorted(counts.items())]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"seed": seed, "networks": done, "counts": rows}, indent=None)


def run(networks: int, seed: int, each: int, names: list[str], state: Path, progress: Progress) -> tuple[int, Counts]:
    """Explain the networks that are not in the state yet."""
    done, counts = load(state, seed)
    try:
        while done < networks:
            counts.update(verdicts(seed + done, each, names))
            done += 1
            progress("networks", done, networks)
            if done % 100 == 0 or done == networks:
                save(state, seed, done, counts)
    except KeyboardInterrupt:
        print("stopped")
    return done, counts


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Explain many random small networks.")
    parser.add_argument("--networks", type=int, default=10_000, help="how many networks")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first network")
    parser.add_argument("--each", type=int, default=4, help="how many methods explain each network")
    parser.add_argument("--methods", nargs="+", default=sorted(METHODS), help="the methods that take turns")
    parser.add_argument("--state", type=Path, default=Path("out/fuzz.json"), help="keeps the counts, to go on later")
    given = parser.parse_args()
    warnings.simplefilter("ignore")  # torch's, for some wrappers
    with Bar() as bar:
        done, counts = run(given.networks, given.seed, given.each, given.methods, given.state, bar)
    print(f"\n{done} networks, {counts.total()} maps\n\n{table(counts, given.methods)}\n")
    print(f"| refused | why |\n|---|---|\n{reasons(counts)}")
    return 0 if all(v.startswith(("equal", "refused")) for _, v in counts) else 1


if __name__ == "__main__":
    sys.exit(main())
