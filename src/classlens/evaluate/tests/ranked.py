"""Ranked: are the maps of similar classes right too? A cat is a tabby first, then an Egyptian cat, then a tiger cat.

The three most likely classes of one superclass (dogs and cats) are explained on images whose most likely class is one.
All three stand for the same animal, so the maps of the second and the third should lie on it like that of the first. A
map that contrasts a class with its rivals can be the photographic negative of the first map. The scores of each rank:

    AP, accuracy    of the animal's mask, as in `segmentation` (soft AP)
    detail          AP within a band of a few pixels on both sides of the mask's outline
    change          of the class's own logit when the 15 % of the pixels with the highest values are blurred
    own             that change minus the mean change when the map of another rank selects the pixels
    correlation     with the map of rank 1

If the network's classes are those of the masks (a multi-label network on VOC), each class in a mask is scored on its
own mask: classes that the network finds, and classes that it misses.

    >>> members("cats", imagenet(), 1000)
    (281, 282, 283, 284, 285)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from classlens.data.labels import imagenet, imagenet_wnids, label_index
from classlens.data.layouts import Item
from classlens.data.masks import IGNORE, Mask, classes_in
from classlens.errors import DataError
from classlens.evaluate.metrics import Metric, lists, mean
from classlens.evaluate.panels import Panel, comparison
from classlens.evaluate.registry import Classes, Config, Prediction, Subject, Test, Unit, Values, option, register
from classlens.evaluate.scene import Explained, Scene
from classlens.evaluate.stats import Floats
from classlens.evaluate.tests.perturbation import ranks, replacement
from classlens.evaluate.tests.segmentation import TASK, Map, average_precision, foreground_scores, predicted_classes
from classlens.models.network import images_per_forward

if TYPE_CHECKING:
    import pyarrow as pa

    from classlens.evaluate.tables import Table

RANKS = 3
BLURRED = 0.15  # of the pixels
BAND = 1 / 28  # of the shorter side, on both sides of the outline: 8 pixels of 224
ACROSS = 4  # bands: how wide an unlabelled border may be

_DOGS, _CATS = ("n02085620", "n02113978"), ("n02123045", "n02124075")
SUPERCLASSES = {  # name -> first and last WordNet id of each run of ImageNet's classes
    "pets": (_DOGS, _CATS),
    "dogs": (_DOGS,),
    "cats": (_CATS,),
    "birds": (("n01514668", "n01622779"), ("n01795545", "n01860187"), ("n02002556", "n02058221")),
}


# ------------------------------------------------------------------------------------------------------ which classes


@cache
def members(superclass: str, labels: tuple[str, ...] | None, classes: int) -> tuple[int, ...]:
    """The outputs of a network that belong to a superclass: by WordNet id, or by the names of its labels."""
    runs = SUPERCLASSES[superclass]
    wanted = [wnid for wnid in imagenet_wnids() if any(first <= wnid <= last for first, last in runs)]
    by_id = [label_index(wnid, labels, classes) for wnid in wanted]
    known = [index for index in by_id if index is not None]
    if not known:
        places = {imagenet_wnids().index(wnid) for wnid in wanted}
        known = [i for i, label in enumerate(labels or ()) if label_index(label, imagenet(), 1000) in places]
    return tuple(known)


def likeliest(logits: Tensor, among: Sequence[int], count: int = RANKS) -> list[int]:
    """The classes with the highest logits among some: `likeliest(torch.tensor([3.0, 1.0, 2.0]), (1, 2), 1) == [2]`."""
    order = logits.detach()[list(among)].argsort(descending=True, stable=True)[:count]
    return [among[int(place)] for place in order]


# ------------------------------------------------------------------------------------------------------- how it scores


def mask_of(mask: Mask, index: int) -> Mask:
    """The mask of one class: 1 there, 0 elsewhere, including other objects; unlabelled pixels stay unlabelled."""
    return np.where(mask == IGNORE, IGNORE, mask == index).astype(np.uint8)


def outline(mask: Mask, reach: int) -> NDArray[np.bool_]:
    """The band on both sides of an object's outline: object pixels near background, and background pixels near it.

    Many masks leave an unlabelled border between the two, up to a tenth of the image wide. The band lies on both
    sides of it. Other unlabelled regions (another object, padding) are not an outline.

    >>> outline(np.array([[1, 1, 1, 255, 255, 0, 0, 0]], np.uint8), 1).astype(int)
    array([[0, 0, 1, 0, 0, 1, 0, 0]])
    """
    inside, outside = (mask > 0) & (mask != IGNORE), mask == 0
    edge = inside & _near(~inside, reach) | outside & _near(~outside, reach)
    return np.asarray(edge & _near(inside, ACROSS * reach) & _near(outside, ACROSS * reach))


def _near(there: NDArray[np.bool_], reach: int) -> NDArray[np.bool_]:
    """Whether a pixel is set within `reach` rows and columns of each pixel."""
    side, found = 2 * reach + 1, torch.from_numpy(there)[None].float()
    found = F.max_pool2d(F.max_pool2d(found, (side, 1), 1, (reach, 0)), (1, side), 1, (0, reach))
    return np.asarray(found[0].numpy() > 0)


def detail(evidence: Map, mask: Mask) -> float | None:
    """AP of the raw map within the band around the mask's outline; None if there is no outline."""
    band = outline(mask, max(1, round(BAND * min(mask.shape))))
    inside = mask[band] > 0
    return None if inside.all() else average_precision(evidence[band], inside)


