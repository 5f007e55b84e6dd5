"""Spectral clustering of pictures by what their evidence shows: the same colours at the same places.

    >>> (labels,) = clusters(described(grids, looks))          # (n,), 0 for the largest group

After spectral relevance analysis (Lapuschkin et al., Nature Communications 2019): likeness of all pairs, the graph of
nearest neighbours, the eigenvectors of its Laplacian with the smallest eigenvalues, as many as the largest gap between
eigenvalues says, and k-means on them. There, maps are compared; here, the picture weighted by its map: a watermark
looks the same in all of its pictures, while objects that lie in the same place by chance do not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from classlens.report.measure import Floats

NEIGHBOURS = 3  # of each map in the graph
MOST = 12  # groups
_STARTS, _ROUNDS = 8, 50  # of k-means

Labels = NDArray[np.int64]


def described(grids: Floats, looks: NDArray[Any]) -> Floats:
    """Each picture (3,2h,2w) weighted by the evidence (h,w) in its cells, as a vector of length 1.

    The product of two vectors is the likeness of the pictures where both have evidence.
    """
    contrast = looks.astype(np.float64) - looks.mean((2, 3), keepdims=True, dtype=np.float64)
    weight = np.sqrt(np.repeat(np.repeat(grids, 2, 1), 2, 2))[:, None]
    found = (weight * contrast).reshape(len(grids), -1)
    return np.asarray(found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12))


def clusters(vectors: Floats, seed: int = 0, neighbours: int = NEIGHBOURS, gaps: int = 1) -> list[Labels]:
    """The group of each picture, the largest group first; one division for each of the `gaps` largest eigengaps."""
    values, found = spectrum(affinity(vectors, neighbours))
    random = np.random.default_rng(seed)
    return [_ordered(k_means(embedding(found, count), count, random)) for count in eigengaps(values, gaps)]


def _ordered(found: Labels) -> Labels:
    order = np.argsort(-np.bincount(found), kind="stable")
    return np.asarray(np.argsort(order)[found])


def affinity(vectors: Floats, neighbours: int) -> Floats:
    """(n,n): the likeness of each picture and its nearest neighbours, 0 for other pairs."""
    alike = np.maximum(vectors @ vectors.T, 0)
    np.fill_diagonal(alike, 0)
    rank = np.argsort(np.argsort(-alike, axis=1, kind="stable"), axis=1, kind="stable")
    near = rank < neighbours
    return np.where(near | near.T, alike, 0.0)


def spectrum(weights: Floats) -> tuple[Floats, Floats]:
    """Eigenvalues, the smallest first, and eigenvectors of the normalised Laplacian of a graph."""
    scale = 1 / np.sqrt(np.maximum(weights.sum(1), 1e-12))
    values, vectors = np.linalg.eigh(np.eye(len(weights)) - scale[:, None] * weights * scale[None])
    return np.asarray(values), np.asarray(vectors)


def eigengaps(values: Floats, gaps: int, most: int = MOST) -> list[int]:
    """How many groups there are: the positions of the largest gaps between the first eigenvalues."""
    return [int(place) + 1 for place in np.argsort(-np.diff(values[: most + 1]), kind="stable")[:gaps]]


def embedding(vectors: Floats, count: int) -> Floats:
    """The rows of the first eigenvectors, scaled to length 1."""
    chosen = vectors[:, :count]
    return np.asarray(chosen / np.maximum(np.linalg.norm(chosen, axis=1, keepdims=True), 1e-12))


def k_means(points: Floats, count: int, random: np.random.Generator) -> Labels:
    """The best of a few runs, each started from points that lie far from each other (k-means++)."""
    runs = [_run(points, _start(points, count, random)) for _ in range(_STARTS)]
    return min(runs, key=lambda run: run[1])[0]


def _start(points: Floats, count: int, random: np.random.Generator) -> Floats:
    centres = points[random.integers(len(points))][None]
    while len(centres) < count:
        apart: Floats = _squared(points, centres).min(1)
        chances = apart / apart.sum() if apart.sum() > 0 else np.full(len(points), 1 / len(points))
        centres = np.concatenate([centres, points[random.choice(len(points), p=chances)][None]])
    return np.asarray(centres)


def _run(points: Floats, centres: Floats) -> tuple[Labels, float]:
    labels = np.zeros(len(points), np.int64)
    for _ in range(_ROUNDS):
        labels = np.asarray(_squared(points, centres).argmin(1))
        # A centre that lost all its points stays where it was.
        moved = [points[labels == k].mean(0) if (labels == k).any() else centres[k] for k in range(len(centres))]
        if np.allclose(moved, centres):
            break
        centres = np.stack(moved)
    return labels, float(_squared(points, centres).min(1).sum())


def _squared(points: Floats, centres: Floats) -> Floats:
    """(n,k): squared distances."""
    return np.asarray(((points[:, None] - centres[None]) ** 2).sum(2))
