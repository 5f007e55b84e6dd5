"""Draws the selected images as JPEG: the image, the map of each class over it, and where two maps differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from classlens.data.images import to_image
from classlens.data.masks import Mask
from classlens.methods import resolve
from classlens.progress import Progress
from classlens.render import RGB, overlay, shares
from classlens.render.html import jpeg
from classlens.report import measure
from classlens.report.collect import Record, Subject
from classlens.report.hide import hide
from classlens.report.truth import Labels

_SIDE = 224  # pixels of a drawn picture
_QUALITY = 84


@dataclass(frozen=True)
class Drawn:
    """One picture."""

    photo: bytes
    map: bytes  # of the predicted class
    others: dict[int, bytes] = field(default_factory=dict)  # maps of other classes
    differences: dict[int, bytes] = field(default_factory=dict)  # predicted class minus that class
    overlaps: dict[int, float] = field(default_factory=dict)  # of their positive evidence
    leads: dict[int, tuple[str, str]] = field(default_factory=dict)  # where the predicted class, and that one, has more
    hidden: bytes | None = None  # the photograph without the object


def draw(subject: Subject, wanted: Mapping[str, tuple[Record, list[int]]], progress: Progress) -> dict[str, Drawn]:
    """Explain the selected images again, with the other classes that the page needs, and draw them."""
    drawn = {}
    progress("drawing", 0, len(wanted))
    for done, (name, (record, others)) in enumerate(wanted.items(), 1):
        drawn[name] = _draw(subject, record, others)
        progress("drawing", done, len(wanted))
    return drawn


def legend(signed: bool) -> bytes:
    """The colours of overlays from least to most, on light grey."""
    ramp = np.linspace(-1.0 if signed else 0.0, 1.0, _SIDE)[None, :].repeat(12, 0)
    return jpeg(overlay(torch.full((3, *ramp.shape), 0.85), ramp, signed), _SIDE, 95)


def _draw(subject: Subject, record: Record, others: list[int]) -> Drawn:
    image, picture = subject.read(record.item)
    explanation = subject.explain(image[None], [[record.predicted, *others]])
    photo, signed = explanation.pictures[0].cpu(), resolve(subject.method)[0].signed
    own, *maps = explanation.maps[0].cpu().double().numpy()
    shown = None
    if record.where.inside is not None:
        mask = subject.mask(record.item, picture)
        labels = Labels(subject.dataset, subject.model.labels, explanation.logits.shape[1])
        shown = None if mask is None else labels.object_mask(mask, record.predicted)

    def over(evidence: measure.Floats, signs: bool = signed) -> bytes:
        return jpeg(_outlined(overlay(photo, evidence, signs), shown), _SIDE, _QUALITY)

    apart = {k: measure.difference(own, found) for k, found in zip(others, maps, strict=True)}
    positive = {k: measure.positive_shares(found) for k, found in zip(others, maps, strict=True)}
    mine = measure.positive_shares(own)
    return Drawn(
        photo=jpeg(np.asarray(to_image(photo)), _SIDE, _QUALITY),
        map=over(own),
        others={k: over(found) for k, found in zip(others, maps, strict=True)},
        differences={k: over(between, True) for k, between in apart.items()},
        overlaps={k: measure.overlap(mine, s) for k, s in positive.items() if mine is not None and s is not None},
        leads={k: (_place(between), _place(-between)) for k, between in apart.items()},
        hidden=None if shown is None else _without(subject, image, shown),
    )


def _place(evidence: measure.Floats) -> str:
    """The ninth of the image with the most positive evidence: `top-left`."""
    cells, _ = shares(evidence)
    return max(cells, key=cells.__getitem__, default="")


def _without(subject: Subject, image: torch.Tensor, mask: Mask) -> bytes:
    filled = hide(image[None], torch.from_numpy(mask != 0)[None])[0]
    return jpeg(np.asarray(to_image(subject.model.preprocess.restore(filled))), _SIDE, _QUALITY)


def _outlined(pixels: RGB, mask: Mask | None) -> RGB:
    """With a white outline around the object: overlays never use white for evidence."""
    if mask is None:
        return pixels
    line, rim = _edge(mask == 1)
    drawn = pixels.copy()
    drawn[rim] = drawn[rim] // 2
    drawn[line] = 255
    return drawn


def _edge(region: NDArray[np.bool_]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """The pixels just inside a region, and those just outside."""
    padded = np.pad(region, 1, mode="edge")
    sides = [padded[:-2, 1:-1], padded[2:, 1:-1], padded[1:-1, :-2], padded[1:-1, 2:]]
    some, every = np.logical_or.reduce(sides), np.logical_and.reduce(sides)
    return region & ~every, ~region & some
