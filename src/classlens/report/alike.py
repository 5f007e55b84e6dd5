"""Pictures that show the same thing at the same place, and have evidence there: what three of sixty have in common.

    >>> alike_somewhere(grids, looks)         # n maps and pictures -> one set of pictures for each place
    [array([57, 58, 59])]

Whole pictures are compared by spectral.py. There, a few pictures with a watermark are alike in the watermark and unlike
in all else that they have evidence for, and three of them are lost among sixty. Here the place comes first: each window
of the picture is asked which pictures have evidence in it, and which of these look the same in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from classlens.report.measure import Floats

SIDE, STEP = 4, 1  # of the windows, in cells
EVIDENCE = 0.1  # of a picture's evidence: the least that a window holds
SAME = 0.8  # likeness of two pictures in a window, in [-1,1]; of two things of one kind it is hardly ever so high

Chosen = NDArray[np.intp]


def alike_somewhere(grids: Floats, looks: NDArray[Any], least: int = 3, most: float = 0.5) -> list[Chosen]:
    """Sets of `least` pictures or more, up to a share of all, that look alike where much of their evidence is."""
    found: set[frozenset[int]] = set()
    rows, columns = grids.shape[1:]
    for top in range(0, rows - SIDE + 1, STEP):
        for left in range(0, columns - SIDE + 1, STEP):
            inside = grids[:, top : top + SIDE, left : left + SIDE].sum((1, 2))
            there = np.flatnonzero(inside >= EVIDENCE)
            if len(there) < least:
                continue
            patches = looks[there][:, :, 2 * top : 2 * (top + SIDE), 2 * left : 2 * (left + SIDE)]
            sets = (frozenset(there[members].tolist()) for members in together(likeness(patches), SAME))
            found |= {members for members in sets if least <= len(members) <= most * len(grids)}
    joined = united(sorted(found, key=lambda members: (-len(members), sorted(members))))
    return [np.array(sorted(members)) for members in joined if len(members) <= most * len(grids)]


def united(sets: Sequence[frozenset[int]]) -> list[frozenset[int]]:
    """Sets that share half of the smaller one are the same group, seen through windows beside each other.

    >>> united([frozenset({1, 2, 3, 4}), frozenset({3, 4, 5}), frozenset({6, 7, 8})])
    [frozenset({1, 2, 3, 4, 5}), frozenset({8, 6, 7})]
    """
    found: list[frozenset[int]] = []
    for members in sets:
        near = [one for one in found if 2 * len(one & members) >= min(len(one), len(members))]
        found = [one for one in found if one not in near] + [members.union(*near)]
    return found


def likeness(patches: NDArray[Any]) -> Floats:
    """(n,n) correlation of patches (n,3,h,w), each less its own mean colour: light and dark corners are not alike.

    >>> likeness(np.stack([stripes, stripes + 0.2, 1 - stripes])).round().tolist()[0]
    [1.0, 1.0, -1.0]
    """
    values = patches.astype(np.float64)
    values -= values.mean((2, 3), keepdims=True)
    flat = values.reshape(len(values), -1)
    flat /= np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-12)
    return np.asarray(flat @ flat.T)


def together(alike: Floats, least: float) -> list[Chosen]:
    """Groups by average linkage: the two most alike are joined, as long as their pairs are alike by `least` on average.

    >>> [group.tolist() for group in together(np.array([[1, 0.9, 0], [0.9, 1, 0.1], [0, 0.1, 1]]), 0.5)]
    [[0, 1], [2]]
    """
    between = alike.copy()
    np.fill_diagonal(between, -np.inf)
    groups = [[index] for index in range(len(alike))]
    while len(groups) > 1:
        one, two = sorted(int(place) for place in np.unravel_index(between.argmax(), between.shape))
        if between[one, two] < least:
            break
        sizes = len(groups[one]), len(groups[two])
        joined = np.average(between[[one, two]], axis=0, weights=sizes)
        between[one], between[:, one] = joined, joined
        between[one, one] = -np.inf
        between = np.delete(np.delete(between, two, 0), two, 1)
        groups[one] += groups.pop(two)
    return [np.array(sorted(group)) for group in groups]
