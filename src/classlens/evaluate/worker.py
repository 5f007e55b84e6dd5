"""One worker: a network, its explainer and the data sets, ready to turn shards into rows; here or on a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from classlens.data.layouts import Dataset, Item, open_dataset, told_apart
from classlens.data.masks import IGNORE, Mask
from classlens.errors import ClasslensError, ImageError, ModelError
from classlens.evaluate.plan import PREDICTION, Shard
from classlens.evaluate.registry import TESTS, Config, Seen, Subject, Values
from classlens.evaluate.scene import Explained, Scene, seed_of
from classlens.evaluate.settings import Settings
from classlens.evaluate.stopwatch import Stopwatch
from classlens.evaluate.store import Row
from classlens.models import LoadedModel, Preprocess, load
from classlens.models.network import Network

DRAWN = Dataset("drawn pictures", "drawn", Path(), ())  # for tests that need no data set
_NOT_FINITE = "the map holds NaN or infinite values"


@dataclass(frozen=True)
class Loaded:
    """What could be read of a shard."""

    scene: Scene | None  # None: nothing
    broken: dict[str, str]  # unit -> why it could not


@dataclass(frozen=True)
class Result:
    """Rows that belong together, and what they cost."""

    rows: list[Row]
    seconds: dict[str, float]  # by stage
    method: str
    images: int
    done: int  # of the rows that the shard lacks


class Worker:
    """Holds what is loaded once; `run` does a shard.

    >>> worker = Worker(settings)
    >>> rows = [row for shard in shards for result in worker.run(shard) for row in result.rows]
    """

    def __init__(self, settings: Settings, loaded: LoadedModel | None = None) -> None:
        """`loaded`: a network that exists in memory only, instead of the one that the settings name."""
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self.settings = settings
        loaded = loaded or load(settings.model, settings.weights, settings.device)
        self.network = Network(loaded, settings.frame)
        datasets = told_apart([open_dataset(path, settings.split) for path in settings.data]) or [DRAWN]
        self.explainer = settings.explainer(self.network, settings.methods, settings.frame, settings.seed)
        self.subjects = tuple(Subject(self.network, dataset, self.explainer.offers) for dataset in datasets)
        self._built: dict[tuple[int, Config], Subject] = {}
        self._watch = Stopwatch()

    # ------------------------------------------------------------------------------------------------------- reading

    def load(self, shard: Shard) -> Loaded:
        """Read a shard's pictures and compose its units; may run in another thread, ahead of time."""
        subject = self._subject(shard)
        needs = frozenset().union(*(config.needs for config in shard.tests))
        compose = TESTS[shard.tests[0].test].compose if shard.tests else None

        def read(item: Item) -> Seen:
            return self._read(self.subjects[shard.data], item, needs)

        units, seen, broken = [], [], {}
        for unit in shard.units:
            try:
                found = read(unit.items[0]) if compose is None else compose(subject, unit, shard.tests[0], read)
            except ImageError as error:
                broken[unit.name] = subject.dataset.why(error)
                continue
            units.append(unit)
            seen.append(found)
        if len({found.image.shape for found in seen}) > 1:
            raise ModelError("the model takes pictures of any size, so they make no batch; give it a size in a card")
        scene = Scene(subject, shard.tests, tuple(units), tuple(seen), self._watch) if seen else None
        return Loaded(scene, broken)

    def _subject(self, shard: Shard) -> Subject:
        """The data set with the model, or with the network that the test builds from it, once."""
        subject, config = self.subjects[shard.data], next(iter(shard.tests), None)
        build = None if config is None else TESTS[config.test].network
        if config is None or build is None:
            return subject
        if (shard.data, config) not in self._built:
            self._built[shard.data, config] = replace(subject, network=build(subject, config))
        return self._built[shard.data, config]

    def _read(self, subject: Subject, item: Item, needs: frozenset[str]) -> Seen:
        label = subject.label(item)
        if label is None and "labels" in needs:
            raise ImageError(f"its label {item.label!r} is no class of the model")
        picture, preprocess = subject.dataset.picture(item), self.network.preprocess
        mask = framed_mask(subject.dataset, item, picture, preprocess) if "masks" in needs else None
        return Seen(preprocess(picture), mask, label)

    # ---------------------------------------------------------------------------------------------------------- rows

    def run(self, shard: Shard, loaded: Loaded | None = None) -> Iterator[Result]:
        """Rows of a shard, method by method, as they come."""
        if loaded is None:
            with self._watch("load"):
                loaded = self.load(shard)
        try:
            yield from self._rows(shard, loaded)
        except torch.OutOfMemoryError as error:
            raise ModelError(f"out of memory; give a smaller --batch-size than {len(shard.units)}") from error

    def _rows(self, shard: Shard, loaded: Loaded) -> Iterator[Result]:
        rows, scene, lacking = self._broken(shard, loaded.broken), loaded.scene, shard.rows
        shard = shard.without(loaded.broken)
        if scene is None or not shard.todo:
            yield self._result(rows, PREDICTION, 0, lacking)
            return
        lost = lacking - shard.rows
        if shard.prediction is not None:
            rows += self._predictions(shard, scene, shard.prediction)
            done = lost + len(shard.todo.get((PREDICTION, shard.prediction), ()))
            yield self._result(rows, PREDICTION, len(scene.rows), done)
        elif rows:
            yield self._result(rows, PREDICTION, 0, lost)
        if scene.tests and "classes" in self.explainer.offers:
            _ = scene.asked  # here: what goes wrong with that concerns the run, not a method
        kept: dict[str, tuple[Explained, dict[int, str]]] = {}
        for method in dict.fromkeys(method for method, _ in shard.todo if method != PREDICTION):
            found, failed = self._explain(scene, method)
            configs = [config for name, config in shard.todo if name == method]
            rows = self._failures(shard, scene, method, failed)
            for config in configs:
                score = TESTS[config.test].score
                if found is not None and score is not None:
                    with self._watch("scores"):
                        rows += self._kept(shard, scene, method, config, failed, score(scene, config, found))
            if found is not None and any(TESTS[config.test].score_together for config in configs):
                kept[method] = (found, failed)
            at_once = [config for config in configs if TESTS[config.test].score is not None]
            yield self._result(rows, method, len(scene.rows), sum(len(shard.todo[method, c]) for c in at_once))
        yield from self._together(shard, scene, kept)

    def _together(
        self, shard: Shard, scene: Scene, kept: Mapping[str, tuple[Explained, dict[int, str]]]
    ) -> Iterator[Result]:
        """Rows of tests that score the maps of all methods at once."""
        for config in dict.fromkeys(config for _, config in shard.todo):
            score = TESTS[config.test].score_together if config.test in TESTS else None
            found = {method: maps for method, (maps, _) in kept.items() if (method, config) in shard.todo}
            if score is None or not found:
                continue
            scored = score(scene, config, found)
            while True:
                with self._watch("scores"):
                    method, values = next(scored, ("", []))
                if not method:
                    break
                rows = self._kept(shard, scene, method, config, kept[method][1], values)
                yield self._result(rows, method, 0, len(shard.todo[method, config]))

    def _broken(self, shard: Shard, broken: Mapping[str, str]) -> list[Row]:
        """Pictures that cannot be read: one row each, for all tests and methods."""
        return [
            self._row(shard, PREDICTION, "skipped", "", name, broken[unit.name])
            for unit in shard.units
            if unit.name in broken
            for name in unit.rows
        ]

    def _predictions(self, shard: Shard, scene: Scene, config: Config) -> list[Row]:
        confidence, predicted = scene.tape.logits.detach().double().softmax(1).max(1)
        values = [
            {"label": seen.label, "predicted": int(predicted[row]), "confidence": float(confidence[row])}
            for row, seen in enumerate(scene.seen)
        ]
        return self._kept(shard, scene, PREDICTION, config, {}, values)

    def _kept(
        self, shard: Shard, scene: Scene, method: str, config: Config, failed: Mapping[int, str], values: list[Values]
    ) -> list[Row]:
        """Values of a scene as rows, for those that lack one."""
        todo = shard.todo.get((method, config), frozenset())
        return [
            self._row(shard, method, config.kind, config.hash, name) | found
            for (position, name), found in zip(scene.rows, values, strict=True)
            if name in todo and position not in failed
        ]

    def _failures(self, shard: Shard, scene: Scene, method: str, failed: Mapping[int, str]) -> list[Row]:
        return [
            self._row(shard, method, "skipped", config.hash, row, failed[position])
            for position, row in scene.rows
            if position in failed
            for (name, config), todo in shard.todo.items()
            if name == method and row in todo
        ]

    def _row(self, shard: Shard, method: str, kind: str, config: str, image: str, reason: str | None = None) -> Row:
        data = self.subjects[shard.data].dataset.name
        key = {"model": self.network.id, "method": method, "test": kind, "data": data, "image": image}
        key |= {"config": config, "content": shard.contents[image]}
        return key | ({"reason": reason} if reason is not None else {})

    def _result(self, rows: list[Row], method: str, images: int, done: int) -> Result:
        return Result(rows, self._watch.take(), method, images, done)

    # ---------------------------------------------------------------------------------------------------------- maps

    def _explain(self, scene: Scene, method: str) -> tuple[Explained | None, dict[int, str]]:
        """The maps of a method (None: all failed), and the positions for which it failed, with the reason."""
        seed = seed_of(self.settings.seed, method)
        with self._watch("method"):
            try:
                found: Explained | None = self.explainer.explain(scene, method, seed)
                failed: dict[int, str] = {}
            except Exception as error:  # whatever a method does on a network it was not made for
                if isinstance(error, (torch.OutOfMemoryError, *self.explainer.fatal)):
                    raise
                found, failed = self._one_by_one(scene, method, seed, error)
            if found is None:
                return None, failed
            finite = torch.isfinite(found.maps).flatten(1).all(1)
            failed = dict.fromkeys((~finite).nonzero()[:, 0].tolist(), _NOT_FINITE) | failed
            return replace(found, maps=torch.nan_to_num(found.maps)) if len(failed) < len(finite) else None, failed

    def _one_by_one(
        self, scene: Scene, method: str, seed: int, error: Exception
    ) -> tuple[Explained | None, dict[int, str]]:
        """One bad image must not cost its neighbours their maps."""
        if len(scene.units) == 1:
            return None, {0: _reason(error)}
        parts: dict[int, Explained] = {}
        failed: dict[int, str] = {}
        for row in range(len(scene.units)):
            try:
                parts[row] = self.explainer.explain(scene, method, seed, slice(row, row + 1))
            except Exception as single:
                failed[row] = _reason(single)
        if not parts:
            return None, failed
        first = next(iter(parts.values()))
        maps = torch.zeros(len(scene.units), *first.maps.shape[1:])
        targets = torch.zeros(len(scene.units), first.targets.shape[1], dtype=torch.int64)
        for row, part in parts.items():
            maps[row], targets[row] = part.maps[0], part.targets[0]
        return replace(first, maps=maps, targets=targets), failed


def framed_mask(dataset: Dataset, item: Item, picture: Image.Image, preprocess: Preprocess) -> Mask:
    """A picture's mask, in the part of the picture that the network sees; what was added around it is not labelled."""
    full = Image.fromarray(dataset.mask(item))
    if full.size != picture.size:
        raise ImageError(f"its mask is {full.width}x{full.height}, the picture {picture.width}x{picture.height}")
    return np.asarray(replace(preprocess, interpolation="nearest", fill=(IGNORE,)).frame(full))


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, ClasslensError) else f"{type(error).__name__}: {text}"
