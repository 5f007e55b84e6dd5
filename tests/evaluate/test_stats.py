from __future__ import annotations

import numpy as np
import pytest

from classlens.evaluate.stats import estimate, mean_ratio, ratio


def test_the_interval_of_a_mean_is_the_textbooks() -> None:
    values = np.random.default_rng(0).normal(3, 2, 400)
    found = estimate(np.stack([values, np.ones(400)], 1), ratio)
    half = 1.96 * values.std() / 20
    assert found.value == pytest.approx(values.mean())
    assert found.low == pytest.approx(values.mean() - half, abs=0.25 * half)
    assert found.high == pytest.approx(values.mean() + half, abs=0.25 * half)
    assert found.n == 400
    assert estimate(np.stack([values, np.ones(400)], 1), ratio) == found


def test_pooled_shares_weigh_large_pictures_more() -> None:
    assert estimate(np.array([[9.0, 10.0], [0.0, 90.0]]), ratio).value == pytest.approx(0.09)


def test_rows_of_a_group_are_drawn_together() -> None:
    """Four equal copies of each value must not look like four times the evidence."""
    values = np.random.default_rng(1).normal(size=100)
    single = estimate(np.stack([values, np.ones(100)], 1), ratio)
    copies = np.repeat(values, 4)
    grouped = estimate(np.stack([copies, np.ones(400)], 1), ratio, np.repeat(np.arange(100), 4))
    assert grouped.high - grouped.low == pytest.approx(single.high - single.low, rel=0.1)
    assert grouped.n == 400


def test_classes_that_never_occur_are_left_out_of_the_mean() -> None:
    sums = np.array([4.0, 0.0, 1.0, 8.0, 0.0, 4.0])  # intersections of three classes, then unions
    assert mean_ratio(sums) == pytest.approx((0.5 + 0.25) / 2)


def test_what_is_missing_gives_nothing() -> None:
    nothing = estimate(np.zeros((5, 2)), ratio)
    assert np.isnan([nothing.value, nothing.low, nothing.high]).all()
    assert nothing.n == 0
    assert np.isnan(estimate(np.array([[1.0, 1.0]]), ratio).low)  # one picture has no interval
