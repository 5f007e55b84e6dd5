"""Sanity: a map must change when what it explains changes.

- Parameter randomisation (Adebayo et al. 2018): the weights of the layers are shuffled, from the top downwards. A
  method whose maps do not change shows the edges of the image, not the network.
- Logit randomisation (Sixt et al. 2020): another class must give another map.

Maps are compared by SSIM, by rank correlation and by the orientation of their gradients (HOG). 1 means identical, 0
unrelated. A map and its negative count as identical: LRP's map of a class with a negative logit is that of another
class with the sign flipped, and must not count as class-specific.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from classlens.core.capture import Tape
from classlens.data.layouts import Item
from classlens.errors import ClasslensError, ModelError
from classlens.evaluate.metrics import Metric, floats, lists, mean
from classlens.evaluate.panels import Panel, comparison
from classlens.evaluate.registry import (
    Classes,
    Config,
    Prediction,
    Subject,
    Test,
    Unit,
    Values,
    every_picture,
    option,
    register,
)
from classlens.evaluate.scene import Explained, Scene, maps_of, number, seed_of
from classlens.evaluate.stats import Floats

if TYPE_CHECKING:
    import pyarrow as pa

    from classlens.evaluate.tables import Table

STAGES = (0.0, 0.25, 0.5, 0.75, 1.0)  # share of the randomised layers; 0: only the topmost
MEASURES = ("ssim", "rank", "hog")
_WINDOW = 7
_BINS = 9
_CELL = 16


def similarities(a: Tensor, b: Tensor) -> Tensor:
    """Two batches of maps (B,H,W) -> (B,3): SSIM, rank correlation, HOG similarity; up to the maps' sign."""
    first, second = unit(a.float()), unit(b.float())
    structure = torch.maximum(*ssim(first, second))
    return torch.stack([structure.double(), rank_correlation(a, b).abs(), hog_similarity(first, second)], 1)


def unit(maps: Tensor) -> Tensor:
    """Scale each map to [-1,1], keeping zero; the largest 0.5 % are clipped, so that outliers do not set the scale."""
    size = maps.flatten(1).abs()
    top = size.kthvalue(max(1, round(0.995 * size.shape[1])), dim=1).values
    top = torch.where(top > 0, top, size.amax(1)).view(-1, 1, 1)
    scaled: Tensor = maps / top.masked_fill(top == 0, 1.0)
    return scaled.clamp(-1, 1)


