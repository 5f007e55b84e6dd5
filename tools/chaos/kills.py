"""SIGKILL at random moments, until a command gets through; afterwards its result has to be that of a fresh one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from arena import Arena, Wrong, die, die_after, paint
from registry import attack

from classlens.evaluate import store

_STORM = 12  # kills, after which a run is left alone
BANK = "--model", "sorting:net", "--batch-size", "2"


def storm(arena: Arena, command: Callable[[Callable[[], None]], Any], longest: float = 2.0) -> Iterator[str]:
    """Kill a command over and over."""
    for _ in range(_STORM):
        ended = command(die_after(arena.dice.uniform(0.05, longest)))
        yield ended.check_clean()


@attack("killed: evaluate and resume")
def killed_evaluate(arena: Arena) -> Iterator[str]:
    """At random moments, and then left alone."""
    data = arena.pictures("data")
    expected = arena.fresh(data)
    for number in arena.rounds():
        out = arena.folder / f"run{number}"
        yield from storm(arena, lambda prepare, out=out: arena.evaluate(data, out, prepare=prepare))  # type: ignore[misc]
        arena.check_rows(data, out, expected)
        shutil.rmtree(out)
        yield "done"


@attack("killed: compaction")
def killed_compaction(arena: Arena) -> Iterator[str]:
    """At each of the file operations with which the parts of a run are put together."""
    data = arena.pictures("data")
    expected = arena.fresh(data)
    out = arena.folder / "run"
    arena.evaluate(data, out)
    for number in arena.rounds():
        at = arena.dice.randint(1, 24)
        yield arena.evaluate(data, out, prepare=lambda at=at: _die_in_compaction(at)).check_clean()  # type: ignore[misc]
        if number % 4 == 0:
            arena.check_rows(data, out, expected)
            yield "done"
            paint(data / "red" / "0.png", number)  # so that there are new parts to put together
            expected = arena.fresh(data)


def _die_in_compaction(at: int) -> None:
    store._COMPACT_FROM = 2
    seen, compact = 0, store.Store.compact

    def compacting(self: store.Store) -> None:
        replace, unlink = Path.replace, Path.unlink

        def count(path: Path) -> None:
            nonlocal seen
            seen += path.suffix in (".parquet", ".part")
            if seen == at:
                die()

        def replacing(self: Path, target: Path) -> Path:
            count(target)
            return replace(self, target)

        def unlinking(self: Path, missing_ok: bool = False) -> None:
            count(self)
            unlink(self, missing_ok)

        Path.replace, Path.unlink = replacing, unlinking  # type: ignore[method-assign, assignment]
        compact(self)

    store.Store.compact = compacting  # type: ignore[method-assign]


@attack("killed: two processes, one folder")
def two_at_once(arena: Arena) -> Iterator[str]:
    """A second command in the same folder while the first one is killed."""
    data = arena.pictures("data")
    expected = arena.fresh(data)
    for number in arena.rounds():
        out = arena.folder / f"run{number}"
        pid = os.fork()
        if pid == 0:
            try:
                os._exit(arena.evaluate(data, out).check_clean() != "done")
            finally:
                os._exit(1)
        yield arena.evaluate(data, out, prepare=die_after(arena.dice.uniform(0.2, 3.0))).check_clean()
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            raise Wrong("the other process failed")
        arena.check_rows(data, out, expected)
        shutil.rmtree(out)
        yield "done"


@attack("killed: bank building")
def killed_bank(arena: Arena) -> Iterator[str]:
    """A bank that was killed and resumed is that of one go."""
    data = arena.pictures("data")
    if arena.classlens("selfsup", "bank", data, *BANK, "--out", arena.folder / "whole").check_clean() != "done":
        raise Wrong("an undisturbed bank failed")
    for number in arena.rounds():
        out = arena.folder / f"bank{number}"
        command = ("selfsup", "bank", data, *BANK, "--out", out)
        yield from storm(arena, lambda prepare, c=command: arena.classlens(*c, prepare=prepare), 0.6)  # type: ignore[misc]
        ended = arena.classlens(*command)
        if ended.check_clean() != "done":
            raise Wrong(f"it cannot be resumed: {ended.text.strip()[-300:]!r}")
        check_bank(arena.folder / "whole", out)
        yield "done"


def check_bank(whole: Path, other: Path) -> None:
    """Two banks of the same pictures are equal."""
    for name in ("latents.npy", "rows.npy"):
        a, b = np.load(whole / name), np.load(other / name)
        same = np.allclose(a, b, atol=1e-5) if name == "latents.npy" else bool((a == b).all())
        if not same:
            raise Wrong(f"{name} is not that of a bank that was built at once")
