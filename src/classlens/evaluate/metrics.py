"""From rows to numbers: what each test's table shows, and how it is made from sums over pictures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from classlens.evaluate import perturbation, sanity
from classlens.evaluate.records import same_pictures
from classlens.evaluate.settings import Config
from classlens.evaluate.stats import Combine, Estimate, Floats, estimate, mean_ratio, ratio


@dataclass(frozen=True)
class Metric:
    """A column of a table."""

    name: str
    better: int  # +1: more is better, -1: less is
    columns: Callable[[pa.Table], Floats]  # rows -> (n, c), to be summed
    combine: Combine = ratio
    scale: float = 100.0

    def estimate(self, rows: pa.Table, seed: int) -> Estimate:
        """The value over all rows with its interval; grids' cells are drawn together."""
        return self.scaled(estimate(self.columns(rows), self.combine, _groups(rows), seed))

    def difference(self, rows: pa.Table, others: pa.Table, seed: int) -> Estimate:
        """The value less that of `others` on the same pictures, drawn together: far finer than two intervals."""
        mine, theirs = same_pictures(rows, others)
        # sums of both side by side, the weights of both behind: what `estimate` expects of its columns
        halves = [np.split(self.columns(table), 2, axis=1) for table in (mine, theirs)]
        columns = np.concatenate([part[i] for i in (0, 1) for part in halves], 1)

        def less(sums: Floats) -> Floats:
            a, b, weight_a, weight_b = np.split(sums, 4, axis=-1)
            first = self.combine(np.concatenate([a, weight_a], -1))
            return first - self.combine(np.concatenate([b, weight_b], -1))

        return self.scaled(estimate(columns, less, _groups(mine), seed))

    def scaled(self, found: Estimate) -> Estimate:
        """In the unit that tables show."""
        return Estimate(self.scale * found.value, self.scale * found.low, self.scale * found.high, found.n)


def metrics(config: Config) -> tuple[Metric, ...]:
    """The columns of a test's table."""
    if config.test == "perturbation":
        return tuple(
            Metric(
                f"{direction} AUC, {against}", +1 if direction == "negative" else -1, _area(direction, against), scale=1
            )
            for against in ("accuracy", "agreement")
            for direction in perturbation.DIRECTIONS
        )
    if config.test == "segmentation":
        return (
            Metric("pixel accuracy", +1, lambda rows: _columns(rows, "correct", "labelled")),
            Metric("mAP (paper)", +1, lambda rows: mean(floats(rows, "ap_paper"))),
            Metric("mIoU", +1, _overlap, mean_ratio),
            Metric("AP (soft)", +1, lambda rows: mean(floats(rows, "ap_soft"))),
        )
    if config.test == "pointing":
        return (
            Metric("share in the right cell", +1, lambda rows: mean(floats(rows, "share"))),
            Metric("hits of the maximum", +1, lambda rows: mean(floats(rows, "hit"))),
        )
    return tuple(
        Metric(f"{what}, {measure}", -1, columns(measure), scale=1)
        for what, columns in (("random network", _last_stage), ("other class", _other_class))
        for measure in sanity.MEASURES
    )


def curves(rows: pa.Table, direction: str, against: str) -> NDArray[np.float64]:
    """(n,10): whether each picture was still recognised, clean first; NaN without a label."""
    steps = np.array(rows[f"{direction}_predicted"].to_pylist(), float).reshape(len(rows), -1)
    predicted = floats(rows, "predicted")
    truth = floats(rows, "label") if against == "accuracy" else predicted
    hits = np.concatenate([predicted[:, None], steps], 1) == truth[:, None]
    return np.where(np.isnan(truth)[:, None], np.nan, hits.astype(float))


def stages(rows: pa.Table, measure: str) -> NDArray[np.float64]:
    """(n,stages): similarity to the original map as more of the network is randomised."""
    return np.array(rows[measure].to_pylist(), float).reshape(len(rows), -1)


def image_scores(config: Config, rows: pa.Table) -> NDArray[np.float64]:
    """One number in [0,1] for each row, by which methods can be compared on a picture; NaN if there is none."""
    if config.test == "perturbation":
        least = np.array(rows["negative_probability"].to_pylist(), float).reshape(len(rows), -1).mean(1)
        most = np.array(rows["positive_probability"].to_pylist(), float).reshape(len(rows), -1).mean(1)
        return np.asarray((1 + least - most) / 2)
    if config.test == "segmentation":
        return floats(rows, "ap_soft")
    if config.test == "pointing":
        return floats(rows, "share")
    return np.full(len(rows), np.nan)


def floats(rows: pa.Table, name: str) -> NDArray[np.float64]:
    """A column of numbers; what is missing is NaN."""
    return np.array([np.nan if value is None else value for value in rows[name].to_pylist()], float)


def mean(values: NDArray[Any]) -> Floats:
    """Columns whose `ratio` is the mean of the values that there are."""
    there = ~np.isnan(values)
    return np.stack([np.where(there, values, 0.0), there.astype(float)], 1)


def _groups(rows: pa.Table) -> NDArray[Any] | None:
    """The grid of each row, where rows are cells of grids."""
    return np.array(rows["grid"].to_pylist()) if "grid" in rows.column_names else None


def _area(direction: str, against: str) -> Callable[[pa.Table], Floats]:
    return lambda rows: mean(perturbation.areas(curves(rows, direction, against)))


def _last_stage(measure: str) -> Callable[[pa.Table], Floats]:
    return lambda rows: mean(stages(rows, measure)[:, -1])


def _other_class(measure: str) -> Callable[[pa.Table], Floats]:
    return lambda rows: mean(floats(rows, f"class_{measure}"))


def _columns(rows: pa.Table, *names: str) -> Floats:
    return np.stack([floats(rows, name) for name in names], 1)


def _overlap(rows: pa.Table) -> Floats:
    both, either = (
        np.array(rows[name].to_pylist(), float).reshape(len(rows), -1) for name in ("intersection", "union")
    )
    return np.concatenate([both, either], 1)
