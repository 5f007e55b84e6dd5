"""What was tried, kept as rows; and the table of it, with a reason for each survivor."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from faults import Mutant
from where import ROWS, SECONDS, SURVIVORS, TABLE

LEAST = 0.95  # of all faults a test has to notice
INTRODUCTION = """# Mutants

`make mutants` puts one small fault at a time into the maths and runs the tests that reach it. `tools/mutants/faults.py`
has the kinds of faults: a swapped operator, another constant, a condition that never holds, a dropped statement, an
argument left out. A fault is killed when a test fails. Every fault that survives is listed below with the reason.

Only the tests of the core and of the methods take part, without the whole architectures of `tests/methods/test_zoo.py`.
A fault is tried by tests that reach it and take {seconds:.0f} seconds together: one for each way through the changed
function first, those of its own test file before others. Code that runs on import is tried by the tests of its own file
and of the registry. Tests that were left out might kill a few more. A verdict holds until its function changes.

{state}

| file | faults | tried | killed | survived | killed, % of tried |
|---|---|---|---|---|---|
"""


class Rows:
    """What was tried already, a line of JSON each; a row counts while the function that it changes is as it was."""

    def __init__(self) -> None:
        lines = ROWS.read_text().splitlines() if ROWS.exists() else []
        rows = [json.loads(line) for line in lines]
        self.rows = {(r["file"], r["key"], r["version"]): r for r in rows}

    def __contains__(self, mutant: Mutant) -> bool:
        return (mutant.file, mutant.key, mutant.version) in self.rows

    def killed(self, mutant: Mutant) -> bool:
        return mutant in self and not self.survived(mutant)

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


def report(faults: Sequence[Mutant], rows: Rows) -> int:
    """Say what survived without a reason, and how many were killed; gives the exit code."""
    reasons = explained()
    tried = [m for m in faults if m in rows]
    survivors = [m for m in tried if rows.survived(m)]
    unexplained = [m for m in survivors if (m.file, m.key) not in reasons]
    for mutant in unexplained:
        print(f"no test fails, and no reason is given: {mutant.file}:{mutant.line}  {mutant.key}")
    share = 1 - len(survivors) / max(len(tried), 1)
    print(f"{len(tried)} of {len(faults)} faults tried, {len(survivors)} survived, {len(unexplained)} without a reason")
    print(f"{100 * share:.1f} % killed")
    return int(bool(unexplained) or share < LEAST)


def write_table(faults: Sequence[Mutant], rows: Rows) -> None:
    """The table of all faults, those that survived, and their reasons."""
    for file, key in sorted(explained() - {(m.file, m.key) for m in faults if rows.survived(m) or m not in rows}):
        print(f"listed as a survivor, but it is none: {file}  {key}")
    tried = sum(m in rows for m in faults)
    state = (
        "All faults were tried."
        if tried == len(faults)
        else (
            f"{tried} of {len(faults)} faults have a verdict. The others were not tried yet, or their function "
            "has changed since. So the share of a file with few verdicts says little."
        )
    )
    files = list(dict.fromkeys(m.file for m in faults))
    groups = [(f"`{file}`", [m for m in faults if m.file == file]) for file in files]
    lines = [_line(name, group, rows) for name, group in [*groups, ("all", list(faults))]]
    TABLE.write_text(INTRODUCTION.format(state=state, seconds=SECONDS) + "".join(lines) + _survivors(faults, rows))


def _line(name: str, faults: Sequence[Mutant], rows: Rows) -> str:
    killed, survived = sum(map(rows.killed, faults)), sum(map(rows.survived, faults))
    share = f"{100 * killed / (killed + survived):.1f}" if killed + survived else ""
    return f"| {name} | {len(faults)} | {killed + survived} | {killed} | {survived} | {share} |\n"


def _survivors(faults: Sequence[Mutant], rows: Rows) -> str:
    """The survivors by reason, and then those without one."""
    alive = [(m.file, m.key) for m in faults if rows.survived(m)]
    groups = [(e["file"], e["reason"], [k for k in e["faults"] if (e["file"], k) in alive]) for e in entries()]
    rest = [fault for fault in alive if fault not in explained()]
    groups += [
        (
            file,
            "no reason yet. A test that was written since may kill it (`tools/mutants --again`).",
            [k for f, k in rest if f == file],
        )
        for file in dict.fromkeys(f for f, _ in rest)
    ]
    texts = [f"`{f}`: {reason}\n\n" + "".join(f"    {key}\n" for key in keys) for f, reason, keys in groups if keys]
    return "\n## Survivors\n\n" + "\n".join(texts)
