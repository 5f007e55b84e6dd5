"""From rows to numbers: a column of a test's table, and how it is made from sums over pictures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from classlens.evaluate.stats import Combine, Estimate, Floats, estimate, ratio
from classlens.evaluate.store import same_pictures

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Metric:
    """A column of a table."""

    name: str
    better: int  # +1: more is better, -1: less is, 0: neither
    columns: Callable[[pa.Table], Floats]  # rows -> (n, c), to be summed
    combine: Combine = ratio
    scale: float = 100.0

    def estimate(self, rows: pa.Table, seed: int, group: str | None = None) -> Estimate:
        """The value over all rows with its interval; rows with the same value of `group` are drawn together."""
        return self.scaled(estimate(self.columns(rows), self.combine, _groups(rows, group), seed))

    def difference(self, rows: pa.Table, others: pa.Table, seed: int, group: str | None = None) -> Estimate:
        """The value less that of `others` on the same pictures, drawn together: far finer than two intervals."""
        mine, theirs = same_pictures(rows, others)
        # sums of both side by side, the weights of both behind: what `estimate` expects of its columns
        halves = [np.split(self.columns(table), 2, axis=1) for table in (mine, theirs)]
        columns = np.concatenate([part[i] for i in (0, 1) for part in halves], 1)

        def less(sums: Floats) -> Floats:
            a, b, weight_a, weight_b = np.split(sums, 4, axis=-1)
            first = self.combine(np.concatenate([a, weight_a], -1))
            return first - self.combine(np.concatenate([b, weight_b], -1))

        return self.scaled(estimate(columns, less, _groups(mine, group), seed))

    def scaled(self, found: Estimate) -> Estimate:
        """In the unit that tables show."""
        return Estimate(self.scale * found.value, self.scale * found.low, self.scale * found.high, found.n)


def floats(rows: pa.Table, name: str) -> NDArray[np.float64]:
    """A column of numbers; what is missing is NaN."""
    return np.array([np.nan if value is None else value for value in rows[name].to_pylist()], float)


def mean(values: NDArray[Any]) -> Floats:
    """Columns whose `ratio` is the mean of the values that there are."""
    there = ~np.isnan(values)
    return np.stack([np.where(there, values, 0.0), there.astype(float)], 1)


def lists(rows: pa.Table, name: str) -> NDArray[np.float64]:
    """A column of lists of one length, (n, length)."""
    return np.array(rows[name].to_pylist(), float).reshape(len(rows), -1)


def _groups(rows: pa.Table, group: str | None) -> NDArray[Any] | None:
    return None if group is None else np.array(rows[group].to_pylist())
