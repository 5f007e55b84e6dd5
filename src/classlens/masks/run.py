"""Makes pseudo-labels: maps of all pictures, a setting chosen on half A, labels, files."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from classlens import files
from classlens.data.divide import half_of
from classlens.data.layouts import Item, open_dataset
from classlens.errors import DataError, ImageError
from classlens.evaluate.manifest import versions
from classlens.evaluate.stats import Estimate
from classlens.masks import write
from classlens.masks.labels import REFINEMENTS, THRESHOLDS, Setting, labels
from classlens.masks.measure import MIOU, Measured, measure
from classlens.masks.seeds import seeds
from classlens.masks.subject import Asked, asked
from classlens.methods import check_options, resolve
from classlens.models import LoadedModel
from classlens.models.choice import Choice, named
from classlens.models.network import Network, weights_hash
from classlens.progress import Progress, reporting, silent, ticker

LEAST = 4  # pictures in each half, to choose and to measure


@dataclass(frozen=True)
class Made:
    """The folder with the pseudo-labels, how they were made, and what was measured."""

    folder: Path
    classes: tuple[str, ...]
    setting: Setting
    pictures: tuple[str, ...]
    measured: Mapping[str, Measured]  # by method; empty without drawn masks
    differences: Mapping[str, Estimate]  # of mIoU on half B: the method less another, each at its best
    skipped: Mapping[str, str]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Recipe:
    """How seeds are made."""

    method: str
    scales: tuple[float, ...] = (1.0,)
    flip: bool = True
    seed: int = 0


def make_masks(
    model: LoadedModel,
    data: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    classes: Sequence[str] | None = None,
    shown_by: str | None = None,
    method: str | Choice = "agf",
    against: str | None = None,
    scales: Sequence[float] = (1.0,),
    flip: bool = True,
    threshold: float | None = None,
    refine: str | None = None,
    split: str = "val",
    limit: int | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> Made:
    """Write masks of classes for pictures, made from maps, as VOC and COCO have them.

    >>> make_masks(load("runs/voc"), "photos/", "pseudo", classes=["cat", "dog"]).folder

    `classes` are the classes of the masks, by default those of drawn masks; "object" is whatever the network finds
    likeliest. `shown_by` says who knows which classes a picture shows: "data" (labels) or "model". If the data have
    drawn masks, threshold and refinement are chosen on half A and measured on half B, also for the method `against`.
    """
    network, name = Network(model, "whole"), named(method, model)
    methods = (name, *([against] if against else []))
    for one in methods:
        check_options(*resolve(one))
    given = None if threshold is None and refine is None else Setting.of(resolve(name)[0].signed, threshold, refine)
    dataset = open_dataset(data, split)
    subject = asked(network, dataset, classes, shown_by)
    work = _Work(subject, Path(out), Recipe(name, tuple(scales), flip, seed), weights_hash(network.module), {}, set())
    return _made(work, dataset.select(limit, seed), methods, given, progress)


def _made(
    work: _Work, items: Sequence[Item], methods: Sequence[str], given: Setting | None, progress: Progress
) -> Made:  # fmt: skip
    """Maps of all pictures, the setting, labels and files."""
    mine, seed = methods[0], work.recipe.seed
    maps = {name: work.all_seeds(name, items, progress) for name in methods}
    good = [item for item in items if item.name not in work.skipped]
    if not good:
        name, why = next(iter(work.skipped.items()))
        raise DataError(f"none of {len(items)} pictures could be used; the first, {name}: {why}")
    if len(work.empty) == len(good):
        raise DataError(
            f"none of {len(good)} pictures shows a class of the masks, says the {work.subject.shown_by}: check "
            "--classes, or choose who says it with --labels"
        )
    measured, notes = _measured(work, good, maps, given, seed, progress)
    setting = given or (measured[mine].best if measured else Setting.of(resolve(mine)[0].signed))
    _write(work, good, maps[mine], setting, progress)
    made = Made(
        work.out, work.subject.names, setting, tuple(item.name for item in good), measured,
        {other: _difference(measured[mine], found, seed) for other, found in measured.items() if other != mine},
        work.skipped, (*notes, *_about_empty(work.empty, len(good))),
    )  # fmt: skip
    files.write_json(work.out / "masks.json", _document(made, work))
    return made


def _about_empty(empty: Collection[str], pictures: int) -> list[str]:
    return [f"{len(empty)} of {pictures} pictures show none of the classes: their masks are empty."] if empty else []


@dataclass(frozen=True)
class _Work:
    """What is the same for all pictures, and where their seeds are kept."""

    subject: Asked
    out: Path
    recipe: Recipe
    weights: str
    skipped: dict[str, str]
    empty: set[str]  # pictures that show none of the classes

    def all_seeds(self, method: str, items: Sequence[Item], progress: Progress) -> dict[str, Path]:
        """The files with the seeds of each picture; those of an earlier run are used."""
        found = {}
        progress(f"maps by {method}", 0, len(items))
        for number, item in enumerate(items, 1):
            try:
                found[item.name] = self._seeds(method, item)
            except ImageError as error:
                self.skipped[item.name] = self.subject.dataset.why(error)
            progress(f"maps by {method}", number, len(items))
        return found

    def _seeds(self, method: str, item: Item) -> Path:
        network, picture = self.subject.network, self.subject.dataset.picture(item)
        image = network.preprocess(picture)
        shown, outputs = self.subject.present(item, network.forward(image[None])[0])
        if self.subject.measurable and item.mask is not None:
            self._truth(item, picture)  # now, so that an unreadable mask is skipped here
        if not outputs:
            self.empty.add(item.name)
        about = [self.weights, network.preprocess.to_json(), method, outputs, self.recipe.scales, self.recipe.flip,
                 self.recipe.seed, hashlib.sha256(picture.tobytes()).hexdigest()]  # fmt: skip
        file = self.out / "seeds" / f"{files.text_hash(json.dumps(about), 24)}.npz"
        if not file.exists():
            found = torch.zeros(0, *image.shape[1:])
            if outputs:
                recipe = self.recipe
                found = seeds(network, image, outputs, method, recipe.scales, recipe.flip, recipe.seed)
            buffer = io.BytesIO()
            np.savez_compressed(buffer, scores=found.numpy().astype(np.float16), shown=np.array(shown, np.uint8))
            files.write_bytes(file, buffer.getvalue())
        return file

    def _truth(self, item: Item, picture: Image.Image) -> NDArray[np.uint8]:
        truth = self.subject.truth(item)
        if truth.shape != (picture.height, picture.width):
            raise ImageError(f"the mask of {item.name} is of another size than the picture")
        return truth

    def labelled(self, item: Item, file: Path, setting: Setting) -> NDArray[np.uint8]:
        """The labels of a picture, by the classes of the masks."""
        with np.load(file) as kept:
            scores, shown = kept["scores"].astype(np.float32), kept["shown"]
        found = labels(scores, self.subject.dataset.picture(item), setting)
        return np.array([0, *shown], np.uint8)[found]


def _measured(
    work: _Work, items: Sequence[Item], maps: Mapping[str, Mapping[str, Path]], given: Setting | None, seed: int,
    progress: Progress,
) -> tuple[dict[str, Measured], list[str]]:  # fmt: skip
    """mIoU by method, if there are drawn masks of the classes; otherwise a note."""
    if not work.subject.measurable:
        return {}, ["There are no drawn masks of these classes, so nothing was measured; the threshold is not chosen."]
    by_name = {item.name: item for item in items if item.mask is not None}
    a, b = ([name for name in by_name if half_of(name) == half] for half in "AB")
    if min(len(a), len(b)) < LEAST:
        return {}, [f"There are fewer than {LEAST} pictures with drawn masks in a half, so nothing was measured."]
    truth = {name: work.subject.truth(item) for name, item in by_name.items()}
    steps = 1 if given is not None else len(THRESHOLDS) + 3
    found = {}
    for method, kept in maps.items():

        def labelled(name: str, setting: Setting, kept: Mapping[str, Path] = kept) -> NDArray[np.uint8]:
            return work.labelled(by_name[name], kept[name], setting)

        with reporting(progress):
            tick = ticker(steps, f"settings for {method}")
        found[method] = measure((a, b), truth, labelled, len(work.subject.names), seed, given, tick)
    return found, []


def _difference(mine: Measured, other: Measured, seed: int) -> Estimate:
    """Of mIoU on half B: each with the setting that half A chose for it."""
    return MIOU.difference(mine.rows_b[mine.best.refine], other.rows_b[other.best.refine], seed)


def _write(
    work: _Work, items: Sequence[Item], kept: Mapping[str, Path], setting: Setting, progress: Progress
) -> None:  # fmt: skip
    masks = []
    progress("masks", 0, len(items))
    for name, item in zip(write.file_names([item.name for item in items]), items, strict=True):
        found = work.labelled(item, kept[item.name], setting)
        write.write_picture(work.out, name, work.subject.dataset.picture(item), found)
        masks.append((name, found))
        progress("masks", len(masks), len(items))
    write.write_lists(work.out, [name for name, _ in masks], work.subject.names)
    write.write_coco(work.out, work.subject.names, masks)


def _document(made: Made, work: _Work) -> dict[str, Any]:
    def numbers(found: Estimate) -> dict[str, Any]:
        return {"value": found.value, "interval": [found.low, found.high], "n": found.n}

    return {
        "model": work.subject.network.id,
        "weights": work.weights,
        "recipe": vars(work.recipe),
        "setting": vars(made.setting),
        "classes": list(made.classes),
        "shown by": work.subject.shown_by,
        "pictures": list(made.pictures),
        "mIoU on half B": {
            method: {
                refine: vars(found.settings[refine]) | numbers(found.on_b[refine])
                for refine in REFINEMENTS if refine in found.settings
            }
            for method, found in made.measured.items()
        },
        "differences on half B": {other: numbers(found) for other, found in made.differences.items()},
        "skipped": dict(made.skipped),
        "versions": versions(),
    }  # fmt: skip
