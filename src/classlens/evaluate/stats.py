"""Numbers with their uncertainty: a metric of many pictures, and its 95 % bootstrap interval.

>>> estimate(np.array([[1.0, 1.0], [0.0, 1.0], [1.0, 1.0], [1.0, 1.0]]), ratio).value
0.75
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

DRAWS = 1000
_BLOCK = 2_000_000  # random numbers at once

Floats = NDArray[np.floating[Any]]
Combine = Callable[[Floats], Floats]  # sums (..., columns) -> value (...)


@dataclass(frozen=True)
class Estimate:
    """A value, the interval it lies in with 95 %, and from how many pictures."""

    value: float
    low: float
    high: float
    n: int


def ratio(sums: Floats) -> Floats:
    """Sum of the first column over that of the second: a mean, or a pooled share."""
    return _divide(sums[..., 0], sums[..., 1])


def mean_ratio(sums: Floats) -> Floats:
    """2m columns: the mean over m of column i over column m+i, leaving out those that never occur."""
    top, bottom = np.split(sums, 2, axis=-1)
    there = bottom > 0
    return _divide((np.divide(top, bottom, out=np.zeros_like(top), where=there)).sum(-1), there.sum(-1))


def estimate(columns: Floats, combine: Combine, groups: NDArray[Any] | None = None, seed: int = 0) -> Estimate:
    """A metric that is made of the columns' sums, and its percentile bootstrap over rows (or groups of rows).

    Rows of a group (cells of one grid) are drawn together: they are not independent of each other.
    """
    columns = np.asarray(columns, float)
    units = columns if groups is None else _by_group(columns, groups)
    n = int((columns[:, columns.shape[1] // 2 :].sum(1) > 0).sum())  # those that weigh anything
    value = float(combine(columns.sum(0)))
    if len(units) < 2:
        return Estimate(value, np.nan, np.nan, n)
    generator = np.random.default_rng(seed)
    drawn = [combine(counts @ units) for counts in _draws(generator, len(units))]
    with np.errstate(all="ignore"):
        low, high = np.nanpercentile(np.concatenate(drawn), (2.5, 97.5)) if not np.isnan(value) else (np.nan, np.nan)
    return Estimate(value, float(low), float(high), n)


def _draws(generator: np.random.Generator, n: int) -> Iterator[Floats]:
    """How often each of n units is drawn, in blocks that fit into memory."""
    block = max(1, min(DRAWS, _BLOCK // n))
    for start in range(0, DRAWS, block):
        picks = generator.integers(0, n, (min(block, DRAWS - start), n))
        yield np.stack([np.bincount(row, minlength=n) for row in picks]).astype(float)


def _by_group(columns: Floats, groups: NDArray[Any]) -> Floats:
    names, index = np.unique(groups, return_inverse=True)
    sums = np.zeros((len(names), columns.shape[1]))
    np.add.at(sums, index, columns)
    return sums


def _divide(top: Floats, bottom: Floats) -> Floats:
    top, bottom = np.asarray(top, float), np.asarray(bottom, float)
    result: Floats = np.divide(top, bottom, out=np.full(np.shape(top), np.nan), where=bottom > 0)
    return result