def ssim(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Structural similarity (Wang et al. 2004) of a with b, and of a with -b; each (B,).

    7x7 windows, for values in [-1,1]; the mean over all windows that lie inside.
    """
    c1, c2 = (0.01 * 2) ** 2, (0.03 * 2) ** 2
    mean_a, mean_b = _windowed(a), _windowed(b)
    count = min(_WINDOW, *a.shape[1:]) ** 2
    unbiased = count / max(count - 1, 1)
    var_a = unbiased * (_windowed(a * a) - mean_a**2)
    var_b = unbiased * (_windowed(b * b) - mean_b**2)
    covariance = unbiased * (_windowed(a * b) - mean_a * mean_b)
    both = (mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2)
    same = (2 * mean_a * mean_b + c1) * (2 * covariance + c2) / both
    turned = (-2 * mean_a * mean_b + c1) * (-2 * covariance + c2) / both
    return same.mean((1, 2)), turned.mean((1, 2))


def rank_correlation(a: Tensor, b: Tensor) -> Tensor:
    """Spearman correlation: of the ranks of the pixels, with mean ranks for ties. 0 if a map is constant."""
    return correlation(_average_ranks(a.flatten(1)), _average_ranks(b.flatten(1)))


def hog_similarity(a: Tensor, b: Tensor) -> Tensor:
    """Correlation of histograms of oriented gradients."""
    return correlation(hog(a).flatten(1), hog(b).flatten(1))


def hog(maps: Tensor) -> Tensor:
    """(B,H,W) -> (B,H//16,W//16,9): gradient magnitude by orientation in cells of 16x16 (Dalal, Triggs 2005)."""
    side = min(_CELL, *maps.shape[1:])
    rows, columns = maps.shape[1] // side, maps.shape[2] // side
    down, right = torch.zeros_like(maps), torch.zeros_like(maps)
    down[:, 1:-1] = maps[:, 2:] - maps[:, :-2]
    right[:, :, 1:-1] = maps[:, :, 2:] - maps[:, :, :-2]
    down, right = (g[:, : rows * side, : columns * side] for g in (down, right))
    angle = torch.rad2deg(torch.atan2(down, right)) % 180
    orientation = (angle / (180 / _BINS)).long().clamp(max=_BINS - 1)
    cell = (torch.arange(rows * side) // side)[:, None] * columns + torch.arange(columns * side) // side
    place = cell * _BINS + orientation
    size = torch.hypot(down, right)
    counts = [
        torch.bincount(p.flatten(), m.flatten(), rows * columns * _BINS) for p, m in zip(place, size, strict=True)
    ]
    histograms: Tensor = torch.stack(counts).view(-1, rows, columns, _BINS) / side**2
    return histograms


def layers(model: nn.Module, tape: Tape) -> list[str]:
    """Names of the modules that own weights, in the order in which the forward pass used them."""
    own = [name for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))]
    first: dict[str, int] = {}
    for position, node in enumerate(tape.nodes):
        first.setdefault(node.module, position)
    # A module without a recorded operation (a parent uses its weights) keeps its position by name.
    last = len(tape.nodes)
    return sorted(own, key=lambda name: first.get(name, last))


def cascade(model: nn.Module, names: Sequence[str], seed: int, stages: Sequence[float] = STAGES) -> Iterator[nn.Module]:
    """A copy of the model with more and more randomised layers, from the top; the same object at each stage.

    The values of each tensor are shuffled: this destroys what was learnt but keeps the magnitudes, so that activations
    neither vanish nor explode, as they would with new weights and the old normalisation statistics.
    """
    network = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    waiting = list(names)
    shuffled: set[int] = set()
    for stage in stages:
        keep = len(names) - max(1, round(stage * len(names)))
        while len(waiting) > keep:
            _shuffle(network.get_submodule(waiting.pop()), generator, shuffled)
        yield network


@torch.no_grad()
def _shuffle(module: nn.Module, generator: torch.Generator, done: set[int]) -> None:
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    for tensor in tensors:
        if tensor.is_floating_point() and id(tensor) not in done:
            done.add(id(tensor))  # tied weights are shuffled once
            order = torch.randperm(tensor.numel(), generator=generator).to(tensor.device)
            tensor.copy_(tensor.flatten()[order].view_as(tensor))


def _windowed(maps: Tensor) -> Tensor:
    """The mean of each window: first along columns, then along rows."""
    side = min(_WINDOW, *maps.shape[1:])
    return F.avg_pool2d(F.avg_pool2d(maps[:, None], (side, 1), stride=1), (1, side), stride=1)[:, 0]


def _average_ranks(values: Tensor) -> Tensor:
    """(B,N) -> ranks; equal values share their mean rank."""
    result = np.empty(values.shape)
    for row, numbers in enumerate(values.detach().cpu().numpy()):
        order = np.argsort(numbers)
        ordered = numbers[order]
        group = np.concatenate([[0], np.cumsum(ordered[1:] != ordered[:-1])])
        sizes = np.bincount(group)
        result[row, order] = (np.cumsum(sizes) - (sizes + 1) / 2)[group]
    return torch.from_numpy(result)


def correlation(a: Tensor, b: Tensor) -> Tensor:
    """(B,N) and (B,N) -> the correlation (B,) of each row; 0 if one of them is constant."""
    a, b = (x.double() - x.double().mean(1, keepdim=True) for x in (a, b))
    size = a.norm(dim=1) * b.norm(dim=1)
    return torch.where(size > 0, (a * b).sum(1) / size.masked_fill(size == 0, 1.0), torch.zeros_like(size))


# ---------------------------------------------------------------------------------------------------------- the test


@dataclass(frozen=True)
class Options:
    """Each image is explained at every stage, so fewer images are used."""

    sanity_images: int = option(50, "use at most N images", least=1, decides=False)


def _units(
    subject: Subject, items: Sequence[Item], config: Config, predictions: Mapping[str, Prediction]
) -> list[Unit]:
    return every_picture(subject, items[: config.options.sanity_images], config, predictions)


def _classes(scene: Scene, config: Config) -> Mapping[str, Classes]:
    """The predicted class and another class, the same in every run."""
    count = scene.network.classes
    if count < 2:
        raise ModelError("the sanity test compares two classes; the model has one")
    drawn = torch.tensor([number(config["seed"], name) % (count - 1) for name in scene.names])
    return {"predicted": scene.predicted, "other": drawn + (drawn >= scene.predicted)}


def _score(scene: Scene, config: Config, found: Mapping[str, Explained]) -> Iterator[tuple[str, list[Values]]]:
    """The randomised networks are shared by all methods."""
    similar: dict[str, list[Tensor]] = {method: [] for method in found}
    names = layers(scene.network.module, scene.tape)
    for module in cascade(scene.network.module, names, config["seed"], config["stages"]):
        for method, measured in _compared(scene, config, module, found).items():
            similar[method].append(measured)
    for method, maps in found.items():
        yield method, _values(maps, torch.stack(similar[method]))


def _compared(scene: Scene, config: Config, module: nn.Module, found: Mapping[str, Explained]) -> dict[str, Tensor]:
    """Similarity (B,3) of each method's maps to those of a randomised network; NaN if that gives no map."""
    nothing = torch.full((len(scene.units), len(MEASURES)), torch.nan, dtype=torch.float64)
    similar = dict.fromkeys(found, nothing)
    try:
        with scene.watch("further forward"):
            tape = scene.network.record(scene.images, module)
    except ClasslensError:  # a random network may give NaN
        return similar
    for method, original in found.items():
        targets = scene.asked.targets[:, scene.asked.columns["predicted"], None]
        seed = seed_of(config["seed"], method)
        try:
            with scene.watch("further method"):
                other = maps_of(scene.network, tape, targets, method, seed, module)[:, 0]
        except ClasslensError:
            continue
        measured = similarities(original.of("predicted"), torch.nan_to_num(other))
        similar[method] = torch.where(torch.isfinite(other).all(2).all(1, keepdim=True), measured, nothing)
    return similar


def _values(found: Explained, stages: Tensor) -> list[Values]:
    """`stages` (stages,B,3): similarity to the maps of randomised networks."""
    classes = similarities(found.of("predicted"), found.of("other"))  # (B,3)
    predicted, other = found.explained("predicted"), found.explained("other")
    return [
        {"explained": predicted[row], "other": other[row]}
        | {name: stages[:, row, i].tolist() for i, name in enumerate(MEASURES)}
        | {f"class_{name}": float(classes[row, i]) for i, name in enumerate(MEASURES)}
        for row in range(len(predicted))
    ]


def _last_stage(measure: str) -> Callable[[pa.Table], Floats]:
    return lambda rows: mean(lists(rows, measure)[:, -1])


def _other_class(measure: str) -> Callable[[pa.Table], Floats]:
    return lambda rows: mean(floats(rows, f"class_{measure}"))


def _panels(table: Table, rows: Mapping[str, pa.Table]) -> list[Panel]:
    names = {"ssim": "SSIM", "rank": "rank correlation", "hog": "HOG similarity"}
    shares = [100 * stage for stage in table.config["stages"]]
    # "no layer" and "only the topmost layer" would both be at 0
    x, ticks = (-10.0, *shares), ("none", "top", *(f"{share:.0f}" for share in shares[1:]))
    found = []
    for measure in MEASURES:
        lines = {method: np.array([1.0, *_means(lists(part, measure))]) for method, part in rows.items()}
        found.append(
            Panel(
                f"Randomised layers: {table.data}", names[measure], "layers randomised from the top, %", x, ticks, lines
            )
        )
    return [*found, comparison(table, "other class", "similarity")]


def _means(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The mean of each column without missing values; NaN if all are missing."""
    there = ~np.isnan(values).all(0)
    means = np.full(values.shape[1], np.nan)
    means[there] = np.nanmean(values[:, there], 0)
    return means


register(
    Test(
        name="sanity",
        question="does the map change with the network's weights, and with the class?",
        columns={"explained": "int32", "other": "int32"}
        | dict.fromkeys(MEASURES, "list<float64>")
        | {f"class_{measure}": "float64" for measure in MEASURES},
        metrics=lambda config: tuple(
            Metric(f"{what}, {measure}", -1, columns(measure), scale=1)
            for what, columns in (("random network", _last_stage), ("other class", _other_class))
            for measure in MEASURES
        ),
        title=lambda config: "Sanity",
        remark=lambda config: (
            "Similarity to the map of a network with all weights shuffled, and to the map of another class, ignoring "
            "signs; lower is better. A method that ignores the network, or the class, is near 1."
        ),
        options=Options,
        needs=frozenset({"classes"}),
        constants={"stages": STAGES},
        units=_units,
        classes=_classes,
        score_together=_score,
        panels=_panels,
        place=40,
    )
)
