"""For the report: the pictures on which methods disagree most, drawn; and the operations that take the time."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from classlens.evaluate import metrics
from classlens.evaluate.plan import Part, planned_grids
from classlens.evaluate.records import Store
from classlens.evaluate.settings import Config, Settings
from classlens.evaluate.shards import GridShard, ImageShard
from classlens.evaluate.tables import title
from classlens.evaluate.worker import Worker
from classlens.files import text_hash
from classlens.methods import resolve
from classlens.render import overlay
from classlens.render.html import jpeg

_COUNT = 10
_OPS = 5
_SIDE = 180  # pixels of a drawn picture


@dataclass(frozen=True)
class Dispute:
    """A picture on which the methods' scores lie far apart."""

    part: Part
    config: Config
    image: str
    picture: str  # the grid's name in a pointing game, else the image's
    scores: dict[str, float]

    @property
    def spread(self) -> float:
        judged = [score for method, score in self.scores.items() if not _is_control(method)]
        return max(judged) - min(judged) if judged else 0.0


@dataclass(frozen=True)
class Shown:
    """A dispute, drawn: JPEG of the picture, and of every method's map over it."""

    caption: str
    picture: bytes
    maps: dict[str, tuple[float, bytes]]  # method -> its score, JPEG


def _is_control(method: str) -> bool:
    """Whether a method is noise to compare with: that it disagrees says nothing."""
    return resolve(method)[0].family == "controls"


def disputes(results: Sequence[tuple[Part, Config, Mapping[str, pa.Table]]]) -> list[Dispute]:
    """The ten pictures with the largest distance between the best and the worst method, each picture (or grid) once."""
    found: list[Dispute] = []
    for part, config, rows in results:
        scores: dict[tuple[str, str], dict[str, float]] = {}
        for method, table in rows.items():
            images = table["image"].to_pylist()
            pictures = table["grid"].to_pylist() if config.test == "pointing" else images
            for image, picture, score in zip(images, pictures, metrics.image_scores(config, table), strict=True):
                if not np.isnan(score):
                    scores.setdefault((image, picture), {})[method] = float(score)
        found += [Dispute(part, config, *names, by) for names, by in scores.items() if len(by) > 1]
    found.sort(key=lambda dispute: (-dispute.spread, dispute.image))
    unique: dict[tuple[int, str], Dispute] = {}
    for dispute in found:
        unique.setdefault((dispute.part.index, dispute.picture), dispute)
    return [dispute for dispute in unique.values() if dispute.spread > 0][:_COUNT]


def show(dispute: Dispute, worker: Worker, settings: Settings, store: Store) -> Shown | None:
    """Explain the picture again with every method; drawings are kept in RUN/pictures."""
    scene = _scene(dispute, worker, settings, store)
    if scene is None:
        return None
    image, target = scene
    picture = worker.network.preprocess.restore(image)
    label = worker.network.labels[target] if worker.network.labels else f"class {target}"
    caption = f"{title(dispute.config)}, {dispute.part.dataset.name}: {dispute.image}, explained: {label}"
    drawn: dict[str, tuple[float, bytes]] = {}
    tape = None
    for method, score in dispute.scores.items():
        key = json.dumps([worker.network.id, method, dispute.part.dataset.name, dispute.image, dispute.config.hash])
        name = f"pictures/{text_hash(key, 20)}.jpg"
        if not (store.root / name).exists():
            tape = tape or worker.network.record(image[None])
            evidence = worker.network.maps(tape, torch.tensor([[target]]), method, settings.seed)[0, 0]
            store.write_bytes(name, jpeg(overlay(picture, evidence, resolve(method)[0].signed), _SIDE))
        drawn[method] = (score, (store.root / name).read_bytes())
    pixels = (picture.permute(1, 2, 0).double().numpy() * 255).round().astype(np.uint8)
    return Shown(caption, jpeg(pixels, _SIDE), drawn)


def slowest_ops(worker: Worker, part: Part, settings: Settings, store: Store) -> dict[str, list[tuple[str, float]]]:
    """For each method the operations that take most of its time, with their share; measured once, on one picture."""
    file = store.root / "ops.json"
    known: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    found = {}
    images = None
    for method in settings.methods:
        key = f"{worker.network.id} {method}"
        if key not in known:
            images = images if images is not None else _first_image(worker, part)
            known[key] = _profile(worker, images, method, settings.seed)
            store.write_text("ops.json", json.dumps(known, indent=1))
        found[method] = [(name, share) for name, share in known[key]]
    return found


def _profile(worker: Worker, images: Tensor | None, method: str, seed: int) -> list[tuple[str, float]]:
    if images is None:
        return []
    targets = worker.network.forward(images).argmax(1, keepdim=True).cpu()
    try:
        with _OpTimes() as times:
            worker.network.maps(worker.network.record(images), targets, method, seed)
    except Exception:  # a method that cannot serve this network has no slowest operation
        return []
    total = sum(times.seconds.values()) or 1.0
    slowest = sorted(times.seconds.items(), key=lambda entry: -entry[1])
    return [(name, round(seconds / total, 4)) for name, seconds in slowest[:_OPS]]


class _OpTimes(TorchDispatchMode):
    """Seconds by operation of everything that runs inside, gradients included.

    torch's own profiler writes to stderr, which belongs to the progress bar.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        begun = time.perf_counter()
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.seconds[str(func.overloadpacket).removeprefix("aten.")] += time.perf_counter() - begun


def _first_image(worker: Worker, part: Part) -> Tensor | None:
    for item in part.items[:5]:
        batch = worker.load(ImageShard(part.index, (item,), (), {}))
        if batch.names:
            return batch.images
    return None


def _scene(dispute: Dispute, worker: Worker, settings: Settings, store: Store) -> tuple[Tensor, int] | None:
    """The picture (3,H,W) that was explained, and the class: of a pointing game, the whole grid."""
    items = {item.name: item for item in dispute.part.items}
    if dispute.config.test == "pointing":
        grids = planned_grids(dispute.part, dispute.config, settings, worker.network.id, store)
        grid, cell = next((g, c) for g in grids for c in g if c.image == dispute.image)
        members = tuple(items[member.image] for member in grid)
        batch = worker.load(GridShard(dispute.part.index, (grid,), members, dispute.config, {}))
        if batch.broken:
            return None
        return worker.compose(dispute.config, batch, [grid]).images[0], cell.target
    batch = worker.load(ImageShard(dispute.part.index, (items[dispute.image],), (), {}))
    if not batch.names:
        return None
    label = batch.labels[0]
    if dispute.config.test == "perturbation" and dispute.config["explain"] == "target" and label is not None:
        return batch.images[0], label
    return batch.images[0], int(worker.network.forward(batch.images).argmax(1)[0])
