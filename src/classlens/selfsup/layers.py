"""Maps through the probes of a network, stage by stage, and how well they lie on the object.

>>> scored = segmentation_by_stage(probed, open_dataset("data/voc"), methods=("agf",), limit=200)
>>> layers_figure(probed, scored).savefig("layers.png")
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from classlens.data.labels import folded
from classlens.data.layouts import Dataset, Item
from classlens.data.masks import IGNORE, Mask
from classlens.errors import DataError, ImageError, NotFiniteError
from classlens.evaluate.stats import Estimate
from classlens.evaluate.store import arrow
from classlens.evaluate.tests.segmentation import METRICS, foreground_scores
from classlens.evaluate.worker import framed_mask
from classlens.explanation import Explanation, explain
from classlens.methods import resolve
from classlens.models import Preprocess
from classlens.models.network import short_name
from classlens.progress import Progress, silent
from classlens.render import figure, probability_text
from classlens.selfsup.probes import Probed
from classlens.training.data import whole_view

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#e4202c", "#1f6fe0", "#009e73", "#e69f00", "#9b5de5", "#8c564b")


@dataclass(frozen=True)
class Scored:
    """The segmentation scores of one method through the probe of one stage."""

    stage: str
    method: str
    scores: tuple[Estimate, ...]  # one for each of METRICS


@dataclass(frozen=True)
class _Seen:
    """A network input with its target and its mask."""

    image: Tensor  # (3,H,W)
    target: int | None  # a class of the probes; None: the most likely class of each probe
    mask: Mask  # 0, 1 (the object), 255


def segmentation_by_stage(
    probed: Probed,
    dataset: Dataset,
    methods: Sequence[str] = ("agf",),
    limit: int | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> tuple[Scored, ...]:
    """Explain each image through the probe of each stage, and compare the maps with its mask.

    If the classes of the masks are those of the probes, the class of the largest object is explained and its pixels are
    the ground truth. Otherwise the most likely class is explained and all objects are the ground truth.
    """
    if not dataset.has_masks:
        raise DataError(f"{dataset.name} has no masks to score maps with: give a data set with masks, --masks")
    items = dataset.select(limit, seed)
    probes = {found.stage.name: probed.probe(found.stage) for found in probed.stages}
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {(s, m): [] for s in probes for m in methods}
    for done, item in enumerate(items, 1):
        seen = _look(dataset, item, probed)
        if seen is not None:
            for stage, method in rows:
                try:
                    evidence = explain(probes[stage], seen.image[None], targets=seen.target, method=method).maps[0, 0]
                except NotFiniteError:  # the table shows the number of images behind each mean
                    continue
                scores = foreground_scores(evidence.cpu().numpy(), seen.mask, resolve(method)[0].signed)
                rows[stage, method].append(asdict(scores))
        progress("segmentation through the probes", done, len(items))
    if not any(rows.values()):
        raise DataError(f"{dataset.name}: no image with an object in its mask could be read")
    return tuple(
        Scored(stage, method, tuple(metric.estimate(arrow().Table.from_pylist(found), seed) for metric in METRICS))
        for (stage, method), found in rows.items()
    )


def _look(dataset: Dataset, item: Item, probed: Probed) -> _Seen | None:
    """None for an image that cannot be read or has no labelled object."""
    preprocess: Preprocess = probed.model.preprocess
    try:
        picture = dataset.picture(item)
        mask = framed_mask(dataset, item, picture, preprocess)
        image = preprocess(picture)
    except ImageError:
        return None
    sizes = np.bincount(mask[(mask != IGNORE) & (mask > 0)], minlength=1)
    if not sizes.any():
        return None
    known = [folded(label) for label in probed.labels]
    if dataset.classes is None or not {folded(name) for name in dataset.classes} <= set(known):
        return _Seen(image, None, np.where((mask != IGNORE) & (mask > 0), 1, mask).astype(np.uint8))
    largest = int(sizes.argmax())
    only = np.where(mask == IGNORE, IGNORE, mask == largest).astype(np.uint8)
    return _Seen(image, known.index(folded(dataset.classes[largest - 1])), only)


def segmentation_table(scored: Sequence[Scored]) -> str:
    """CSV text: a row for each stage and method, each score with its 95 % interval."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    columns = [f"{metric.name}{end}" for metric in METRICS for end in ("", " low", " high")]
    writer.writerow(["stage", "method", "pictures", *columns])
    for row in scored:
        values = [f"{value:.3f}" for e in row.scores for value in (e.value, e.low, e.high)]
        writer.writerow([row.stage, row.method, row.scores[0].n, *values])
    return buffer.getvalue()


