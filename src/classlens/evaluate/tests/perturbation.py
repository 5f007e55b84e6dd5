"""Perturbation: remove pixels in the order of a map, and measure how long the network still recognises the class.

*Negative*: the least relevant pixels go first; with a good map the accuracy stays high. *Positive*: the most relevant
pixels go first; with a good map it falls at once. The score is the area under the curve over 0..90 % removed.

    >>> auc([1, 1, 1, 1, 1, 1, 1, 1, 1, 1])     # the maximum: always recognised
    90.0
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from classlens.data.layouts import Item
from classlens.errors import DataError
from classlens.evaluate.metrics import Metric, floats, lists, mean
from classlens.evaluate.panels import Panel
from classlens.evaluate.registry import Classes, Config, Subject, Test, Values, option, register
from classlens.evaluate.scene import Explained, Scene
from classlens.evaluate.stats import Floats
from classlens.methods.inputs import filtered
from classlens.models.network import images_per_forward
from classlens.models.preprocess import Preprocess

if TYPE_CHECKING:
    import pyarrow as pa

    from classlens.evaluate.tables import Table

FRACTIONS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
DIRECTIONS = ("negative", "positive")
FILLS = ("black", "blur", "mean")

Forward = Callable[[Tensor], Tensor]  # (n,3,H,W) -> (n,classes), without gradients


def auc(curve: Sequence[float] | NDArray[np.float64]) -> float:
    """Area by the trapezoid rule over 0, 0.1, ..., 0.9, times 100; the first value is the clean accuracy."""
    return float(areas(np.asarray(curve, float)))


def areas(curves: NDArray[np.float64]) -> NDArray[np.float64]:
    """The areas of many curves (..., 10) at once. The mean of the areas is the area of the mean."""
    widths = np.diff(np.array((0.0, *FRACTIONS)))
    result: NDArray[np.float64] = 100 * ((curves[..., 1:] + curves[..., :-1]) / 2 * widths).sum(-1)
    return result


def ranks(maps: Tensor, seed: int = 0) -> Tensor:
    """(B,H,W) -> the rank of every pixel in the ascending order of its map, 0..HW-1.

    Ties (Grad-CAM is zero on half of an image) are broken in the same random order for every method. Memory order would
    remove the top rows first, which favours objects at the bottom.
    """
    flat = maps.detach().flatten(1).cpu().numpy()
    shuffled = _permutation(flat.shape[1], seed)
    result = np.empty(flat.shape, np.int64)
    for row, values in enumerate(flat):
        result[row, shuffled[np.argsort(values[shuffled], kind="stable")]] = np.arange(flat.shape[1])
    return torch.from_numpy(result).view(maps.shape)


def replacement(images: Tensor, kind: str, preprocess: Preprocess) -> Tensor:
    """The fill for removed pixels, as network input: `black` (the paper), the `blur`red image, its `mean` colour."""
    if kind == "black":
        return preprocess.normalise(torch.zeros_like(images[:, :, :1, :1])).expand_as(images)
    if kind == "mean":
        return images.mean((2, 3), keepdim=True).expand_as(images)
    if kind == "blur":
        return blurred(images, sigma=min(images.shape[2:]) / 20)
    raise ValueError(kind)


def blurred(images: Tensor, sigma: float) -> Tensor:
    """A Gaussian blur with mirrored borders. Stored rows depend on the rounding of its kernel: do not change it."""
    reach = min(int(3 * sigma) + 1, *(side - 1 for side in images.shape[2:]))
    x = torch.arange(-reach, reach + 1, dtype=images.dtype, device=images.device)
    kernel = torch.exp(-0.5 * (x / sigma) ** 2)
    return filtered(images, kernel / kernel.sum(), "reflect")


@dataclass(frozen=True)
class Curves:
    """The network's predictions at each step; the first axis is the direction, the second the fraction."""

    predicted: Tensor  # (2,9,B) class
    probability: Tensor  # (2,9,B) of the explained class


def measure(
    forward: Forward,
    images: Tensor,
    maps: Tensor,
    fill: Tensor,
    explained: Tensor,
    at_once: int,
    seed: int = 0,
    fractions: Sequence[float] = FRACTIONS,
) -> Curves:
    """Run all steps of a batch: network inputs (B,3,H,W), maps (B,H,W), and the fill with the shape of the images.

    Every step starts from the unperturbed image; `at_once` is the batch size.
    """
    order = ranks(maps, seed).to(images.device)
    found = [
        _read(forward(batch), explained[rows.to(explained.device)])
        for batch, rows in _perturbed(images, order, fill, fractions, at_once)
    ]
    shape = (len(DIRECTIONS), len(fractions), len(images))
    predicted, probability = (torch.cat(parts).view(shape) for parts in zip(*found, strict=True))
    return Curves(predicted, probability)