def correlation(one: Map, other: Map) -> float | None:
    """Pearson correlation of two maps; None if one is constant."""
    a, b = (m.astype(np.float64).ravel() - m.mean(dtype=np.float64) for m in (one, other))
    length = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / length if length else None


def without_reddest(images: Tensor, maps: Tensor, fill: Tensor, seed: int = 0) -> Tensor:
    """Images (n,3,H,W) in which the pixels with the highest values of the maps (n,H,W) are replaced by `fill`."""
    pixels = maps[0].numel()
    gone = ranks(maps, seed) >= pixels - int(BLURRED * pixels)
    return torch.where(gone[:, None].to(images.device), fill, images)


def own_changes(changes: Tensor) -> list[float | None]:
    """(K maps, K classes) -> for each class the change by its own map minus the mean change by the other maps.

    >>> own_changes(torch.tensor([[-3.0, 0.0], [-1.0, -2.0]]))
    [-2.0, -2.0]
    """
    if len(changes) < 2:
        return [None] * len(changes)
    own = changes.diagonal()
    found: list[float | None] = (own - (changes.sum(0) - own) / (len(changes) - 1)).tolist()
    return found


# ---------------------------------------------------------------------------------------------------------- the test

_ASKED = "ranked classes"
_BY_RANK, _BY_CLASS = "ranks", "classes"  # the two tasks


@dataclass(frozen=True)
class Measure:
    """A column of the rows, shown for every rank."""

    title: str
    better: int
    scale: float = 100.0
    unit: str = "%"


MEASURES = {
    "ap": Measure("AP", +1),
    "accuracy": Measure("accuracy", +1),
    "detail": Measure("detail", +1),
    "change": Measure("change", -1, 1.0, "change of the logit"),
    "own": Measure("own", -1, 1.0, "change of the logit"),
    "correlation": Measure("correlation", 0, 1.0, "with rank 1"),
}


@dataclass(frozen=True)
class Options:
    """Whose ranks."""

    superclass: str = option(
        "pets", f"the superclass whose classes are ranked: {', '.join(SUPERCLASSES)}", choices=tuple(SUPERCLASSES)
    )
    threshold: float = option(
        0.5, "minimum probability of a predicted class, for multi-label networks", needs="classes"
    )


def _variants(options: Options, subject: Subject) -> list[Values]:
    if subject.outputs is not None:
        return [{TASK: _BY_CLASS, "threshold": options.threshold}]
    known = len(_members(subject, options.superclass)) if "classes" in subject.offers else RANKS
    if known < RANKS:
        raise DataError(
            f"ranking needs a model with {RANKS} classes of {options.superclass} by ImageNet's names or ids, or one "
            f"with the classes of the masks; this one has {known}: choose another --model or --superclass"
        )
    return [{TASK: _BY_RANK, "superclass": options.superclass}]


def _members(subject: Subject, superclass: str) -> tuple[int, ...]:
    labels = subject.network.labels
    return members(superclass, None if labels is None else tuple(labels), subject.network.classes)


