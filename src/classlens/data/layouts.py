"""Data sets by their layout on disk: which files they have, and how an image and its mask are read.

    >>> pets = open_dataset("data/oxford-pets")
    >>> pets.layout, len(pets.items)
    ('pets', 370)
    >>> train, val = open_divided("data/oxford-pets", seed=0).parts       # training split and held-out split
    >>> len(train), len(val)
    (296, 74)

A layout is one entry of `LAYOUTS` and works for every command that reads images. Masks are converted to one form:
0 background, 1.. objects, 255 unlabelled.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from PIL import Image

from classlens.data import find, matlab
from classlens.data.divide import half_of, hold_out, shuffled
from classlens.data.find import SPLITS, Item
from classlens.data.images import open_image
from classlens.data.masks import IGNORE, Mask, anything_but_zero, class_indices, read_mask, trimap
from classlens.errors import DataError, ImageError, printable

__all__ = [
    "LAYOUTS",
    "Dataset",
    "Divided",
    "Item",
    "Layout",
    "data_hash",
    "open_dataset",
    "open_divided",
    "size_of",
    "told_apart",
]

_PLAIN_NAMES = {"val", "train", "test", "images", "voc2012", "vocdevkit", "data", ""}
_PETS_NAME = re.compile(r"(.+)_\d+")


@dataclass(frozen=True)
class Dataset:
    """The images of a folder."""

    name: str
    layout: str
    root: Path
    items: tuple[Item, ...]
    classes: tuple[str, ...] | None = None  # the classes of the mask values 1, 2, ..., if known

    @property
    def has_masks(self) -> bool:
        return any(item.mask is not None for item in self.items)

    @property
    def has_labels(self) -> bool:
        return any(item.label is not None for item in self.items)

    @property
    def folder(self) -> Path:
        """The folder of its files: the root, or the root's parent if the root is a file."""
        return self.root.parent if self.root.is_file() else self.root

    def select(self, limit: int | None, seed: int, half: str | None = None) -> tuple[Item, ...]:
        """Use at most `limit` images: a deterministic subset for each seed. A larger limit adds images to it.

        `half="A"` or `"B"` keeps only one half of the images. The half depends only on the file name, not on seed or
        folder, so that settings chosen on one half can be measured on the other.
        """
        mine = [item for item in self.items if half in (None, half_of(item.name))]
        return tuple(shuffled(mine, seed)[:limit])

    def label(self, item: Item) -> str | None:
        """The label of an image: its own, or the breed in the name of a file of Oxford pets (`great_pyrenees_12`)."""
        if item.label is None and self.layout == "pets":
            named = _PETS_NAME.fullmatch(item.name.rpartition("/")[2].rpartition(".")[0])
            return named[1] if named else None
        return item.label

    def picture(self, item: Item) -> Image.Image:
        """The image in RGB, upright."""
        if isinstance(item.image, int):
            return Image.fromarray(matlab.read_image(self.root, item.image)).convert("RGB")
        return open_image(item.image)

    def mask(self, item: Item) -> Mask:
        """Its mask (H,W): 0 background, 1.. objects, 255 unlabelled."""
        decode = LAYOUTS[self.layout].decode
        if item.mask is None or decode is None:
            raise ImageError(f"{item.name} has no mask")
        values = matlab.read_mask(self.root, item.mask) if isinstance(item.mask, int) else read_mask(item.mask)
        mask = decode(values)
        highest = int(mask[mask != IGNORE].max(initial=0))
        if self.classes is not None and highest > len(self.classes):
            raise ImageError(f"the mask of {item.name} holds class {highest}; the data set has {len(self.classes)}")
        return mask

    def why(self, error: ImageError) -> str:
        """Why an image was skipped, without its location on this machine."""
        return str(error).replace(printable(f"{self.folder}/"), "")


@dataclass(frozen=True)
class Divided:
    """A data set in two parts: a training split and a held-out split."""

    dataset: Dataset  # reads the pictures and masks of both
    parts: tuple[tuple[Item, ...], tuple[Item, ...]]
    neither: tuple[Item, ...] = ()  # images that are in neither of the data set's own splits


