"""Which data set serves which test, and what is still to be done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from classlens.data.layouts import LAYOUTS, Dataset, Item
from classlens.errors import DataError
from classlens.evaluate import pointing
from classlens.evaluate.records import SCHEMAS, Store, finished, where
from classlens.evaluate.settings import Config, Settings, configs
from classlens.evaluate.shards import Done, Shard, grid_shards, image_shards
from classlens.evaluate.worker import Worker


@dataclass(frozen=True)
class Part:
    """A data set with the pictures chosen from it and the tests it serves."""

    index: int
    dataset: Dataset
    items: tuple[Item, ...]
    tests: tuple[Config, ...]  # on pictures
    grids: tuple[Config, ...]  # pointing, on grids of them


@dataclass(frozen=True)
class Plan:
    """All parts of a run, and remarks for the reader of its tables."""

    parts: tuple[Part, ...]
    notes: tuple[str, ...]


def make_plan(settings: Settings, worker: Worker) -> Plan:
    """Every data set serves the tests asked for; in `all` only those it was made for."""
    parts, notes = [], []
    labels_anywhere = any(dataset.has_labels for dataset in worker.datasets)
    for index, dataset in enumerate(worker.datasets):
        tests = [t for t in settings.tests if not settings.everything or _suits(t, dataset, labels_anywhere)]
        if not tests:
            notes.append(f"{dataset.name} serves none of the tests and was not used.")
            continue
        items = dataset.select(settings.limit, settings.seed, settings.half)
        _check(tests, settings, dataset, items, worker)
        multi_label = worker.multi_label(dataset)
        notes += _remarks(tests, dataset, items, worker, multi_label)
        on_pictures = [c for test in tests if test != "pointing" for c in configs(settings, test, multi_label)]
        on_grids = configs(settings, "pointing") if "pointing" in tests else ()
        parts.append(Part(index, dataset, items, tuple(on_pictures), on_grids))
    served = {config.test for part in parts for config in (*part.tests, *part.grids)}
    notes += [f"{test} was left out: no data set given serves it." for test in settings.tests if test not in served]
    return Plan(tuple(parts), tuple(notes))


def image_work(plan: Plan, settings: Settings, worker: Worker, store: Store) -> list[Shard]:
    """Shards of pictures with what is missing."""
    done = _done(store, worker.network.id)
    return [
        shard
        for part in plan.parts
        for shard in image_shards(
            part.index,
            part.items,
            [(config, wanted(config, settings)) for config in part.tests],
            settings.methods,
            prediction(settings),
            done.get(part.dataset.name, {}),
            settings.images_at_once,
        )
    ]


def grid_work(plan: Plan, settings: Settings, worker: Worker, store: Store) -> list[Shard]:
    """Shards of grids with what is missing; the predictions of all pictures must be there."""
    if not any(part.grids for part in plan.parts):
        return []
    done = _done(store, worker.network.id)
    return [
        shard
        for part in plan.parts
        for config in part.grids
        for shard in grid_shards(
            part.index,
            planned_grids(part, config, settings, worker.network.id, store),
            {item.name: item for item in part.items},
            config,
            settings.methods,
            done.get(part.dataset.name, {}),
            settings.images_at_once,
        )
    ]


def planned_grids(part: Part, config: Config, settings: Settings, model: str, store: Store) -> list[pointing.Grid]:
    """The grids of one shape, from the pictures whose prediction is confident and, where that is known, right."""
    rows = where(store.read("prediction"), model=model, data=part.dataset.name, config=prediction(settings).hash)
    columns = [rows[name].to_pylist() for name in ("image", "label", "predicted", "confidence")]
    known = {image: found for image, *found in zip(*columns, strict=True)}
    confident = []
    for item in part.items:
        label, predicted, sure = known.get(item.name, (None, 0, 0.0))
        if sure >= config["confidence"] and label in (None, predicted):
            confident.append(pointing.Cell(item.name, predicted))
    return pointing.plan(confident, config["shape"])[: settings.max_grids]


def prediction(settings: Settings) -> Config:
    """What the rows of predictions depend on."""
    return configs(settings, "prediction")[0]


def wanted(config: Config, settings: Settings) -> int | None:
    """How many pictures a test takes at most."""
    return settings.sanity_images if config.test == "sanity" else None


def _done(store: Store, model: str) -> dict[str, Done]:
    """data -> (method, config) -> names that need no more work: they have a row, or a reason for having none."""
    found: dict[str, dict[tuple[str, str], set[str]]] = {}
    for test in SCHEMAS:
        for (owner, data, method, config), names in finished(store.read(test)).items():
            if owner == model:
                found.setdefault(data, {}).setdefault((method, config), set()).update(names)
    return dict(found)


def _suits(test: str, dataset: Dataset, labels_anywhere: bool) -> bool:
    """In `all`, masks are for segmentation, and labelled pictures, where there are any, for the rest."""
    if test == "segmentation":
        return dataset.has_masks
    return dataset.has_labels or not labels_anywhere


def _check(tests: Sequence[str], settings: Settings, dataset: Dataset, items: Sequence[Item], worker: Worker) -> None:
    if "segmentation" in tests and not dataset.has_masks:
        layouts = ", ".join(name for name, layout in LAYOUTS.items() if layout.decode)
        raise DataError(
            f"segmentation needs masks, and {dataset.name} ({dataset.layout}) has none; layouts with: {layouts}"
        )
    target = "perturbation" in tests and settings.explain == "target"
    if target and all(worker.label(item) is None for item in items):
        raise DataError(f"--explain target needs labels that the model knows, and {dataset.name} has none")


def _remarks(
    tests: Sequence[str], dataset: Dataset, items: Sequence[Item], worker: Worker, multi_label: bool
) -> list[str]:
    remarks = []
    if "perturbation" in tests and all(worker.label(item) is None for item in items):
        remarks.append(f"{dataset.name} has no labels that the model knows: there is agreement, but no accuracy.")
    if "segmentation" in tests and multi_label:
        remarks.append(f"{dataset.name} is read by classes: maps of every predicted class against the mask's classes.")
    elif "segmentation" in tests and dataset.classes is not None:
        remarks.append(
            f"{dataset.name} is read as object against background: the model's classes are not the masks', so the "
            "map of its likeliest class is compared with all objects together, whatever they are."
        )
    return remarks
