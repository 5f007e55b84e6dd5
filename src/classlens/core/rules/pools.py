"""A max-pool rule that distributes relevance over each window, since values close to the maximum are evidence too.

The default rule gives all relevance to the maximum, which leads to a speckled map.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from classlens.core.capture import Node
from classlens.core.capture.fold import pad_sizes
from classlens.core.ops import Kind, of_kind, per_axis
from classlens.core.rules.generic import Shares, divide, magnitude, shared

_AVERAGE: dict[int, Any] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
_CONV: dict[int, Any] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_ADAPTIVE: dict[str, Any] = {
    "adaptive_max_pool1d": F.adaptive_avg_pool1d,
    "adaptive_max_pool2d": F.adaptive_avg_pool2d,
    "adaptive_max_pool3d": F.adaptive_avg_pool3d,
}
_AXES = {f"max_pool{n}d": n for n in _AVERAGE}  # of their windows
MAX_POOLS = of_kind(Kind.MAX_POOL)


def over_window(node: Node, relevance: Tensor) -> Shares:
    """The relevance of a max-pool node, distributed over each window in proportion to |x|; windows may overlap.

    For one window of 1 and 3 with relevance 8 the shares are 2 and 6. Where all units of a window are 0, they get
    equal shares. Padding gets none.
    """
    x = magnitude(node.inputs[0].tensor)
    if node.op in _ADAPTIVE:
        size, average = node.arguments()["output_size"], _ADAPTIVE[node.op]
        return shared(lambda x: [average(x, size)], [x], relevance)
    windows = Windows.of(node)
    if windows.tile(x.shape, node.outputs[0].shape):
        return [_over_tiles(x, windows.mean(x), relevance)]
    return shared(lambda x: [windows.mean(x)], [x], relevance)


def _over_tiles(x: Tensor, mean: Tensor, relevance: Tensor) -> Tensor:
    """Adjacent windows: the ratio of a window goes to each of its positions, for all classes at once."""
    of_window = divide(relevance, mean * (math.prod(x.shape[2:]) / math.prod(mean.shape[2:])))
    large = F.interpolate(of_window.flatten(0, 1), x.shape[2:], mode="nearest")
    share: Tensor = large.unflatten(0, relevance.shape[:2]).mul_(x)
    return share


@dataclass(frozen=True)
class Windows:
    """The windows that a pool reads, as sizes along each axis."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    ceil_mode: bool

    @classmethod
    def of(cls, node: Node) -> Windows:
        a = node.arguments()
        n = _AXES[node.op]
        kernel = per_axis(a["kernel_size"], n)
        return cls(
            kernel, per_axis(a.get("stride") or kernel, n), per_axis(a.get("padding", 0), n),
            per_axis(a.get("dilation", 1), n), bool(a.get("ceil_mode", False)),
        )  # fmt: skip

    def tile(self, before: torch.Size, after: torch.Size) -> bool:
        """Whether the windows tile a feature map (B,C,*places) without gaps or overlaps."""
        if (
            len(before) != 2 + len(self.kernel)
            or self.stride != self.kernel
            or max(self.padding) > 0
            or max(self.dilation) > 1
        ):
            return False
        return all(size == n * k for size, n, k in zip(before[2:], after[2:], self.kernel, strict=True))

    def mean(self, x: Tensor) -> Tensor:
        """The sum over each window of x (..., *places), up to a factor for each window, which cancels in a share."""
        n = len(self.kernel)
        if max(self.dilation) > 1 or any(size < k for size, k in zip(x.shape[-n:], self.kernel, strict=True)):
            return self._by_convolution(x)
        average: Tensor = _AVERAGE[n](x, self.kernel, self.stride, self.padding, self.ceil_mode)
        return average

    def _by_convolution(self, x: Tensor) -> Tensor:
        """torch cannot average windows that are dilated, or larger than a volume; a convolution with ones can."""
        n = len(self.kernel)
        before, after = zip(*(self._pads(size, axis) for axis, size in enumerate(x.shape[-n:])), strict=True)
        maps = F.pad(x, pad_sizes(before, after)).flatten(0, -n - 1)[:, None]
        sums: Tensor = _CONV[n](maps, x.new_ones(1, 1, *self.kernel), None, self.stride, 0, self.dilation)
        return sums.reshape(*x.shape[:-n], *sums.shape[2:])

    def _pads(self, size: int, axis: int) -> tuple[int, int]:
        """Zeros before and after an axis. With `ceil_mode` the last window may reach beyond it, if it begins inside."""
        pad, stride = self.padding[axis], self.stride[axis]
        room = size + 2 * pad - self.dilation[axis] * (self.kernel[axis] - 1) - 1
        beyond = -room % stride if self.ceil_mode else 0
        begins_inside = room + beyond < size + pad
        return pad, pad + (beyond if begins_inside else 0)