@dataclass(frozen=True)
class Layout:
    """How a kind of data set is stored on disk."""

    expected: str  # a description of the layout, for error messages
    find: Callable[[Path], Path | None]  # a folder -> the root of the data set, or None if it has another layout
    items: Callable[[Path, str | None], Iterable[Item]]  # of a split, if it has splits; None: all
    decode: Callable[[NDArray[Any]], Mask] | None = None  # converts the values of its masks; None: it has no masks
    classes: Callable[[Path], tuple[str, ...] | None] = lambda root: None  # of the mask values 1, 2, ...
    names_all: bool = False  # it lists all classes in an image, as multi-label training needs
    only_by_name: bool = False  # never detected automatically: write `csv:FOLDER`
    ordered: bool = False  # its items keep their order; others are sorted by name


def open_dataset(path: str | os.PathLike[str], split: str | None = "val") -> Dataset:
    """The data set in a folder. The layout is detected, or given before a colon: `pets:data/oxford-pets`.

    If the data set has splits, `split` selects one; None gives all images, each with its split.
    """
    root, said = _parse(path)
    if not root.exists():
        raise DataError(f"there is no data at {root}: check the path")
    candidates = {said: LAYOUTS[said]} if said else LAYOUTS
    try:
        for name, layout in candidates.items():
            start = layout.find(root) if said or not layout.only_by_name else None
            if start is not None:
                items = _items(layout, start, split, f"{root} is laid out as {name}, but holds")
                return Dataset(_short_name(start), name, start, items, layout.classes(start))
        found = _contents(root)
    except OSError as error:
        raise DataError(f"{root} cannot be listed: {error}") from error
    expected = "; or ".join(f"{name}: {layout.expected}" for name, layout in candidates.items())
    raise DataError(f"{root} has no known layout (expected {expected}); found {found}")


def _items(layout: Layout, start: Path, split: str | None, complaint: str) -> tuple[Item, ...]:
    """The images of a split, in order; at least one."""
    found = list(layout.items(start, split))
    if not found:
        raise DataError(f"{complaint} no pictures; found {_contents(start)}")
    everything = [_escaped(item) for item in found]
    if everything != found and len({item.name for item in everything}) < len(found):
        raise DataError(f"{complaint} files whose names are the same in UTF-8: rename them")
    wanted = [item for item in everything if split is None or item.split in (None, split)]
    if not wanted:
        raise DataError(f"{complaint} no pictures in the split {split!r}: choose another")
    return tuple(wanted if layout.ordered else sorted(wanted, key=lambda item: item.name))


def _escaped(item: Item) -> Item:
    """The item with a name that every table, page and terminal can show; the path of its file is unchanged."""
    name, label = printable(item.name), None if item.label is None else printable(item.label)
    if (name, label) == (item.name, item.label):
        return item
    return replace(item, name=name, label=label, classes=frozenset(map(printable, item.classes)))


def open_divided(path: str | os.PathLike[str], seed: int = 0) -> Divided:
    """A data set divided by its own splits (or folders `train` and `val`); otherwise every fifth image is held out."""
    root, said = _parse(path)
    if not said and all((root / split).is_dir() for split in SPLITS):
        train, val = (open_dataset(root / split) for split in SPLITS)
        return Divided(replace(val, name=root.name, root=root), (train.items, val.items))
    found = open_dataset(path, None)
    if not any(item.split for item in found.items):
        train_items, val_items = hold_out(found.items, seed)
        return Divided(found, (tuple(train_items), tuple(val_items)))
    train_items, val_items, neither = ([i for i in found.items if i.split == split] for split in (*SPLITS, ""))
    return Divided(found, (tuple(train_items), tuple(val_items)), tuple(neither))


def told_apart(datasets: Sequence[Dataset]) -> list[Dataset]:
    """Data sets whose names differ: where folders have one name, those above them are said too.

    >>> [dataset.name for dataset in told_apart([open_dataset("a/pics"), open_dataset("b/pics")])]
    ['a/pics', 'b/pics']
    """
    found = []
    for mine in datasets:
        same = [dataset.root.resolve() for dataset in datasets if dataset.name == mine.name]
        root = mine.root.resolve()
        if same.count(root) > 1:
            raise DataError(f"{mine.root} is given twice: give a data set once")
        parts = next(
            n for n in range(1, len(root.parts) + 1) if [p.parts[-n:] for p in same].count(root.parts[-n:]) < 2
        )
        found.append(mine if len(same) < 2 else replace(mine, name=printable("/".join(root.parts[-parts:]))))
    return found


