from __future__ import annotations

import numpy as np
import pytest
import torch

from classlens.evaluate.stats import estimate, ratio
from classlens.evaluate.tests import pointing
from classlens.evaluate.tests.pointing import Cell


def test_grids_hold_different_classes_and_use_each_picture_once() -> None:
    pictures = [Cell(f"{i}", i % 5) for i in range(43)]
    for shape, count in (("2x1", 2), ("2x2", 4)):
        grids = pointing.plan(pictures, shape)
        names = [cell.image for grid in grids for cell in grid]
        assert len(names) == len(set(names)) == count * len(grids)
        assert all(len({cell.target for cell in grid}) == count for grid in grids)
        assert len(grids) >= 43 // count - 2
    assert pointing.plan(pictures, "3x3") == []  # nine classes are needed


def test_more_pictures_only_add_grids() -> None:
    pictures = [Cell(f"{i}", (7 * i) % 10) for i in range(60)]
    few, more = pointing.plan(pictures[:25], "2x2"), pointing.plan(pictures, "2x2")
    assert more[: len(few)] == few


def test_cells_of_a_grid() -> None:
    assert pointing.cells("3x2") == (2, 3)
    assert pointing.edges(224, 3) == [0, 75, 149, 224]
    pictures = [torch.full((3, 24, 24), float(i)) for i in range(6)]
    grid = pointing.compose(pictures, "3x2", (24, 24))
    assert grid[0, [4, 20]][:, [3, 12, 20]].tolist() == [[0, 1, 2], [3, 4, 5]]
    full = pointing.compose(pictures, "3x2", (48, 72))
    assert torch.equal(full[:, 24:, 48:], pictures[5])


def test_a_picture_keeps_its_proportions_and_its_middle() -> None:
    ramp = torch.arange(40.0).expand(3, 40, 40)
    left_half = pointing.compose([ramp, ramp], "2x1", (40, 40))[:, :, :20]
    assert torch.equal(left_half, ramp[:, :, 10:30])
    small = pointing.compose([ramp] * 4, "2x2", (40, 40))[0, 0, :20]
    assert torch.allclose(small, 2 * torch.arange(20.0) + 0.5, atol=0.3)


@pytest.mark.parametrize("shape", pointing.SHAPES)
def test_a_perfect_map_points_right(shape: str) -> None:
    rows, columns = pointing.cells(shape)
    count = rows * columns
    masks = [
        pointing.compose([torch.full((3, 9, 9), float(i == k)) for i in range(count)], shape, (36, 36))[0]
        for k in range(count)
    ]
    share, hit = pointing.scores(torch.stack(masks) - 0.5, shape)
    assert share.tolist() == hit.tolist() == [1.0] * count
    share, hit = pointing.scores(torch.stack([masks[1], *masks[:-1]]), shape)
    assert share.tolist() == hit.tolist() == [0.0] * count


@pytest.mark.parametrize("shape", pointing.SHAPES)
def test_random_maps_point_by_chance(shape: str) -> None:
    rows, columns = pointing.cells(shape)
    count, generator = rows * columns, torch.Generator().manual_seed(0)
    drawn = [pointing.scores(torch.randn(count, 36, 36, generator=generator), shape) for _ in range(150)]
    share, hit = (np.concatenate([d[i].numpy() for d in drawn]) for i in (0, 1))
    groups = np.repeat(np.arange(150), count)
    for values in (share, hit):
        found = estimate(np.stack([values, np.ones_like(values)], 1), ratio, groups)
        assert found.low < 1 / count < found.high
    constant = pointing.scores(torch.ones(count, 36, 36), shape)
    assert constant[0].tolist() == constant[1].tolist() == pytest.approx([1 / count] * count)


def test_a_map_without_evidence_points_nowhere() -> None:
    share, hit = pointing.scores(-torch.rand(2, 8, 8), "2x1")
    assert share.tolist() == hit.tolist() == [0.0, 0.0]
