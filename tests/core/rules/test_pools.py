import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from classlens.core.capture import Node, record
from classlens.core.rules.pools import Windows, over_window
from steps import Does

POOLS = [
    nn.MaxPool2d(2), nn.MaxPool2d((4, 3)), nn.MaxPool2d(4, (4, 3)), nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(3, 3, 1),
    nn.MaxPool2d((3, 2), 2, ceil_mode=True), nn.MaxPool2d(3, (2, 3), (1, 0), ceil_mode=True),
    nn.MaxPool2d(2, dilation=2), nn.MaxPool2d(2, dilation=2, ceil_mode=True), nn.MaxPool2d(2, 3, 1, dilation=(2, 1)),
    nn.MaxPool2d((2, 3), 2, (0, 1), dilation=(3, 2), ceil_mode=True), nn.MaxPool2d(3, 1, 1, dilation=(1, 2)),
    nn.MaxPool2d(3, 3, (1, 0)), nn.MaxPool2d(2, 3, 1, dilation=2, ceil_mode=True),
    nn.MaxPool2d((2, 1), 4, (1, 0), dilation=(2, 1), ceil_mode=True), nn.MaxPool2d(2, 2, 0, (1, 2), ceil_mode=True),
    nn.MaxPool2d((1, 2), 5, (0, 1), dilation=(1, 3), ceil_mode=True), nn.MaxPool2d(3, 4, 1, dilation=2, ceil_mode=True),
    nn.MaxPool2d(2, 5, 1, dilation=2, ceil_mode=True),  # the last window would begin outside
    nn.MaxPool2d(3, 3, 0, (1, 2), ceil_mode=True),  # as many windows as if they lay side by side
]  # fmt: skip


def pooled(module: nn.Module, x: Tensor) -> Node:
    (node,) = [n for n in record(module.eval(), x).nodes if n.op.startswith("max_pool")]
    return node


def by_hand(pool: nn.MaxPool1d | nn.MaxPool2d | nn.MaxPool3d, x: Tensor, relevance: Tensor) -> Tensor:
    """Window by window and place by place; x (C,*places), relevance (K,C,*windows)."""
    kernel, stride, padding, dilation = (
        np.broadcast_to(v, x.dim() - 1) for v in (pool.kernel_size, pool.stride, pool.padding, pool.dilation)
    )
    found = torch.zeros(len(relevance), *x.shape, dtype=x.dtype)
    for c, *window in np.ndindex(*relevance.shape[1:]):
        corner = np.array(window) * stride - padding
        places = [corner + np.array(step) * dilation for step in np.ndindex(*kernel)]
        inside = [(c, *p) for p in places if (p >= 0).all() and (p < x.shape[1:]).all()]
        total = sum(x[p] for p in inside)
        for p in inside:
            found[(slice(None), *p)] += relevance[(slice(None), c, *window)] * (
                x[p] / total if total else 1 / len(inside)
            )
    return found


@pytest.mark.parametrize("pool", POOLS, ids=str)
@pytest.mark.parametrize("size", [(8, 7), (8, 9), (8, 6), (8, 8), (6, 9), (10, 11)])
def test_a_max_pool_shares_by_size_over_its_windows(pool: nn.MaxPool2d, size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 2, *size, dtype=torch.float64).relu()
    x[:, 0, :4, :4] = 0  # windows in which no unit is on share evenly
    node = pooled(nn.Sequential(pool, nn.Flatten()), x)
    relevance = torch.randn(3, *node.outputs[0].shape, dtype=torch.float64)
    (ours,) = over_window(node, relevance)
    assert torch.allclose(ours.sum((2, 3, 4)), relevance.sum((2, 3, 4)))
    assert torch.allclose(ours[:, 0], by_hand(pool, x[0], relevance[:, 0]), rtol=1e-9)


@pytest.mark.parametrize("pool", [nn.MaxPool1d(2), nn.MaxPool1d(3, 2, 1), nn.MaxPool1d(2, 1, dilation=2)], ids=str)
def test_windows_along_a_line(pool: nn.MaxPool1d) -> None:
    x = torch.rand(1, 2, 8, generator=torch.Generator().manual_seed(0)).double()
    node = pooled(nn.Sequential(pool, nn.Flatten()), x)
    relevance = torch.rand(2, *node.outputs[0].shape).double()
    (ours,) = over_window(node, relevance)
    assert torch.allclose(ours[:, 0], by_hand(pool, x[0], relevance[:, 0]), rtol=1e-9)


@pytest.mark.parametrize(
    ("pool", "size", "side_by_side"),
    [
        (nn.MaxPool2d(2), (6, 4), True), (nn.MaxPool2d((3, 2)), (6, 4), True), (nn.MaxPool2d(2), (7, 4), False),
        (nn.MaxPool2d(4, (4, 3)), (8, 8), False), (nn.MaxPool2d(3, 3, (1, 0)), (5, 6), False),
        (nn.MaxPool2d(3, 3, (1, 0)), (6, 6), False), (nn.MaxPool2d(2, 2, 0, (1, 2)), (6, 6), False),
        (nn.MaxPool2d(3, 3, 0, (1, 2), ceil_mode=True), (6, 6), False),
    ],
    ids=str,
)  # fmt: skip
def test_windows_that_lie_side_by_side_are_recognised(
    pool: nn.MaxPool2d, size: tuple[int, int], side_by_side: bool
) -> None:
    """Each of these is shared right either way; side by side it is much quicker."""
    node = pooled(nn.Sequential(pool, nn.Flatten()), torch.rand(1, 2, *size))
    assert Windows.of(node).tile(node.inputs[0].shape, node.outputs[0].shape) is side_by_side


