"""What came of each fault, kept in verdicts.txt; and the table of it, with a reason for each survivor."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from faults import Mutant
from where import SECONDS, SURVIVORS, TABLE, VERDICTS

LEAST = 0.95  # of all faults a test has to notice; one that was not tried counts as not noticed
INTRODUCTION = """# Mutants

`make mutants` puts one small fault at a time into the maths and runs the tests that reach it. `tools/mutants/faults.py`
has the kinds of faults: a swapped operator, another constant, a condition that never holds, a dropped statement, an
argument left out. A fault is killed when a test fails with it and passes without it. Every fault that survives is
listed below with the reason.

Only the tests of the core and of the methods take part, without the whole architectures of `tests/methods/test_zoo.py`.
A fault is tried by tests that reach it and take {seconds:.0f} seconds together: quick ones before slow ones, those of
its own test file and those that take another way through the changed function before others. Code that runs on import
is tried by the tests of its own file and of the registry. Tests that were left out might kill a few more. A verdict
holds until its function changes; `tools/mutants/verdicts.txt` keeps all of them.

{state}

"""
HEAD = """| file | faults | tried | killed | survived | killed, % of all |
|---|---|---|---|---|---|
"""


class Verdicts:
    """What came of each fault so far, kept in the repository, so that it survives a clone. A line is a function.

        methods/agf/terms.py factorised 8c2f0d6b41e7 kkkkskk.

    A letter is a fault, in the order of the source: k killed, s survived, q survived a quick run with fewer tests,
    . not tried. The hash is that of the function and its faults, so a line counts while these are as they were.
    """

    def __init__(self, faults: Sequence[Mutant]) -> None:
        groups: dict[tuple[str, str, str], list[Mutant]] = {}
        for mutant in faults:
            groups.setdefault((mutant.file, mutant.owner or "-", mutant.version), []).append(mutant)
        self.groups = {(file, owner, _state(of, group)): group for (file, owner, of), group in groups.items()}
        lines = VERDICTS.read_text().splitlines() if VERDICTS.exists() else []
        kept = {(file, owner, of): letters for file, owner, of, letters in map(str.split, lines)}
        here = {mutant.file for mutant in faults}
        self.others = {at: letters for at, letters in kept.items() if at[0] not in here}  # of files not looked at now
        self.letters: dict[Mutant, str] = {}
        for at, group in self.groups.items():
            self.letters |= dict(zip(group, kept.get(at, "." * len(group)), strict=True))

    def __contains__(self, mutant: Mutant) -> bool:
        return self.letters[mutant] != "."

    def killed(self, mutant: Mutant) -> bool:
        return self.letters[mutant] == "k"

    def survived(self, mutant: Mutant) -> bool:
        return self.letters[mutant] in ("s", "q")

    def quickly(self, mutant: Mutant) -> bool:
        """Whether it survived a quick run only."""
        return self.letters[mutant] == "q"

    def add(self, mutant: Mutant, outcome: Mapping[str, Any], quick: bool = False) -> None:
        letter = outcome["outcome"][0]
        self.letters[mutant] = "q" if quick and letter == "s" else letter
        known = {at: "".join(self.letters[m] for m in group) for at, group in self.groups.items()}
        known = {at: letters for at, letters in known.items() if letters.strip(".")}
        files = sorted((self.others | known).items(), key=lambda line: line[0][0])
        part = VERDICTS.with_suffix(".part")
        part.write_text("".join(f"{' '.join(at)} {letters}\n" for at, letters in files))
        part.replace(VERDICTS)


def _state(version: str, group: Sequence[Mutant]) -> str:
    return hashlib.sha256("\n".join([version, *(m.key for m in group)]).encode()).hexdigest()[:12]


def entries() -> list[dict[str, Any]]:
    """Survivors as they are listed: a file, the reason, and the faults. Several files may share an entry."""
    listed: list[dict[str, Any]] = tomllib.loads(SURVIVORS.read_text())["survivors"]
    return [e | {"file": file} for e in listed for file in ([e["file"]] if isinstance(e["file"], str) else e["file"])]


def explained() -> set[tuple[str, str]]:
    """File and key of every survivor that has a reason."""
    return {(entry["file"], key) for entry in entries() for key in entry["faults"]}


def report(faults: Sequence[Mutant], verdicts: Verdicts) -> int:
    """Print the table, and what survived without a reason; gives the exit code."""
    reasons = explained()
    tried = [m for m in faults if m in verdicts]
    survivors = [m for m in tried if verdicts.survived(m)]
    unexplained = [m for m in survivors if (m.file, m.key) not in reasons]
    print(_table(faults, verdicts), end="")
    for mutant in unexplained:
        print(f"no test fails, and no reason is given: {mutant.file}:{mutant.line}  {mutant.key}")
    print(f"{len(tried)} of {len(faults)} faults tried, {len(survivors)} survived, {len(unexplained)} without a reason")
    share = sum(map(verdicts.killed, faults)) / max(len(faults), 1)
    print(f"{100 * share:.1f} % of all killed; at least {100 * LEAST:.0f} % have to be")
    return int(bool(unexplained) or share < LEAST)


def write_table(faults: Sequence[Mutant], verdicts: Verdicts) -> None:
    """The table of all faults, those that survived, and their reasons."""
    possible = {(m.file, m.key) for m in faults if not verdicts.killed(m)}
    for file, key in sorted(explained() - possible):
        print(f"listed as a survivor, but it is none: {file}  {key}")
    tried = sum(m in verdicts for m in faults)
    state = (
        "All faults were tried."
        if tried == len(faults)
        else (
            f"{tried} of {len(faults)} faults have a verdict. The others were not tried yet, or their function "
            "has changed since; they count as not killed."
        )
    )
    if quick := sum(map(verdicts.quickly, faults)):
        state += (
            f" {quick} of the survivors were tried in a quick run (`--seconds`), with only some of their tests; others "
            "may kill them: `tools/mutants --again` tells."
        )
    introduction = INTRODUCTION.format(state=state, seconds=SECONDS)
    TABLE.write_text(introduction + _table(faults, verdicts) + _survivors(faults, verdicts))


def _table(faults: Sequence[Mutant], verdicts: Verdicts) -> str:
    """A line for each file, and one for all."""
    groups = [(f"`{file}`", [m for m in faults if m.file == file]) for file in sorted({m.file for m in faults})]
    return HEAD + "".join(_line(name, group, verdicts) for name, group in [*groups, ("all", list(faults))])


def _line(name: str, faults: Sequence[Mutant], verdicts: Verdicts) -> str:
    killed, survived = sum(map(verdicts.killed, faults)), sum(map(verdicts.survived, faults))
    share = 100 * killed / max(len(faults), 1)
    return f"| {name} | {len(faults)} | {killed + survived} | {killed} | {survived} | {share:.1f} |\n"


def _survivors(faults: Sequence[Mutant], verdicts: Verdicts) -> str:
    """The survivors by reason, and then those without one."""
    alive = [(m.file, m.key) for m in faults if verdicts.survived(m)]
    groups = [(e["file"], e["reason"], [k for k in e["faults"] if (e["file"], k) in alive]) for e in entries()]
    rest = [fault for fault in alive if fault not in explained()]
    groups += [
        (
            file,
            "no reason yet. A test that was written since, or that a quick run left out, may kill it.",
            [k for f, k in rest if f == file],
        )
        for file in dict.fromkeys(f for f, _ in rest)
    ]
    texts = [f"`{f}`: {reason}\n\n" + "".join(f"    {key}\n" for key in keys) for f, reason, keys in groups if keys]
    return "\n## Survivors\n\n" + "\n".join(texts)