def _units(
    subject: Subject, items: Sequence[Item], config: Config, predictions: Mapping[str, Prediction]
) -> list[Unit]:
    """Images whose most likely class is in the superclass; all images if each class has its own mask."""
    among = None if config[TASK] == _BY_CLASS else set(_members(subject, config["superclass"]))
    said = {name: prediction.predicted for name, prediction in predictions.items()}
    return [Unit(i.name, (i,), (i.name,)) for i in items if among is None or said.get(i.name) in among]


def _classes(scene: Scene, config: Config) -> Mapping[str, Classes]:
    """The most likely classes of the superclass; or those in the mask (if it is empty, the most likely class)."""
    if config[TASK] == _BY_RANK:
        among = _members(scene.subject, config["superclass"])
        return {_ASKED: [likeliest(logits, among) for logits in scene.tape.logits]}
    outputs = scene.subject.outputs or ()
    there = [[outputs[index - 1] for index in classes_in(_mask(scene, row))] for row in range(len(scene.seen))]
    return {_ASKED: [row or [int(first)] for row, first in zip(there, scene.predicted, strict=True)]}


def _mask(scene: Scene, row: int) -> Mask:
    mask = scene.seen[row].mask
    assert mask is not None  # an image without a mask is skipped
    return mask


def _score(scene: Scene, config: Config, found: Explained) -> list[Values]:
    after = _without_reddest(scene, config, found)
    return [_of_picture(scene, config, found, row, after[row]) for row in range(len(scene.seen))]


def _without_reddest(scene: Scene, config: Config, found: Explained) -> list[Tensor]:
    """For each image, the logits (K,C) without the reddest pixels of each of its K maps."""
    images, asked = scene.network.placed(scene.images), scene.asked.lists[_ASKED]
    fill = replacement(images, "blur", scene.network.preprocess)
    pairs = torch.tensor([(row, place) for row, places in enumerate(asked) for place in places.values()])
    after = []
    for rows, places in (block.unbind(1) for block in pairs.split(images_per_forward(scene.tape, None))):
        maps = found.maps[rows, places]
        after.append(scene.forward(without_reddest(images[rows], maps, fill[rows], config["seed"])))
    return list(torch.cat(after).double().split([len(places) for places in asked]))


def _of_picture(scene: Scene, config: Config, found: Explained, row: int, after: Tensor) -> Values:
    """The values of a row: a list for each measure, with a number for each rank (or: found, missed)."""
    asked = scene.asked.lists[_ASKED][row]
    classes = list(asked)
    maps = found.maps[row, list(asked.values())].numpy()
    clean = scene.tape.logits[row].detach().double().cpu()
    changes = (after - clean)[:, classes]
    masks = _masks(scene, config, row, classes)
    scores = [foreground_scores(m, mask, found.signed) for m, mask in zip(maps, masks, strict=True)]
    values: dict[str, list[float | None]] = {
        "ap": [score.ap_soft for score in scores],
        "accuracy": [score.correct / score.labelled if score.labelled else None for score in scores],
        "detail": [detail(m, mask) for m, mask in zip(maps, masks, strict=True)],
        "change": changes.diagonal().tolist(),
        "own": own_changes(changes),
        "correlation": [correlation(m, maps[0]) for m in maps],
    }
    groups = _groups(scene, config, row, classes)
    return {"explained": classes} | {name: [_mean(v, group) for group in groups] for name, v in values.items()}


def _masks(scene: Scene, config: Config, row: int, classes: Sequence[int]) -> list[Mask]:
    """The mask for each class: the object, or the mask of that class if the masks have classes."""
    mask, outputs = _mask(scene, row), scene.subject.outputs
    if config[TASK] == _BY_RANK or outputs is None:
        return [mask] * len(classes)
    return [mask_of(mask, outputs.index(index) + 1) for index in classes]


def _groups(scene: Scene, config: Config, row: int, classes: Sequence[int]) -> list[list[int]]:
    """The classes behind each number of a row: one rank, or all classes in the mask that are predicted, or missed."""
    outputs = scene.subject.outputs
    if config[TASK] == _BY_RANK or outputs is None:
        return [[place] for place in range(RANKS)]
    found = predicted_classes(scene.tape.logits[row], outputs, config["threshold"])
    there = set(classes_in(_mask(scene, row)))
    numbers = [outputs.index(index) + 1 for index in classes]
    return [[k for k, n in enumerate(numbers) if n in chosen] for chosen in (there & found, there - found)]


