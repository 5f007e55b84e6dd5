"""One worker: a network and the data sets, ready to turn shards into rows. The same on a laptop and on a cluster."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from classlens.core.capture import Tape
from classlens.data.labels import class_outputs, label_index
from classlens.data.layouts import Dataset, Item, open_dataset
from classlens.data.masks import IGNORE, Mask
from classlens.errors import ClasslensError, ImageError, ModelError
from classlens.evaluate import perturbation, pointing, sanity, segmentation
from classlens.evaluate.network import Network, Stopwatch, images_per_forward
from classlens.evaluate.pointing import Grid
from classlens.evaluate.records import Row
from classlens.evaluate.settings import Config, Settings
from classlens.evaluate.shards import PREDICTION, GridShard, ImageShard, Shard
from classlens.files import text_hash
from classlens.methods import resolve
from classlens.models import Preprocess, load

_NOT_FINITE = "the map holds NaN or infinite values"

Maps = tuple[Tensor, dict[int, str]]  # (B,K,H,W), and the rows for which a method failed, with the reason


@dataclass(frozen=True)
class Batch:
    """The pictures of a shard that could be read."""

    names: tuple[str, ...]
    images: Tensor  # (B,3,H,W) as the network takes them
    masks: tuple[Mask | None, ...]
    labels: tuple[int | None, ...]
    broken: dict[str, str]  # name -> why it could not


@dataclass(frozen=True)
class Result:
    """Rows that belong together, and what they cost."""

    rows: list[Row]
    seconds: dict[str, float]  # by stage
    method: str
    images: int
    units: int  # of the progress bar


@dataclass(frozen=True)
class Scene:
    """A batch in front of the network: the recorded forward, and the classes (B,K) that are explained."""

    shard: ImageShard
    batch: Batch
    tape: Tape
    targets: Tensor
    columns: dict[str, int]  # "predicted", "label", "other" -> column
    in_mask: tuple[dict[int, int], ...]  # for each image: class of the mask, 1.. -> column

    def tests(self, method: str, *names: str) -> list[Config]:
        """The tests for which a method still lacks rows."""
        return [config for name, config in self.shard.todo if name == method and config.test in names]


class Worker:
    """Holds what is loaded once; `run` does a shard.

    >>> worker = Worker(settings)
    >>> rows = [row for shard in shards for result in worker.run(shard) for row in result.rows]
    """

    def __init__(self, settings: Settings) -> None:
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self.settings = settings
        self.network = Network(load(settings.model, settings.weights, settings.device), settings.frame)
        self.datasets = tuple(open_dataset(path, settings.split) for path in settings.data)
        self._watch = Stopwatch()

    def label(self, item: Item) -> int | None:
        return label_index(item.label, self.network.labels, self.network.classes)

    def multi_label(self, dataset: Dataset) -> bool:
        """Whether the masks' classes are the model's own, so that it can be read as a labeller of pixels."""
        return self._outputs(dataset) is not None

    def load(self, shard: Shard) -> Batch:
        """Read a shard's pictures; may run in another thread, ahead of time."""
        dataset = self.datasets[shard.data]
        tests = shard.tests if isinstance(shard, ImageShard) else (shard.test,)
        with_mask = any(config.test == "segmentation" for config in tests)
        read: list[tuple[str, Tensor, Mask | None, int | None]] = []
        broken: dict[str, str] = {}
        for item in shard.items:
            try:
                label = self.label(item)
                if label is None and _explains_label(tests):
                    raise ImageError(f"its label {item.label!r} is no class of the model")
                read.append((item.name, *self._read(dataset, item, with_mask), label))
            except ImageError as error:
                broken[item.name] = dataset.why(error)
        if not read:
            return Batch((), torch.empty(0), (), (), broken)
        names, images, masks, labels = zip(*read, strict=True)
        if len({image.shape for image in images}) > 1:
            raise ModelError("the model takes pictures of any size, so they make no batch; give it a size in a card")
        return Batch(names, torch.stack(images), masks, labels, broken)

    def run(self, shard: Shard, batch: Batch | None = None) -> Iterator[Result]:
        """Rows of a shard, method by method, as they come."""
        if batch is None:
            with self._watch("load"):
                batch = self.load(shard)
        try:
            yield from self._images(shard, batch) if isinstance(shard, ImageShard) else self._grids(shard, batch)
        except torch.OutOfMemoryError as error:
            raise ModelError(f"out of memory; give a smaller --batch-size than {len(batch.names)}") from error

    # ------------------------------------------------------------------------------------------------ pictures

    def _images(self, shard: ImageShard, batch: Batch) -> Iterator[Result]:
        skipped = [self._row(shard, PREDICTION, "skipped", "", *entry) for entry in batch.broken.items()]
        if not batch.names:
            yield self._result(skipped, PREDICTION, 0, shard.units)
            return
        with self._watch("clean forward"):
            scene = self._scene(shard, batch)
        rows = skipped + self._predictions(scene)
        yield self._result(rows, PREDICTION, len(batch.names), _count(shard, PREDICTION))
        kept: dict[str, Maps] = {}
        for method in dict.fromkeys(method for method, _ in shard.todo if method != PREDICTION):
            maps, failed = self._maps(batch, scene.tape, scene.targets, method)
            rows = self._failures(scene, method, failed)
            for config in scene.tests(method, "perturbation"):
                rows += self._rows(scene, method, config, failed, self._perturbation(scene, config, maps))
            with self._watch("scores"):
                for config in scene.tests(method, "segmentation"):
                    rows += self._rows(scene, method, config, failed, self._segmentation(scene, config, method, maps))
            if scene.tests(method, "sanity") and len(failed) < len(batch.names):
                kept[method] = (maps, failed)
            yield self._result(rows, method, len(batch.names), _count(shard, method, "perturbation", "segmentation"))
        yield from self._sanity(scene, kept)

    def _scene(self, shard: ImageShard, batch: Batch) -> Scene:
        """One recorded forward for all methods, and the classes that any test wants explained.

        They depend on the tests that were asked for and never on what is already done, so that maps computed again
        after an interruption are the same to the last bit.
        """
        tape = self.network.record(batch.images)
        classes = {"predicted": tape.logits.argmax(1).cpu()}
        if _explains_label(shard.tests):
            classes["label"] = torch.tensor([index for index in batch.labels if index is not None])
        if any(config.test == "sanity" for config in shard.tests):
            classes["other"] = self._other_classes(batch.names, classes["predicted"])
        in_mask, more = self._mask_columns(shard, batch, tape.logits, len(classes))
        columns = {name: k for k, name in enumerate(classes)}
        return Scene(shard, batch, tape, torch.stack([*classes.values(), *more], 1), columns, in_mask)

    def _predictions(self, scene: Scene) -> list[Row]:
        confidence, predicted = scene.tape.logits.detach().double().softmax(1).max(1)
        values = [
            {"label": label, "predicted": int(predicted[row]), "confidence": float(confidence[row])}
            for row, label in enumerate(scene.batch.labels)
        ]
        configs = scene.tests(PREDICTION, "prediction")
        return [row for config in configs for row in self._rows(scene, PREDICTION, config, {}, values)]

    def _other_classes(self, names: Sequence[str], predicted: Tensor) -> Tensor:
        """For each image some class that is not the predicted one, the same in every run."""
        if self.network.classes < 2:
            raise ModelError("the sanity test compares two classes; the model has one")
        drawn = torch.tensor([_number(self.settings.seed, name) % (self.network.classes - 1) for name in names])
        return drawn + (drawn >= predicted)

    # ------------------------------------------------------------------------------------------------- methods

    def _maps(self, batch: Batch, tape: Tape, targets: Tensor, method: str) -> Maps:
        seed = _number(self.settings.seed, method, *batch.names)
        with self._watch("method"):
            try:
                maps = self.network.maps(tape, targets, method, seed)
                failed: dict[int, str] = {}
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever a method does on a network it was not made for
                maps, failed = self._maps_one_by_one(batch, targets, method, seed, error)
            finite = torch.isfinite(maps).flatten(1).all(1)
        return torch.nan_to_num(maps), dict.fromkeys((~finite).nonzero()[:, 0].tolist(), _NOT_FINITE) | failed

    def _maps_one_by_one(self, batch: Batch, targets: Tensor, method: str, seed: int, error: Exception) -> Maps:
        """One bad image must not cost its neighbours their maps."""
        maps = torch.zeros(*targets.shape, *batch.images.shape[2:])
        if len(targets) == 1:
            return maps, {0: _reason(error)}
        failed: dict[int, str] = {}
        for row in range(len(targets)):
            try:
                tape = self.network.record(batch.images[row : row + 1])
                maps[row] = self.network.maps(tape, targets[row : row + 1], method, seed)[0]
            except Exception as single:
                failed[row] = _reason(single)
        return maps, failed

    def _failures(self, scene: Scene, method: str, failed: dict[int, str]) -> list[Row]:
        return [
            self._row(scene.shard, method, "skipped", config.hash, scene.batch.names[row], why)
            for row, why in failed.items()
            for (name, config), todo in scene.shard.todo.items()
            if name == method and scene.batch.names[row] in todo
        ]

    # -------------------------------------------------------------------------------------------------- scores

    def _rows(
        self, scene: Scene, method: str, config: Config, failed: dict[int, str], values: list[dict[str, Any]]
    ) -> list[Row]:
        """Values of a batch as rows, for those that lack one."""
        return [
            self._row(scene.shard, method, config.test, config.hash, name) | values[row]
            for row, name in enumerate(scene.batch.names)
            if name in scene.shard.todo[method, config] and row not in failed
        ]

    def _perturbation(self, scene: Scene, config: Config, maps: Tensor) -> list[dict[str, Any]]:
        column = scene.columns["label" if config["explain"] == "target" else "predicted"]
        explained, images = scene.targets[:, column], self.network.placed(scene.batch.images)
        at_once = images_per_forward(scene.tape, self.settings.memory_limit, self.settings.device)
        with self._watch("perturb"):
            fill = perturbation.replacement(images, config["fill"], self.network.preprocess)
            curves = perturbation.measure(
                self._perturbed_forward, images, maps[:, column], fill, explained, at_once, self.settings.seed
            )
        clean = scene.tape.logits.detach().double().softmax(1).cpu()
        return [
            {
                "label": scene.batch.labels[row],
                "predicted": int(scene.targets[row, scene.columns["predicted"]]),
                "explained": int(explained[row]),
                "clean_probability": float(clean[row, explained[row]]),
            }
            | {
                f"{direction}_{what}": steps[d, :, row].tolist()
                for d, direction in enumerate(perturbation.DIRECTIONS)
                for what, steps in (("predicted", curves.predicted), ("probability", curves.probability))
            }
            for row in range(len(images))
        ]

    def _perturbed_forward(self, images: Tensor) -> Tensor:
        with self._watch("perturbed forward"):
            return self.network.forward(images).cpu()

    def _segmentation(self, scene: Scene, config: Config, method: str, maps: Tensor) -> list[dict[str, Any]]:
        signed = resolve(method)[0].signed
        column = scene.columns["predicted"]
        values = []
        for row, mask in enumerate(scene.batch.masks):
            assert mask is not None  # `load` has read one for every picture, or called it broken
            if config["reading"] == "object":
                scores = segmentation.foreground_scores(maps[row, column].numpy(), mask, signed)
            else:
                by_class = {index: maps[row, k].numpy() for index, k in scene.in_mask[row].items()}
                outputs = self._outputs(self.datasets[scene.shard.data]) or ()
                predicted = _predicted(scene.tape.logits[row], outputs, config["threshold"])
                scores = segmentation.label_scores(by_class, predicted, mask, signed, len(outputs))
            values.append({"explained": int(scene.targets[row, column])} | asdict(scores))
        return values

    def _mask_columns(
        self, shard: ImageShard, batch: Batch, logits: Tensor, start: int
    ) -> tuple[tuple[dict[int, int], ...], list[Tensor]]:
        """Columns for every class of the masks that is predicted or there, beside column 0, the likeliest class.

        Images with fewer classes repeat their likeliest.
        """
        config = next((c for c in shard.tests if c.test == "segmentation" and c["reading"] == "multi-label"), None)
        outputs = self._outputs(self.datasets[shard.data])
        if config is None or outputs is None:
            return (), []
        columns, more = [], []
        for row, mask in enumerate(batch.masks):
            first = outputs.index(int(logits[row].argmax())) + 1
            others = (_classes_in(mask) | _predicted(logits[row], outputs, config["threshold"])) - {first}
            columns.append({first: 0} | {index: start + k for k, index in enumerate(sorted(others))})
            more.append([outputs[index - 1] for index in sorted(others)])
        width = max(len(others) for others in columns) - 1
        padded = [torch.tensor((m + width * [int(logits[row].argmax())])[:width]) for row, m in enumerate(more)]
        return tuple(columns), list(torch.stack(padded).unbind(1)) if width else []

    def _outputs(self, dataset: Dataset) -> tuple[int, ...] | None:
        return class_outputs(dataset.classes, self.network.labels, self.network.classes)

    # -------------------------------------------------------------------------------------------------- sanity

    def _sanity(self, scene: Scene, originals: dict[str, Maps]) -> Iterator[Result]:
        """Rows of the methods whose maps are given; the randomised networks are made once for all of them."""
        if not originals:
            return
        (config,) = {config for config in scene.shard.tests if config.test == "sanity"}
        found: dict[str, list[Tensor]] = {method: [] for method in originals}
        for module in self._randomised(scene, config):
            for method, similar in self._compared(scene, module, originals).items():
                found[method].append(similar)
        for method, (maps, failed) in originals.items():
            with self._watch("scores"):
                values = self._sanity_values(scene, maps, torch.stack(found[method]))
            rows = self._rows(scene, method, config, failed, values)
            yield self._result(rows, method, 0, _count(scene.shard, method, "sanity"))

    def _randomised(self, scene: Scene, config: Config) -> Iterator[nn.Module]:
        layers = sanity.layers(self.network.module, scene.tape)
        stages = sanity.cascade(self.network.module, layers, self.settings.seed, config["stages"])
        while True:
            with self._watch("randomise"):
                module = next(stages, None)
            if module is None:
                return
            yield module

    def _compared(self, scene: Scene, module: nn.Module, originals: dict[str, Maps]) -> dict[str, Tensor]:
        """Similarity (B,3) of each method's maps with those on a randomised network; NaN where that has none."""
        column = scene.columns["predicted"]
        nothing = torch.full((len(scene.batch.names), len(sanity.MEASURES)), torch.nan, dtype=torch.float64)
        found = dict.fromkeys(originals, nothing)
        try:
            with self._watch("clean forward"):
                tape = self.network.record(scene.batch.images, module)
        except ClasslensError:  # a random network may well give NaN
            return found
        for method, (maps, _) in originals.items():
            seed = _number(self.settings.seed, method, *scene.batch.names)
            try:
                with self._watch("randomised method"):
                    other = self.network.maps(tape, scene.targets[:, column, None], method, seed, module)[:, 0]
            except ClasslensError:
                continue
            with self._watch("scores"):
                similar = sanity.similarities(maps[:, column], torch.nan_to_num(other))
                found[method] = torch.where(torch.isfinite(other).all(2).all(1, keepdim=True), similar, nothing)
        return found

    def _sanity_values(self, scene: Scene, maps: Tensor, stages: Tensor) -> list[dict[str, Any]]:
        """`stages` (stages,B,3): similarity with the maps of randomised networks."""
        predicted, other = scene.columns["predicted"], scene.columns["other"]
        classes = sanity.similarities(maps[:, predicted], maps[:, other])  # (B,3)
        return [
            {"explained": int(scene.targets[row, predicted]), "other": int(scene.targets[row, other])}
            | {name: stages[:, row, i].tolist() for i, name in enumerate(sanity.MEASURES)}
            | {f"class_{name}": float(classes[row, i]) for i, name in enumerate(sanity.MEASURES)}
            for row in range(len(maps))
        ]

    # --------------------------------------------------------------------------------------------------- grids

    def _grids(self, shard: GridShard, batch: Batch) -> Iterator[Result]:
        """Each cell's class is explained in the whole grid; a grid with a picture that is gone is skipped."""
        whole = [grid for grid in shard.grids if not any(cell.image in batch.broken for cell in grid)]
        gone = [cell.image for grid in shard.grids if grid not in whole for cell in grid]
        if whole:
            with self._watch("clean forward"):
                composed = self.compose(shard.test, batch, whole)
                tape = self.network.record(composed.images)
            targets = torch.tensor([[cell.target for cell in grid] for grid in whole])
        for (method, config), todo in shard.todo.items():
            rows = [
                self._row(shard, method, "skipped", config.hash, name, "a picture of its grid cannot be read")
                for name in gone
                if name in todo
            ]
            if whole:
                maps, failed = self._maps(composed, tape, targets, method)
                with self._watch("scores"):
                    rows += self._pointing(shard, whole, maps, failed, method)
            yield self._result(rows, method, len(shard.items), len(todo))

    def compose(self, config: Config, batch: Batch, grids: Sequence[Grid]) -> Batch:
        """The grids as pictures."""
        pictures = dict(zip(batch.names, batch.images, strict=True))
        rows, columns = pointing.cells(config["shape"])
        height, width = batch.images.shape[2:]
        size = (height, width) if config["cells"] == "fit" else (rows * height, columns * width)
        images = [pointing.compose([pictures[cell.image] for cell in grid], config["shape"], size) for grid in grids]
        return Batch(tuple(_grid_name(grid) for grid in grids), torch.stack(images), (), (), {})

    def _pointing(
        self, shard: GridShard, grids: Sequence[Grid], maps: Tensor, failed: dict[int, str], method: str
    ) -> list[Row]:
        rows, config = [], shard.test
        for index, grid in enumerate(grids):
            share, hit = pointing.scores(maps[index], config["shape"])
            for k, cell in enumerate(grid):
                if cell.image not in shard.todo[method, config]:
                    continue
                if index in failed:
                    rows.append(self._row(shard, method, "skipped", config.hash, cell.image, failed[index]))
                    continue
                values = {"cell": k, "explained": cell.target, "share": float(share[k]), "hit": float(hit[k])}
                row = self._row(shard, method, "pointing", config.hash, cell.image)
                rows.append(row | {"grid": _grid_name(grid)} | values)
        return rows

    # --------------------------------------------------------------------------------------------- small parts

    def _read(self, dataset: Dataset, item: Item, with_mask: bool) -> tuple[Tensor, Mask | None]:
        picture = dataset.picture(item)
        mask = framed_mask(dataset, item, picture, self.network.preprocess) if with_mask else None
        return self.network.preprocess(picture), mask

    def _row(self, shard: Shard, method: str, test: str, config: str, image: str, reason: str | None = None) -> Row:
        data = self.datasets[shard.data].name
        key = {"model": self.network.id, "method": method, "test": test, "data": data, "image": image}
        return key | {"config": config} | ({"reason": reason} if reason is not None else {})

    def _result(self, rows: list[Row], method: str, images: int, units: int) -> Result:
        return Result(rows, self._watch.take(), method, images, units)


