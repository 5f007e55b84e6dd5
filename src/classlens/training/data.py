"""Multi-label data on disk: which pictures there are, what each one shows, and the views that training draws.

    >>> data = open_data("data/voc", "voc")
    >>> len(data.train), len(data.val), data.labels[:2]
    (1464, 500, ('aeroplane', 'bicycle'))

Layouts are those of `classlens.data.layouts` that name everything a picture shows. Everything is read once before
training begins: a broken file is left out and counted then, never met in the middle of an epoch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from classlens.data import layouts
from classlens.data.images import to_tensor
from classlens.data.labels import check_class_names
from classlens.data.layouts import Dataset, Item, open_divided, size_of
from classlens.data.masks import IGNORE, classes_in
from classlens.errors import DataError, ImageError
from classlens.files import text_hash
from classlens.models import Preprocess
from classlens.models.network import input_size
from classlens.progress import Progress, silent

LAYOUTS = tuple(name for name, layout in layouts.LAYOUTS.items() if layout.names_all)

_ROOM = 321 / 224  # a random crop of 224 is cut from a picture whose short edge is 321, as in the AGF paper


@dataclass(frozen=True)
class Skipped:
    """A picture that is left out, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Data:
    """Pictures to train with and to validate with, each with the classes that it shows as a whole."""

    name: str
    labels: tuple[str, ...]
    train: tuple[Item, ...]
    val: tuple[Item, ...]
    skipped: tuple[Skipped, ...]
    dataset: Dataset  # reads their pictures and masks

    @property
    def hash(self) -> str:
        """What was trained with, and on which labels, in 16 letters."""
        text = f"{self.labels}\n{fingerprint(self.train)}\n{fingerprint(self.val)}"
        return text_hash(text)


def fingerprint(items: Sequence[Item]) -> str:
    """Of names, sizes and labels (not of contents, which would be read twice)."""
    lines = (f"{i.name}\t{size_of(i.image)}\t{size_of(i.mask)}\t{sorted(i.classes)}\n" for i in items)
    return text_hash("".join(lines), 64)


# ------------------------------------------------------------------------------------------------------- reading


def open_data(path: str | Path, layout: str, seed: int = 0, progress: Progress = silent) -> Data:
    """The data in a folder; what cannot be read is left out and told in `skipped`."""
    if layout not in LAYOUTS:
        raise DataError(f"there is no layout {layout!r}; there are {', '.join(LAYOUTS)}")
    found = open_divided(f"{layout}:{path}", seed)
    dataset, (train, val) = found.dataset, found.parts
    labels = dataset.classes or tuple(sorted({name for item in dataset.items for name in item.classes}))
    check_class_names(labels)
    read: list[Item | Skipped] = []
    with ThreadPoolExecutor(2) as readers:
        for checked in readers.map(lambda item: _checked(item, dataset), (*train, *val)):
            read.append(checked)
            progress("reading", len(read), len(train) + len(val))
    kept = [tuple(i for i in part if isinstance(i, Item)) for part in (read[: len(train)], read[len(train) :])]
    skipped = [Skipped(item.name, "its split is empty") for item in found.neither]
    skipped += [entry for entry in read if isinstance(entry, Skipped)]
    data = Data(_name(dataset), labels, kept[0], kept[1], tuple(skipped), dataset)
    _check_classes(data)
    return data


def _name(dataset: Dataset) -> str:
    """What cards call the data. A stopped training must know them again, so this name never changes."""
    return dataset.name if dataset.layout == "voc" else dataset.folder.name


def _checked(item: Item, dataset: Dataset) -> Item | Skipped:
    """The item with its classes, if its files can be read and it shows anything."""
    try:
        picture = dataset.picture(item)
        if item.mask is not None:
            mask = dataset.mask(item)
            if mask.shape != (picture.height, picture.width):
                raise ImageError(f"its mask is {mask.shape[1]}x{mask.shape[0]}, the picture {picture.width}x"
                                 f"{picture.height}")  # fmt: skip
            names = dataset.classes or ()
            item = replace(item, classes=frozenset(names[index - 1] for index in classes_in(mask)))
    except ImageError as error:
        return Skipped(item.name, dataset.why(error))
    return item if item.classes else Skipped(item.name, "it has no label")


