"""Segmentation: does a map lie on the object? Compared with masks by two protocols.

- `paper`: a hard foreground, which is the positive part of a signed map, or the part above the mean of an unsigned map.
  Pixel accuracy, IoU, and the average precision of the *hard* map, which only restates the accuracy.
- `soft`: average precision of the raw map, without a threshold.

    >>> foreground_scores(mask.astype(float), mask, signed=True).correct == mask.size
    True
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from classlens.data.layouts import Item
from classlens.data.masks import IGNORE, Mask
from classlens.evaluate.metrics import Metric, floats, lists, mean
from classlens.evaluate.registry import Classes, Config, Subject, Test, Values, option, register
from classlens.evaluate.scene import Explained, Scene
from classlens.evaluate.stats import Floats, mean_ratio

if TYPE_CHECKING:
    import pyarrow as pa

Map = NDArray[Any]  # (H,W) floating point


@dataclass(frozen=True)
class Scores:
    """The scores of one map, or of the maps of one image. Counts are pooled over the data set, precisions averaged."""

    correct: int  # pixels
    labelled: int  # pixels
    intersection: tuple[int, ...]  # of each class, background first
    union: tuple[int, ...]
    ap_paper: float | None
    ap_soft: float | None  # None: the image has no labelled object (or nothing else)


def average_precision(score: NDArray[Any], positive: NDArray[np.bool_]) -> float | None:
    """Sum over thresholds of (recall gained) x precision; None without positives.

    Every positive contributes the precision at its own score; equal scores form one threshold. It takes two sorts.
    """
    hits = np.sort(score[positive])
    if not len(hits):
        return None
    everything = np.sort(score, axis=None)
    at_least = everything.size - np.searchsorted(everything, hits, side="left")
    true_at_least = hits.size - np.searchsorted(hits, hits, side="left")
    return float((true_at_least / at_least).mean())


def hard_average_precision(accuracy: float) -> float:
    """AP of a hard two-channel map against the one-hot mask; it depends only on the accuracy."""
    return accuracy**2 + (1 - accuracy) / 2


def hard_foreground(evidence: Map, signed: bool) -> NDArray[np.bool_]:
    """The paper's foreground: the positive part, or the part above the mean for a method without negative values."""
    threshold = 0.0 if signed else evidence.mean()
    return evidence > threshold


def foreground_scores(evidence: Map, mask: Mask, signed: bool) -> Scores:
    """One map against object and background: every object counts as foreground."""
    labelled = mask != IGNORE
    truth, guess = (mask > 0)[labelled], hard_foreground(evidence, signed)[labelled]
    correct = int((truth == guess).sum())
    both = (int((~truth & ~guess).sum()), int((truth & guess).sum()))
    either = (int((~truth | ~guess).sum()), int((truth | guess).sum()))
    accuracy = hard_average_precision(correct / truth.size) if truth.size else None
    # An image without background is uninformative: any map would score 1.
    soft = None if truth.all() else average_precision(evidence[labelled], truth)
    return Scores(correct, truth.size, both, either, accuracy, soft)


def label_scores(
    maps: Mapping[int, Map], predicted: set[int], mask: Mask, signed: bool, classes: int, scaled: bool = False
) -> Scores:
    """Maps of several classes (1..classes, as in the mask) against a mask of classes: VOC's protocol.

    `predicted` are the predicted classes; the soft score also includes the other classes in the mask. `scaled`: the
    maps have a common scale already and are used unchanged.
    """
    stack = np.zeros((classes + 1, *mask.shape))
    for index in predicted:
        stack[index] = maps[index] if scaled else _unit(maps[index], signed)
    score = label_softmax(stack, predicted)
    labelled = mask != IGNORE
    truth, guess = mask[labelled], score.argmax(0)[labelled]  # ties: the lowest index, background first
    correct, both, either = overlaps(truth, guess, classes + 1)
    one_hot = truth[None] == np.arange(classes + 1)[:, None]
    present = [index for index in np.unique(truth) if index > 0]
    soft = [average_precision(maps[index][labelled], truth == index) for index in present if (truth != index).any()]
    known = [value for value in soft if value is not None]
    hard = average_precision(score[:, labelled], one_hot)
    return Scores(correct, truth.size, both, either, hard, float(np.mean(known)) if known else None)


