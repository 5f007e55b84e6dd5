"""Multi-label data on disk: which pictures there are, what each one shows, and the views that training draws.

    >>> data = open_data("data/voc", "voc")
    >>> len(data.train), len(data.val), data.labels[:2]
    (1464, 500, ('aeroplane', 'bicycle'))

A layout is one entry of `LAYOUTS`. Everything is read once before training begins: a broken file is left out and
counted then, never met in the middle of an epoch.
"""

from __future__ import annotations

import csv
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from classlens.data.images import open_image, to_tensor
from classlens.data.layouts import (
    IGNORE,
    DataError,
    Dataset,
    Item,
    Mask,
    check_class_names,
    open_dataset,
    pictures_in,
)
from classlens.errors import ImageError
from classlens.evaluate.network import input_size
from classlens.files import draw_key, text_hash
from classlens.models import Preprocess
from classlens.progress import Progress, silent

_HELD_OUT = 5  # without a split of its own, every fifth picture validates
_ROOM = 321 / 224  # a random crop of 224 is cut from a picture whose short edge is 321, as in the AGF paper


@dataclass(frozen=True)
class Example:
    """A picture, and the classes that it shows as a whole."""

    name: str
    image: Path
    classes: frozenset[str]
    mask: Item | None = None  # read through the data set that knows its layout


