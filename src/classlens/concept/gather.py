"""The relevance of a class at several layers, over a folder of pictures; stored, so that a stopped run goes on.

index/predictions-HASH.json     what the network predicts for 16 pictures
index/relevance-HASH.npz        the relevance of a class at its layers, in those pictures that are taken for it

A hash covers everything that decides the contents: network, preprocessing, pictures and, for relevance, class and
layers. Files are whole or not there, so any number of classes and folders share one index.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from classlens.concept.evidence import MOST_PASSES, by_sign, evidence
from classlens.concept.flow import Flow, flow
from classlens.concept.layers import COARSE, candidates
from classlens.core.capture import Tape
from classlens.data.labels import label_index
from classlens.data.layouts import Dataset, Item, data_hash
from classlens.errors import DataError, ImageError, MethodError
from classlens.files import text_hash, write_bytes
from classlens.methods.featuremaps import FeatureMap, named_map
from classlens.methods.tail import Tail
from classlens.models import LoadedModel
from classlens.models.network import Network
from classlens.progress import Progress

FORMAT = 3  # of the files of an index: a new number where their contents change
LEAST = 6  # pictures of the class: fewer would give concepts of single pictures
_CHUNK = 16  # pictures of a file of the index
_LOGITS = "the logits"  # beside the layers in a file of relevance; no layer has such a name


@dataclass
class Cost:
    """What was computed: forward passes, and sweeps back from the logits or from a layer."""

    forwards: int = 0
    sweeps: int = 0
    missed: int = 0  # times that the evidence at a layer did not come near the logit


@dataclass(frozen=True, eq=False)
class Subject:
    """A class of a network, the method, and where the index is."""

    model: LoadedModel
    target: int
    method: str
    layer: str | None = None  # None: it is chosen
    index: Path | None = None
    cost: Cost = field(default_factory=Cost)

    @cached_property
    def network(self) -> Network:
        return Network(self.model)

    def name(self, target: int) -> str:
        """The name of a class, or `class 7`."""
        return self.network.labels[target] if self.network.labels else f"class {target}"

    def read(self, dataset: Dataset, item: Item) -> Tensor:
        """(1,3,H,W)."""
        return self.model.preprocess(dataset.picture(item))[None]

    def record(self, images: Tensor) -> Tape:
        self.cost.forwards += len(images)
        return self.network.record(images)

    def evidence(self, tape: Tape, layer: FeatureMap, target: int | None = None) -> Tensor:
        """(2,C,h,w): what speaks for a class at a layer of one recorded picture, and what against it."""
        asked = torch.tensor([self.target if target is None else target])
        found, passes = evidence(tail_of(tape, layer), layer, asked)
        self.cost.forwards += passes
        self.cost.missed += passes == MOST_PASSES
        return by_sign(found)[:, 0]

    def flow(self, tape: Tape, layer: FeatureMap) -> Flow:
        """The same evidence (2,1,C,h,w), and the way on to the image by the method."""
        self.cost.sweeps += 1
        targets = torch.tensor([[self.target]], device=tape.image.tensor.device)
        way = flow(tape, self.network.module, targets, self.method, layer, self.model.multilabel)
        return replace(way, relevance=self.evidence(tape, layer)[:, None])

    def layers(self, tape: Tape) -> dict[str, FeatureMap]:
        """The layers at which concepts are looked for, by name; the deepest first."""
        if tape.image.tensor.dim() != 4:
            raise MethodError("concepts are found in images; this network reads volumes")
        if self.layer is not None:
            return {self.layer: named_map(tape, self.layer)}
        found = candidates(tape)
        if not found:
            raise MethodError(
                f"the network has no feature map {COARSE} times smaller than the image that all of its evidence "
                "passes through; name a layer"
            )
        return {tape.producer[cut.value].module or f"map {number}": cut for number, cut in enumerate(found)}


@dataclass(frozen=True, eq=False)
class Gathered:
    """The pictures that are taken for the class, and its relevance at each layer: (n,2,C,h,w)."""

    items: tuple[Item, ...]
    relevance: dict[str, Tensor]
    logits: Tensor  # (n,classes)
    looked: int  # pictures that were looked at
    skipped: tuple[str, ...]  # pictures that could not be read


def gather(subject: Subject, dataset: Dataset, items: Sequence[Item], limit: int, progress: Progress) -> Gathered:
    """The first `limit` pictures that the network takes for the class, in the order of `items`."""
    asked = _labelled(subject, items) or list(items)
    rows: list[tuple[Item, dict[str, Tensor], Tensor]] = []
    skipped: list[str] = []
    looked = 0
    for start in range(0, len(asked), _CHUNK):
        if len(rows) >= limit:
            break
        chunk = asked[start : start + _CHUNK]
        progress("pictures", start, len(asked))
        predicted = _predictions(subject, dataset, chunk)
        skipped += [item.name for item in chunk if predicted[item.name] is None]
        mine = [item for item in chunk if subject.target in (predicted[item.name] or ())]
        rows += [(item, *found) for item, found in zip(mine, _relevance(subject, dataset, mine), strict=True)]
        looked += len(chunk)
    progress("pictures", len(asked), len(asked))
    _check(subject, dataset, len(rows), looked)
    rows = rows[:limit]
    layers = {name: torch.stack([found[name] for _, found, _ in rows]) for name in rows[0][1]}
    logits = torch.stack([each for *_, each in rows])
    return Gathered(tuple(item for item, *_ in rows), layers, logits, looked, tuple(skipped))


def _labelled(subject: Subject, items: Sequence[Item]) -> list[Item]:
    """The pictures with the label of the class, if the data set knows it."""
    labels, classes = subject.network.labels, subject.network.classes
    return [item for item in items if label_index(item.label, labels, classes) == subject.target]


def _check(subject: Subject, dataset: Dataset, count: int, looked: int) -> None:
    name = subject.name(subject.target)
    if count == 0:
        raise DataError(
            f"the network takes none of {looked} pictures of {dataset.name} for {name!r}; give pictures of this class"
        )
    if count < LEAST:
        raise DataError(
            f"the network takes only {count} of {looked} pictures of {dataset.name} for {name!r}; concepts need at "
            f"least {LEAST}"
        )


def _predictions(subject: Subject, dataset: Dataset, items: Sequence[Item]) -> dict[str, list[int] | None]:
    """The classes that each picture is taken for; None if it cannot be read."""

    def compute() -> bytes:
        found: dict[str, list[int] | None] = {}
        for item in items:
            try:
                image = subject.read(dataset, item)
            except ImageError:
                found[item.name] = None
                continue
            subject.cost.forwards += 1
            logits = subject.network.forward(image)[0]
            classes = (logits > 0).nonzero()[:, 0] if subject.model.multilabel else logits.argmax()[None]
            found[item.name] = classes.tolist()
        return json.dumps(found).encode()

    key = f"{subject.network.id}\n{data_hash(dataset, items)}"
    known: dict[str, list[int] | None] = json.loads(
        stored(subject.index, f"predictions-{text_hash(key)}.json", compute)
    )
    return known


def _relevance(subject: Subject, dataset: Dataset, items: Sequence[Item]) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """For each picture, the relevance of the class at each layer: (2,C,h,w); and its logits."""
    if not items:
        return

    def compute() -> bytes:
        found: dict[str, list[NDArray[np.float32]]] = {}
        for item in items:
            tape = subject.record(subject.read(dataset, item))
            found.setdefault(_LOGITS, []).append(tape.logits[0].detach().float().cpu().numpy())
            for name, layer in subject.layers(tape).items():
                found.setdefault(name, []).append(subject.evidence(tape, layer).float().cpu().numpy())
        return packed({name: np.stack(rows) for name, rows in found.items()})

    decides = (FORMAT, subject.network.id, data_hash(dataset, items), subject.target, subject.layer)
    layers = unpacked(stored(subject.index, f"relevance-{text_hash(repr(decides))}.npz", compute), subject.index)
    logits = torch.from_numpy(layers.pop(_LOGITS))
    for row in range(len(items)):
        yield {name: torch.from_numpy(found[row]) for name, found in layers.items()}, logits[row]


def tail_of(tape: Tape, layer: FeatureMap) -> Tail:
    """The network after a layer."""
    return Tail.after(tape, layer.value, "concepts cannot be removed from this layer")


def stored(index: Path | None, name: str, compute: Callable[[], bytes]) -> bytes:
    """The contents of a file of the index, computed and written if it is not there."""
    if index is None:
        return compute()
    path = index / name
    if not path.is_file():
        return write_bytes(path, compute()).read_bytes()
    return path.read_bytes()


def packed(arrays: dict[str, NDArray[Any]]) -> bytes:
    """Arrays as the bytes of an npz file."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]  # its names are no keyword of the function
    return buffer.getvalue()


def unpacked(content: bytes, index: Path | None) -> dict[str, NDArray[Any]]:
    """The arrays of such a file."""
    try:
        with np.load(io.BytesIO(content)) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"a file of the index {index} is damaged ({error}); delete the folder and run again") from error
