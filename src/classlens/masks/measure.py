"""Chooses threshold and refinement on half A by mIoU, and measures them on half B with intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from classlens.data.masks import IGNORE
from classlens.evaluate.metrics import Metric
from classlens.evaluate.stats import Estimate
from classlens.evaluate.store import arrow
from classlens.evaluate.tests.segmentation import METRICS, overlaps
from classlens.masks.labels import NONE, REFINEMENTS, THRESHOLDS, WALK, Setting

if TYPE_CHECKING:
    import pyarrow as pa

Labelled = Callable[[str, Setting], NDArray[np.uint8]]  # picture, setting -> its labels
MIOU: Metric = next(metric for metric in METRICS if metric.name == "mIoU")


@dataclass(frozen=True)
class Measured:
    """A setting for each refinement, chosen on half A, with its mIoU on half B."""

    settings: Mapping[str, Setting]  # by refinement
    on_a: Mapping[str, float]
    on_b: Mapping[str, Estimate]
    rows_b: Mapping[str, pa.Table]

    @property
    def best(self) -> Setting:
        """The setting with the highest mIoU on half A; of equals, without refinement."""
        return self.settings[max(REFINEMENTS, key=lambda name: self.on_a.get(name, -1.0))]


def measure(
    halves: tuple[Sequence[str], Sequence[str]], truth: Mapping[str, NDArray[np.uint8]], labelled: Labelled,
    classes: int, seed: int, given: Setting | None = None, tick: Callable[[], None] = lambda: None,
) -> Measured:  # fmt: skip
    """Try settings on the pictures of half A; for each refinement, measure the best one on half B.

    A random walk takes longer, so it is tried at the best threshold without it and at the next ones only.
    """

    def rows(names: Sequence[str], setting: Setting) -> pa.Table:
        return table(names, [overlaps_of(truth[name], labelled(name, setting), classes) for name in names])

    score = dict[Setting, float]()

    def best_of(tried: Sequence[Setting]) -> Setting:
        for setting in tried:
            score[setting] = MIOU.estimate(rows(halves[0], setting), seed).value
            tick()
        return max(tried, key=lambda setting: score[setting])

    if given is not None:
        best = {given.refine: best_of([given])}
    else:
        plain = best_of([Setting(threshold) for threshold in THRESHOLDS])
        best = {NONE: plain, WALK: best_of([Setting(threshold, WALK) for threshold in nearest(plain.threshold)])}
    rows_b = {name: rows(halves[1], setting) for name, setting in best.items()}
    on_b = {name: MIOU.estimate(found, seed) for name, found in rows_b.items()}
    return Measured(best, {name: score[setting] for name, setting in best.items()}, on_b, rows_b)


def nearest(threshold: float) -> tuple[float, ...]:
    """A threshold and those beside it.

    >>> nearest(0.01), nearest(0.3)
    ((0.01, 0.02), (0.25, 0.3, 0.35))
    """
    place = THRESHOLDS.index(threshold)
    return THRESHOLDS[max(0, place - 1) : place + 2]


def overlaps_of(truth: NDArray[np.uint8], guess: NDArray[np.uint8], classes: int) -> dict[str, Any]:
    """Intersection and union of background and of each class, without unlabelled pixels."""
    labelled = truth != IGNORE
    _, both, either = overlaps(truth[labelled], guess[labelled].astype(np.int64), classes + 1)
    return {"intersection": list(both), "union": list(either)}


def table(names: Sequence[str], values: Sequence[Mapping[str, Any]]) -> pa.Table:
    """A row for each picture."""
    return arrow().Table.from_pylist([{"image": name, **value} for name, value in zip(names, values, strict=True)])
