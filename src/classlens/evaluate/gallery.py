"""For the report: the pictures on which methods disagree most, drawn; and the operations that take the time."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from classlens.evaluate.plan import Part, Plan, Shard, units_of
from classlens.evaluate.registry import TESTS, Config, Unit
from classlens.evaluate.scene import Scene, maps_of
from classlens.evaluate.settings import Settings
from classlens.evaluate.store import Store
from classlens.evaluate.worker import Worker
from classlens.files import text_hash
from classlens.methods import resolve
from classlens.render import overlay
from classlens.render.html import jpeg

if TYPE_CHECKING:
    import pyarrow as pa

_COUNT = 10
_OPS = 5
_SIDE = 180  # pixels of a drawn picture


@dataclass(frozen=True)
class Dispute:
    """A picture on which the methods' scores lie far apart."""

    part: Part
    config: Config
    image: str
    group: str  # of rows that belong together; else the image
    explained: tuple[int, ...]  # most often one
    scores: dict[str, float]

    @property
    def spread(self) -> float:
        judged = [score for method, score in self.scores.items() if not _is_control(method)]
        return max(judged) - min(judged) if judged else 0.0


@dataclass(frozen=True)
class Shown:
    """A dispute, drawn: JPEG of the picture, and of every method's map over it."""

    caption: str
    judge: str  # what the scores are
    picture: bytes
    maps: dict[str, tuple[float, bytes]]  # method -> its score, JPEG


def _is_control(method: str) -> bool:
    """Whether a method is noise to compare with: that it disagrees says nothing."""
    return resolve(method)[0].family == "controls"


def disputes(results: Sequence[tuple[Part, Config, Mapping[str, pa.Table]]]) -> list[Dispute]:
    """The ten pictures (or groups) with the largest distance between the best and the worst method."""
    found: list[Dispute] = []
    for part, config, rows in results:
        test = TESTS[config.test]
        judge = test.picture_score
        if judge is None:
            continue
        scores: dict[tuple[str, str, tuple[int, ...]], dict[str, float]] = {}
        for method, table in rows.items():
            if not len(table):
                continue
            columns = [table[name].to_pylist() for name in ("image", test.group or "image", "explained")]
            for *names, score in zip(*columns, judge(table), strict=True):
                if not np.isnan(score):
                    scores.setdefault((names[0], names[1], _as_tuple(names[2])), {})[method] = float(score)
        found += [Dispute(part, config, *names, by) for names, by in scores.items() if len(by) > 1]
    found.sort(key=lambda dispute: (-dispute.spread, dispute.image))
    unique: dict[tuple[int, str], Dispute] = {}
    for dispute in found:
        unique.setdefault((dispute.part.index, dispute.group), dispute)
    return [dispute for dispute in unique.values() if dispute.spread > 0][:_COUNT]


def _as_tuple(explained: int | list[int]) -> tuple[int, ...]:
    return tuple(explained) if isinstance(explained, list) else (explained,)


def show(dispute: Dispute, worker: Worker, plan: Plan, seed: int, store: Store) -> Shown | None:
    """Explain the picture again with every method; drawings are kept in RUN/pictures."""
    units = units_of(dispute.part, dispute.config, plan, store)
    unit = next(unit for unit in units if dispute.image in unit.rows)
    scene = _scene(worker, dispute.part, dispute.config, unit)
    if scene is None:
        return None
    network = scene.network
    picture, labels = network.preprocess.restore(scene.images[0]), network.labels
    label = ", ".join(labels[target] if labels else f"class {target}" for target in dispute.explained)
    test = TESTS[dispute.config.test]
    caption = f"{test.title(dispute.config)}, {dispute.part.dataset.name}: {dispute.image}, explained: {label}"
    drawn: dict[str, tuple[float, bytes]] = {}
    tape = None
    for method, score in dispute.scores.items():
        key = [worker.network.id, method, dispute.part.dataset.name, dispute.image, dispute.config.hash, unit.content]
        name = f"pictures/{text_hash(json.dumps(key), 20)}.jpg"
        if not (store.root / name).exists():
            tape = tape or network.record(scene.images)
            maps = maps_of(network, tape, torch.tensor([dispute.explained]), method, seed)[0]
            drawings = [overlay(picture, evidence, resolve(method)[0].signed) for evidence in maps]
            store.write_bytes(name, jpeg(np.concatenate(drawings, 1), _SIDE * len(drawings)))
        drawn[method] = (score, (store.root / name).read_bytes())
    pixels = (picture.permute(1, 2, 0).double().numpy() * 255).round().astype(np.uint8)
    return Shown(caption, test.picture_score_name, jpeg(pixels, _SIDE), drawn)


def slowest_ops(worker: Worker, part: Part, settings: Settings, store: Store) -> dict[str, list[tuple[str, float]]]:
    """For each method the operations that take most of its time, with their share; measured once, on one picture."""
    file = store.root / "ops.json"
    known: dict[str, Any] = _known_ops(file)
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


def _known_ops(file: Path) -> dict[str, Any]:
    """What was measured before; whatever else stands in its place is measured again."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return {
        key: ops
        for key, ops in (found.items() if isinstance(found, dict) else ())
        if isinstance(ops, list) and all(isinstance(op, list) and [*map(type, op)] == [str, float] for op in ops)
    }


def _profile(worker: Worker, images: Tensor | None, method: str, seed: int) -> list[tuple[str, float]]:
    if images is None:
        return []
    targets = worker.network.forward(images).argmax(1, keepdim=True).cpu()
    try:
        with _OpTimes() as times:
            maps_of(worker.network, worker.network.record(images), targets, method, seed)
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
        scene = _scene(worker, part, None, Unit(item.name, (item,), (item.name,)))
        if scene is not None:
            return scene.images
    return None


def _scene(worker: Worker, part: Part, config: Config | None, unit: Unit) -> Scene | None:
    """A unit alone, as a test (or none) has it composed; None if it cannot be read."""
    tests = () if config is None else (config,)
    return worker.load(Shard(part.index, (unit,), tests, {})).scene