def framed_mask(dataset: Dataset, item: Item, picture: Image.Image, preprocess: Preprocess) -> Mask:
    """A picture's mask, in the part of the picture that the network sees; what was added around it is not labelled."""
    full = Image.fromarray(dataset.mask(item))
    if full.size != picture.size:
        raise ImageError(f"its mask is {full.width}x{full.height}, the picture {picture.width}x{picture.height}")
    return np.asarray(replace(preprocess, interpolation="nearest", fill=(IGNORE,)).frame(full))


def _explains_label(tests: Sequence[Config]) -> bool:
    return any(config.test == "perturbation" and config["explain"] == "target" for config in tests)


def _count(shard: Shard, method: str, *tests: str) -> int:
    """Rows that a method lacks for these tests (or for all)."""
    return sum(
        len(names) for (name, c), names in shard.todo.items() if name == method and (not tests or c.test in tests)
    )


def _classes_in(mask: Mask | None) -> set[int]:
    return set() if mask is None else {int(value) for value in np.unique(mask)} - {0, IGNORE}


def _predicted(logits: Tensor, outputs: Sequence[int], threshold: float) -> set[int]:
    """The classes of the mask, 1.., that a multi-label network says are there."""
    probability = logits.detach().double().sigmoid()
    return {i + 1 for i, output in enumerate(outputs) if probability[output] > threshold}


def _grid_name(grid: Grid) -> str:
    return text_hash("\n".join(cell.image for cell in grid), 12)


def _number(*parts: object) -> int:
    """A number below 2**63 that belongs to these words: for seeds and stable choices."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, ClasslensError) else f"{type(error).__name__}: {text}"
