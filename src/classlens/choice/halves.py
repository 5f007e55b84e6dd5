"""Measures methods on one half of the pictures: an ordinary run of the evaluations, which resumes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from classlens.choice.contest import LEAST_GRIDS, LEAST_PICTURES, title
from classlens.choice.rank import Duel
from classlens.errors import DataError
from classlens.evaluate import TESTS, Settings
from classlens.evaluate.gallery import Shown, disputes, show
from classlens.evaluate.metrics import Metric, mean
from classlens.evaluate.plan import Part, Plan
from classlens.evaluate.registry import Config
from classlens.evaluate.report import collect, skipped_rows
from classlens.evaluate.runner import run_and
from classlens.evaluate.stats import Estimate
from classlens.evaluate.store import Store, where
from classlens.evaluate.worker import Worker
from classlens.models import LoadedModel
from classlens.progress import Progress

if TYPE_CHECKING:
    import pyarrow as pa

_MOST_FAILED = 0.1  # a method that fails on more of the pictures is left out
_SHOWN = 4  # pictures with maps


@dataclass(frozen=True)
class Scores:
    """One test on one half: the rows of each method, all on the same pictures."""

    test: str
    rows: Mapping[str, pa.Table]
    seed: int

    @property
    def group(self) -> str | None:
        return TESTS[self.test].group

    @property
    def metric(self) -> Metric:
        """The mean of the test's score of a picture, in per cent."""
        score = TESTS[self.test].picture_score
        assert score is not None  # `contest` names only tests that have one
        return Metric(title(self.test), +1, lambda rows: mean(score(rows)))

    @property
    def units(self) -> int:
        """The number of pictures, or of grids: of what is drawn together."""
        table = next(iter(self.rows.values()))
        return len(set(table[self.group or "image"].to_pylist()))

    def estimate(self, method: str) -> Estimate:
        """The score of a method with its interval."""
        return self.metric.estimate(self.rows[method], self.seed, self.group)

    def difference(self, method: str, against: str) -> Estimate:
        """The score of a method less that of another, on the same pictures."""
        return self.metric.difference(self.rows[method], self.rows[against], self.seed, self.group)


@dataclass(frozen=True)
class Half:
    """All tests on one half."""

    scores: Mapping[str, Scores]  # by test
    methods: tuple[str, ...]
    pictures: tuple[str, ...]
    left_out: Mapping[str, str]  # methods and tests, with the reason
    shown: tuple[Shown, ...] = ()

    def duel(self, method: str, against: str) -> Duel:
        """A method against another, test by test."""
        return Duel(method, against, {test: found.difference(method, against) for test, found in self.scores.items()})


def run_half(
    half: str, settings: Settings, loaded: LoadedModel, out: str | os.PathLike[str], progress: Progress,
    command: Sequence[str], draw: bool = False,
) -> Half:  # fmt: skip
    """Compute the missing rows of a half, and read all."""

    def report(store: Store, plan: Plan, settings: Settings, worker: Worker) -> Half:
        found = _half(half, store, plan, settings.seed)
        if not draw:
            return found
        results = [(part, config, rows) for part, config, rows in collect(store, plan) if config.test in found.scores]
        drawn = [show(one, worker, plan, settings.seed, store) for one in disputes(results)[:_SHOWN]]
        return replace(found, shown=tuple(one for one in drawn if one is not None))

    def named(what: str, done: int, total: int, /) -> None:
        progress(f"half {half}: {what}", done, total)

    return run_and(report, replace(settings, half=half), out, None, named, command, loaded)


def _half(half: str, store: Store, plan: Plan, seed: int) -> Half:
    results = collect(store, plan)
    left_out = _failed(store, plan, results)
    methods = tuple(method for method in plan.methods if method not in left_out)
    scores: dict[str, Scores] = {}
    for _, config, rows in results:
        found = Scores(config.test, _shared({method: rows[method] for method in methods}), seed)
        least = LEAST_GRIDS if found.group else LEAST_PICTURES
        if found.units < least:
            left_out[title(config.test)] = (
                f"the test {title(config.test)} is left out: half {half} has {found.units} of the {least} "
                + ("grids of confidently recognised pictures that it needs" if found.group else "pictures it needs")
            )
            continue
        scores[config.test] = found
    if not scores:
        raise DataError(f"half {half} has too few pictures for any test: " + "; ".join(left_out.values()))
    return Half(scores, methods, tuple(item.name for part in plan.parts for item in part.items), left_out)


def _failed(store: Store, plan: Plan, results: Sequence[tuple[Part, Config, Mapping[str, pa.Table]]]) -> dict[str, str]:
    """Methods without a map for many of the pictures that another method explains."""
    found: dict[str, str] = {}
    reasons = {row["method"]: row["reason"] for row in skipped_rows(store, plan)}
    for _, _, rows in results:
        most = max(len(table) for table in rows.values())
        for method, table in rows.items():
            if len(table) < (1 - _MOST_FAILED) * most:
                why = reasons.get(method, "no reason was given")
                found[method] = f"{method} gave no map for {most - len(table)} of {most} pictures: {why}"
    return found


def _shared(rows: Mapping[str, pa.Table]) -> dict[str, pa.Table]:
    """The rows on pictures that every method has, in one order: their means can be compared."""
    common = set.intersection(*(set(table["image"].to_pylist()) for table in rows.values()))
    return {method: where(table, image=sorted(common)).sort_by("image") for method, table in rows.items()}