def data_hash(dataset: Dataset, items: Sequence[Item]) -> str:
    """A fingerprint of the selected files: names and sizes (not contents, which would have to be read twice)."""
    digest = hashlib.sha256(f"{dataset.layout}\n".encode())
    for item in items:
        sizes = [size_of(part) for part in (item.image, item.mask)]
        digest.update(f"{item.name}\t{sizes}\t{item.label}\n".encode())
    if dataset.root.is_file():
        digest.update(str(dataset.root.stat().st_size).encode())
    return digest.hexdigest()[:16]


def size_of(part: Path | int | None) -> int | None:
    """The size of a file, -1 if it does not exist; a position in an HDF5 file is returned unchanged."""
    if not isinstance(part, Path):
        return part
    try:
        found = part.stat()
    except OSError:
        return -1
    return found.st_size if stat.S_ISREG(found.st_mode) else -1


# ------------------------------------------------------------------------------------------------------- texts


def _parse(path: str | os.PathLike[str]) -> tuple[Path, str | None]:
    """`pets:data` -> the folder, and the layout if one is given."""
    text = os.fspath(path)
    said, colon, rest = text.partition(":")
    return (Path(rest), said) if colon and said in LAYOUTS else (Path(text), None)


def _contents(root: Path) -> str:
    """A summary of a folder's contents: `2 folders (images, notes), 3 files (a.txt, ...)`."""
    if root.is_file():
        return f"a file {root.name}"
    children = sorted(root.iterdir())
    folders = [child.name for child in children if child.is_dir()]
    files = [child.name for child in children if not child.is_dir()]
    parts = [
        f"{len(names)} {kind} ({', '.join(names[:4])}{', ...' if len(names) > 4 else ''})"
        for kind, names in (("folders", folders), ("files", files))
        if names
    ]
    return ", ".join(parts) or "an empty folder"


def _short_name(root: Path) -> str:
    """A name for tables: the last informative part of the path, without its location on this machine."""
    path = root.resolve()
    path = path.parent if path.name == "labels.csv" else path
    parts = [path.stem if path.suffix in (".mat", ".csv") else path.name, *(parent.name for parent in path.parents)]
    return printable(next((part for part in parts if part.lower() not in _PLAIN_NAMES), "data"))


LAYOUTS: dict[str, Layout] = {
    "voc": Layout(
        "JPEGImages/, SegmentationClass/ and ImageSets/Segmentation/, as in VOC2012 (your own classes: labels.txt)",
        find.voc_root, find.voc_items, class_indices, find.voc_classes, names_all=True,
    ),
    "pets": Layout(
        "images/ and annotations/trimaps/, as in Oxford-IIIT Pet",
        find.two_folders("images", "annotations/trimaps"), find.pairs("images", "annotations/trimaps"), trimap,
    ),
    "masks": Layout(
        "images/ and masks/ with files of the same names (0 is background)",
        find.two_folders("images", "masks"), find.pairs("images", "masks"), anything_but_zero,
    ),
    "imagenet-segmentation": Layout(
        "the HDF5 file gtsegs_ijcv.mat", find.matlab_file, find.matlab_items, anything_but_zero
    ),
    "imagenet": Layout(
        "a folder for each class, named by wnid (n01440764/...) or as the model's labels",
        find.folder_per_class, find.class_items,
    ),
    "folder": Layout("images directly in the folder, without labels", find.just_pictures, find.picture_items),
    "csv": Layout(
        "labels.csv with the columns image, labels (separated by `;`) and, optionally, split (train or val)",
        find.csv_file, find.csv_items, names_all=True, only_by_name=True, ordered=True,
    ),
    "folders": Layout(
        "a folder of images for each class, or for several as cat+dog; inside train/ and val/ if these exist",
        find.class_folders, find.class_folder_items, names_all=True, only_by_name=True, ordered=True,
    ),
}  # fmt: skip
"""Every layout by name. Layouts are tried in this order."""
