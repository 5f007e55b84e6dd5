"""Runs a model over images: its prediction for each, where the evidence lies, and what happens when that is hidden.

Only numbers are kept, so that a data set of any size fits into memory; the figures are drawn afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from classlens.data.layouts import Dataset, Item
from classlens.data.masks import Mask
from classlens.errors import ImageError, ModelError, NotFiniteError
from classlens.evaluate.worker import framed_mask
from classlens.explanation import Explanation, explain
from classlens.methods import resolve
from classlens.models import LoadedModel
from classlens.models.loaded import probabilities
from classlens.models.network import Network
from classlens.progress import Progress
from classlens.report import measure
from classlens.report.hide import as_many_others, hide
from classlens.report.truth import Labels, Truth

_MOSTLY_OBJECT = 0.9  # of the image: if the object is larger, hiding it leaves nothing
_NO_EVIDENCE = "the map holds no evidence for the class"
_NOT_FINITE = "the map holds NaN or infinite values"


@dataclass(frozen=True)
class Where:
    """Where the positive evidence of a map lies; all are shares in [0,1]."""

    border: float  # in the outer tenth of the image
    even_border: float  # the same of an evenly spread map
    half: float  # of the image: the smallest part that holds half of the evidence
    against: float  # share of all evidence that is against the class
    inside: float | None = None  # on the object, among labelled pixels; None without a mask
    area: float | None = None  # area of the object: `inside` of an evenly spread map


@dataclass(frozen=True)
class Hidden:
    """The probability of the predicted class when something is hidden."""

    evidence: float  # the part that holds half of the evidence
    elsewhere: float  # as many random cells from the rest
    object: float | None = None  # the object
    instead: int | None = None  # the prediction with the object hidden


@dataclass(frozen=True, eq=False)
class Seen:
    """The map and the picture, small enough to keep."""

    grid: measure.Floats  # (16,16) shares of the evidence
    look: NDArray[np.float16]  # (3,32,32) in [0,1]
    covered: measure.Floats | None = None  # (16,16): which share of each cell the object covers; None without a mask


@dataclass(frozen=True)
class Record:
    """The prediction for one image, and where its evidence lies."""

    item: Item
    predicted: int
    confidence: float
    second: int
    second_confidence: float
    truth: Truth
    truth_confidence: float | None  # of the most likely class in the image, if it is a class of the model
    true_class: int | None
    where: Where
    hidden: Hidden
    seen: Seen | None = None

    @property
    def right(self) -> bool | None:
        """Whether the prediction is one of the classes in the image; None if none of them is a class of the model."""
        return self.predicted in self.truth.outputs if self.truth.outputs else None


@dataclass(frozen=True)
class Collected:
    """All records, and the images that could not be used."""

    records: tuple[Record, ...]
    skipped: dict[str, str] = field(default_factory=dict)  # name -> why there is no record
    without_mask: dict[str, str] = field(default_factory=dict)  # name -> why its mask could not be read


@dataclass(frozen=True)
class Subject:
    """The subject of a report: a model, a data set, and a method."""

    model: LoadedModel
    dataset: Dataset
    method: str = "agf"
    seed: int = 0

    @cached_property
    def network(self) -> Network:
        return Network(self.model)

    def read(self, item: Item) -> tuple[Tensor, Image.Image]:
        """The network input (3,H,W) and the whole image."""
        picture = self.dataset.picture(item)
        return self.model.preprocess(picture), picture

    def mask(self, item: Item, picture: Image.Image) -> Mask | None:
        return None if item.mask is None else framed_mask(self.dataset, item, picture, self.model.preprocess)

    def explain(self, images: Tensor, targets: Any = None) -> Explanation:
        """Maps by the method; methods that sample get the seed, unless they have their own."""
        chosen, written = resolve(self.method)
        options: dict[str, Any] = {"seed": self.seed} if "seed" in chosen.options and "seed" not in written else {}
        return explain(self.model, images, targets, self.method, **options)

    def probabilities(self, logits: Tensor) -> Tensor:
        """(B,classes), float64, on the CPU."""
        return probabilities(logits, self.model.multilabel)

    def name(self, index: int) -> str:
        """A class's name, or `class 7`."""
        return self.model.labels[index] if self.model.labels else f"class {index}"


def collect(subject: Subject, items: Sequence[Item], batch_size: int, progress: Progress) -> Collected:
    """A record for every image that can be read and explained."""
    records: list[Record] = []
    skipped: dict[str, str] = {}
    without_mask: dict[str, str] = {}
    progress("pictures", 0, len(items))
    for start in range(0, len(items), batch_size):
        batch = _read(subject, items[start : start + batch_size], skipped, without_mask)
        if batch:
            records += _records(subject, batch, skipped)
        progress("pictures", min(start + batch_size, len(items)), len(items))
    return Collected(tuple(records), skipped, without_mask)