def _check_classes(data: Data) -> None:
    if not data.train or not data.val:
        empty = "train" if not data.train else "validate"
        raise DataError(f"{data.name}: no picture is left to {empty} with; {skipped_text(data.skipped)}")
    count = Counter(name for item in data.train for name in item.classes)
    without = [label for label in data.labels if not count[label]]
    if without:
        raise DataError(
            f"{data.name}: no training picture has the label {', '.join(map(repr, without))}: add pictures, or take "
            "the label out"
        )


def skipped_text(skipped: Sequence[Skipped], shown: int = 2) -> str:
    """What was left out, in one line.

    >>> skipped_text([Skipped("a.jpg", "it has no label")])
    '1 picture left out: a.jpg (it has no label)'
    """
    if not skipped:
        return "none was left out"
    some = ", ".join(f"{s.name} ({s.reason})" for s in skipped[:shown]) + (", ..." if len(skipped) > shown else "")
    return f"{len(skipped)} picture{'s' if len(skipped) > 1 else ''} left out: {some}"


# --------------------------------------------------------------------------------------------------------- views


def whole_view(item: Item, data: Data, preprocess: Preprocess) -> tuple[Tensor, Tensor]:
    """What the network sees of a picture when it is used, and its labels (classes,) in that frame."""
    picture = data.dataset.picture(item)
    mask = _mask(item, data)
    if mask is not None:
        mask = replace(preprocess, interpolation="nearest", fill=(IGNORE,)).frame(mask)
    return preprocess(picture), labels_of(item, data, mask)


def random_view(
    item: Item, data: Data, preprocess: Preprocess, random: np.random.Generator, may_flip: bool = True
) -> tuple[Tensor, Tensor]:
    """A random crop, flipped half of the time, and the labels of what it shows: those of the *cropped* mask."""
    height, width = input_size(preprocess)
    room = replace(preprocess, resize=(round(height * _ROOM), round(width * _ROOM)), fit="cover", crop=None)
    picture, mask = room.frame(data.dataset.picture(item)), _mask(item, data)
    top, left = (int(random.integers(0, free + 1)) for free in (picture.height - height, picture.width - width))
    box, flip = (left, top, left + width, top + height), may_flip and random.random() < 0.5
    if mask is not None:
        mask = replace(room, interpolation="nearest").frame(mask).crop(box)  # its classes do not care for a flip
    pixels = preprocess.normalise(to_tensor(picture.crop(box)))
    return pixels.flip(-1) if flip else pixels, labels_of(item, data, mask)


def labels_of(item: Item, data: Data, mask: Image.Image | None) -> Tensor:
    """(classes,) of 0 and 1: from the part of the mask that is seen, or without a mask of the whole picture."""
    found = [data.labels[i - 1] for i in classes_in(np.asarray(mask))] if mask is not None else item.classes
    return torch.tensor([float(label in found) for label in data.labels])


def _mask(item: Item, data: Data) -> Image.Image | None:
    return None if item.mask is None else Image.fromarray(data.dataset.mask(item))


def order(count: int, seed: int, epoch: int) -> list[int]:
    """All positions in an order that seed and epoch decide, so that a stopped training goes on with the same."""
    found: list[int] = np.random.default_rng([seed, epoch]).permutation(count).tolist()
    return found


def pieces(items: Iterable[int], size: int) -> list[list[int]]:
    """In pieces of a size: `pieces(range(5), 2)` gives [[0, 1], [2, 3], [4]]."""
    listed = list(items)
    return [listed[i : i + size] for i in range(0, len(listed), size)]