def label_map(maps: NDArray[Any], signed: bool) -> NDArray[np.int64]:
    """(K,H,W) maps of classes -> (H,W): 1..K, the class with the strongest evidence, and 0 where none is positive.

    >>> label_map(np.array([[[2.0, -1.0, -1.0]], [[-1.0, 5.0, -1.0]]]), signed=True)
    array([[1, 2, 0]])
    """
    units = np.stack([np.zeros(maps.shape[1:]), *(_unit(evidence, signed) for evidence in maps)])
    result: NDArray[np.int64] = label_softmax(units, set(range(1, len(units)))).argmax(0)
    return result


def label_softmax(maps: NDArray[Any], predicted: set[int]) -> NDArray[np.float64]:
    """(1+classes,H,W) maps, background 0 first -> the scores that are compared: softmax of positive parts.

    A class that is not predicted starts 0.1 below, so it never wins over background.
    """
    absent = np.array([index > 0 and index not in predicted for index in range(len(maps))])
    height = np.maximum(maps, 0).astype(np.float64) - 0.1 * absent[:, None, None]
    e = np.exp(height - height.max(0))
    result: NDArray[np.float64] = e / e.sum(0)
    return result


def _unit(evidence: Map, signed: bool) -> Map:
    """Divided by its maximum; an unsigned map after subtracting its mean."""
    shifted = evidence if signed else evidence - evidence.mean()
    top = shifted.max()
    return shifted / top if top > 0 else np.zeros_like(shifted)