# ------------------------------------------------------------------------------------------------------- figures


def layers_figure(probed: Probed, scored: Sequence[Scored] = ()) -> Figure:
    """The score of the probes by stage, and each segmentation score by stage with a line for each method."""
    from matplotlib.figure import Figure

    shown = METRICS if scored else ()
    fig = Figure(figsize=(3.3 * (1 + len(shown)), 3.4), layout="constrained", facecolor="white", dpi=130)
    first, *others = fig.subplots(1, 1 + len(shown), squeeze=False)[0]
    names = [found.stage.name for found in probed.stages]
    short = _short(names)
    values = [100 * found.score for found in probed.stages]
    first.plot(short, values, color="#000000", marker="o")
    first.axhline(100 * probed.chance, color="#888888", ls="--", lw=1)
    first.text(len(names) - 1, 100 * probed.chance, "chance", ha="right", va="bottom", fontsize=9, color="#555555")
    _finish(first, f"probe: held-out {probed.score_name}, %")
    for column, (axes, metric) in enumerate(zip(others, shown, strict=True)):
        for colour, method in zip(_COLOURS, dict.fromkeys(row.method for row in scored), strict=False):
            line = [row.scores[column] for row in scored if row.method == method]
            axes.plot(short, [e.value for e in line], color=colour, marker="o", ms=4, label=method)
            axes.fill_between(short, [e.low for e in line], [e.high for e in line], color=colour, alpha=0.15, lw=0)
        _finish(axes, f"segmentation: {metric.name}, %")
    if others:
        others[0].legend(frameon=False, fontsize=9)
    return fig


def maps_figure(probed: Probed, method: str = "agf", count: int = 6) -> Figure:
    """Held-out images, one per row, with the map of one of their classes through the probe of each stage."""
    probes = [probed.probe(found.stage) for found in probed.stages]
    data = probed.data
    chosen = data.val[:: max(1, len(data.val) // count)][:count]
    views = [whole_view(example, data, probed.model.preprocess) for example in chosen]
    views = [(image, labels) for image, labels in views if labels.any()]  # a crop may contain none of the labels
    images = torch.stack([image for image, _ in views])
    targets = torch.stack([labels.argmax() for _, labels in views])
    found = [explain(probe, images, targets=targets, method=method) for probe in probes]
    return _draw_maps(found, targets, probed)


def _draw_maps(found: Sequence[Explanation], targets: Tensor, probed: Probed) -> Figure:
    """Columns are stages, drawn like the maps of several classes."""
    short = _short([stage.stage.name for stage in probed.stages])
    together = Explanation(
        maps=torch.cat([e.maps for e in found], 1),
        targets=targets[:, None].expand(-1, len(found)),
        logits=found[-1].logits,
        pictures=found[0].pictures,
        labels=probed.labels,
        method=found[0].method,
        signed=found[0].signed,
        report=found[0].report,
        model=f"linear probes of {short_name(probed.model.name)}",
    )
    fig = figure(together)
    for row, target in enumerate(targets.tolist()):
        panels = fig.axes[row * (1 + len(found)) : (row + 1) * (1 + len(found))]
        panels[0].set_title(probed.labels[target], loc="left", fontsize=10.5, fontweight="bold", parse_math=False)
        for axes, stage, e in zip(panels[1:], short, found, strict=True):
            axes.set_title(stage, loc="left", fontsize=10.5, fontweight="bold", parse_math=False)
            axes.set_title(probability_text(e.probability(row, 0)), loc="right", fontsize=9.5, color="#666666")
    return fig


def _finish(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, parse_math=False)
    axes.tick_params(axis="x", labelrotation=30, labelsize=9)
    axes.grid(color="#dddddd", lw=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _short(names: Sequence[str]) -> list[str]:
    """Names without their common prefix: features.conv1, features.conv2 -> conv1, conv2."""
    parts = [name.split(".") for name in names]
    common = 0
    while all(len(part) > common + 1 for part in parts) and len({part[common] for part in parts}) == 1:
        common += 1
    return [".".join(part[common:]) for part in parts]
