from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from classlens.evaluate import TESTS
from classlens.evaluate.registry import Config
from classlens.evaluate.store import schemas
from classlens.evaluate.tests import segmentation


def table(test: str, rows: list[dict[str, Any]]) -> Any:
    return schemas()[test].empty_table().from_pylist(rows, schemas()[test])


def pictures(scores: dict[str, float]) -> Any:
    """One row a picture, of 100 pixels."""
    return table(
        "segmentation",
        [
            {"image": name, "correct": round(100 * s), "labelled": 100, "ap_paper": s, "ap_soft": s,
             "intersection": [round(100 * s), 0], "union": [100, 0]}
            for name, s in scores.items()
        ],
    )  # fmt: skip


def test_a_difference_is_taken_on_the_same_pictures() -> None:
    mine = pictures({"a": 0.9, "b": 0.5, "c": 0.7, "mine alone": 0.0})
    other = pictures({"theirs alone": 1.0, "c": 0.6, "b": 0.4, "a": 0.8})
    for metric in segmentation.METRICS:
        found = metric.difference(mine, other, seed=0)
        if metric.name == "mAP (paper)" or metric.name == "AP (soft)":
            assert found.n == 3
        assert found.value == pytest.approx(10.0), metric.name
        # Every picture differs by as much: there is nothing uncertain about it, however far the pictures lie apart.
        assert (found.low, found.high) == (pytest.approx(10.0), pytest.approx(10.0)), metric.name


def test_the_interval_of_a_difference_is_that_of_the_mean_of_differences() -> None:
    random = np.random.default_rng(0)
    easy = random.uniform(0.2, 0.8, 300)
    gain = random.normal(0.02, 0.05, 300)
    names = [f"{i:03d}" for i in range(300)]
    soft = segmentation.METRICS[-1]
    found = soft.difference(
        pictures(dict(zip(names, easy + gain, strict=True))), pictures(dict(zip(names, easy, strict=True))), 0
    )
    half = 1.96 * 100 * gain.std() / np.sqrt(300)
    assert found.value == pytest.approx(100 * gain.mean())
    assert found.high - found.low == pytest.approx(2 * half, rel=0.15)


def test_cells_of_a_grid_are_drawn_together() -> None:
    def grids(gain: float) -> Any:
        return table(
            "pointing",
            [
                {"image": f"{g}{c}", "grid": str(g), "cell": c, "share": 0.5 + gain * g, "hit": 1.0}
                for g in range(20)
                for c in range(2)
            ],
        )

    pointing = TESTS["pointing"]
    share = pointing.metrics(Config("pointing", (("shape", "2x1"),)))[0]
    found = share.difference(grids(0.02), grids(0.0), seed=0, group=pointing.group)
    spread = 100 * 0.02 * np.arange(20).std() / np.sqrt(20)
    assert found.value == pytest.approx(19.0)
    assert found.high - found.low == pytest.approx(2 * 1.96 * spread, rel=0.2)
