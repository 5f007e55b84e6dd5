"""What a concept looks like: the pictures in which it has most relevance, cropped to what it sees there.

The crop is the concept's own receptive field: the relevance of its strongest place is swept on to the image, and the
crop holds nine tenths of it. The field that the network's kernels allow would often be the whole picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from classlens.concept.directions import Directions
from classlens.concept.gather import Gathered, Subject
from classlens.data.layouts import Dataset
from classlens.explanation import pictures_of
from classlens.progress import Progress
from classlens.render.colours import pixels_of

SHOWN = 6  # references of a concept
_OUTSIDE = 0.05  # share of the relevance on either side of the crop
_SMALLEST = 6  # the crop is at least a sixth of the image wide

Box = tuple[int, int, int, int]  # top, left, bottom, right


@dataclass(frozen=True, eq=False)
class Reference:
    """A picture in which a concept has much relevance."""

    name: str  # of the picture in its data set
    box: Box
    crop: NDArray[np.uint8]  # (h,w,3)
    share: float  # of the evidence in that picture


def shares_of(parts: Tensor, relevance: Tensor) -> Tensor:
    """(M,n): the share of each part (M,n,C,h,w) of all evidence (n,2,C,h,w); below 0 if it is against the class."""
    everything = relevance.abs().flatten(1).sum(1).clamp(min=torch.finfo(relevance.dtype).tiny)
    return parts.flatten(2).sum(2) / everything


def references(
    subject: Subject, dataset: Dataset, gathered: Gathered, layer: str, directions: Directions, progress: Progress
) -> tuple[list[list[Reference]], Tensor]:
    """For each concept its references, the strongest first; and its share in each picture (M,n)."""
    relevance = gathered.relevance[layer]
    every = [directions.parts(one[None])[:, 0] for one in relevance]
    shares = torch.stack(
        [shares_of(parts[:, None], one[None])[:, 0] for parts, one in zip(every, relevance, strict=True)], 1
    )
    # One more than is shown: the picture that is asked about may be among them.
    strongest = shares.abs().topk(min(SHOWN + 1, shares.shape[1]), dim=1).indices.tolist()
    found: dict[tuple[int, int], Reference] = {}
    rows = sorted({row for chosen in strongest for row in chosen})
    for done, row in enumerate(rows):
        progress("reference pictures", done, len(rows))
        wanted = [m for m, chosen in enumerate(strongest) if row in chosen]
        picture, boxes = _fields(subject, dataset, gathered, row, layer, every[row][wanted])
        for m, (top, left, bottom, right) in zip(wanted, boxes, strict=True):
            crop = picture[top:bottom, left:right]
            found[m, row] = Reference(gathered.items[row].name, (top, left, bottom, right), crop, float(shares[m, row]))
    progress("reference pictures", len(rows), len(rows))
    return [[found[m, row] for row in chosen] for m, chosen in enumerate(strongest)], shares


def _fields(
    subject: Subject, dataset: Dataset, gathered: Gathered, row: int, layer: str, parts: Tensor
) -> tuple[NDArray[np.uint8], Sequence[Box]]:
    """The picture (H,W,3), and the box of the strongest place of each part (M,C,h,w)."""
    tape = subject.record(subject.read(dataset, gathered.items[row]))
    flow = subject.flow(tape, subject.layers(tape)[layer])
    subject.cost.sweeps += len(parts)
    maps = flow.through([strongest_place(part).to(flow.relevance)[None] for part in parts])
    return pixels_of(pictures_of(tape.image.tensor, subject.model)[0]), [box(one[0]) for one in maps]


def strongest_place(part: Tensor) -> Tensor:
    """A part (C,h,w) with everything but its strongest place set to 0."""
    places = part.sum(0).abs()
    return part * (places == places.max())


def box(field: Tensor) -> Box:
    """The square that holds most of a map (H,W), inside of the image.

    >>> spot = torch.zeros(60, 60)
    >>> spot[10:30, 20:40] = 1.0
    >>> box(spot)
    (10, 20, 30, 40)
    """
    size = field.detach().cpu().double().abs()
    height, width = size.shape
    (top, bottom), (left, right) = (_between(size.sum(axis)) for axis in (1, 0))
    side = min(max(bottom - top, right - left, min(height, width) // _SMALLEST), height, width)
    y, x = (
        min(max((a + b - side) // 2, 0), most - side) for a, b, most in ((top, bottom, height), (left, right, width))
    )
    return y, x, y + side, x + side


def _between(profile: Tensor) -> tuple[int, int]:
    """Where a profile begins and ends, without a small share on either side."""
    share = profile.cumsum(0) / profile.sum().clamp(min=torch.finfo(profile.dtype).tiny)
    begin = int((share > _OUTSIDE).double().argmax())
    end = int((share >= 1 - _OUTSIDE).double().argmax())
    return begin, end + 1


def as_arrays(found: Sequence[Sequence[Reference]]) -> dict[str, NDArray[Any]]:
    """References as arrays, to be stored."""
    arrays: dict[str, NDArray[Any]] = {}
    for m, several in enumerate(found):
        for k, one in enumerate(several):
            arrays[f"crop {m} {k}"] = one.crop
            arrays[f"about {m} {k}"] = np.array([one.name, *map(str, one.box), repr(one.share)])
    return arrays


def from_arrays(arrays: dict[str, NDArray[Any]], concepts: int) -> list[list[Reference]]:
    """The inverse of `as_arrays`."""
    found: list[list[Reference]] = [[] for _ in range(concepts)]
    for key, about in arrays.items():
        if key.startswith("about "):
            m, k = map(int, key.split()[1:])
            name, top, left, bottom, right, share = about.tolist()
            box_of = int(top), int(left), int(bottom), int(right)
            found[m].append(Reference(name, box_of, arrays[f"crop {m} {k}"], float(share)))
    return found
