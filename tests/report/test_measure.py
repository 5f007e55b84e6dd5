from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from classlens.data.masks import IGNORE
from classlens.report import measure


def shares(values: list[list[float]]) -> NDArray[np.float64]:
    found = measure.positive_shares(np.array(values))
    assert found is not None
    return found


def test_shares_are_of_the_positive_evidence() -> None:
    assert shares([[3, -2], [1, 0]]).tolist() == [[0.75, 0], [0.25, 0]]
    assert measure.positive_shares(np.array([[-1.0, 0.0]])) is None
    assert measure.against(np.array([[3.0, -2.0], [1.0, 0.0]])) == pytest.approx(2 / 6)
    assert measure.against(np.zeros((2, 2))) == 0


def test_what_is_not_labelled_counts_for_nobody() -> None:
    share = shares([[4, 1], [3, 2]])
    mask = np.array([[1, 0], [IGNORE, 0]], np.uint8)
    assert measure.inside(share, mask) == pytest.approx(4 / 7)
    assert measure.area(mask) == pytest.approx(1 / 3)
    nothing = np.full((2, 2), IGNORE, np.uint8)
    assert measure.inside(share, nothing) is None
    assert measure.area(nothing) is None


def test_every_object_of_a_mask_is_inside() -> None:
    assert measure.inside(shares([[4, 1], [3, 2]]), np.array([[1, 2], [0, 0]], np.uint8)) == pytest.approx(0.5)


def test_the_border_is_the_outer_tenth_of_each_side() -> None:
    border = measure.frame(20, 10)
    assert border[:2].all()
    assert border[:, 0].all()
    assert not border[2:18, 1:9].any()
    assert border.sum() == 20 * 10 - 16 * 8
    assert measure.frame(3, 3).sum() == 8  # never nothing


def test_cells_hold_all_of_the_evidence() -> None:
    share = shares(np.arange(35.0).reshape(5, 7).tolist())
    grid = measure.cells(share, 3)
    assert grid.shape == (3, 3)
    assert grid.sum() == pytest.approx(1)
    # Rows 0,1 | 2,3 | 4 and columns 0,1,2 | 3,4 | 5,6.
    assert grid[0, 0] == pytest.approx((0 + 1 + 2 + 7 + 8 + 9) / 595)
    assert grid[2, 2] == pytest.approx((33 + 34) / 595)
    assert np.array_equal(measure.cells(share, 16), share)  # never more cells than pixels


def test_cells_come_back_as_their_pixels() -> None:
    chosen = np.zeros((3, 3), bool)
    chosen[0, 0] = chosen[2, 2] = True
    pixels = measure.pixels(chosen, (5, 7))
    assert np.argwhere(pixels).tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2], [4, 5], [4, 6]]


@pytest.mark.parametrize(
    ("grid", "count"),
    [
        ([[1.0, 0.0], [0.0, 0.0]], 1),
        ([[0.25, 0.25], [0.25, 0.25]], 2),  # evenly spread: half of the picture
        ([[0.4, 0.3], [0.2, 0.1]], 2),
        ([[0.5, 0.5], [0.0, 0.0]], 1),
    ],
)
def test_the_fewest_cells_that_hold_half(grid: list[list[float]], count: int) -> None:
    values = np.array(grid)
    chosen = measure.half_cells(values)
    assert chosen.sum() == count
    assert values[chosen].sum() >= 0.5
    assert values[chosen].min() >= values[~chosen].max()


def test_how_two_maps_differ() -> None:
    one, other = np.array([[1.0, 1.0, 0.0]]), np.array([[0.0, 3.0, -1.0]])
    assert measure.difference(one, other).tolist() == [[0.5, -0.25, 0.25]]
    assert measure.overlap(shares([[1, 1, 0]]), shares([[0, 3, 0]])) == pytest.approx(0.5)
    assert measure.overlap(shares([[1, 1, 0]]), shares([[2, 2, 0]])) == pytest.approx(1)
    assert measure.overlap(shares([[1, 0, 0]]), shares([[0, 0, 1]])) == 0
    assert measure.difference(one, np.zeros((1, 3))).tolist() == [[0.5, 0.5, 0]]
