"""Scores of clusters against labels that were not used for training.

>>> purity(np.array([0, 0, 1, 1]), np.array([5, 5, 5, 7]))
0.75
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def purity(clusters: Ints, labels: Ints) -> float:
    """The share of images whose label is the most frequent one of their cluster."""
    return float(_table(clusters, labels).max(1).sum() / len(labels))


def chance_purity(clusters: Ints, labels: Ints, seed: int = 0, draws: int = 10) -> float:
    """The purity of clusters of these sizes with shuffled labels: many small clusters are pure by chance."""
    generator = np.random.default_rng(seed)
    return float(np.mean([purity(clusters, generator.permutation(labels)) for _ in range(draws)]))


def mutual_information(clusters: Ints, labels: Ints) -> float:
    """Normalised mutual information, 0..1: I(clusters; labels) over the mean of their entropies.

    >>> mutual_information(np.array([1, 1, 0, 0]), np.array([0, 0, 1, 1]))
    1.0
    """
    joint = _table(clusters, labels) / len(labels)
    rows, columns = joint.sum(1), joint.sum(0)
    mean = (_entropy(rows) + _entropy(columns)) / 2
    return float((_entropy(rows) + _entropy(columns) - _entropy(joint)) / mean) if mean > 0 else 0.0


def _table(clusters: Ints, labels: Ints) -> NDArray[np.int64]:
    """(clusters, labels): the number of images with both."""
    table = np.zeros((int(clusters.max()) + 1, int(labels.max()) + 1), np.int64)
    np.add.at(table, (clusters, labels), 1)
    return table


def _entropy(shares: NDArray[np.float64]) -> float:
    there = shares[shares > 0]
    return float(-(there * np.log(there)).sum())