def _mean(values: Sequence[float | None], places: Sequence[int]) -> float | None:
    known = [value for place in places if (value := values[place]) is not None]
    return float(np.mean(known)) if known else None


# ----------------------------------------------------------------------------------------------------- how it is shown


def _parts(config: Config) -> tuple[str, ...]:
    return tuple(f"rank {k + 1}" for k in range(RANKS)) if config[TASK] == _BY_RANK else ("found", "missed")


def _column(name: str, place: int) -> Callable[[pa.Table], Floats]:
    return lambda rows: mean(lists(rows, name)[:, place])


def _metrics(config: Config) -> tuple[Metric, ...]:
    """Every measure of every rank, except the correlation of rank 1 with itself; with classes, those of single maps."""
    shown = [(name, place, part) for name in MEASURES for place, part in enumerate(_parts(config))]
    left_out = [("correlation", 0)]
    if config[TASK] == _BY_CLASS:
        left_out += [(name, place) for name in ("own", "correlation") for place in (0, 1)]
    return tuple(
        Metric(f"{m.title}, {part}", m.better, _column(name, place), scale=m.scale)
        for name, place, part in shown
        if (name, place) not in left_out and (m := MEASURES[name])
    )


def _title(config: Config) -> str:
    return "Classes in the image" if config[TASK] == _BY_CLASS else f"Ranked classes ({config['superclass']})"


def _remark(config: Config) -> str:
    what = (
        "AP (soft) and pixel accuracy against the mask, in per cent. Detail: the AP within a few pixels of the mask's "
        "outline. Change: of the class's own logit when the 15 % of the pixels with the highest values are blurred"
    )
    if config[TASK] == _BY_CLASS:
        return f"Maps of the classes in a mask: predicted with more than {config['threshold']}, or missed. {what}."
    return (
        f"Maps of the {RANKS} most likely {config['superclass']}, on images whose most likely class is one. {what}. "
        "Own: that change minus the mean change when the map of another rank selects the pixels. Correlation with the "
        "map of rank 1: near -1 a map is its negative, near 1 the map is the same for every class."
    )


def _notes(subject: Subject, items: Sequence[Item], config: Config) -> list[str]:
    if config[TASK] == _BY_CLASS or subject.dataset.classes is None:
        return []
    return [
        f"{subject.dataset.name} has masks of several classes that are not the model's: the maps of {_title(config)} "
        "are compared with all objects together."
    ]


def _panels(table: Table, rows: Mapping[str, pa.Table]) -> list[Panel]:
    """One panel for each measure, with the ranks side by side."""
    drawn = [
        replace(comparison(table, m.title), title=f"{m.title}: {table.data}", ylabel=m.unit) for m in MEASURES.values()
    ]
    return [panel for panel in drawn if panel.groups]


def _last_ranks(rows: pa.Table) -> NDArray[Any]:
    """AP of the ranks after the first, or of the missed classes."""
    values = lists(rows, "ap")[:, 1:]
    there = ~np.isnan(values)
    means = np.divide(np.nansum(values, 1), there.sum(1), out=np.full(len(values), np.nan), where=there.any(1))
    return np.asarray(means)


register(
    Test(
        name="ranked",
        question="do the maps of similar classes lie on the object too, when they are less likely?",
        columns={"explained": "list<int32>"} | dict.fromkeys(MEASURES, "list<float64>"),
        metrics=_metrics,
        title=_title,
        remark=_remark,
        options=Options,
        needs=frozenset({"masks", "predictions", "classes"}),
        variants=_variants,
        constants={"ranks": RANKS, "blurred": BLURRED, "band": BAND, "across": ACROSS},
        units=_units,
        alone=True,
        classes=_classes,
        score=_score,
        notes=_notes,
        nothing=lambda config, data: (
            f"In no image of {data} is the most likely class one of the superclass; raise --limit or choose another "
            "--superclass."
        ),
        panels=_panels,
        picture_score=_last_ranks,
        picture_score_name="AP of the ranks after the first (or of the missed classes)",
        proof=("AP, rank 2", "AP, rank 3"),
        place=45,
    )
)
