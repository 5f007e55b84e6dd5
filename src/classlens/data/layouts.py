"""Data sets by their layout on disk, nothing hidden: which files there are, and how a picture and its mask are read.

    >>> pets = open_dataset("data/oxford-pets")
    >>> pets.layout, len(pets.items)
    ('pets', 370)

A layout is one entry of `LAYOUTS`. A mask is brought to one form: 0 background, 1.. objects, 255 not labelled.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from classlens.data.images import open_image
from classlens.data.labels import imagenet, imagenet_wnids
from classlens.errors import ClasslensError, ImageError
from classlens.files import draw_key

IGNORE = 255  # in a mask: not labelled, counts for nobody
Mask = NDArray[np.uint8]  # (H,W)

VOC_CLASSES = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog",
    "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip

_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
_WNID = re.compile(r"n\d{8}")
_PLAIN_NAMES = {"val", "train", "test", "images", "voc2012", "vocdevkit", "data", ""}


class DataError(ClasslensError):
    """A data set that is not laid out as expected, or cannot serve a test."""


@dataclass(frozen=True)
class Item:
    """One picture of a data set. Its files may be missing or broken: that is found out when it is read."""

    name: str  # stable, and unique in the data set
    image: Path | int  # a file, or a position in an HDF5 file
    mask: Path | int | None = None
    label: str | None = None  # a wnid, or the name of a class


@dataclass(frozen=True)
class Dataset:
    """The pictures of a folder."""

    name: str
    layout: str
    root: Path
    items: tuple[Item, ...]
    classes: tuple[str, ...] | None = None  # what 1, 2, ... in a mask mean, where that is known

    @property
    def has_masks(self) -> bool:
        return any(item.mask is not None for item in self.items)

    @property
    def has_labels(self) -> bool:
        return any(item.label is not None for item in self.items)

    def select(self, limit: int | None, seed: int, half: str | None = None) -> tuple[Item, ...]:
        """The first `limit` pictures in an order that only the seed decides, so a larger limit only adds some.

        `half`: only those of half "A" or "B", which the name of a file decides, whatever the seed and the folder: what
        was chosen on one half can be measured on the other.
        """
        mine = [item for item in self.items if half in (None, half_of(item.name))]
        order = sorted(mine, key=lambda item: draw_key(seed, item.name))
        return tuple(order[:limit])

    def picture(self, item: Item) -> Image.Image:
        """The picture in RGB, upright."""
        if isinstance(item.image, int):
            return Image.fromarray(_matlab_image(self.root, item.image)).convert("RGB")
        return open_image(item.image)

    def mask(self, item: Item) -> Mask:
        """Its mask (H,W): 0 background, 1.. objects, 255 not labelled."""
        if item.mask is None:
            raise ImageError(f"{item.name} has no mask")
        values = _matlab_mask(self.root, item.mask) if isinstance(item.mask, int) else read_mask(item.mask)
        mask = LAYOUTS[self.layout].decode(values)
        highest = int(mask[mask != IGNORE].max(initial=0))
        if self.classes is not None and highest > len(self.classes):
            raise ImageError(f"the mask of {item.name} holds class {highest}; the data set has {len(self.classes)}")
        return mask


def half_of(name: str) -> str:
    """Which half a file belongs to, "A" or "B": a bit of the hash of its name."""
    return "AB"[hashlib.sha256(name.rsplit("/", 1)[-1].encode()).digest()[0] & 1]


@dataclass(frozen=True)
class Layout:
    """How a kind of data set lies on disk."""

    expected: str  # for the message when it does not
    find: Callable[[Path], Path | None]  # a folder given -> where the data set begins, if it is one
    items: Callable[[Path, str], Iterable[Item]]
    decode: Callable[[NDArray[Any]], Mask]
    classes: Callable[[Path], tuple[str, ...] | None] = lambda root: None  # of the masks' values 1, 2, ...


def open_dataset(path: str | os.PathLike[str], split: str = "val") -> Dataset:
    """The data set in a folder. The layout is recognised, or said before a colon: `pets:data/oxford-pets`."""
    text = os.fspath(path)
    wanted, colon, rest = text.partition(":")
    layouts = {wanted: LAYOUTS[wanted]} if colon and wanted in LAYOUTS else LAYOUTS
    root = Path(rest if layouts is not LAYOUTS else text)
    if not root.exists():
        raise DataError(f"there is no data at {root}: check the path")
    for name, layout in layouts.items():
        start = layout.find(root)
        if start is not None:
            items = tuple(sorted(layout.items(start, split), key=lambda item: item.name))
            if not items:
                raise DataError(f"{root} is laid out as {name}, but holds no pictures; found {_contents(start)}")
            return Dataset(_short_name(start), name, start, items, layout.classes(start))
    expected = "; or ".join(f"{name}: {layout.expected}" for name, layout in layouts.items())
    raise DataError(f"{root} is not laid out as expected ({expected}); found {_contents(root)}")


def label_index(label: str | None, labels: Sequence[str] | None, classes: int) -> int | None:
    """Which output of a model a data set's label means; None if the model does not know that class.

    >>> label_index("n02099601", imagenet(), 1000), label_index("ship", ("frog", "ship"), 2)
    (207, 1)
    """
    if label is None:
        return None
    if _WNID.fullmatch(label):
        knows = classes == 1000 and (labels is None or tuple(labels) == imagenet())
        return _wnid_positions().get(label) if knows else None
    if labels is None:
        return int(label) if label.isdigit() and int(label) < classes else None
    folded = [name.casefold() for name in labels]
    return folded.index(label.casefold()) if label.casefold() in folded else None


def class_outputs(classes: Sequence[str] | None, labels: Sequence[str] | None, outputs: int) -> tuple[int, ...] | None:
    """Which outputs of a model are the classes of a data set's masks, in their order; None if it is no such model.

    >>> class_outputs(("cat", "tv monitor"), ("TVmonitor", "cat"), 2)
    (1, 0)
    """
    if classes is None or outputs != len(classes):
        return None
    if labels is None:
        return tuple(range(outputs))
    wanted, known = [folded(name) for name in classes], [folded(name) for name in labels]
    return tuple(known.index(name) for name in wanted) if set(known) == set(wanted) else None


def folded(name: str) -> str:
    """A class name without what people write differently: case, spaces, `_` and `-`."""
    return re.sub(r"[\s_-]+", "", name.casefold())


def check_class_names(names: Sequence[str]) -> None:
    """Refuse names that differ only in case, spaces, `_` and `-`: nobody could tell which one is meant."""
    seen: dict[str, str] = {}
    for name in names:
        if folded(name) in seen:
            raise DataError(
                f"the classes {seen[folded(name)]!r} and {name!r} differ at most in case or spaces: "
                "make them one, or tell them apart"
            )
        seen[folded(name)] = name


def data_hash(dataset: Dataset, items: Sequence[Item]) -> str:
    """A fingerprint of the chosen files: their names and sizes (not their contents, which would be read twice)."""
    digest = hashlib.sha256(f"{dataset.layout}\n".encode())
    for item in items:
        sizes = [_size(part) for part in (item.image, item.mask)]
        digest.update(f"{item.name}\t{sizes}\t{item.label}\n".encode())
    if dataset.root.is_file():
        digest.update(str(dataset.root.stat().st_size).encode())
    return digest.hexdigest()[:16]


# ------------------------------------------------------------------------------------------- what lies where


def _folder_per_class(root: Path) -> Path | None:
    """A folder whose sub-folders are classes; `val` of it, if it has one."""
    for start in (root, root / "val"):
        if start.is_dir() and any(_WNID.fullmatch(child.name) for child in start.iterdir() if child.is_dir()):
            return start
    children = [child for child in root.iterdir() if child.is_dir()] if root.is_dir() else []
    # Classes by name: nothing but folders, and pictures right inside the first of them.
    if children and not pictures_in(root) and pictures_in(min(children)):
        return root
    return None


def _class_items(root: Path, _split: str) -> Iterable[Item]:
    for folder in root.iterdir():
        if folder.is_dir():
            for file in pictures_in(folder):
                yield Item(f"{folder.name}/{file.name}", file, label=folder.name)


def _just_pictures(root: Path) -> Path | None:
    return root if root.is_dir() and pictures_in(root) else None


def _picture_items(root: Path, _split: str) -> Iterable[Item]:
    return (Item(file.name, file) for file in pictures_in(root))


def _voc_root(root: Path) -> Path | None:
    for start in (root, root / "VOC2012", root / "VOCdevkit" / "VOC2012"):
        if (start / "JPEGImages").is_dir() and (start / "SegmentationClass").is_dir():
            return start
    return None


def _voc_items(root: Path, split: str) -> Iterable[Item]:
    lists = root / "ImageSets" / "Segmentation"
    file = lists / f"{split}.txt"
    if not file.is_file():
        there = ", ".join(sorted(path.stem for path in lists.glob("*.txt"))) or "none"
        raise DataError(f"{root} has no split {split!r} (ImageSets/Segmentation/{split}.txt); there are: {there}")
    for name in file.read_text(encoding="utf-8").split():
        yield Item(name, root / "JPEGImages" / f"{name}.jpg", root / "SegmentationClass" / f"{name}.png")


def _voc_classes(root: Path) -> tuple[str, ...]:
    """The 20 of VOC, or those of a file `labels.txt`, a line for each value of the masks from 1."""
    file = root / "labels.txt"
    if not file.is_file():
        return VOC_CLASSES
    names = tuple(line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip())
    if not 0 < len(names) < IGNORE:
        raise DataError(f"{file} must name 1 to {IGNORE - 1} classes, one a line; it has {len(names)}")
    check_class_names(names)
    return names


def _pairs(images: str, masks: str) -> Callable[[Path, str], Iterable[Item]]:
    """Pictures and masks of the same name in two folders; one without the other is found out when it is read."""

    def items(root: Path, _split: str) -> Iterable[Item]:
        pictures, labelled = _by_stem(root / images), _by_stem(root / masks)
        for stem in pictures.keys() | labelled.keys():
            name = pictures[stem].relative_to(root / images).as_posix() if stem in pictures else stem
            yield Item(
                name,
                pictures.get(stem, root / images / f"{stem}.jpg"),
                labelled.get(stem, root / masks / f"{stem}.png"),
            )

    return items


def _two_folders(images: str, masks: str) -> Callable[[Path], Path | None]:
    return lambda root: root if (root / images).is_dir() and (root / masks).is_dir() else None


def _by_stem(folder: Path) -> dict[str, Path]:
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in pictures_in(folder, deep=True)}


def pictures_in(folder: Path, deep: bool = False) -> list[Path]:
    """The picture files right in a folder, or anywhere below it."""
    # Hidden files beside pictures (._cat.jpg) are an operating system's notes.
    found = folder.rglob("*") if deep else folder.iterdir()
    return [path for path in found if path.suffix.lower() in _SUFFIXES and not path.name.startswith(".")]


def _matlab_file(root: Path) -> Path | None:
    file = root / "gtsegs_ijcv.mat" if root.is_dir() else root
    return file if file.is_file() and file.suffix == ".mat" else None


def _matlab_items(root: Path, _split: str) -> Iterable[Item]:
    content = _hdf5(root)
    if "value" not in content or not {"img", "gt"} <= set(content["value"]):
        raise DataError(
            f"{root} is expected to hold value/img and value/gt (gtsegs_ijcv.mat); found {', '.join(content)}"
        )
    count = len(content["value/img"])
    for index in range(count):
        name = _matlab_name(content, index)
        label = name.partition("_")[0]
        yield Item(f"{index:05d}-{name}", index, index, label if _WNID.fullmatch(label) else None)


# ------------------------------------------------------------------------------------------------------- masks


def read_mask(path: Path) -> NDArray[Any]:
    """The values as they are stored: of a palette picture the indices, not the colours."""
    try:
        with Image.open(path) as image:
            return np.asarray(image)
    except FileNotFoundError:
        raise ImageError(f"the mask {path.name} does not exist") from None
    except Exception as error:  # each format's decoder raises its own kinds
        raise ImageError(f"the mask {path.name} cannot be read: {error}") from error


def class_indices(values: NDArray[Any]) -> Mask:
    """The values of a mask as they are: each is a class, 0 background."""
    if values.ndim != 2:
        raise ImageError("a mask must hold class indices (a palette or grey picture), not colours")
    return values.astype(np.uint8)


def _anything_but_zero(values: NDArray[Any]) -> Mask:
    """Every colour or number but 0 is an object."""
    if values.ndim not in (2, 3):
        raise ImageError("a mask must be a picture (H,W) or (H,W,channels)")
    return np.asarray((values.reshape(*values.shape[:2], -1) != 0).any(2), np.uint8)


def _trimap(values: NDArray[Any]) -> Mask:
    """1 the animal, 2 background, 3 the border between them, which is not labelled."""
    indices = class_indices(values)
    if not np.isin(indices, (1, 2, 3)).all():
        raise ImageError("a trimap holds 1, 2 and 3 alone")
    meaning = np.array([IGNORE, 1, 0, IGNORE], np.uint8)
    mask: Mask = meaning[indices]
    return mask


# -------------------------------------------------------------------------- ImageNet-Segmentation (Matlab 7.3)


@cache
def _hdf5(path: Path) -> Any:
    try:
        import h5py
    except ImportError:
        raise DataError(f"{path.name} is an HDF5 file: pip install 'classlens[hdf5]' to read it") from None
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise DataError(f"{path} cannot be read as HDF5: {error}") from error


def _matlab_name(content: Any, index: int) -> str:
    """The picture's ImageNet name, where the file has it (as character codes)."""
    if "id" not in content["value"]:
        return str(index)
    return "".join(chr(code) for code in np.asarray(content[content["value/id"][index, 0]]).ravel())


