"""Trains a multi-label classifier and writes it to a folder that `load` reads.

>>> trained = train_multilabel(Choices(data="data/voc", layout="voc", freeze=True), "runs/voc")
>>> classlens.load("runs/voc").labels[:2]
('aeroplane', 'bicycle')
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from classlens.data.layouts import Item
from classlens.files import write_text
from classlens.models import DEFAULT
from classlens.models.cards import CARD, WEIGHTS, card_text, write_weights
from classlens.models.network import short_name
from classlens.progress import Progress, silent
from classlens.render import write_png
from classlens.training.data import Data, open_data, skipped_text
from classlens.training.heads import Backbone, with_new_head
from classlens.training.loop import MULTILABEL, Epoch, Recipe, TrainingError, best_of, fit
from classlens.training.part import LastPart
from classlens.training.run import metrics_figure, run_folder, table, training_text
from classlens.training.sources import Batch, Features, Pictures, Source, cached_features


@dataclass(frozen=True)
class Choices:
    """The network and the data of a training."""

    data: str
    layout: str
    backbone: str = DEFAULT
    weights: str | None = "default"
    hidden: tuple[int, ...] = ()
    freeze: bool = False
    flip: bool = True
    delete_patches: bool = False
    device: str = "cpu"
    readers: int = 2
    train_from: str | None = None  # a module: it and what follows are trained, on cached features of what precedes it

    def __post_init__(self) -> None:
        if self.freeze and self.train_from is not None:
            raise TrainingError("--freeze trains only the head: leave out --train-from, or --freeze")
        if self.delete_patches and (self.freeze or self.train_from is not None):
            raise TrainingError("--delete-patches trains the whole network: leave out --freeze and --train-from")


@dataclass(frozen=True)
class Trained:
    """The result of a training."""

    folder: Path
    history: tuple[Any, ...]  # the metrics of each epoch
    best: Any
    remark: str  # which images were skipped


def train_multilabel(
    choices: Choices,
    out: str | os.PathLike[str],
    recipe: Recipe | None = None,
    progress: Progress = silent,
) -> Trained:
    """Train, or resume a stopped training with the same settings.

    The folder holds card.json and model.safetensors (the best epoch so far), metrics.csv, metrics.png and state.pt.
    """
    recipe = recipe or Recipe()
    folder = run_folder(out)
    data = open_data(choices.data, choices.layout, recipe.seed, progress)
    backbone = with_new_head(choices.backbone, choices.weights, len(data.labels), choices.hidden, seed=recipe.seed)
    backbone.model.to(choices.device)
    folder.mkdir(parents=True, exist_ok=True)
    module, train, val = (
        _on_features(choices, recipe, backbone, data, folder, progress)
        if choices.freeze or choices.train_from is not None
        else _whole(choices, recipe, backbone, data)
    )
    identity = _identity(choices, recipe, backbone, data)

    def on_epoch(history: list[Epoch]) -> None:
        if best_of(history) is history[-1]:
            write_weights(folder / WEIGHTS, backbone.model)
        write_text(folder / CARD, _card(backbone, data, history, identity))
        write_text(folder / "metrics.csv", table(history))

    history = fit(MULTILABEL, module, train, val, recipe, folder, identity, on_epoch, progress)
    write_png(folder / "metrics.png", metrics_figure(history, MULTILABEL))
    return Trained(folder, tuple(history), best_of(history), skipped_text(data.skipped))


def _on_features(
    choices: Choices, recipe: Recipe, backbone: Backbone, data: Data, folder: Path, progress: Progress
) -> tuple[nn.Module, Source, Source]:
    """Train only the head, or the last part, on the features of each image and of its mirror image."""
    part = None if choices.train_from is None else LastPart(backbone, choices.train_from)

    def features(examples: Sequence[Item], mirrored: bool, what: str) -> Batch:
        say = functools.partial(progress, f"features of {what}")
        return cached_features(part or backbone, data, examples, folder / "features", mirrored, choices.device, say)

    val = features(data.val, False, "validation pictures")
    views = [features(data.train, False, "training pictures")]
    if choices.flip:
        views.append(features(data.train, True, "their mirror images"))
    inputs, targets = zip(*views, strict=True)
    train = Features(torch.cat(inputs), torch.cat(targets), recipe.batch_size, recipe.seed)
    return part or backbone.head_module, train, Features(*val, recipe.batch_size, recipe.seed)


def _whole(choices: Choices, recipe: Recipe, backbone: Backbone, data: Data) -> tuple[nn.Module, Source, Source]:
    preprocess = backbone.loaded.preprocess
    train, val = (
        Pictures(
            data,
            examples,
            preprocess,
            recipe.batch_size,
            recipe.seed,
            choices.flip,
            choices.delete_patches,
            choices.readers,
        )
        for examples in (data.train, data.val)
    )
    return backbone.model, train, val


def _identity(choices: Choices, recipe: Recipe, backbone: Backbone, data: Data) -> dict[str, Any]:
    """The settings that determine the result; they must be the same when a training is resumed."""
    weights = os.path.basename(choices.weights) if choices.weights else "random"
    return {
        "backbone": short_name(choices.backbone), "weights": weights, "head": backbone.head.to_json(),
        "frozen": choices.freeze, "train_from": choices.train_from, "flip": choices.flip, "data": data.name,
        "data_hash": data.hash,
    } | ({"delete_patches": True} if choices.delete_patches else {}) | asdict(recipe)  # fmt: skip


def _card(backbone: Backbone, data: Data, history: Sequence[Epoch], identity: dict[str, Any]) -> str:
    return card_text(
        architecture=backbone.name,
        preprocess=backbone.loaded.preprocess,
        labels=data.labels,
        overrides=backbone.overrides,
        head=backbone.head,
        multilabel=True,
        training=training_text(identity, data, history),
    )
