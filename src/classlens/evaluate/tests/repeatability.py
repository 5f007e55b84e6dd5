"""Repeatability: a picture that is changed a little should have nearly the same map.

The picture is shifted by a few pixels, flipped, compressed as a JPEG, or brightened, and explained again, for the same
class. The new map is moved back and compared with the first one, by correlation and by the overlap of their highest
pixels. `--other MODEL` also compares with the map of another network with the same classes, such as one that was
trained from another seed.

A method that ignores the picture repeats itself perfectly, so compare with the controls.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from classlens.core.capture import Tape
from classlens.data.layouts import Item
from classlens.errors import ClasslensError, DataError
from classlens.evaluate.metrics import Metric, floats, mean
from classlens.evaluate.panels import Panel, comparison
from classlens.evaluate.registry import (
    Config,
    Prediction,
    Subject,
    Test,
    Unit,
    Values,
    every_picture,
    option,
    register,
    variants_of_fields,
)
from classlens.evaluate.scene import Explained, Scene, maps_of, seed_of
from classlens.evaluate.stats import Floats
from classlens.evaluate.tests.perturbation import ranks
from classlens.evaluate.tests.sanity import correlation
from classlens.methods.places import enlarged
from classlens.models import load
from classlens.models.network import Network, input_size

if TYPE_CHECKING:
    import pyarrow as pa

    from classlens.evaluate.tables import Table

QUALITY = 50  # of the JPEG
BRIGHTER = 1.2
STEP = 28  # a picture is shifted by this part of its side: 8 of 224 pixels
TOP = 0.2  # of the pixels: the highest values, whose overlap is measured


def shifted(pictures: Tensor) -> Tensor:
    """Moved down and to the right; the border is repeated."""
    down, right = _steps(pictures)
    return F.pad(pictures, (right, 0, down, 0), mode="replicate")[..., : pictures.shape[-2], : pictures.shape[-1]]


def compressed(pictures: Tensor) -> Tensor:
    """As a JPEG file has them."""
    found = []
    for picture in pictures:
        pixels = (picture.permute(1, 2, 0) * 255).round().clamp(0, 255).to(torch.uint8).cpu().numpy()
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=QUALITY)
        found.append(torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1) / 255)
    return torch.stack(found).to(pictures)


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "shift": shifted,
    "flip": lambda pictures: pictures.flip(-1),
    "jpeg": compressed,
    "bright": lambda pictures: (BRIGHTER * pictures).clamp(max=1),
}
"""What is done to pictures (B,3,H,W) in [0,1]."""

NETWORK = "network"  # not a change of the picture: another network explains it
COMPARED = (*CHANGES, NETWORK)


def moved_back(change: str, first: Tensor, maps: Tensor) -> tuple[Tensor, Tensor]:
    """Maps (B,H,W) of pictures and of the changed pictures -> what both show, pixel by pixel."""
    if change == "flip":
        return first, maps.flip(-1)
    if change == "shift":
        down, right = _steps(maps)
        return first[:, : first.shape[1] - down, : first.shape[2] - right], maps[:, down:, right:]
    return first, maps


def overlap(first: Tensor, second: Tensor) -> Tensor:
    """(B,): intersection over union of the highest fifth of the pixels; ties are broken in one random order."""
    least = (1 - TOP) * first[0].numel()
    one, other = ((ranks(maps) >= least).flatten(1) for maps in (first, second))
    return (one & other).sum(1).double() / (one | other).sum(1)


def _steps(pictures: Tensor) -> tuple[int, int]:
    return pictures.shape[-2] // STEP, pictures.shape[-1] // STEP


# ---------------------------------------------------------------------------------------------------------- the test


@dataclass(frozen=True)
class Options:
    """Each image is explained several times, so fewer images are used."""

    other: str = option("", "another network with the same classes, to compare maps with", metavar="MODEL")
    repeat_images: int = option(50, "use at most N images", least=1, decides=False)


@cache
def _opened(name: str) -> Network:
    return Network(load(name))


def _variants(options: Options, subject: Subject) -> list[Values]:
    (values,) = variants_of_fields(options, subject)
    if not options.other:
        return [values]
    other, mine = _opened(options.other), subject.network
    if other.classes != mine.classes:
        raise DataError(f"--other {options.other} has {other.classes} classes, the model {mine.classes}")
    return [values | {"fingerprint": other.id}]


def _units(
    subject: Subject, items: Sequence[Item], config: Config, predictions: Mapping[str, Prediction]
) -> list[Unit]:
    return every_picture(subject, items[: config.options.repeat_images], config, predictions)


def _again(scene: Scene, config: Config) -> Iterator[tuple[str, Network, Tape]]:
    """Each change, with the network and the tape that explain it."""
    preprocess = scene.network.preprocess
    pictures = torch.stack([preprocess.restore(image) for image in scene.images])
    for name, change in CHANGES.items():
        with scene.watch("further forward"):
            tape = scene.network.record(preprocess.normalise(change(pictures)))
        yield name, scene.network, tape
    if config["other"]:
        other = _opened(config["other"])
        resized = F.interpolate(pictures, input_size(other.preprocess), mode="bilinear", antialias=True)
        with scene.watch("further forward"):
            tape = other.record(other.preprocess.normalise(resized))
        yield NETWORK, other, tape


def _score(scene: Scene, config: Config, found: Mapping[str, Explained]) -> Iterator[tuple[str, list[Values]]]:
    values: dict[str, list[Values]] = {
        method: [{"explained": k} | dict.fromkeys(_columns()) for k in maps.explained("predicted")]
        for method, maps in found.items()
    }
    targets = scene.asked.targets[:, scene.asked.columns["predicted"], None]
    for change, network, tape in _again(scene, config):
        for method, original in found.items():
            try:
                with scene.watch("further method"):
                    maps = maps_of(network, tape, targets, method, seed_of(config["seed"], method))
            except ClasslensError:  # a method that cannot serve the other network has no value
                continue
            first = original.of("predicted")
            one, other = moved_back(change, first, enlarged(maps, first.shape[1:])[:, 0])
            same, shared = correlation(one.flatten(1), other.flatten(1)), overlap(one, other)
            for row, value in enumerate(values[method]):
                value |= {f"{change}_correlation": float(same[row]), f"{change}_iou": float(shared[row])}
    yield from values.items()


def _columns() -> list[str]:
    return [f"{change}_{measure}" for measure in ("correlation", "iou") for change in COMPARED]


def _mean_of(column: str) -> Callable[[pa.Table], Floats]:
    return lambda rows: mean(floats(rows, column))


def _mean_overlap(rows: pa.Table) -> NDArray[np.float64]:
    """Of each picture, over the changes: between 0 and 1, so that a score can be compared with those of other tests."""
    return np.asarray(np.stack([floats(rows, f"{change}_iou") for change in CHANGES], 1).mean(1))


def _panels(table: Table, rows: Mapping[str, pa.Table]) -> list[Panel]:
    return [comparison(table, measure, measure) for measure in ("correlation", "IoU")]


register(
    Test(
        name="repeatability",
        question="does a picture that is changed a little have nearly the same map?",
        columns={"explained": "int32"} | dict.fromkeys(_columns(), "float64"),
        metrics=lambda config: tuple(
            Metric(f"{measure}, {change}", +1, _mean_of(f"{change}_{measure.lower()}"), scale=1)
            for measure in ("correlation", "IoU")
            for change in COMPARED
        ),
        title=lambda config: "Repeatability",
        remark=lambda config: (
            f"Correlation, and IoU of the highest {100 * TOP:.0f} % of the pixels, with the map of the same picture "
            "shifted, flipped, compressed, brightened, or of another network; 1 is the same map. A method that ignores "
            "the picture repeats itself too."
        ),
        options=Options,
        needs=frozenset({"classes"}),
        variants=_variants,
        constants={"quality": QUALITY, "brighter": BRIGHTER, "step": STEP, "top": TOP},
        units=_units,
        score_together=_score,
        panels=_panels,
        picture_score=_mean_overlap,
        picture_score_name="the overlap of the highest fifth of the map with that of the changed picture",
        chooses="stability",
        proof=("correlation, shift", "correlation, jpeg"),
        place=47,
    )
)
