"""A class in a region of a picture, for networks with an output for each pixel.

>>> explain(model, image, region("person", pixel=(40, 60)))
>>> explain(model, image, region(15, box=(10, 20, 80, 90)))
>>> explain(model, image, region("person", mask))               # a mask (H,W) of the network's input
>>> explain(model, image, region("person"))                     # where the network itself finds the class
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from classlens.core.targets.answers import Answers
from classlens.core.targets.dense import dense
from classlens.core.targets.questions import Box, Found, Outline, Question
from classlens.errors import TargetError


@dataclass(frozen=True, eq=False)
class Region(Question):
    """The mean logit of a class over the pixels of a region. Positions are in pixels of the network's input."""

    category: int | str
    mask: Tensor | None = field(default=None, repr=False)  # (H,W)
    box: Box | None = None
    pixel: tuple[int, int] | None = None  # (x,y)

    def find(self, answers: Answers, image: int) -> Found:
        found = dense(answers, "region(...)")
        maps = found.maps(image)
        index = answers.class_index(self.category, len(maps))
        weights, place, outlines = self._where(answers, maps, found.where(image, index), index)
        weights = (weights / weights.sum()).to(maps).flatten()

        def mean(numbers: Sequence[Tensor]) -> Tensor:
            values = found.values(numbers, index)
            return (values * weights.to(values)).sum()

        return Found(f"{answers.label(index)} {place}", found.picks(index), mean, outlines)

    def _where(
        self, answers: Answers, maps: Tensor, own: Tensor, index: int
    ) -> tuple[Tensor, str, tuple[Outline, ...]]:
        """The weight of each position of the output (h,w), the region in words, and what to draw."""
        (height, width), places = answers.size, own.shape
        if self.pixel is not None:
            return _pixel_weights(self.pixel, answers.size, places)
        if self.mask is not None:
            if tuple(self.mask.shape) != (height, width):
                raise TargetError(f"the mask has shape {tuple(self.mask.shape)}, but the input is {(height, width)}")
            return _resized(self.mask, places), "in the masked region", (self.mask,)
        if self.box is not None:
            return _resized(_filled(self.box, answers.size), places), f"in {in_words(self.box)}", (self.box,)
        if not own.any():
            counts = maps.argmax(0).flatten().bincount()
            most = ", ".join(answers.label(int(i)) for i in counts.argsort(descending=True)[:3] if counts[i])
            other = f", or a class that it finds: {most}" if len(maps) > 1 else ""
            raise TargetError(
                f"the network finds {answers.label(index)} at no pixel; give a mask, a box or a pixel{other}"
            )
        shown = F.interpolate(own[None, None].float(), size=(height, width), mode="nearest")[0, 0] > 0
        return own.double(), "where the network finds it", (shown.cpu(),)


def region(
    category: int | str, mask: Any = None, *, box: Sequence[float] | None = None, pixel: Sequence[int] | None = None
) -> Region:
    """A class in a region: its mean logit over a mask (H,W), a box (left, top, right, bottom) or a pixel (x, y).

    >>> classlens.explain(segmenter, "street.jpg", classlens.region("person", box=(10, 20, 80, 90)))

    All are in pixels of the network's input. Without a region, it is where the network itself finds the class.
    """
    given = [name for name, value in (("mask", mask), ("box", box), ("pixel", pixel)) if value is not None]
    if len(given) > 1:
        raise TargetError(f"give a region one way, not as {' and '.join(given)}")
    if not isinstance(category, int | str) or isinstance(category, bool):
        raise TargetError(f"the class of a region is an index or a name, not {category!r}")
    kept = None if mask is None else as_mask(mask)
    if pixel is not None and (len(pixel) != 2 or not all(isinstance(p, int) for p in pixel)):
        raise TargetError(f"a pixel is (x, y), two integers, not {pixel!r}")
    return Region(category, kept, None if box is None else as_box(box), None if pixel is None else (pixel[0], pixel[1]))


def as_mask(given: Any) -> Tensor:
    """A mask (H,W) from a tensor or an array; refused if it is empty."""
    mask = torch.as_tensor(given).detach().cpu()
    if mask.dim() != 2:
        raise TargetError(f"a mask has shape (H,W), not {tuple(mask.shape)}")
    if not (mask != 0).any():
        raise TargetError("the mask is empty: no pixel of it is set")
    return mask != 0


def as_box(given: Sequence[float]) -> Box:
    """A box from four numbers; refused if it is empty."""
    if len(given) != 4 or not (given[0] < given[2] and given[1] < given[3]):
        raise TargetError(f"a box is (left, top, right, bottom) with left < right and top < bottom, not {tuple(given)}")
    return Box(*map(float, given))


def in_words(box: Box) -> str:
    """The box in words, with whole pixels."""
    return f"the box ({box.left:.0f}, {box.top:.0f}, {box.right:.0f}, {box.bottom:.0f})"


def _filled(box: Box, size: tuple[int, int]) -> Tensor:
    filled = torch.zeros(size)
    top, left = max(round(box.top), 0), max(round(box.left), 0)
    filled[top : max(round(box.bottom), 0), left : max(round(box.right), 0)] = 1
    if not filled.any():
        raise TargetError(f"{in_words(box)} lies outside the input, {size[1]} pixels wide and {size[0]} high")
    return filled


def _resized(mask: Tensor, places: Sequence[int]) -> Tensor:
    """The share of each position of the output that a mask covers."""
    return F.interpolate(mask[None, None].double(), size=tuple(places), mode="area")[0, 0]


def _pixel_weights(
    pixel: tuple[int, int], size: tuple[int, int], places: Sequence[int]
) -> tuple[Tensor, str, tuple[Outline, ...]]:
    (x, y), (height, width) = pixel, size
    if not (0 <= x < width and 0 <= y < height):
        raise TargetError(f"the pixel ({x}, {y}) lies outside the input, {width} pixels wide and {height} high")
    weights = torch.zeros(tuple(places), dtype=torch.float64)
    weights[y * places[0] // height, x * places[1] // width] = 1
    return weights, f"at pixel ({x}, {y})", (Box(x, y, x + 1, y + 1),)