Read = tuple[Item, Tensor, Mask | None]


def _read(subject: Subject, items: Sequence[Item], skipped: dict[str, str], without_mask: dict[str, str]) -> list[Read]:
    """The readable images; an image with an unreadable mask is used without it."""
    found: list[Read] = []
    for item in items:
        mask = None
        try:
            image, picture = subject.read(item)
        except ImageError as error:
            skipped[item.name] = subject.dataset.why(error)
            continue
        try:
            mask = subject.mask(item, picture)
        except ImageError as error:
            without_mask[item.name] = subject.dataset.why(error)
        found.append((item, image, mask))
    if len({image.shape for _, image, _ in found}) > 1:
        raise ModelError("the model accepts images of any size, so they cannot form a batch; use --batch-size 1")
    return found


def _records(subject: Subject, batch: Sequence[Read], skipped: dict[str, str]) -> Iterator[Record]:
    images = torch.stack([image for _, image, _ in batch])
    try:
        explanation = subject.explain(images)
    except torch.OutOfMemoryError as error:
        raise ModelError(f"out of memory; use a smaller --batch-size than {len(batch)}") from error
    except NotFiniteError:
        if len(batch) > 1:  # one bad image must not affect the others
            for single in batch:
                yield from _records(subject, [single], skipped)
        else:
            skipped[batch[0][0].name] = _NOT_FINITE
        return
    probabilities = subject.probabilities(explanation.logits)
    if probabilities.shape[1] < 2:
        raise ModelError("the model has a single output; a report needs at least two classes")
    labels = Labels(subject.dataset, subject.model.labels, probabilities.shape[1])
    for row, (item, image, mask) in enumerate(batch):
        evidence = explanation.maps[row, 0].cpu().double().numpy()
        share = measure.positive_shares(evidence)
        if share is None:
            skipped[item.name] = _NO_EVIDENCE
            continue
        predicted = int(explanation.targets[row, 0])
        shown = None if mask is None else labels.object_mask(mask, predicted)
        yield _record(
            item,
            probabilities[row],
            labels.truth(item, mask),
            _where(evidence, share, shown),
            _hidden(subject, item, image, share, shown, predicted),
            _seen(subject, image, share, shown),
        )


def _record(item: Item, probability: Tensor, truth: Truth, where: Where, hidden: Hidden, seen: Seen) -> Record:
    (first, second), (predicted, runner_up) = (found.tolist() for found in probability.topk(2))
    true_class = max(truth.outputs, key=lambda index: float(probability[index]), default=None)
    return Record(
        item=item,
        predicted=predicted,
        confidence=first,
        second=runner_up,
        second_confidence=second,
        truth=truth,
        truth_confidence=None if true_class is None else float(probability[true_class]),
        true_class=true_class,
        where=where,
        hidden=hidden,
        seen=seen,
    )


def _seen(subject: Subject, image: Tensor, share: measure.Floats, mask: Mask | None) -> Seen:
    grid = measure.cells(share)
    small = adaptive_avg_pool2d(subject.model.preprocess.restore(image), (2 * grid.shape[0], 2 * grid.shape[1]))
    return Seen(grid, small.cpu().numpy().astype(np.float16), None if mask is None else measure.covered(mask))


def _where(evidence: measure.Floats, share: measure.Floats, mask: Mask | None) -> Where:
    border = measure.frame(*share.shape)
    area = None if mask is None else measure.area(mask)
    return Where(
        border=float(share[border].sum()),
        even_border=float(border.mean()),
        half=float(measure.half_cells(measure.cells(share)).mean()),
        against=measure.against(evidence),
        # An object outside the crop, or one that fills it, is uninformative.
        inside=measure.inside(share, mask) if mask is not None and area and area < 1 else None,
        area=area if area and area < 1 else None,
    )


@torch.no_grad()
def _hidden(
    subject: Subject, item: Item, image: Tensor, share: measure.Floats, mask: Mask | None, predicted: int
) -> Hidden:
    """One forward pass with the evidence, an equal part elsewhere, and the object hidden."""
    strongest = measure.half_cells(measure.cells(share))
    others = as_many_others(strongest, subject.seed, item.name)
    parts = [measure.pixels(chosen, share.shape) for chosen in (strongest, others)]
    if mask is not None and 0 < (mask != 0).mean() <= _MOSTLY_OBJECT:
        parts.append(mask != 0)  # including the unlabelled rim, which shows the object's edge
    images = hide(image.expand(len(parts), -1, -1, -1), torch.from_numpy(np.stack(parts)))
    probability = subject.probabilities(subject.network.forward(images))
    said = probability[:, predicted].tolist()
    if len(parts) < 3:
        return Hidden(said[0], said[1])
    return Hidden(said[0], said[1], said[2], int(probability[2].argmax()))
