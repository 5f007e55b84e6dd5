"""Scenes with two animals: cut out of Oxford-IIIT Pet with their masks and pasted into a third image.

    >>> compose_scenes("data/oxford-pets", "data/two-pets", train=600, val=150)
    Composed(train=600, val=150, classes=37, ...)

The breeds differ, so the map of a class can be scored against the mask of that class. The folder has the VOC layout:
JPEGImages, SegmentationClass (breeds), SegmentationObject (1 behind, 2 in front), ImageSets/Segmentation, and
labels.txt. Animals of validation scenes appear in no training scene. The same seed gives the same files.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from classlens.data.divide import shuffled
from classlens.data.labels import check_class_names
from classlens.data.layouts import Dataset, Item, open_dataset
from classlens.data.masks import IGNORE, Mask
from classlens.errors import DataError, ImageError
from classlens.files import creating, write_text
from classlens.progress import Progress, silent

Pixels = NDArray[np.float32]  # (H,W,3) in 0..255

_HELD_OUT = 0.3  # of the images of each breed
_LARGE, _SMALLER = (
    (0.6, 0.9),
    (0.45, 0.75),
)  # longer edges: of the larger animal relative to the scene, of the other relative to the larger one
_LEAST_VISIBLE = 0.5  # of the animal behind
_TRIES = 30
_TOO_SMALL = 0.02  # a cut-out that covers a smaller share of its image is skipped
_QUALITY = 92


@dataclass(frozen=True)
class Composed:
    """A summary of the scenes that were written."""

    train: int
    val: int
    classes: int
    remark: str  # which images were skipped


@dataclass(frozen=True)
class Animal:
    """A cut-out: its pixels, and its mask of 1 (animal), IGNORE (the border) and 0."""

    name: str
    breed: str
    pixels: Pixels
    mask: Mask


@dataclass(frozen=True)
class Placed:
    """The position of an animal in a scene; a row of scenes.csv."""

    scene: str
    place: str  # behind or front
    breed: str
    source: str
    left: int
    top: int
    width: int
    height: int
    visible: float  # share of its pixels that are not covered


@dataclass(frozen=True)
class Scene:
    """An image with its masks."""

    pixels: NDArray[np.uint8]
    classes: Mask
    objects: Mask
    placed: tuple[Placed, Placed]


def compose_scenes(
    pets: str | os.PathLike[str],
    out: str | os.PathLike[str],
    train: int = 600,
    val: int = 150,
    side: int = 320,
    seed: int = 0,
    progress: Progress = silent,
) -> Composed:
    """Write a new folder of scenes, atomically."""
    target = Path(out)
    if target.exists():
        raise DataError(f"{target} exists: choose a new folder for the scenes, or remove this one first")
    dataset = open_dataset(f"pets:{os.fspath(pets)}")
    animals, skipped = _read(dataset, progress)
    labels = sorted({animal.breed for animal in animals})
    check_class_names(labels)
    parts = _split(animals, labels, seed)
    with creating(target) as draft:
        rows: list[Placed] = []
        for split, count in (("train", train), ("val", val)):
            names = [f"{split}-{number:05d}" for number in range(count)]
            for number, name in enumerate(names):
                scene = compose(parts[split], labels, side, _random(seed, split, number), name, number)
                _write_scene(draft, name, scene)
                rows += scene.placed
                progress(f"{split} scenes", number + 1, count)
            write_text(draft / "ImageSets" / "Segmentation" / f"{split}.txt", "".join(f"{name}\n" for name in names))
        write_text(draft / "labels.txt", "".join(f"{label}\n" for label in labels))
        write_text(draft / "scenes.csv", _table(rows))
        write_text(draft / "README.md", _about(seed))
    return Composed(train, val, len(labels), _remark(skipped))


def compose(
    animals: Sequence[Animal], labels: Sequence[str], side: int, random: np.random.Generator, name: str, turn: int
) -> Scene:
    """Compose one scene. Breeds take turns, so that as many scenes as breeds show them all."""
    first = labels[turn % len(labels)]
    second = str(random.choice([label for label in labels if label != first]))
    chosen = [_draw(animals, {breed}, random) for breed in (first, second)]
    backdrop = _draw(animals, set(labels) - {first, second}, random)
    large = random.uniform(*_LARGE)
    scales = [large, large * random.uniform(*_SMALLER)]
    sized = [_resized(animal, scale * side, random) for animal, scale in zip(chosen, scales, strict=True)]
    if random.random() < 0.5:  # which animal is in front
        sized.reverse()
    corners, visible = _places(sized, side, random)
    if visible < _LEAST_VISIBLE:  # a small one behind a large one
        sized.reverse()
        corners, _ = _places(sized, side, random)
    canvas = _backdrop(backdrop, side, random)
    classes, objects = np.zeros((side, side), np.uint8), np.zeros((side, side), np.uint8)
    for number, (animal, corner) in enumerate(zip(sized, corners, strict=True), 1):
        _paste(canvas, classes, objects, animal, corner, labels.index(animal.breed) + 1, number)
    seen = [float((objects == number).sum() / (animal.mask == 1).sum()) for number, animal in enumerate(sized, 1)]
    behind, front = (_placed(name, place, sized[k], corners[k], seen[k]) for k, place in enumerate(("behind", "front")))
    return Scene(canvas.round().clip(0, 255).astype(np.uint8), classes, objects, (behind, front))


# ------------------------------------------------------------------------------------------------------- animals


def _read(dataset: Dataset, progress: Progress) -> tuple[list[Animal], dict[str, str]]:
    """All cut-outs, and why images were skipped."""
    animals, skipped = [], {}
    for done, item in enumerate(dataset.items, 1):
        try:
            animals.append(_animal(dataset, item))
        except ImageError as error:
            skipped[item.name] = str(error)
        progress("animals", done, len(dataset.items))
    return animals, skipped


def _animal(dataset: Dataset, item: Item) -> Animal:
    mask, pixels = dataset.mask(item), np.asarray(dataset.picture(item), np.float32)
    if mask.shape != pixels.shape[:2]:
        raise ImageError("its mask has another size")
    if (mask == 1).mean() < _TOO_SMALL:
        raise ImageError("its mask shows no animal, or a tiny one")
    breed = Path(item.name).stem.rpartition("_")[0].replace("_", " ")
    if not breed:
        raise ImageError("its name is not BREED_NUMBER, as in Oxford-IIIT Pet")
    return Animal(item.name, breed, pixels, mask)


def _split(animals: Sequence[Animal], labels: Sequence[str], seed: int) -> dict[str, list[Animal]]:
    """Hold out some animals of each breed for validation, in an order that depends only on the seed."""
    if len(labels) < 3:
        raise DataError(f"scenes need images of three breeds, there are {len(labels)} ({', '.join(labels)})")
    parts: dict[str, list[Animal]] = {"train": [], "val": []}
    for label in labels:
        own = [animal for animal in animals if animal.breed == label]
        if len(own) < 2:
            raise DataError(f"{label!r} has one usable image; a breed needs one for training and one for validation")
        own = shuffled(own, seed)
        held_out = max(1, round(_HELD_OUT * len(own)))
        parts["val"] += own[:held_out]
        parts["train"] += own[held_out:]
    return parts


def _draw(animals: Sequence[Animal], breeds: set[str], random: np.random.Generator) -> Animal:
    candidates = [animal for animal in animals if animal.breed in breeds]
    return candidates[int(random.integers(len(candidates)))]


def _resized(animal: Animal, length: float, random: np.random.Generator) -> Animal:
    """Crop to the animal's box and resize its longer edge to `length`; mirrored half of the time."""
    rows, columns = (np.flatnonzero((animal.mask > 0).any(axis)) for axis in (1, 0))
    box = np.s_[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    pixels, mask = animal.pixels[box], animal.mask[box]
    factor = length / max(mask.shape)
    size = max(1, round(factor * mask.shape[1])), max(1, round(factor * mask.shape[0]))
    picture = Image.fromarray(pixels.astype(np.uint8)).resize(size, Image.Resampling.BICUBIC)
    small = Image.fromarray(mask).resize(size, Image.Resampling.NEAREST)
    step = -1 if random.random() < 0.5 else 1
    return Animal(animal.name, animal.breed, np.asarray(picture, np.float32)[:, ::step], np.asarray(small)[:, ::step])


# --------------------------------------------------------------------------------------------------------- scenes


def _places(animals: Sequence[Animal], side: int, random: np.random.Generator) -> tuple[list[tuple[int, int]], float]:
    """(left, top) of both, and the visible share of the one behind: the first draw with enough, or the best."""
    behind, front = animals
    body = behind.mask == 1
    best: list[tuple[int, int]] = []
    most = -1.0
    for _ in range(_TRIES):
        corners = [
            (int(random.integers(side - a.mask.shape[1] + 1)), int(random.integers(side - a.mask.shape[0] + 1)))
            for a in animals
        ]
        covered = np.zeros((side, side), bool)
        covered[_window(front, corners[1])] = front.mask > 0
        visible = 1 - float((covered[_window(behind, corners[0])] & body).sum() / body.sum())
        if visible > most:
            best, most = corners, visible
        if visible >= _LEAST_VISIBLE:
            break
    return best, most


def _window(animal: Animal, corner: tuple[int, int]) -> tuple[slice, slice]:
    left, top = corner
    height, width = animal.mask.shape
    return slice(top, top + height), slice(left, left + width)


def _paste(
    canvas: Pixels, classes: Mask, objects: Mask, animal: Animal, corner: tuple[int, int], label: int, number: int
) -> None:
    """Paste onto the canvas and the masks, in place. The unlabelled border is blended half and half."""
    window = _window(animal, corner)
    alpha = np.where(animal.mask == 1, 1.0, np.where(animal.mask == IGNORE, 0.5, 0.0)).astype(np.float32)[..., None]
    canvas[window] = (1 - alpha) * canvas[window] + alpha * animal.pixels
    for mask, value in ((classes, label), (objects, number)):
        part = mask[window]
        part[animal.mask == 1] = value
        part[animal.mask == IGNORE] = IGNORE


def _backdrop(animal: Animal, side: int, random: np.random.Generator) -> Pixels:
    """An image without its animal, resized to the scene and mirrored half of the time."""
    pixels = filled(animal.pixels, animal.mask != 0)
    image = Image.fromarray(pixels.round().clip(0, 255).astype(np.uint8)).resize((side, side), Image.Resampling.BICUBIC)
    return np.array(image, np.float32)[:, :: -1 if random.random() < 0.5 else 1].copy()


def filled(pixels: Pixels, hole: NDArray[np.bool_]) -> Pixels:
    """Fill a hole in an image smoothly from its surroundings: means of known pixels, from coarse to fine.

    >>> filled(np.full((4, 4, 3), 7, np.float32), np.eye(4, dtype=bool)).min()
    7.0
    """
    known = (~hole).astype(np.float32)[..., None]
    if not hole.any() or not known.any():
        return pixels
    height, width = hole.shape
    if height * width <= 4:
        mean = (pixels * known).sum((0, 1)) / known.sum()
        return np.where(hole[..., None], mean, pixels).astype(np.float32)
    grown = np.pad(np.concatenate([pixels * known, known], 2), ((0, height % 2), (0, width % 2), (0, 0)))
    halves = grown.reshape(grown.shape[0] // 2, 2, grown.shape[1] // 2, 2, 4).sum((1, 3))
    weight = halves[..., 3:]
    coarse = filled(halves[..., :3] / np.maximum(weight, 1), weight[..., 0] == 0)
    finer = Image.fromarray(coarse.round().clip(0, 255).astype(np.uint8)).resize(
        (2 * coarse.shape[1], 2 * coarse.shape[0]), Image.Resampling.BILINEAR
    )
    return np.where(hole[..., None], np.asarray(finer, np.float32)[:height, :width], pixels)


def _placed(scene: str, place: str, animal: Animal, corner: tuple[int, int], visible: float) -> Placed:
    height, width = animal.mask.shape
    return Placed(scene, place, animal.breed, animal.name, *corner, width, height, round(visible, 4))


def _random(seed: int, split: str, number: int) -> np.random.Generator:
    return np.random.default_rng([seed, ("train", "val").index(split), number])


# ---------------------------------------------------------------------------------------------------------- files


def _write_scene(root: Path, name: str, scene: Scene) -> None:
    for folder in ("JPEGImages", "SegmentationClass", "SegmentationObject"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    Image.fromarray(scene.pixels).save(root / "JPEGImages" / f"{name}.jpg", quality=_QUALITY)
    for folder, mask in (("SegmentationClass", scene.classes), ("SegmentationObject", scene.objects)):
        picture = Image.fromarray(mask).convert("P")
        picture.putpalette(palette().flatten().tolist())
        picture.save(root / folder / f"{name}.png")


def palette() -> NDArray[np.uint8]:
    """(256,3) distinct colours for class indices, black for 0: VOC's palette, an index's bits spread over R, G, B."""
    indices = np.arange(256)
    colours = np.zeros((256, 3), np.uint8)
    for bit in range(8):
        for channel in range(3):
            colours[:, channel] |= (((indices >> (3 * bit + channel)) & 1) << (7 - bit)).astype(np.uint8)
    return colours


def _table(rows: Iterable[Placed]) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(Placed.__dataclass_fields__), lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return buffer.getvalue()


def _about(seed: int) -> str:
    return (
        "# Scenes with two animals\n\n"
        f"Made by `classlens data compose --seed {seed}` from photographs and trimaps of Oxford-IIIT Pet "
        "(CC BY-SA 4.0); these scenes are under the same licence.\n\n"
        "SegmentationClass holds breeds (the lines of labels.txt, from 1), SegmentationObject 1 for the animal behind "
        "and 2 for the one in front; 0 is background and 255 marks the animals' borders, which are ignored. scenes.csv "
        "lists the position of each animal.\n"
    )


def _remark(skipped: dict[str, str]) -> str:
    if not skipped:
        return "no images were skipped"
    name, why = next(iter(skipped.items()))
    return f"{len(skipped)} images were skipped, such as {name} ({why})"