def overlaps(truth: NDArray[Any], guess: NDArray[Any], classes: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Labels 0..classes-1 against the true ones: equal pixels; and of each class, intersection and union in pixels."""
    table = np.bincount(truth.astype(np.int64) * classes + guess, minlength=classes**2).reshape(classes, classes)
    both = table.diagonal()
    either = table.sum(0) + table.sum(1) - both
    return int(both.sum()), tuple(both.tolist()), tuple(either.tolist())


# ---------------------------------------------------------------------------------------------------------- the test

TASK = "reading"  # the setting that holds the task; stored rows have this name
OBJECT, CLASSES = "object", "multi-label"  # the two tasks
_IN_MASK = "in the mask"


@dataclass(frozen=True)
class Options:
    """For networks whose classes are those of the masks."""

    threshold: float = option(
        0.5, "minimum probability of a predicted class, for multi-label networks", needs="classes"
    )


def _variants(options: Options, subject: Subject) -> list[Values]:
    """If the classes of the masks are those of the model, the task is to label pixels by class."""
    if subject.outputs is None:
        return [{TASK: OBJECT}]
    return [{TASK: CLASSES, "threshold": options.threshold}]


def _classes(scene: Scene, config: Config) -> Mapping[str, Classes]:
    """The most likely class, and every class of the masks that is predicted or in the mask."""
    asked: dict[str, Classes] = {"predicted": scene.predicted}
    outputs = scene.subject.outputs
    if config[TASK] == CLASSES and outputs is not None:
        asked[_IN_MASK] = [
            [outputs[index - 1] for index in sorted(wanted)] for wanted in _beside_the_likeliest(scene, config, outputs)
        ]
    return asked


def _beside_the_likeliest(scene: Scene, config: Config, outputs: Sequence[int]) -> list[set[int]]:
    """For each image: classes of the mask, 1.."""
    return [
        (_in(seen.mask) | predicted_classes(scene.tape.logits[row], outputs, config["threshold"]))
        - {outputs.index(int(scene.predicted[row])) + 1}
        for row, seen in enumerate(scene.seen)
    ]


def _in(mask: Mask | None) -> set[int]:
    return set() if mask is None else {int(value) for value in np.unique(mask)} - {0, IGNORE}


def predicted_classes(logits: Tensor, outputs: Sequence[int], threshold: float) -> set[int]:
    """The classes of the mask, 1.., that a multi-label network predicts."""
    probability = logits.detach().double().sigmoid()
    return {i + 1 for i, output in enumerate(outputs) if probability[output] > threshold}


def _score(scene: Scene, config: Config, found: Explained) -> list[Values]:
    explained = found.explained("predicted")
    return [
        {"explained": explained[row]} | asdict(_of_picture(scene, config, found, row)) for row in range(len(explained))
    ]


def _of_picture(scene: Scene, config: Config, found: Explained, row: int) -> Scores:
    mask = scene.seen[row].mask
    assert mask is not None  # an image without a mask is skipped
    likeliest, outputs = found.of("predicted")[row].numpy(), scene.subject.outputs
    if config[TASK] == OBJECT or outputs is None:
        return foreground_scores(likeliest, mask, found.signed)
    maps = {outputs.index(int(scene.predicted[row])) + 1: likeliest}
    for output, column in scene.asked.lists[_IN_MASK][row].items():
        maps[outputs.index(output) + 1] = found.maps[row, column].numpy()
    predicted = predicted_classes(scene.tape.logits[row], outputs, config["threshold"])
    return label_scores(maps, predicted, mask, found.signed, len(outputs))


def _accuracy(rows: pa.Table) -> Floats:
    return np.stack([floats(rows, "correct"), floats(rows, "labelled")], 1)


def _overlap(rows: pa.Table) -> Floats:
    return np.concatenate([lists(rows, "intersection"), lists(rows, "union")], 1)


METRICS = (
    Metric("pixel accuracy", +1, _accuracy),
    Metric("mAP (paper)", +1, lambda rows: mean(floats(rows, "ap_paper"))),
    Metric("mIoU", +1, _overlap, mean_ratio),
    Metric("AP (soft)", +1, lambda rows: mean(floats(rows, "ap_soft"))),
)


def _remark(config: Config) -> str:
    if config[TASK] == CLASSES:
        return (
            f"Maps of the classes predicted with more than {config['threshold']}, compared with the classes of the "
            "mask, in per cent. AP (soft): the raw map of every class in the mask, without a threshold."
        )
    return (
        "The map of the most likely class, compared with all objects in the mask, in per cent. Paper: the positive "
        "part of signed maps, the part above the mean of unsigned maps; its mAP follows from the pixel accuracy alone. "
        "Soft: the raw map, without a threshold."
    )


def _notes(subject: Subject, items: Sequence[Item], config: Config) -> list[str]:
    name = subject.dataset.name
    if config[TASK] == CLASSES:
        return [
            f"{name} is scored by classes: the map of every predicted class, compared with the classes of the mask."
        ]
    if subject.dataset.classes is None or "classes" not in subject.offers:
        return []
    return [
        f"{name} is scored as object against background: the classes of the model are not those of the masks, so the "
        "map of the most likely class is compared with all objects together."
    ]


TEST = register(
    Test(
        name="segmentation",
        question="does the map lie on the object?",
        columns={
            "explained": "int32", "correct": "int64", "labelled": "int64", "intersection": "list<int64>",
            "union": "list<int64>", "ap_paper": "float64", "ap_soft": "float64",
        },
        metrics=lambda config: METRICS,
        title=lambda config: (
            f"Segmentation ({'classes' if config[TASK] == CLASSES else 'object against background'})"
        ),
        remark=_remark,
        options=Options,
        needs=frozenset({"masks"}),
        variants=_variants,
        classes=_classes,
        score=_score,
        notes=_notes,
        picture_score=lambda rows: floats(rows, "ap_soft"),
        picture_score_name="AP (soft)",
        chooses="masks",
        place=20,
    )
)  # fmt: skip
