"""What was tried, kept as rows; and the table of it, with a reason for each survivor."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from faults import Mutant
from where import ROWS, SURVIVORS, TABLE

LEAST = 0.95  # of all faults a test has to notice
INTRODUCTION = """# Mutants

`make mutants` puts one small fault at a time into the maths (`tools/mutants/faults.py` has the kinds) and runs the
tests that reach it. A fault is killed when a test fails. Those that survive are listed below with the reason.

| file | faults | killed | survived | killed, % |
|---|---|---|---|---|
"""


class Rows:
    """What was tried already, a line of JSON each; a row counts while the function that it changes is as it was."""

    def __init__(self) -> None:
        lines = ROWS.read_text().splitlines() if ROWS.exists() else []
        rows = [json.loads(line) for line in lines]
        self.rows = {(r["file"], r["key"], r["version"]): r for r in rows}

    def __contains__(self, mutant: Mutant) -> bool:
        return (mutant.file, mutant.key, mutant.version) in self.rows

    def survived(self, mutant: Mutant) -> bool:
        return mutant in self and self.rows[mutant.file, mutant.key, mutant.version]["outcome"] == "survived"

    def add(self, mutant: Mutant, outcome: Mapping[str, Any]) -> None:
        row = {"file": mutant.file, "key": mutant.key, "version": mutant.version, **outcome}
        self.rows[mutant.file, mutant.key, mutant.version] = row
        ROWS.parent.mkdir(exist_ok=True)
        with ROWS.open("a") as out:
            out.write(json.dumps(row) + "\n")


def entries() -> list[dict[str, Any]]:
    """Survivors as they are listed: a file, the reason, and the faults."""
    listed: list[dict[str, Any]] = tomllib.loads(SURVIVORS.read_text())["survivors"]
    return listed


def explained() -> set[tuple[str, str]]:
    """File and key of every survivor that has a reason."""
    return {(entry["file"], key) for entry in entries() for key in entry["faults"]}


def report(chosen: Sequence[Mutant], rows: Rows, whole: bool) -> int:
    """Say what survived without a reason and, after a whole run, write the table; gives the exit code."""
    reasons = explained()
    survivors = [m for m in chosen if rows.survived(m)]
    unexplained = [m for m in survivors if (m.file, m.key) not in reasons]
    for mutant in unexplained:
        print(f"no test fails, and no reason is given: {mutant.file}:{mutant.line}  {mutant.key}")
    if whole:
        for file, key in sorted(reasons - {(m.file, m.key) for m in survivors}):
            print(f"listed as a survivor, but it is none: {file}  {key}")
        TABLE.write_text(_table(chosen, rows))
    share = 1 - len(survivors) / max(len(chosen), 1)
    print(
        f"{len(chosen)} faults, {len(survivors)} survived, {100 * share:.1f} % killed, {len(unexplained)} unexplained"
    )
    return int(bool(unexplained) or share < LEAST)


def _table(chosen: Sequence[Mutant], rows: Rows) -> str:
    files = list(dict.fromkeys(m.file for m in chosen))
    groups = [(f"`{file}`", [m for m in chosen if m.file == file]) for file in files]
    lines = []
    for name, faults in [*groups, ("all", list(chosen))]:
        survived = sum(rows.survived(m) for m in faults)
        killed = len(faults) - survived
        lines.append(f"| {name} | {len(faults)} | {killed} | {survived} | {100 * killed / len(faults):.1f} |\n")
    listed = [
        f"`{entry['file']}`: {entry['reason']}\n\n" + "".join(f"    {key}\n" for key in entry["faults"])
        for entry in entries()
    ]
    return INTRODUCTION + "".join(lines) + "\n## Survivors\n\n" + "\n".join(listed)
