"""Multi-label data on disk: the images, their labels, and the augmented views for training.

    >>> data = open_data("data/voc", "voc")
    >>> len(data.train), len(data.val), data.labels[:2]
    (1464, 500, ('aeroplane', 'bicycle'))

The layouts are those of `classlens.data.layouts` that list all classes of an image. All files are read once before
training starts: broken files are skipped and counted then, not in the middle of an epoch.
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

_ROOM = 321 / 224  # a random crop of 224 is taken from an image whose short edge is 321, as in the AGF paper


@dataclass(frozen=True)
class Skipped:
    """A skipped image, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Data:
    """Training and validation images, each with all classes of the whole image."""

    name: str
    labels: tuple[str, ...]
    train: tuple[Item, ...]
    val: tuple[Item, ...]
    skipped: tuple[Skipped, ...]
    dataset: Dataset  # reads the images and masks

    @property
    def hash(self) -> str:
        """A hash of the images and labels, in 16 letters."""
        text = f"{self.labels}\n{fingerprint(self.train)}\n{fingerprint(self.val)}"
        return text_hash(text)


def fingerprint(items: Sequence[Item]) -> str:
    """A hash of names, sizes and labels (not of contents, which would have to be read twice)."""
    lines = (f"{i.name}\t{size_of(i.image)}\t{size_of(i.mask)}\t{sorted(i.classes)}\n" for i in items)
    return text_hash("".join(lines), 64)


# ------------------------------------------------------------------------------------------------------- reading


def open_data(path: str | Path, layout: str, seed: int = 0, progress: Progress = silent) -> Data:
    """The data in a folder; unreadable images are listed in `skipped`."""
    if layout not in LAYOUTS:
        raise DataError(f"there is no layout {layout!r}; choose one of {', '.join(LAYOUTS)}")
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
    """The name of the data in cards. It must never change: a resumed training compares it."""
    return dataset.name if dataset.layout == "voc" else dataset.folder.name


def _checked(item: Item, dataset: Dataset) -> Item | Skipped:
    """The item with its classes, if its files can be read and it has a label."""
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
        raise DataError(f"{data.name}: no image is left to {empty} with; {skipped_text(data.skipped)}")
    count = Counter(name for item in data.train for name in item.classes)
    without = [label for label in data.labels if not count[label]]
    if without:
        raise DataError(
            f"{data.name}: no training image has the label {', '.join(map(repr, without))}: add images, or remove "
            "the label"
        )


def skipped_text(skipped: Sequence[Skipped], shown: int = 2) -> str:
    """The skipped images, in one line.

    >>> skipped_text([Skipped("a.jpg", "it has no label")])
    '1 image skipped: a.jpg (it has no label)'
    """
    if not skipped:
        return "no images were skipped"
    some = ", ".join(f"{s.name} ({s.reason})" for s in skipped[:shown]) + (", ..." if len(skipped) > shown else "")
    return f"{len(skipped)} image{'s' if len(skipped) > 1 else ''} skipped: {some}"


# --------------------------------------------------------------------------------------------------------- views


def whole_view(item: Item, data: Data, preprocess: Preprocess) -> tuple[Tensor, Tensor]:
    """The network's view of an image at evaluation, and the labels (classes,) in that crop."""
    picture = data.dataset.picture(item)
    mask = _mask(item, data)
    if mask is not None:
        mask = replace(preprocess, interpolation="nearest", fill=(IGNORE,)).frame(mask)
    return preprocess(picture), labels_of(item, data, mask)


def random_view(
    item: Item, data: Data, preprocess: Preprocess, random: np.random.Generator, may_flip: bool = True
) -> tuple[Tensor, Tensor]:
    """A random crop, flipped half of the time, and the labels of the *cropped* mask."""
    height, width = input_size(preprocess)
    room = replace(preprocess, resize=(round(height * _ROOM), round(width * _ROOM)), fit="cover", crop=None)
    picture, mask = room.frame(data.dataset.picture(item)), _mask(item, data)
    top, left = (int(random.integers(0, free + 1)) for free in (picture.height - height, picture.width - width))
    box, flip = (left, top, left + width, top + height), may_flip and random.random() < 0.5
    if mask is not None:
        mask = replace(room, interpolation="nearest").frame(mask).crop(box)  # a flip does not change the classes
    pixels = preprocess.normalise(to_tensor(picture.crop(box)))
    return pixels.flip(-1) if flip else pixels, labels_of(item, data, mask)


def labels_of(item: Item, data: Data, mask: Image.Image | None) -> Tensor:
    """(classes,) of 0 and 1: from the visible part of the mask, or without a mask from the whole image."""
    found = [data.labels[i - 1] for i in classes_in(np.asarray(mask))] if mask is not None else item.classes
    return torch.tensor([float(label in found) for label in data.labels])


def _mask(item: Item, data: Data) -> Image.Image | None:
    return None if item.mask is None else Image.fromarray(data.dataset.mask(item))


def order(count: int, seed: int, epoch: int) -> list[int]:
    """All positions in an order that depends only on seed and epoch, so that a resumed training uses the same."""
    found: list[int] = np.random.default_rng([seed, epoch]).permutation(count).tolist()
    return found


def pieces(items: Iterable[int], size: int) -> list[list[int]]:
    """Batches of a size: `pieces(range(5), 2)` gives [[0, 1], [2, 3], [4]]."""
    listed = list(items)
    return [listed[i : i + size] for i in range(0, len(listed), size)]