def _matlab_image(path: Path, index: int) -> NDArray[np.uint8]:
    """(H,W,3). Matlab stores columns first, so every array comes out of HDF5 transposed."""
    content = _hdf5(path)
    return np.ascontiguousarray(np.asarray(content[content["value/img"][index, 0]]).T).astype(np.uint8)


def _matlab_mask(path: Path, index: int) -> NDArray[Any]:
    content = _hdf5(path)
    cell = content[content["value/gt"][index, 0]]  # a cell array of one mask
    return np.asarray(content[cell[0, 0]]).T


# ------------------------------------------------------------------------------------------------------- texts


@cache
def _wnid_positions() -> dict[str, int]:
    return {wnid: index for index, wnid in enumerate(imagenet_wnids())}


def _size(part: Path | int | None) -> int | None:
    if not isinstance(part, Path):
        return part
    return part.stat().st_size if part.is_file() else -1


def _contents(root: Path) -> str:
    """What lies in a folder, briefly: `2 folders (images, notes), 3 files (a.txt, ...)`."""
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
    """A name for tables: the last part of the path that says something, and never where on the machine it is."""
    path = root.resolve()
    parts = [path.stem if path.suffix == ".mat" else path.name, *(parent.name for parent in path.parents)]
    return next((part for part in parts if part.lower() not in _PLAIN_NAMES), "data")


LAYOUTS: dict[str, Layout] = {
    "voc": Layout(
        "JPEGImages/, SegmentationClass/ and ImageSets/Segmentation/, as in VOC2012 (classes of your own: labels.txt)",
        _voc_root, _voc_items, class_indices, _voc_classes,
    ),
    "pets": Layout(
        "images/ and annotations/trimaps/, as Oxford-IIIT Pet",
        _two_folders("images", "annotations/trimaps"), _pairs("images", "annotations/trimaps"), _trimap,
    ),
    "masks": Layout(
        "images/ and masks/ with files of the same names (0 is background)",
        _two_folders("images", "masks"), _pairs("images", "masks"), _anything_but_zero,
    ),
    "imagenet-segmentation": Layout(
        "the HDF5 file gtsegs_ijcv.mat", _matlab_file, _matlab_items, _anything_but_zero
    ),
    "imagenet": Layout(
        "a folder for each class, named by wnid (n01440764/...) or as the model's labels",
        _folder_per_class, _class_items, class_indices,
    ),
    "folder": Layout("pictures right in the folder, without labels", _just_pictures, _picture_items, class_indices),
}  # fmt: skip
"""Every layout by name, in the order in which they are tried."""