@dataclass(frozen=True)
class Skipped:
    """A picture that is left out, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Data:
    """Pictures to train with and to validate with."""

    name: str
    labels: tuple[str, ...]
    train: tuple[Example, ...]
    val: tuple[Example, ...]
    skipped: tuple[Skipped, ...] = ()
    masks: Dataset | None = None

    @property
    def hash(self) -> str:
        """What was trained with, and on which labels, in 16 letters."""
        text = f"{self.labels}\n{fingerprint(self.train)}\n{fingerprint(self.val)}"
        return text_hash(text)


def fingerprint(examples: Sequence[Example]) -> str:
    """Of names, sizes and labels (not of contents, which would be read twice)."""
    digest = hashlib.sha256()
    for e in examples:
        mask = e.mask.mask.stat().st_size if e.mask is not None and isinstance(e.mask.mask, Path) else None
        digest.update(f"{e.name}\t{e.image.stat().st_size}\t{mask}\t{sorted(e.classes)}\n".encode())
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------------- reading


def open_data(path: str | Path, layout: str, seed: int = 0, progress: Progress = silent) -> Data:
    """The data in a folder; what cannot be read is left out and told in `skipped`."""
    if layout not in LAYOUTS:
        raise DataError(f"there is no layout {layout!r}; there are {', '.join(LAYOUTS)}")
    root = Path(path)
    if not root.exists():
        raise DataError(f"there is no data at {root}: check the path")
    found = LAYOUTS[layout](root, seed)
    check_class_names(found.labels)
    examples = [*found.train, *found.val]
    read: list[Example | Skipped] = []
    with ThreadPoolExecutor(2) as readers:
        for checked in readers.map(lambda e: _checked(e, found.masks), examples):
            read.append(checked)
            progress("reading", len(read), len(examples))
    train, val = (
        tuple(e for e in part if isinstance(e, Example))
        for part in (read[: len(found.train)], read[len(found.train) :])
    )
    skipped = (*found.skipped, *(e for e in read if isinstance(e, Skipped)))
    data = replace(found, train=train, val=val, skipped=skipped)
    _check_classes(data)
    return data


def _checked(example: Example, masks: Dataset | None) -> Example | Skipped:
    """The example with its classes, if its files can be read and it shows anything."""
    try:
        picture = open_image(example.image)
        if masks is not None and example.mask is not None:
            mask = masks.mask(example.mask)
            if mask.shape != (picture.height, picture.width):
                raise ImageError(f"its mask is {mask.shape[1]}x{mask.shape[0]}, the picture {picture.width}x"
                                 f"{picture.height}")  # fmt: skip
            names = masks.classes or ()
            example = replace(example, classes=frozenset(names[index - 1] for index in classes_in(mask)))
    except ImageError as error:
        return Skipped(example.name, str(error).replace(str(example.image), example.image.name))
    return example if example.classes else Skipped(example.name, "it has no label")


def _check_classes(data: Data) -> None:
    if not data.train or not data.val:
        empty = "train" if not data.train else "validate"
        raise DataError(f"{data.name}: no picture is left to {empty} with; {skipped_text(data.skipped)}")
    count = Counter(name for example in data.train for name in example.classes)
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


# ------------------------------------------------------------------------------------------------------- layouts


def _voc(root: Path, _seed: int) -> Data:
    train, val = (open_dataset(f"voc:{root}", split) for split in ("train", "val"))
    return Data(train.name, train.classes or (), _voc_examples(train), _voc_examples(val), masks=train)


def _voc_examples(dataset: Dataset) -> tuple[Example, ...]:
    return tuple(
        Example(item.name, item.image, frozenset(), item) for item in dataset.items if isinstance(item.image, Path)
    )


def _csv(root: Path, seed: int) -> Data:
    """labels.csv with the columns image and labels (names with `;`), and split (train or val) if there is one."""
    file = root / "labels.csv" if root.is_dir() else root
    if not file.is_file():
        raise DataError(f"there is no {file}: the layout csv is a file labels.csv with the columns image, labels")
    with file.open(newline="", encoding="utf-8-sig") as stream:
        reader = csv.DictReader(stream)
        columns = reader.fieldnames or []
        rows = list(reader)
    missing = {"image", "labels"} - set(columns)
    if missing:
        raise DataError(f"{file} lacks the column {' and '.join(sorted(missing))}; it has {', '.join(columns)}")
    examples, splits = [], {}
    for row in rows:
        name, names = row["image"], [part.strip() for part in (row["labels"] or "").split(";") if part.strip()]
        if name in splits:
            raise DataError(f"{file} names {name} twice: give a picture one row with all its labels")
        examples.append(Example(name, file.parent / name, frozenset(names)))
        splits[name] = (row.get("split") or "").strip()
    wrong = sorted(set(splits.values()) - {"train", "val", ""})
    if wrong:
        raise DataError(f"{file}: split is train or val, not {', '.join(wrong)}")
    return _divided(file.parent.name, examples, splits if any(splits.values()) else None, seed)


def _folders(root: Path, seed: int) -> Data:
    """A folder for each class, or for several as `cat+dog`; inside train/ and val/, or all together."""
    own = (root / "train").is_dir() and (root / "val").is_dir()
    examples, splits = [], {}
    for part in ("train", "val") if own else ("",):
        for folder in sorted(path for path in (root / part).iterdir() if path.is_dir()):
            classes = frozenset(name.strip() for name in folder.name.split("+") if name.strip())
            for file in sorted(pictures_in(folder)):
                name = file.relative_to(root).as_posix()
                examples.append(Example(name, file, classes))
                splits[name] = part
    if not examples:
        raise DataError(f"{root} has no folders of pictures: the layout folders is a folder for each class")
    return _divided(root.name, examples, splits if own else None, seed)


def _divided(name: str, examples: Sequence[Example], splits: dict[str, str] | None, seed: int) -> Data:
    """Into training and validation as the data say, or every fifth in an order that only the seed decides."""
    labels = tuple(sorted({label for example in examples for label in example.classes}))
    if splits is None:
        order = sorted(examples, key=lambda e: draw_key(seed, e.name))
        splits = {e.name: "train" if i % _HELD_OUT else "val" for i, e in enumerate(order)}
    odd = tuple(Skipped(e.name, "its split is empty") for e in examples if not splits[e.name])
    train, val = (tuple(e for e in examples if splits[e.name] == part) for part in ("train", "val"))
    return Data(name, labels, train, val, odd)


LAYOUTS: dict[str, Callable[[Path, int], Data]] = {"voc": _voc, "csv": _csv, "folders": _folders}
"""Every layout by name: (folder, seed) -> what lies there, not yet read."""


# --------------------------------------------------------------------------------------------------------- views


def classes_in(mask: Mask) -> list[int]:
    """The classes of a mask, 1.., without background and what is not labelled."""
    return [int(value) for value in np.unique(mask) if value not in (0, IGNORE)]


def whole_view(example: Example, data: Data, preprocess: Preprocess) -> tuple[Tensor, Tensor]:
    """What the network sees of a picture when it is used, and its labels (classes,) in that frame."""
    picture = open_image(example.image)
    mask = _mask(example, data)
    if mask is not None:
        mask = replace(preprocess, interpolation="nearest", fill=(IGNORE,)).frame(mask)
    return preprocess(picture), labels_of(example, data, mask)


def random_view(
    example: Example, data: Data, preprocess: Preprocess, random: np.random.Generator, may_flip: bool = True
) -> tuple[Tensor, Tensor]:
    """A random crop, flipped half of the time, and the labels of what it shows: those of the *cropped* mask."""
    height, width = input_size(preprocess)
    room = replace(preprocess, resize=(round(height * _ROOM), round(width * _ROOM)), fit="cover", crop=None)
    picture, mask = room.frame(open_image(example.image)), _mask(example, data)
    top, left = (int(random.integers(0, free + 1)) for free in (picture.height - height, picture.width - width))
    box, flip = (left, top, left + width, top + height), may_flip and random.random() < 0.5
    if mask is not None:
        mask = replace(room, interpolation="nearest").frame(mask).crop(box)  # its classes do not care for a flip
    pixels = preprocess.normalise(to_tensor(picture.crop(box)))
    return pixels.flip(-1) if flip else pixels, labels_of(example, data, mask)


def labels_of(example: Example, data: Data, mask: Image.Image | None) -> Tensor:
    """(classes,) of 0 and 1: from the part of the mask that is seen, or without a mask of the whole picture."""
    found = [data.labels[i - 1] for i in classes_in(np.asarray(mask))] if mask is not None else example.classes
    return torch.tensor([float(label in found) for label in data.labels])


def _mask(example: Example, data: Data) -> Image.Image | None:
    if data.masks is None or example.mask is None:
        return None
    return Image.fromarray(data.masks.mask(example.mask))


def order(count: int, seed: int, epoch: int) -> list[int]:
    """All positions in an order that seed and epoch decide, so that a stopped training goes on with the same."""
    found: list[int] = np.random.default_rng([seed, epoch]).permutation(count).tolist()
    return found


def pieces(items: Iterable[int], size: int) -> list[list[int]]:
    """In pieces of a size: `pieces(range(5), 2)` gives [[0, 1], [2, 3], [4]]."""
    listed = list(items)
    return [listed[i : i + size] for i in range(0, len(listed), size)]
