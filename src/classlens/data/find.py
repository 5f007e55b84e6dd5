"""How each kind of data set is recognised on disk, and which images it holds.

    >>> [item.name for item in voc_items(Path("VOCdevkit/VOC2012"), "val")][:2]
    ['2007_000033', '2007_000042']

Each layout has one function that finds the root of a data set and one that lists its images. No image is read yet.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from classlens.data import matlab
from classlens.data.labels import check_class_names, is_wnid
from classlens.data.masks import IGNORE
from classlens.errors import DataError

VOC_CLASSES = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog",
    "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip

SPLITS = ("train", "val")

_SUFFIXES = {
    ".jpg",
    ".jpeg",
    ".png",
    ".bmp",
    ".gif",
    ".webp",
    ".tif",
    ".tiff",
    ".ppm",
    ".pgm",
    ".avif",
    ".heic",
    ".heif",
}


@dataclass(frozen=True)
class Item:
    """One image of a data set. Its files may be missing or broken; this is noticed when they are read."""

    name: str  # stable, and unique in the data set
    image: Path | int  # a file, or a position in an HDF5 file
    mask: Path | int | None = None
    label: str | None = None  # a wnid, or the name of a class
    classes: frozenset[str] = frozenset()  # all classes in the image, if the layout lists them
    split: str | None = None  # "train", "val" or "" (in neither), if the data set has splits


def pictures_in(folder: Path, deep: bool = False) -> list[Path]:
    """The image files directly in a folder, or anywhere below it."""
    found = folder.rglob("*") if deep else folder.iterdir()
    return [path for path in found if path.suffix.lower() in _SUFFIXES and not _is_hidden(path.relative_to(folder))]


def _is_hidden(path: Path) -> bool:
    """Whether a name starts with a dot: metadata of the operating system, such as ._cat.jpg or .Trash/cat.jpg."""
    return any(part.startswith(".") for part in path.parts)


def folder_per_class(root: Path) -> Path | None:
    """A folder whose subfolders are classes; its subfolder `val`, if there is one."""
    for start in (root, root / "val"):
        if start.is_dir() and any(is_wnid(child.name) for child in start.iterdir() if child.is_dir()):
            return start
    children = [child for child in root.iterdir() if child.is_dir()] if root.is_dir() else []
    # Classes by name: only folders, and images directly inside the first of them (else they may be train and val).
    if children and not pictures_in(root) and pictures_in(min(children)):
        return root
    return None


def class_items(root: Path, _split: str | None) -> Iterable[Item]:
    """The images anywhere below the class folders, labelled by their class folder."""
    for folder in root.iterdir():
        if folder.is_dir():
            for file in pictures_in(folder, deep=True):
                yield Item(file.relative_to(root).as_posix(), file, label=folder.name)


def just_pictures(root: Path) -> Path | None:
    """A folder that directly contains images."""
    return root if root.is_dir() and pictures_in(root) else None


def picture_items(root: Path, _split: str | None) -> Iterable[Item]:
    """The images of a folder, without labels."""
    return (Item(file.name, file) for file in pictures_in(root))


def voc_root(root: Path) -> Path | None:
    """The folder with JPEGImages and SegmentationClass: this one, or the one where the archive puts it."""
    for start in (root, root / "VOC2012", root / "VOCdevkit" / "VOC2012"):
        if (start / "JPEGImages").is_dir() and (start / "SegmentationClass").is_dir():
            return start
    return None


def voc_items(root: Path, split: str | None) -> Iterable[Item]:
    """The images of a list in ImageSets/Segmentation; None means train and val."""
    lists = root / "ImageSets" / "Segmentation"
    for part in SPLITS if split is None else (split,):
        file = lists / f"{part}.txt"
        if not file.is_file():
            there = ", ".join(sorted(path.stem for path in lists.glob("*.txt"))) or "none"
            raise DataError(f"{root} has no split {part!r} (ImageSets/Segmentation/{part}.txt); available: {there}")
        for name in _text(file).split():
            image, mask = root / "JPEGImages" / f"{name}.jpg", root / "SegmentationClass" / f"{name}.png"
            yield Item(name, image, mask, split=part)


def voc_classes(root: Path) -> tuple[str, ...]:
    """The 20 classes of VOC, or those in `labels.txt`: one line for each mask value, from 1."""
    file = root / "labels.txt"
    if not file.is_file():
        return VOC_CLASSES
    names = tuple(line.strip() for line in _text(file).splitlines() if line.strip())
    if not 0 < len(names) < IGNORE:
        raise DataError(f"{file} must name 1 to {IGNORE - 1} classes, one per line; it has {len(names)}")
    check_class_names(names)
    return names


def pairs(images: str, masks: str) -> Callable[[Path, str | None], Iterable[Item]]:
    """Images and masks of the same name in two folders; a missing counterpart is noticed when it is read."""

    def items(root: Path, _split: str | None) -> Iterable[Item]:
        pictures, labelled = _by_stem(root / images), _by_stem(root / masks)
        for stem in pictures.keys() | labelled.keys():
            name = pictures[stem].relative_to(root / images).as_posix() if stem in pictures else stem
            yield Item(
                name,
                pictures.get(stem, root / images / f"{stem}.jpg"),
                labelled.get(stem, root / masks / f"{stem}.png"),
            )

    return items


def two_folders(images: str, masks: str) -> Callable[[Path], Path | None]:
    """A folder that has both subfolders."""
    return lambda root: root if (root / images).is_dir() and (root / masks).is_dir() else None


def _text(file: Path) -> str:
    """The content of a text file, with or without a byte order mark."""
    try:
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 text: save it as UTF-8 ({error})") from error


def _by_stem(folder: Path) -> dict[str, Path]:
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in pictures_in(folder, deep=True)}


def matlab_file(root: Path) -> Path | None:
    """The HDF5 file, or the folder that contains it."""
    file = root / "gtsegs_ijcv.mat" if root.is_dir() else root
    return file if file.is_file() and file.suffix == ".mat" else None


def matlab_items(root: Path, _split: str | None) -> Iterable[Item]:
    """The images inside the HDF5 file, by their positions."""
    for index, name in enumerate(matlab.names_in(root)):
        label = name.partition("_")[0]
        yield Item(f"{index:05d}-{name}", index, index, label if is_wnid(label) else None)


def csv_file(root: Path) -> Path | None:
    """A table of labels, or the folder that has labels.csv."""
    file = root / "labels.csv" if root.is_dir() else root
    return file if file.is_file() else None


def csv_items(file: Path, _split: str | None) -> Iterable[Item]:
    """One row for each image: its labels, separated by `;`, and its split, if any row has one."""
    reader = csv.DictReader(io.StringIO(_text(file), newline=""))
    columns = reader.fieldnames or []
    rows = list(reader)
    missing = {"image", "labels"} - set(columns)
    if missing:
        raise DataError(f"{file} lacks the column {' and '.join(sorted(missing))}; it has {', '.join(columns)}")
    splits: dict[str, str] = {}
    for row in rows:
        if row["image"] in splits:
            raise DataError(f"{file} names {row['image']} twice: give each image one row with all its labels")
        splits[row["image"]] = (row.get("split") or "").strip()
    wrong = sorted(set(splits.values()) - {*SPLITS, ""})
    if wrong:
        raise DataError(f"{file}: split must be train or val, not {', '.join(wrong)}")
    for row in rows:
        split = splits[row["image"]] if any(splits.values()) else None
        yield _labelled(row["image"], file.parent / row["image"], (row["labels"] or "").split(";"), split)


def class_folders(root: Path) -> Path | None:
    """A folder with images in subfolders named by their classes."""
    return root if root.is_dir() and any(True for _ in class_folder_items(root, None)) else None


def class_folder_items(root: Path, _split: str | None) -> Iterable[Item]:
    """A folder for each class, or for several as `cat+dog`; inside train/ and val/, or without splits."""
    own = all((root / split).is_dir() for split in SPLITS)
    for part in SPLITS if own else ("",):
        for folder in sorted(path for path in (root / part).iterdir() if path.is_dir()):
            for file in sorted(pictures_in(folder)):
                name = file.relative_to(root).as_posix()
                yield _labelled(name, file, folder.name.split("+"), part if own else None)


def _labelled(name: str, file: Path, labels: Iterable[str], split: str | None) -> Item:
    classes = frozenset(label.strip() for label in labels if label.strip())
    return Item(name, file, None, next(iter(classes)) if len(classes) == 1 else None, classes, split)
