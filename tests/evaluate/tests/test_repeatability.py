from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from classlens.errors import DataError
from classlens.evaluate import Settings, options_of_tests, run
from classlens.evaluate.tests import repeatability as again


@pytest.mark.parametrize("change", again.CHANGES)
def test_a_map_that_follows_the_picture_is_moved_back(change: str) -> None:
    """The picture itself as its map: what remains is what the change did to the pixels."""
    drawn = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    smooth = torch.nn.functional.interpolate(drawn, (56, 56), mode="bilinear") * 0.7
    first, other = again.moved_back(change, smooth.mean(1), again.CHANGES[change](smooth).mean(1))
    assert first.shape == other.shape
    if change in ("shift", "flip"):
        assert torch.equal(first, other)
    else:
        assert torch.allclose(again.correlation(first.flatten(1), other.flatten(1)), torch.ones(2).double(), atol=0.02)
    assert again.overlap(first, other).min() > 0.8


def test_the_changes_by_hand() -> None:
    pictures = torch.rand(1, 3, 56, 56)
    assert torch.equal(again.shifted(pictures)[..., 2:, 2:], pictures[..., :-2, :-2])
    assert torch.equal(again.shifted(pictures)[..., 0, 2:], pictures[..., 0, :-2])
    assert again.compressed(pictures).shape == pictures.shape
    assert 0 < (again.compressed(pictures) - pictures).abs().mean() < 0.3


def test_overlap_by_sets() -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = torch.rand(3, 10, 10, generator=generator), torch.rand(3, 10, 10, generator=generator)
    slow = []
    for a, b in zip(first.flatten(1).numpy(), second.flatten(1).numpy(), strict=True):
        one, other = set(np.argsort(a)[-20:]), set(np.argsort(b)[-20:])
        slow.append(len(one & other) / len(one | other))
    assert again.overlap(first, second).tolist() == pytest.approx(slow)


def test_a_run(labelled: Path, tmp_path: Path) -> None:
    common = {"tests": ("repeatability",), "data": (str(labelled),), "model": "world:make", "limit": 3}
    methods = "gradient-x-input", "random", "centre"
    settings = Settings(methods=methods, options=options_of_tests(other="world:make"), **common)
    (table,) = run(settings, tmp_path).tables
    at = {metric.name: i for i, metric in enumerate(table.metrics)}
    for method in methods:
        assert table.rows[method][at["correlation, network"]].value == pytest.approx(1)  # it is the same network
    assert table.rows["centre"][at["IoU, flip"]].value > 0.9
    assert abs(table.rows["random"][at["correlation, flip"]].value) < 0.1
    with pytest.raises(DataError, match=r"--other classlens\.evaluate\.known:loaded has 7 classes, the model 4"):
        run(
            Settings(methods=methods, options=options_of_tests(other="classlens.evaluate.known:loaded"), **common),
            tmp_path,
        )
