"""Whatever happens to a run and to its data, in any order: at the end its rows are those of a fresh run."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import world
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from PIL import Image

from classlens.evaluate import Settings, store
from classlens.evaluate.report import collect
from classlens.evaluate.runner import run_and
from interrupted import Killed, die, interrupted

Rows = list[dict[str, Any]]
some = st.integers(0, 1000)  # which picture, part or write; taken modulo how many there are


def evaluated(data: Path, out: Path) -> tuple[Rows, Rows]:
    """The rows of a run, as its tables see them, and what it could not read."""
    chosen = Settings(
        tests=("perturbation",), methods=("gradcam", "random"), data=(str(data),), model="world:make", batch_size=2,
        threads=1,
    )  # fmt: skip

    def rows(kept: store.Store, plan: Any, *_: Any) -> tuple[Rows, Rows]:
        tables = [table for _, _, methods in collect(kept, plan) for table in methods.values()]
        return [row for table in tables for row in table.to_pylist()], list(plan.broken)

    return run_and(rows, chosen, out)


def paint(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(world.picture(path.parent.name, seed)[0]).save(path)


def same_rows(ours: Rows, theirs: Rows) -> None:
    assert [sorted(row) for row in ours] == [sorted(row) for row in theirs]
    for one, other in zip(ours, theirs, strict=True):
        for name, value in one.items():
            if isinstance(value, float | list):  # a batch of two and a batch of one may round differently
                assert value == pytest.approx(other[name], abs=1e-4, nan_ok=True), name
            else:
                assert value == other[name], name


class AnyOrder(RuleBasedStateMachine):
    """A folder of pictures and a run on it, with everything that may happen to them."""

    @initialize()
    def begin(self) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.data, self.out, self.count = self.root / "pics", self.root / "run", itertools.count()
        for colour in world.COLOURS:
            paint(self.data / colour / "0.png", 0)

    def teardown(self) -> None:
        if hasattr(self, "root"):
            self.resume()
            shutil.rmtree(self.root)

    # ------------------------------------------------------------------------------------------------------ the data

    @property
    def pictures(self) -> list[Path]:
        return sorted(self.data.rglob("*.png"))

    def tidy(self) -> None:
        """A folder of a class without pictures is refused as an unknown layout, so it goes with its last picture."""
        for folder in self.data.iterdir():
            if not any(folder.iterdir()):
                folder.rmdir()

    @rule(which=some, seed=st.integers(0, 3), same_time=st.booleans())
    def change(self, which: int, seed: int, same_time: bool) -> None:
        path = self.pictures[which % len(self.pictures)]
        before = path.stat()
        paint(path, seed)
        if same_time:
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    @rule(which=some)
    def break_(self, which: int) -> None:
        self.pictures[which % len(self.pictures)].write_bytes(b"not a picture")

    @precondition(lambda self: len(self.pictures) > 2)
    @rule(which=some)
    def delete(self, which: int) -> None:
        self.pictures[which % len(self.pictures)].unlink()
        self.tidy()

    @precondition(lambda self: len(self.pictures) < 6)
    @rule(colour=st.sampled_from(list(world.COLOURS)), seed=st.integers(0, 3))
    def add(self, colour: str, seed: int) -> None:
        paint(self.data / colour / f"{next(self.count) + 1}.png", seed)

    @rule(which=some, colour=st.sampled_from(list(world.COLOURS)))
    def rename(self, which: int, colour: str) -> None:
        (self.data / colour).mkdir(exist_ok=True)
        self.pictures[which % len(self.pictures)].rename(self.data / colour / f"{next(self.count) + 1}.png")
        self.tidy()

    @rule(one=some, other=some)
    def swap(self, one: int, other: int) -> None:
        a, b = self.pictures[one % len(self.pictures)], self.pictures[other % len(self.pictures)]
        kept = a.read_bytes()
        a.write_bytes(b.read_bytes())
        b.write_bytes(kept)

    # ------------------------------------------------------------------------------------------------------- the run

    @rule(at=st.integers(1, 12), after=st.booleans())
    def killed(self, at: int, after: bool) -> None:
        with suppress(Killed), interrupted(at, die, after):
            evaluated(self.data, self.out)

    @rule(at=st.integers(1, 12), after=st.booleans())
    def overtaken(self, at: int, after: bool) -> None:
        """A second process runs from beginning to end between two moments of the first."""
        with interrupted(at, lambda: void(evaluated(self.data, self.out)), after):
            evaluated(self.data, self.out)

    @rule(which=some, keep=st.integers(0, 3))
    def cut_short(self, which: int, keep: int) -> None:
        """A power failure: a part of the rows lost its end."""
        parts = sorted(self.out.rglob("*.parquet"))
        if parts:
            path = parts[which % len(parts)]
            path.write_bytes(path.read_bytes()[: path.stat().st_size * keep // 4])

    @rule(text=st.sampled_from(["", "{", "[]", '{"a": 1}']))
    def forget(self, text: str) -> None:
        if self.out.exists():
            (self.out / "contents.json").write_text(text)

    @rule()
    def resume(self) -> None:
        fresh = self.root / f"fresh{next(self.count)}"
        ours, theirs = evaluated(self.data, self.out), evaluated(self.data, fresh)
        shutil.rmtree(fresh)
        same_rows(ours[0], theirs[0])
        same_rows(ours[1], theirs[1])


def void(_: object) -> None:
    """Do something for its effect."""


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_COMPACT_FROM", 4)  # so that parts are put together at nearly every run
    monkeypatch.setattr(os, "fsync", lambda _: None)  # no power fails here


_LIMITS: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}
TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    max_examples=int(os.environ.get("CLASSLENS_SEQUENCES", "8")), stateful_step_count=8, **_LIMITS
)
