"""Positions of images and feature maps along any number of axes: two for images, three for volumes and videos."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from classlens.core.capture import Tape

_LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}
_CONV = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}


def convolution(tape: Tape, transposed: bool = False) -> str:
    """The operation that convolves over the positions of the image: conv2d, or conv3d for volumes and videos."""
    return f"conv{'_transpose' if transposed else ''}{len(tape.image.shape) - 2}d"


def enlarged(maps: Tensor, size: Sequence[int]) -> Tensor:
    """(N,C,*places) -> (N,C,*size), linear along each axis.

    >>> enlarged(torch.zeros(1, 2, 4, 7, 7), (16, 112, 112)).shape
    torch.Size([1, 2, 16, 112, 112])
    """
    return F.interpolate(maps, tuple(size), mode=_LINEAR[len(size)], align_corners=False)


def shortest_side(images: Tensor) -> int:
    """The shortest side of images (B,C,*size); a side of 1, such as the depth of a single slice, does not count."""
    sides = images.shape[2:]
    return min((side for side in sides if side > 1), default=1)


def filtered_along(pictures: Tensor, kernels: Sequence[Tensor], border: str) -> Tensor:
    """(B,C,*size) filtered by an odd kernel along each axis; `border` is a mode of `torch.nn.functional.pad`.

    >>> smooth = torch.tensor([0.25, 0.5, 0.25])
    >>> filtered_along(pictures, [smooth, smooth], "reflect")       # down, then across
    """
    n = len(kernels)
    pads = [len(kernel) // 2 for kernel in reversed(kernels) for _ in range(2)]  # F.pad starts at the last axis
    flat = F.pad(pictures.reshape(-1, 1, *pictures.shape[2:]), pads, mode=border)
    for axis, kernel in enumerate(kernels):
        flat = _CONV[n](flat, kernel.reshape(1, 1, *[len(kernel) if other == axis else 1 for other in range(n)]))
    return flat.reshape(pictures.shape)