def test_a_pool_that_is_called_with_its_size_alone() -> None:
    """torch's defaults hold: the stride is the size, and a last window that does not fit is left out."""
    x = torch.rand(1, 2, 8, 7, dtype=torch.float64)
    node = pooled(Does(lambda x: F.max_pool2d(x, 3)), x)
    relevance = torch.rand(1, *node.outputs[0].shape, dtype=torch.float64)
    (ours,) = over_window(node, relevance)
    assert torch.allclose(ours[:, 0], by_hand(nn.MaxPool2d(3), x[0], relevance[:, 0]), rtol=1e-9)


@pytest.mark.parametrize(
    "pool", [nn.MaxPool3d(2), nn.MaxPool3d((1, 2, 2)), nn.MaxPool3d(3, 2, 1),
             nn.MaxPool3d((2, 3, 2), 2, ceil_mode=True),
             nn.MaxPool3d(2, (1, 2, 3), 1, dilation=(1, 2, 1), ceil_mode=True),
             nn.MaxPool3d((5, 3, 3), 1, (2, 1, 1))], ids=str,  # larger than the volume, with its padding
)  # fmt: skip
def test_so_do_the_windows_of_a_volume(pool: nn.MaxPool3d) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 2, 4, 6, 6, dtype=torch.float64).relu()
    x[:, 0, :3, :4, :4] = 0
    node = pooled(nn.Sequential(pool, nn.Flatten()), x)
    relevance = torch.randn(3, *node.outputs[0].shape, dtype=torch.float64)
    (ours,) = over_window(node, relevance)
    assert torch.allclose(ours[:, 0], by_hand(pool, x[0], relevance[:, 0]), rtol=1e-9)


def test_windows_longer_than_a_volume_with_its_padding() -> None:
    """Along one axis alone; torch has no average of such windows."""
    pool, x = nn.MaxPool3d((3, 2, 2), 1, (1, 0, 0)), torch.rand(1, 1, 2, 3, 3, dtype=torch.float64)
    node = pooled(nn.Sequential(pool, nn.Flatten()), x)
    relevance = torch.rand(1, *node.outputs[0].shape, dtype=torch.float64)
    (ours,) = over_window(node, relevance)
    assert torch.allclose(ours[:, 0], by_hand(pool, x[0], relevance[:, 0]), rtol=1e-9)


class OfFirstChannel(nn.Module):
    """F.max_pool2d also takes (B,H,W)."""

    def __init__(self, dilation: int) -> None:
        super().__init__()
        self.dilation = dilation

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x[:, 0], 2, dilation=self.dilation).flatten(1)


@pytest.mark.parametrize("dilation", [1, 2])
def test_a_max_pool_of_maps_without_channels_shares_alike(dilation: int) -> None:
    torch.manual_seed(0)
    x = torch.rand(2, 1, 8, 6, dtype=torch.float64)
    flat = pooled(OfFirstChannel(dilation), x)
    plain = pooled(nn.Sequential(nn.MaxPool2d(2, dilation=dilation), nn.Flatten()), x)
    relevance = torch.randn(3, *plain.outputs[0].shape, dtype=torch.float64)
    (ours,), (expected,) = over_window(flat, relevance[:, :, 0]), over_window(plain, relevance)
    assert torch.allclose(ours, expected[:, :, 0])


@pytest.mark.parametrize("n", [1, 2, 3])
def test_adaptive_windows_share_by_size_too(n: int) -> None:
    """Windows of 5 places for 2 outputs: 0 to 2 and 2 to 4 along each axis, so some places are in several."""
    torch.manual_seed(0)
    x = torch.rand(1, 2, *[5] * n, dtype=torch.float64)
    pool = (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)[n - 1]
    (node,) = record(Does(lambda x: pool(x, 2)).eval(), x).nodes
    relevance = torch.rand(1, 1, 2, *[2] * n, dtype=torch.float64)
    (ours,) = over_window(node, relevance)
    alike = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[n - 1](3, 2)
    assert torch.allclose(ours[:, 0], by_hand(alike, x[0], relevance[:, 0]), rtol=1e-9)


def test_indices_that_a_max_pool_gives_too_change_nothing() -> None:
    x = torch.rand(1, 2, 6, 6)

    class Indexed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.max_pool2d(x, 3, 2, return_indices=True)[0].flatten(1)

    relevance = torch.randn(1, 1, 2, 2, 2)
    (ours,) = over_window(pooled(Indexed(), x), relevance)
    (expected,) = over_window(pooled(nn.Sequential(nn.MaxPool2d(3, 2), nn.Flatten()), x), relevance)
    assert torch.equal(ours, expected)


def test_a_max_pool_called_with_a_size_alone() -> None:
    """torch.max_pool2d hands on only what it was called with; the last row and column are in no window."""
    x, relevance = torch.rand(1, 2, 7, 7), torch.randn(1, 1, 2, 3, 3)
    (ours,) = over_window(pooled(Does(lambda x: torch.max_pool2d(x, 2).flatten(1)), x), relevance)
    (expected,) = over_window(pooled(nn.Sequential(nn.MaxPool2d(2), nn.Flatten()), x), relevance)
    assert torch.allclose(ours, expected)
