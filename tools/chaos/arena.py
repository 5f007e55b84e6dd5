"""Where attacks take place: the real command in a child process that may be killed, starved or lied to.

The parent imports everything once and computes nothing, so children can be forked from it: an attempt costs the work of
the command and not the second of its imports.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "worlds"), str(Path(__file__).parent)]

import torch  # noqa: E402
import world  # noqa: E402
from PIL import Image  # noqa: E402

import classlens.selfsup.bank  # noqa: E402, F401  (imported once, for all children)
from classlens.cli import main  # noqa: E402
from classlens.evaluate import gallery, store  # noqa: E402

EVALUATE = "--model", "deadly:make", "--methods", "gradcam,random", "--batch-size", "2", "--threads", "1"


class Wrong(Exception):
    """Something went wrong and nobody said so."""


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code, negative for the signal that killed it, and what it printed."""

    code: int
    text: str

    @property
    def killed(self) -> bool:
        return self.code < 0

    def check_clean(self) -> str:
        """Success ("done"), a signal ("killed"), or one line that says what is wrong ("refused")."""
        lines = [line for line in self.text.splitlines() if line.startswith("error: ")]
        if self.killed:
            return "killed"
        if self.code == 0:
            return "done"
        if self.code != 2 or len(lines) != 1 or "Traceback" in self.text:
            raise Wrong(f"exit {self.code}: {self.text.strip()[-300:]!r}")
        return "refused"


@dataclass
class Arena:
    """A folder for one attack, its dice, and the moment at which it has to end."""

    folder: Path
    dice: random.Random
    until: float

    def rounds(self) -> Iterator[int]:
        """0, 1, 2, ... as long as there is time; at least one."""
        yield 0
        for number in itertools.count(1):
            if time.monotonic() > self.until:
                return
            yield number

    def classlens(self, *arguments: object, prepare: Callable[[], None] = lambda: None, wait: float = 120.0) -> Ended:
        """Run the command in a child; `prepare` is called there first."""
        reading, writing = os.pipe()  # not a file: its size might be limited
        pid = os.fork()
        if pid == 0:
            _be_a_command(writing, prepare, [str(argument) for argument in arguments])
        os.close(writing)
        return _waited(pid, reading, wait)

    def pictures(self, name: str, count: int = 3) -> Path:
        """A folder for each colour with `count` pictures."""
        root = self.folder / name / "pics"
        for colour in world.COLOURS:
            for seed in range(count):
                paint(root / colour / f"{seed}.png", seed)
        return root

    def evaluate(self, data: Path, out: Path, **how: Any) -> Ended:
        return self.classlens("evaluate", "perturbation", "--data", data, *EVALUATE, "--out", out, **how)

    def fresh(self, data: Path) -> dict[str, list[dict[str, Any]]]:
        """The rows of a run that nothing disturbs."""
        out = self.folder / "fresh"
        shutil.rmtree(out, ignore_errors=True)
        ended = self.evaluate(data, out)
        if ended.check_clean() != "done":
            raise Wrong(f"an undisturbed run failed: {ended.text[-300:]!r}")
        return rows_of(out)

    def check_rows(self, data: Path, out: Path, expected: dict[str, list[dict[str, Any]]] | None = None) -> None:
        """Resume the run: its rows have to be those of a fresh one."""
        ended = self.evaluate(data, out)
        if ended.check_clean() != "done":
            raise Wrong(f"it cannot be resumed: {ended.text.strip()[-300:]!r}")
        expected = self.fresh(data) if expected is None else expected
        for kind, found in rows_of(out).items():
            # Rows of what pictures held before are kept too, but no table shows them.
            now = {(row["image"], row["content"]) for row in expected[kind]}
            rows = [row for row in found if (row["image"], row["content"]) in now]
            if not _alike(rows, expected[kind]):
                raise Wrong(f"{len(rows)} rows of {kind}, not the {len(expected[kind])} of a fresh run")


def paint(path: Path, seed: int) -> None:
    """Draw the picture of a colour, which is the name of the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(world.picture(path.parent.name, seed)[0]).save(path)


def rows_of(out: Path) -> dict[str, list[dict[str, Any]]]:
    """The rows of a run, in a fixed order."""
    kept = store.Store(out)
    found = {kind: kept.read(kind).to_pylist() for kind in ("prediction", "perturbation")}
    return {kind: sorted(rows, key=lambda row: (row["image"], row["method"])) for kind, rows in found.items()}


def _alike(ours: Any, theirs: Any) -> bool:
    """Equal, but for rounding: pictures may have been computed in other batches."""
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(_alike(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list):
        return len(ours) == len(theirs) and all(map(_alike, ours, theirs))
    if isinstance(ours, float):
        return abs(ours - theirs) <= 1e-4 or (ours != ours and theirs != theirs)
    return bool(ours == theirs)


def _be_a_command(writing: int, prepare: Callable[[], None], arguments: list[str]) -> None:
    code = 1
    try:
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        os.close(writing)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        torch.set_num_threads(1)
        gallery.slowest_ops = lambda *_: {}  # takes long, and is not what is attacked
        prepare()
        main(arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)  # whatever happened: a child must never go on as a second parent


def _waited(pid: int, reading: int, seconds: float) -> Ended:
    timer = threading.Timer(seconds, os.kill, (pid, signal.SIGTERM))
    timer.start()
    with os.fdopen(reading, errors="replace") as file:
        text = file.read()
    _, status = os.waitpid(pid, 0)
    timer.cancel()
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGTERM:
        raise Wrong(f"it hung for {seconds:.0f} seconds")
    return Ended(code, text)


def die() -> None:
    """End this process as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_after(seconds: float) -> Callable[[], None]:
    """What a child does to be killed at a moment."""

    def prepare() -> None:
        timer = threading.Timer(seconds, die)
        timer.daemon = True
        timer.start()

    return prepare


@contextmanager
def arena(seed: int, seconds: float) -> Iterator[Arena]:
    """An arena whose folder is removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    try:
        yield Arena(folder, random.Random(seed), time.monotonic() + seconds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
