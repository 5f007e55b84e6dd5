"""Training images: found in folders, read once, and cached as small squares in one file.

    >>> found = find_pictures(["data/voc", "data/oxford-pets"], seed=0)
    >>> len(found.train), len(found.val)
    (1760, 574)
    >>> store = read_pictures(found, side=120, folder=Path("runs/rotnet"), progress=print)
    >>> store.train.pixels.shape                # on disk, memory-mapped
    (1760, 3, 120, 120)

Labels are never used for training; if a folder has labels, they are used to score what was learnt.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from classlens.data.divide import shuffled
from classlens.data.images import open_image
from classlens.data.layouts import Item, open_divided, size_of
from classlens.errors import DataError, ImageError, printable
from classlens.files import remove_drafts, replacing, text_hash, write_json
from classlens.models import Preprocess
from classlens.progress import Progress

_READERS = 2


@dataclass(frozen=True)
class Collection:
    """The training images and the held-out images."""

    name: str
    train: tuple[Item, ...]
    val: tuple[Item, ...]

    @property
    def hash(self) -> str:
        """A hash of names, sizes and labels, in 16 letters."""
        parts = (
            "".join(f"{item.name}\t{size_of(item.image)}\t{item.label}\n" for item in part) + "\n"
            for part in (self.train, self.val)
        )
        return text_hash("".join(parts))


@dataclass(frozen=True)
class Part:
    """Cached images: pixels (N,3,S,S) uint8, and labels (N,), -1 without a label."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def labelled(self) -> bool:
        """Whether all images have labels, and there is more than one label."""
        return len(self.labels) > 0 and self.labels.min() >= 0 and self.labels.max() > 0


@dataclass(frozen=True)
class Store:
    """The cached images of a collection."""

    train: Part
    val: Part
    skipped: tuple[str, ...]  # files that could not be read, and why


def find_pictures(paths: Sequence[str | os.PathLike[str]], seed: int = 0, limit: int | None = None) -> Collection:
    """The images of data sets in any layout that `evaluate` knows; at most `limit` training images in total.

    The splits of a data set are used (`train` and `val`); otherwise every fifth image is held out.
    """
    train: list[Item] = []
    val: list[Item] = []
    names = []
    for number, path in enumerate(paths):
        found = open_divided(path, seed)
        names.append(found.dataset.name)
        prefix = f"{number}:" if len(paths) > 1 else ""
        for mine, items in zip((train, val), found.parts, strict=True):
            mine += [_item(item, prefix) for item in items]
    if limit is not None:
        train = sorted(shuffled(train, seed)[:limit], key=lambda item: item.name)
    if not train or not val:
        raise DataError(f"{' + '.join(names)}: no image is left to {'train' if not train else 'measure'} with")
    # Held-out images are shuffled, so that the first few show every class.
    return Collection(" + ".join(names), tuple(train), tuple(shuffled(val, seed)))


def _item(item: Item, prefix: str) -> Item:
    if not isinstance(item.image, Path):
        raise DataError(f"{item.name} is inside another file: training needs one file for each image")
    return replace(item, name=f"{prefix}{item.name}")


# --------------------------------------------------------------------------------------------------------- store


def read_pictures(found: Collection, side: int, folder: Path, progress: Progress) -> Store:
    """All images as squares of one size, from a cache file in the folder, which is created if it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    pixels_file, about_file = folder / "pictures.npy", folder / "pictures.json"
    key = {"hash": found.hash, "side": side}
    about = json.loads(about_file.read_text(encoding="utf-8")) if about_file.is_file() else {}
    if about.get("key") != key or not pixels_file.is_file():
        kept, skipped = _write_pixels(found, side, pixels_file, progress)
        about = {"key": key, "kept": kept, "skipped": skipped}
        write_json(about_file, about, indent=None)  # last: it marks the pixels as complete
    pixels = np.load(pixels_file, mmap_mode="r")
    everything = [*found.train, *found.val]
    classes = sorted({item.label for item in everything if item.label is not None})
    index = {label: i for i, label in enumerate(classes)}
    kept = about["kept"]
    labels = np.array([index.get(everything[i].label or "", -1) for i in kept], np.int64)
    border = sum(i < len(found.train) for i in kept)
    return Store(
        Part(pixels[:border], labels[:border]),
        Part(pixels[border : len(kept)], labels[border:]),
        tuple(about["skipped"]),
    )


def _write_pixels(found: Collection, side: int, file: Path, progress: Progress) -> tuple[list[int], list[str]]:
    """Write the file atomically; returns the positions of the images in it, and the skipped ones."""
    everything = [*found.train, *found.val]
    square = Preprocess(resize=side, crop=side)

    def read(item: Item) -> NDArray[np.uint8] | str:
        assert isinstance(item.image, Path)  # checked by `find_pictures`
        try:
            return np.asarray(square.frame(open_image(item.image))).transpose(2, 0, 1)
        except ImageError as error:
            return str(error).replace(printable(str(item.image)), item.name)

    remove_drafts(file.parent, file.name)  # of a killed run: they may be large
    kept: list[int] = []
    skipped: list[str] = []
    with replacing(file) as draft:
        shape = (len(everything), 3, side, side)
        pixels = np.lib.format.open_memmap(draft, mode="w+", dtype=np.uint8, shape=shape)
        with ThreadPoolExecutor(_READERS) as readers:
            for position, result in enumerate(readers.map(read, everything)):
                if isinstance(result, str):
                    skipped.append(result)
                else:
                    pixels[len(kept)] = result
                    kept.append(position)
                progress("reading pictures", position + 1, len(everything))
        if not any(i < len(found.train) for i in kept) or not any(i >= len(found.train) for i in kept):
            raise DataError(f"{found.name}: too few images can be read; {'; '.join(skipped[:2])}")
        pixels.flush()
        del pixels
    return kept, skipped
