"""Positions along one, two and three axes, by matrices for each axis."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from classlens.core.capture import record
from classlens.methods.places import convolution, enlarged, filtered_along
from steps import Does

SIZES = [(5,), (5, 3), (2, 5, 3)]


def along(matrices: list[Tensor], maps: Tensor) -> Tensor:
    """Each matrix (new, old) applied to its axis of positions."""
    for axis, matrix in enumerate(matrices, 2):
        maps = torch.tensordot(maps, matrix, ([axis], [1])).movedim(-1, axis)
    return maps


def linear(old: int, new: int) -> Tensor:
    """(new, old): the two nearest positions share by distance; beyond the first and the last there is that one."""
    matrix = torch.zeros(new, old).double()
    for row in range(new):
        place = min(max((row + 0.5) * old / new - 0.5, 0), old - 1)
        low = int(place)
        matrix[row, low] += 1 - (place - low)
        matrix[row, min(low + 1, old - 1)] += place - low
    return matrix


def smoothing(size: int, kernel: list[float]) -> Tensor:
    """(size, size): a kernel around each position; the border is repeated."""
    matrix = torch.zeros(size, size).double()
    for row in range(size):
        for step, weight in enumerate(kernel):
            matrix[row, min(max(row + step - len(kernel) // 2, 0), size - 1)] += weight
    return matrix


@pytest.mark.parametrize("size", SIZES)
def test_maps_are_enlarged_linearly(size: tuple[int, ...]) -> None:
    maps = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(0)).double()
    larger = [2 * side + axis for axis, side in enumerate(size)]
    expected = along([linear(*sides) for sides in zip(size, larger, strict=True)], maps)
    assert torch.allclose(enlarged(maps, larger), expected)


@pytest.mark.parametrize("size", SIZES)
def test_each_axis_has_its_kernel(size: tuple[int, ...]) -> None:
    maps = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(0)).double()
    kernels = [[0.5, 0.3, 0.2], [1.0], [0.1, 0.2, 0.3, 0.25, 0.15]][: len(size)]
    expected = along([smoothing(side, kernel) for side, kernel in zip(size, kernels, strict=True)], maps)
    assert torch.allclose(filtered_along(maps, [torch.tensor(k).double() for k in kernels], "replicate"), expected)


@pytest.mark.parametrize(("size", "name"), [((2, 2), "conv2d"), ((2, 2, 2), "conv3d")])
def test_the_convolution_over_positions(size: tuple[int, ...], name: str) -> None:
    tape = record(Does(lambda x: x.relu()).eval(), torch.rand(1, 3, *size))
    assert convolution(tape) == name
    assert convolution(tape, transposed=True) == name.replace("conv", "conv_transpose")
