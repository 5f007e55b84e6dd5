"""Draws rows of a diff as JPEG: the picture, both maps, where B has more of its evidence than A, and places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image
from torch import Tensor

from classlens.data.images import to_image
from classlens.diff.collect import Both, Row, Seen, read
from classlens.diff.places import Place, cells_of
from classlens.methods import resolve
from classlens.progress import Progress
from classlens.render import RGB, overlay, pixels_of
from classlens.render.html import jpeg
from classlens.render.outlines import OUTLINE, edge
from classlens.report import measure
from classlens.report.spots import smoothed

_SIDE, _CROP, _QUALITY = 224, 120, 84
_RIM = 2  # cells


Key = tuple[str, str]  # a row is one class of one picture


@dataclass(frozen=True)
class Drawn:
    """One row."""

    photo: bytes
    before: bytes  # the map by A
    after: bytes  # the map by B
    difference: bytes  # red: B has more


def key(row: Row) -> Key:
    """The name of a row."""
    return row.item.name, row.name


def draw(both: Both, rows: Sequence[Row], progress: Progress) -> dict[Key, Drawn]:
    """Explain the rows again and draw them, each once."""
    wanted = {key(row): row for row in rows}
    drawn = {}
    progress("drawing", 0, len(wanted))
    for done, (name, row) in enumerate(wanted.items(), 1):
        drawn[name] = _row(both, row)
        progress("drawing", done, len(wanted))
    return drawn


def _row(both: Both, row: Row) -> Drawn:
    seen, signed = read(both, row.item), resolve(both.a.method)[0].signed
    photo = _photo(both, seen)
    maps = []
    for which, side in enumerate(both.sides):
        found = side.explain(seen.images[which][None], [[row.classes[which]]]).maps[0, 0]
        maps.append(seen.frame.drawn(which, found.cpu().double().numpy()))
    before, after = (_jpeg(overlay(photo, one, signed)) for one in maps)
    difference = overlay(photo, measure.difference(maps[1], maps[0]), True)
    return Drawn(_jpeg(pixels_of(photo)), before, after, _jpeg(difference))


def crop(both: Both, row: Row, place: Place) -> bytes:
    """The part of a picture where a place gained most, with a rim, so that one sees what it belongs to."""
    change = row.change * (1 if place.appeared else -1)
    chosen = cells_of(row, place.appeared) if place.cells is None else place.cells
    y, x = np.unravel_index(np.where(chosen, smoothed(change), -np.inf).argmax(), chosen.shape)
    near = np.zeros_like(chosen)
    near[max(0, y - _RIM) : y + _RIM + 1, max(0, x - _RIM) : x + _RIM + 1] = True
    photo = _photo(both, read(both, row.item))
    inside = np.argwhere(measure.pixels(near, (photo.shape[1], photo.shape[2])))
    (top, left), (bottom, right) = inside.min(0), inside.max(0) + 1
    image = to_image(photo[:, top:bottom, left:right]).resize((_CROP, _CROP), Image.Resampling.BICUBIC)
    return jpeg(np.asarray(image), _CROP, _QUALITY)


def marked(both: Both, row: Row, place: Place) -> bytes:
    """A picture with the outline of a place."""
    photo = _photo(both, read(both, row.item))
    chosen = cells_of(row, place.appeared) if place.cells is None else place.cells
    pixels = pixels_of(photo).copy()
    inside = measure.pixels(chosen, (photo.shape[1], photo.shape[2]))
    pixels[edge(inside)] = OUTLINE
    return _jpeg(pixels)


def _photo(both: Both, seen: Seen) -> Tensor:
    """What both networks see of a picture, (3,H,W) in [0,1]."""
    if seen.frame.preprocesses is None:
        return both.a.model.preprocess.restore(seen.images[0]).cpu()
    return seen.frame.photo(seen.picture)


def _jpeg(pixels: RGB) -> bytes:
    return jpeg(pixels, _SIDE, _QUALITY)