def _perturbed(
    images: Tensor, order: Tensor, fill: Tensor, fractions: Sequence[float], at_once: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """The perturbed images in batches, by direction and fraction; each with the row of its image."""
    pixels = order[0].numel()
    counts = torch.tensor([int(pixels * fraction) for fraction in fractions], device=images.device)
    kinds = torch.arange(len(DIRECTIONS) * len(fractions) * len(images), device=images.device)
    for block in kinds.split(at_once):
        rows, steps = block % len(images), block // len(images)
        place, count = order[rows], counts[steps % len(fractions)].view(-1, 1, 1)
        positive = (steps // len(fractions) == 1).view(-1, 1, 1)
        gone = torch.where(positive, place >= pixels - count, place < count)
        yield torch.where(gone[:, None], fill[rows], images[rows]), rows


def _read(logits: Tensor, explained: Tensor) -> tuple[Tensor, Tensor]:
    logits = logits.double().cpu()
    return logits.argmax(1), logits.softmax(1).gather(1, explained.cpu()[:, None])[:, 0]


@cache
def _permutation(count: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).permutation(count)


# ---------------------------------------------------------------------------------------------------------- the test


@dataclass(frozen=True)
class Options:
    """The fill for removed pixels, and the class to explain."""

    explain: str = option(
        "predicted", "explain the `predicted` or the `target` class", choices=("predicted", "target"),
        needs="classes", adds=(("target", "labels"),),
    )  # fmt: skip
    fill: tuple[str, ...] = option(("black",), "fill for removed pixels: black, blur, mean", choices=FILLS, each="fill")
    memory_limit: float | None = option(
        None, "memory limit for one forward pass of perturbed images", metavar="GB", least=0.01, decides=False
    )


def _followed(config: Config) -> str:
    """The class whose probability is measured."""
    return "label" if config["explain"] == "target" else "predicted"


def _classes(scene: Scene, config: Config) -> Mapping[str, Classes]:
    if config["explain"] != "target":
        return {"predicted": scene.predicted}
    labels = torch.tensor([seen.label for seen in scene.seen if seen.label is not None])
    return {"predicted": scene.predicted, "label": labels}


def _score(scene: Scene, config: Config, found: Explained) -> list[Values]:
    """The score is for the predicted (or the labelled) class, whichever class the explainer explained."""
    name = _followed(config)
    images = scene.network.placed(scene.images)
    followed = scene.asked.targets[:, scene.asked.columns[name]]
    at_once = images_per_forward(scene.tape, config.options.memory_limit)
    fill = replacement(images, config["fill"], scene.network.preprocess)
    curves = measure(scene.forward, images, found.of(name), fill, followed, at_once, config["seed"])
    clean = scene.tape.logits.detach().double().softmax(1).cpu()
    explained = found.explained(name)
    return [
        {
            "label": seen.label,
            "predicted": int(scene.predicted[row]),
            "explained": explained[row],
            "clean_probability": float(clean[row, followed[row]]),
        }
        | {
            f"{direction}_{what}": steps[d, :, row].tolist()
            for d, direction in enumerate(DIRECTIONS)
            for what, steps in (("predicted", curves.predicted), ("probability", curves.probability))
        }
        for row, seen in enumerate(scene.seen)
    ]


def recognised(rows: pa.Table, direction: str, against: str) -> NDArray[np.float64]:
    """(n,10): whether each image was still recognised, clean first; NaN without a label."""
    predicted = floats(rows, "predicted")
    truth = floats(rows, "label") if against == "accuracy" else predicted
    hits = np.concatenate([predicted[:, None], lists(rows, f"{direction}_predicted")], 1) == truth[:, None]
    return np.where(np.isnan(truth)[:, None], np.nan, hits.astype(float))


def _area(direction: str, against: str) -> Callable[[pa.Table], Floats]:
    return lambda rows: mean(areas(recognised(rows, direction, against)))


METRICS = tuple(
    Metric(f"{direction} AUC, {against}", +1 if direction == "negative" else -1, _area(direction, against), scale=1)
    for against in ("accuracy", "agreement")
    for direction in DIRECTIONS
)


def _order_matters(rows: pa.Table) -> NDArray[np.float64]:
    least, most = (lists(rows, f"{direction}_probability").mean(1) for direction in DIRECTIONS)
    return np.asarray((1 + least - most) / 2)


def _panels(table: Table, rows: Mapping[str, pa.Table]) -> list[Panel]:
    found = []
    shown = [name for name in ("accuracy", "agreement") if any(name in metric.name for metric in table.metrics)]
    for against in shown:
        for direction in DIRECTIONS:
            first = "least" if direction == "negative" else "most"
            lines = {method: np.nanmean(recognised(part, direction, against), 0) for method, part in rows.items()}
            found.append(
                Panel(
                    f"{direction.capitalize()} perturbation ({table.config['fill']}): {table.data}",
                    f"{against}, %",
                    f"pixels removed, {first} relevant first, %",
                    (0.0, *(100 * fraction for fraction in FRACTIONS)),
                    lines={method: 100 * line for method, line in lines.items()},
                )
            )
    return found


def _notes(subject: Subject, items: Sequence[Item], config: Config) -> list[str]:
    if "classes" not in subject.offers or any(subject.label(item) is not None for item in items):
        return []
    if config["explain"] == "target":
        raise DataError(
            f"--explain target needs labels that are classes of the model, and {subject.dataset.name} has none"
        )
    return [f"{subject.dataset.name} has no labels that are classes of the model, so accuracy is not measured."]


_STEPS = {
    f"{direction}_{what}": kind
    for direction in DIRECTIONS
    for what, kind in (("predicted", "list<int32>"), ("probability", "list<float64>"))
}

register(
    Test(
        name="perturbation",
        question="does the network still recognise the class without the pixels that the map marks as irrelevant?",
        columns={"label": "int32", "predicted": "int32", "explained": "int32", "clean_probability": "float64"} | _STEPS,
        metrics=lambda config: METRICS,
        title=lambda config: f"Perturbation ({config['fill']}, {config['explain']} class explained)",
        remark=lambda config: (
            "Area under the curve over 0..90 % of the pixels removed, at most 90. Negative: least relevant first, "
            "higher is better; positive: most relevant first, lower is better. Accuracy compares with the label, "
            "agreement with the unperturbed prediction."
        ),
        options=Options,
        needs=frozenset({"head"}),
        constants={"fractions": FRACTIONS},
        classes=_classes,
        score=_score,
        notes=_notes,
        panels=_panels,
        picture_score=_order_matters,
        picture_score_name="how much the probability of the class depends on the order in which pixels are removed",
        chooses="deletion",
        place=10,
    )
)
