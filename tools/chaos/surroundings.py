"""A picture that kills the process, clocks that jump, and disks that are full."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from arena import Arena, Wrong, paint
from kills import BANK, check_bank
from PIL import Image
from registry import attack

_YEARS = 10 * 365 * 86400


@attack("a picture that kills the process")
def deadly_picture(arena: Arena) -> Iterator[str]:
    """Everything before it is kept, and once it is gone the rest is computed."""
    for number in arena.rounds():
        data, out = arena.pictures(f"data{number}", 2), arena.folder / f"run{number}"
        killer = data / arena.dice.choice(["red", "green", "blue"]) / f"{arena.dice.randint(2, 9)}.png"
        Image.new("RGB", (48, 48), "white").save(killer)
        ended = arena.evaluate(data, out)
        yield ended.check_clean()
        if not ended.killed:
            raise Wrong("a picture that kills the process did not")
        killer.unlink()
        arena.check_rows(data, out)
        yield "done"


@attack("clocks that jump")
def clocks(arena: Arena) -> Iterator[str]:
    """Ten years forwards and backwards at every look at the clock, and pictures that change with any time of change."""
    data, out = arena.pictures("data", 2), arena.folder / "run"
    for _ in arena.rounds():
        seed = arena.dice.randint(0, 10**6)
        path = data / arena.dice.choice(["red", "green", "blue"]) / "0.png"
        paint(path, arena.dice.randint(0, 5))
        when = time.time() + arena.dice.choice([-_YEARS, -2, 0, 2, _YEARS])
        os.utime(path, (when, when))
        yield arena.evaluate(data, out, prepare=lambda seed=seed: _jumping(seed)).check_clean()  # type: ignore[misc]
        arena.check_rows(data, out)
        yield "done"


def _jumping(seed: int) -> None:
    import random

    dice, real, real_ns = random.Random(seed), time.time, time.time_ns
    time.time = lambda: real() + dice.choice([-_YEARS, 0, _YEARS])
    time.time_ns = lambda: real_ns() + dice.choice([-_YEARS, 0, _YEARS]) * 10**9


# ---------------------------------------------------------------------------------------------------------- full disks


def _no_file_beyond(size: int) -> None:
    """Writing beyond this many bytes of a file fails, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@attack("disk full: evaluate")
def full_evaluate(arena: Arena) -> Iterator[str]:
    """Whatever could not be written is written by the next run."""
    data = arena.pictures("data", 2)
    expected = arena.fresh(data)
    for number in arena.rounds():
        out, size = arena.folder / f"run{number}", int(10 ** arena.dice.uniform(0, 5.5))
        yield arena.evaluate(data, out, prepare=lambda size=size: _no_file_beyond(size)).check_clean()  # type: ignore[misc]
        arena.check_rows(data, out, expected)
        shutil.rmtree(out)
        yield "done"


@attack("disk full: explain and report")
def full_writers(arena: Arena) -> Iterator[str]:
    """After a failure there is no file that is cut short."""
    data = arena.pictures("data", 1)
    model = ("--model", "deadly:make")
    commands = (
        ("explain", data / "red" / "0.png", *model, "--method", "gradcam"),
        ("report", "--data", data, *model, "--method", "gradcam"),
    )
    whole = [arena.folder / f"whole{i}" for i in range(len(commands))]
    for command, out in zip(commands, whole, strict=True):
        ended = arena.classlens(*command, "--out", out)
        if ended.check_clean() != "done":
            raise Wrong(f"an undisturbed command failed: {ended.text[-300:]!r}")
    for number in arena.rounds():
        which, out = number % len(commands), arena.folder / f"out{number}"
        size = int(10 ** arena.dice.uniform(0, 5.5))
        limit = lambda size=size: _no_file_beyond(size)  # noqa: E731
        yield arena.classlens(*commands[which], "--out", out, prepare=limit).check_clean()
        _check_whole(whole[which], out)


def _check_whole(whole: Path, out: Path) -> None:
    """Whatever stands in its place is as large as after an undisturbed command, or nearly: times differ."""
    for path in (p for p in out.rglob("*") if p.is_file()):
        expected = (whole / path.relative_to(out)).stat().st_size if (whole / path.relative_to(out)).exists() else None
        if expected is None or abs(path.stat().st_size - expected) > 0.1 * expected + 64:
            raise Wrong(f"{path.relative_to(out)} has {path.stat().st_size} bytes, not {expected}")


@attack("disk full: bank")
def full_bank(arena: Arena) -> Iterator[str]:
    """On a small file system of its own, if this user may mount one; else by a limit on the size of files."""
    data, whole = arena.pictures("data"), arena.folder / "whole"
    arena.classlens("selfsup", "bank", data, *BANK, "--out", whole)
    disk = arena.folder / "disk"
    disk.mkdir()
    for _ in arena.rounds():
        pages = arena.dice.randint(1, 6)
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={4096 * pages}", "tmpfs", str(disk)], capture_output=True, check=False
        )
        limit = 4096 * 10**6 if mounted.returncode == 0 else arena.dice.randint(1, 2000)
        command = ("selfsup", "bank", data, *BANK, "--out", disk / "bank")
        try:
            ended = arena.classlens(*command, prepare=lambda limit=limit: _no_file_beyond(limit))  # type: ignore[misc]
            if ended.killed:
                raise Wrong(f"a full disk killed it with signal {-ended.code}")
            yield ended.check_clean()
            if mounted.returncode == 0:
                subprocess.run(["mount", "-o", "remount,size=16m", str(disk)], capture_output=True, check=True)
            again = arena.classlens(*command)
            if again.check_clean() != "done":
                raise Wrong(f"it cannot be resumed: {again.text.strip()[-300:]!r}")
            check_bank(whole, disk / "bank")
            yield "done"
        finally:
            if mounted.returncode == 0:
                subprocess.run(["umount", str(disk)], capture_output=True, check=True)
            else:
                shutil.rmtree(disk / "bank", ignore_errors=True)
