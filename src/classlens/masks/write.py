"""Writes pseudo-labels: the layout of VOC, which `classlens train segmentation` reads, and COCO's labels.json."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from classlens.data.divide import EVERY
from classlens.files import write_bytes, write_json, write_text
from classlens.interop.coco import outline

_QUALITY = 95


def write_picture(out: Path, name: str, picture: Image.Image, labels: NDArray[np.uint8]) -> None:
    """JPEGImages/NAME.jpg, upright, and SegmentationClass/NAME.png with a palette."""
    buffer = io.BytesIO()
    picture.convert("RGB").save(buffer, "JPEG", quality=_QUALITY)
    write_bytes(out / "JPEGImages" / f"{name}.jpg", buffer.getvalue())
    mask, buffer = Image.fromarray(labels), io.BytesIO()
    mask.putpalette(palette())  # of 8 bits a pixel
    mask.save(buffer, "PNG")
    write_bytes(out / "SegmentationClass" / f"{name}.png", buffer.getvalue())


def file_names(names: Sequence[str]) -> list[str]:
    """Names of files for pictures: without folder and suffix, unless two would be the same.

    >>> file_names(["a/cat.jpg", "dog.jpg", "dog.png"])
    ['a-cat', 'dog-jpg', 'dog-png']
    """
    whole = [name.replace("/", "-") for name in names]
    stems = [Path(name).stem for name in whole]
    return [stem if stems.count(stem) == 1 else name.replace(".", "-") for stem, name in zip(stems, whole, strict=True)]


def write_lists(out: Path, names: Sequence[str], classes: Sequence[str]) -> None:
    """labels.txt and the lists of pictures: every fifth one is in the split `val`, for the training to stop by."""
    write_text(out / "labels.txt", "".join(f"{name}\n" for name in classes))
    held_out = {name for i, name in enumerate(names) if i % EVERY == EVERY - 1}  # `names` are in a shuffled order
    for split, chosen in (("train", set(names) - held_out), ("val", held_out)):
        lines = "".join(f"{name}\n" for name in names if name in chosen)
        write_text(out / "ImageSets" / "Segmentation" / f"{split}.txt", lines)


def write_coco(out: Path, classes: Sequence[str], masks: Sequence[tuple[str, NDArray[np.uint8]]]) -> Path:
    """labels.json: one annotation for each class in a picture, as run lengths."""
    images, annotations = list[dict[str, Any]](), list[dict[str, Any]]()
    for number, (name, labels) in enumerate(masks, 1):
        height, width = labels.shape
        images.append({"id": number, "file_name": f"JPEGImages/{name}.jpg", "width": width, "height": height})
        for category in np.unique(labels[labels > 0]).tolist():
            about = {"id": len(annotations) + 1, "image_id": number, "category_id": category}
            annotations.append(about | outline(labels == category))
    categories = [{"id": i, "name": name, "supercategory": ""} for i, name in enumerate(classes, 1)]
    about = {"info": {"description": "pseudo-labels from maps by classlens"}, "licenses": []}
    return write_json(out / "labels.json", about | {"categories": categories, "images": images,
                                                   "annotations": annotations}, indent=None)  # fmt: skip


def palette() -> list[int]:
    """VOC's colours: the bits of an index, three at a time, from the highest bit of each channel downwards."""
    found = []
    for index in range(256):
        found += [sum(((index >> (3 * bit + channel)) & 1) << (7 - bit) for bit in range(3)) for channel in range(3)]
    return found
