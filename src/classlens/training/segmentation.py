"""Trains a segmentation head on a frozen body and writes both to a folder that `load` reads.

>>> trained = train_segmentation(DenseChoices(data="data/voc"), "runs/voc-segmentation")
>>> m = classlens.load("runs/voc-segmentation")
>>> classlens.explain(m, "photo.jpg", classlens.region("person"))
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from classlens.data.layouts import Item
from classlens.data.masks import IGNORE
from classlens.errors import DataError
from classlens.files import write_text
from classlens.models import DEFAULT, LoadedModel, Preprocess, load
from classlens.models.cards import CARD, WEIGHTS, card_text, write_weights
from classlens.models.network import input_size
from classlens.models.pyramid import Pyramid, PyramidHead, Segmenter, find_pyramid
from classlens.progress import Progress, silent
from classlens.render import write_png
from classlens.training.data import Data, open_data, skipped_text
from classlens.training.loop import Recipe, Row, Task, best_of, fit, forward
from classlens.training.multilabel import Trained
from classlens.training.run import metrics_figure, run_folder, table, training_text
from classlens.training.sources import Batch, Features, Source, cached_features

BACKGROUND = "background"
_STEP = 4  # the loss is computed at every fourth pixel; the scores at every pixel


@dataclass(frozen=True)
class DenseChoices:
    """The network and the data of a segmentation training."""

    data: str
    layout: str = "voc"
    backbone: str = DEFAULT
    weights: str | None = "default"
    flip: bool = True
    device: str = "cpu"


@dataclass(frozen=True)
class DenseRow(Row):
    """The metrics of one epoch of a segmentation training."""

    val_miou: float  # mean over classes of intersection over union
    val_accuracy: float  # share of the labelled pixels whose class is right

    @property
    def score(self) -> float:
        return self.val_miou


@dataclass(frozen=True, eq=False)
class DenseBackbone:
    """A published body, and a pyramid head with random weights."""

    loaded: LoadedModel  # with the segmentation network as its model
    pyramid: Pyramid
    sizes: tuple[tuple[int, ...], ...]  # (C,h,w) of the features
    head_path: str = "head"

    @property
    def model(self) -> nn.Module:
        return self.loaded.model

    def features(self, images: Tensor) -> Tensor:
        """(B,D): the feature maps one after the other, in half precision, which halves their files."""
        with torch.no_grad():
            maps: Sequence[Tensor] = self.model.get_submodule("body")(images)
        return torch.cat([x.flatten(1) for x in maps], 1).half()


class OnFeatures(nn.Module):
    """The head alone, on features (B,D)."""

    def __init__(self, head: PyramidHead, sizes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.head, self.sizes = head, sizes

    def forward(self, features: Tensor) -> Tensor:
        parts = features.float().split([math.prod(size) for size in self.sizes], 1)
        logits: Tensor = self.head([part.unflatten(1, size) for part, size in zip(parts, self.sizes, strict=True)])
        return logits


def train_segmentation(
    choices: DenseChoices, out: str | os.PathLike[str], recipe: Recipe | None = None, progress: Progress = silent
) -> Trained:
    """Train, or resume a stopped training with the same settings.

    The folder holds card.json and model.safetensors (the best epoch so far), metrics.csv, metrics.png and state.pt.
    """
    recipe = recipe or Recipe(epochs=30, batch_size=16, learning_rate=1e-3)
    folder = run_folder(out)
    data = open_data(choices.data, choices.layout, recipe.seed, progress)
    _check_masks(data)
    backbone = dense_backbone(choices, len(data.labels) + 1, recipe.seed)
    folder.mkdir(parents=True, exist_ok=True)

    def features(examples: Sequence[Item], mirrored: bool, what: str) -> Batch:
        say = functools.partial(progress, f"features of {what}")
        return cached_features(
            backbone, data, examples, folder / "features", mirrored, choices.device, say, masked_view
        )

    val = Features(*features(data.val, False, "validation pictures"), recipe.batch_size, recipe.seed)
    views = [features(data.train, False, "training pictures")]
    if choices.flip:
        views.append(features(data.train, True, "their mirror images"))
    inputs, masks = zip(*views, strict=True)
    train = Features(torch.cat(inputs), torch.cat(masks), recipe.batch_size, recipe.seed)
    identity = _identity(choices, recipe, backbone, data)

    def on_epoch(history: list[DenseRow]) -> None:
        if best_of(history) is history[-1]:
            write_weights(folder / WEIGHTS, backbone.model)
        write_text(folder / CARD, _card(choices, backbone, data, history, identity))
        write_text(folder / "metrics.csv", table(history))

    head = backbone.model.get_submodule("head")
    assert isinstance(head, PyramidHead)
    module = OnFeatures(head, backbone.sizes)
    history = fit(SEGMENTATION, module, train, val, recipe, folder, identity, on_epoch, progress)
    write_png(folder / "metrics.png", metrics_figure(history, SEGMENTATION))
    return Trained(folder, tuple(history), best_of(history), skipped_text(data.skipped))


def dense_backbone(choices: DenseChoices, classes: int, seed: int = 0) -> DenseBackbone:
    """The body with published weights (or those of a file), and a new head."""
    loaded = load(choices.backbone, choices.weights)
    size = input_size(loaded.preprocess)
    pyramid = find_pyramid(loaded.model, size, classes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Segmenter(loaded.model, pyramid).to(choices.device)
    with torch.no_grad():
        maps = model.body(torch.zeros(1, 3, *size).to(choices.device))
    return DenseBackbone(replace(loaded, model=model), pyramid, tuple(tuple(x.shape[1:]) for x in maps))


def masked_view(item: Item, data: Data, preprocess: Preprocess, mirrored: bool) -> Batch:
    """An image as at evaluation, or its mirror image, and the mask (H,W) of the same crop."""
    framed = replace(preprocess, interpolation="nearest", fill=(IGNORE,))
    mask = torch.from_numpy(np.array(framed.frame(Image.fromarray(data.dataset.mask(item)))))
    image = preprocess(data.dataset.picture(item))
    return (image.flip(-1), mask.flip(-1)) if mirrored else (image, mask)


def _check_masks(data: Data) -> None:
    without = [item.name for item in (*data.train, *data.val) if item.mask is None]
    if without:
        raise DataError(f"{data.name}: a segmentation needs a mask for every picture, and {without[0]} has none")


# ------------------------------------------------------------------------------------------------- loss and scores


def pixel_loss(logits: Tensor, masks: Tensor) -> Tensor:
    """Cross-entropy over the labelled pixels, at every fourth one."""
    masks = masks[:, _STEP // 2 :: _STEP, _STEP // 2 :: _STEP].long()
    large = F.interpolate(logits, size=masks.shape[1:], mode="bilinear", align_corners=False)
    # The sum, divided by at least 1: a batch without a labelled pixel has no loss, instead of NaN.
    total = F.cross_entropy(large, masks, ignore_index=IGNORE, reduction="sum")
    return total / (masks != IGNORE).sum().clamp(min=1)


@torch.no_grad()
def validate(module: nn.Module, source: Source) -> tuple[float, float, float]:
    """Loss, mean IoU and pixel accuracy, without augmentation."""
    module.eval()
    loss, images = 0.0, 0
    counts: Tensor | None = None
    for batch in source.batches(None):
        logits, masks = forward(module, *batch)
        loss, images = loss + float(pixel_loss(logits, masks)) * len(masks), images + len(masks)
        large = F.interpolate(logits, size=masks.shape[1:], mode="bilinear", align_corners=False)
        found = confusion(large.argmax(1).cpu(), masks.cpu(), logits.shape[1])
        counts = found if counts is None else counts + found
    assert counts is not None
    right = float(counts.diagonal().sum() / counts.sum().clamp(min=1))
    return loss / images, mean_iou(counts), right


def confusion(found: Tensor, masks: Tensor, classes: int) -> Tensor:
    """(classes,classes): how many labelled pixels of a class (row) were given a class (column)."""
    known = masks != IGNORE
    pairs = masks[known].long() * classes + found[known]
    return pairs.bincount(minlength=classes * classes).reshape(classes, classes)


def mean_iou(counts: Tensor) -> float:
    """Mean over classes of intersection over union; classes that are neither there nor found are ignored.

    >>> mean_iou(torch.tensor([[3, 1], [0, 4]]))        # (3 / 4 + 4 / 5) / 2
    0.775
    """
    hits = counts.diagonal().double()
    union = counts.sum(0) + counts.sum(1) - hits
    return float((hits / union)[union > 0].mean())


SEGMENTATION = Task("mIoU", "cross-entropy", pixel_loss, DenseRow, validate)


# ------------------------------------------------------------------------------------------------------------ card


def _identity(choices: DenseChoices, recipe: Recipe, backbone: DenseBackbone, data: Data) -> dict[str, Any]:
    """The settings that determine the result; they must be the same when a training is resumed."""
    weights = os.path.basename(choices.weights) if choices.weights else "random"
    return {
        "task": "segmentation", "backbone": choices.backbone, "weights": weights,
        "pyramid": backbone.pyramid.to_json(), "flip": choices.flip, "data": data.name, "data_hash": data.hash,
    } | asdict(recipe)  # fmt: skip


def _card(
    choices: DenseChoices, backbone: DenseBackbone, data: Data, history: Sequence[DenseRow], identity: dict[str, Any]
) -> str:
    return card_text(
        architecture=choices.backbone,
        preprocess=backbone.loaded.preprocess,
        labels=(BACKGROUND, *data.labels),
        pyramid=backbone.pyramid,
        training=training_text(identity, data, history),
    )
