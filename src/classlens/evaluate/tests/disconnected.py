"""Disconnected: in a grid of images of which the head sees only one, the map should stay there.

DiFull and DiPart of Rao, Böhle and Schiele (CVPR 2022). Images form a grid as in the pointing game. The class of the
first image is explained by a head that is connected to this cell alone:

    full    each image goes through the network on its own; the feature maps are put side by side
    part    the grid goes through the network as one image, so features near the edge see a little of their neighbours

Evidence in another cell is wrong by construction with `full`, and nearly so with `part`. The map is made at three
depths: at the input, at the last feature map that is at most 8 times smaller, and at the one that the head pools. The
score is the share of the positive relevance in the first cell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from classlens.core.capture import placed
from classlens.data.layouts import Item
from classlens.errors import DataError, ModelError
from classlens.evaluate.detour import Change, Detour, cut_at, survey
from classlens.evaluate.metrics import Metric, floats, mean
from classlens.evaluate.panels import comparison
from classlens.evaluate.registry import (
    Classes,
    Config,
    Prediction,
    Read,
    Seen,
    Subject,
    Test,
    Unit,
    Values,
    option,
    register,
    variants_of_fields,
)
from classlens.evaluate.scene import Explained, Scene
from classlens.evaluate.tests import pointing
from classlens.models.network import Network, input_size

KINDS = ("full", "part")
DEPTHS = ("input", "middle", "final")
MIDDLE = 8  # times smaller than the input
SIDE = 2  # cells along each side
SPREADS = "fullgrad"  # lays the bias of a layer that reads a batch of cells over the whole grid: not what it says


def stitched(cells: Tensor) -> Tensor:
    """(B*4,C,h,w) -> (B,C,2h,2w): the cells of each grid, row by row."""
    grids: Tensor = cells.unflatten(0, (-1, SIDE, SIDE)).permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)
    return grids


def unstitched(grids: Tensor) -> Tensor:
    """The inverse of `stitched`."""
    cells: Tensor = grids.unflatten(3, (SIDE, -1)).unflatten(2, (SIDE, -1)).permute(0, 2, 4, 1, 3, 5).flatten(0, 2)
    return cells


def even(grids: Tensor) -> Tensor:
    """Without the last row and column of a feature map that does not divide into cells."""
    height, width = (side // SIDE * SIDE for side in grids.shape[2:])
    return grids[:, :, :height, :width]


class Disconnected(nn.Module):
    """A network that reads a grid of images, or its features at some depth; its head sees the first cell alone.

    >>> net = Disconnected(model, "full", "middle", (224, 224))
    >>> logits = net(net.features(grid))                # grid (B,3,448,448)
    """

    def __init__(self, model: nn.Module, kind: str, depth: str, size: tuple[int, int]) -> None:
        super().__init__()
        self.model = model
        self._whole = kind == "part"
        self._input = depth == "input"
        probe = placed(model, torch.rand(1, 3, *size, generator=torch.Generator().manual_seed(0)))
        found = survey(model, probe)
        self._final = found.final
        self.stacks = kind == "full" or found.final != found.pooled  # layers with biases see the cells as a batch
        self._start = cut_at(model, probe, found, MIDDLE) if depth == "middle" else found.final
        self._size = size

    def features(self, grids: Tensor) -> Tensor:
        """What the network reads: the grids, or their features at its depth."""
        if self._input:
            return grids
        kept: list[Tensor] = []

        def keep(features: Tensor) -> Tensor:
            kept.append(features.clone())
            return features

        images = self._cells(grids)
        with torch.no_grad(), Detour({self._start: keep}):
            self.model(images)
        return self._grids(kept[0])

    def forward(self, x: Tensor) -> Tensor:
        changes: dict[int, Change] = {self._final: lambda cells: unstitched(even(self._grids(cells)))}
        images = self._cells(x) if self._input else x.new_zeros(len(x), 3, *self._size)
        if not self._input:  # the calls before this depth run on empty images, and their result is replaced by x
            changes[self._start] = lambda _: unstitched(even(x)) if self._start == self._final else self._cells(x)
        with Detour(changes):
            logits: Tensor = self.model(images)
        # The head reads each cell as an image of its own, and only the first one's logits go on. A slice of the feature
        # map would do the same, but methods that look for the last feature map would take the slice for the whole grid.
        of_first: Tensor = logits.unflatten(0, (-1, SIDE**2))[:, 0]
        return of_first

    def _cells(self, grids: Tensor) -> Tensor:
        """As the network gets them: the grid itself, or each of its cells."""
        return grids if self._whole else unstitched(grids)

    def _grids(self, cells: Tensor) -> Tensor:
        return cells if self._whole else stitched(cells)


# ---------------------------------------------------------------------------------------------------------- the test


@dataclass(frozen=True)
class Options:
    """Which of the two, at which depths, and from which images."""

    kinds: tuple[str, ...] = option(
        KINDS, "connect cells in no layer, or in all but the head", choices=KINDS, each="kind"
    )
    depths: tuple[str, ...] = option(DEPTHS, "depths of the maps", choices=DEPTHS, each="depth")
    confidence: float = option(0.5, "minimum probability of the class of an image")
    max_grids: int = option(500, "maximum number of grids per shape", least=1, decides=False)


def _variants(options: Options, subject: Subject) -> list[Values]:
    if "classes" in subject.offers:
        try:
            survey(subject.network.module, subject.network.placed(torch.zeros(1, 3, *_size(subject.network))))
        except ModelError as error:
            raise DataError(str(error)) from error
    return variants_of_fields(options, subject)


def _units(
    subject: Subject, items: Sequence[Item], config: Config, predictions: Mapping[str, Prediction]
) -> list[Unit]:
    """The grids of the pointing game; the class of the first image is explained.

    Other cells are wrong whatever they show, so they may show the same class where a data set has few classes.
    """
    grids = pointing.grids(items, f"{SIDE}x{SIDE}", config["confidence"], predictions, mixed=True)
    chosen = grids[: config.options.max_grids]
    return [replace(unit, rows=unit.rows[:1], classes=unit.classes[:1]) for unit in chosen]


def _size(network: Network) -> tuple[int, int]:
    return input_size(network.preprocess)


def _network(subject: Subject, config: Config) -> Network:
    network = subject.network
    module = Disconnected(network.module, config["kind"], config["depth"], _size(network))
    built = Network(replace(network.loaded, model=module.eval()))
    built.preprocess = network.preprocess
    return built


def _compose(subject: Subject, unit: Unit, config: Config, read: Read) -> Seen:
    grid = pointing.composed(unit, f"{SIDE}x{SIDE}", "full", read)
    module = subject.network.module
    assert isinstance(module, Disconnected)
    return Seen(module.features(subject.network.placed(grid[None]))[0].cpu())


def _classes(scene: Scene, config: Config) -> Mapping[str, Classes]:
    return {"first": torch.tensor([unit.classes[0] for unit in scene.units])}


def _score(scene: Scene, config: Config, found: Explained) -> list[Values]:
    module = scene.network.module
    assert isinstance(module, Disconnected)
    shares: list[float | None] = [
        float(pointing.share_in(evidence, f"{SIDE}x{SIDE}", 0)) for evidence in found.of("first")
    ]
    if module.stacks and found.method.partition("(")[0] == SPREADS:
        shares = [None] * len(shares)
    at_input = config["depth"] == "input"  # features cannot be drawn
    return [
        {"explained": k, "share": share, "drawn": share if at_input else None}
        for k, share in zip(found.explained("first"), shares, strict=True)
    ]


register(
    Test(
        name="disconnected",
        question="in a grid of which the head sees one cell, does the map stay in that cell?",
        columns={"explained": "int32", "share": "float64", "drawn": "float64"},
        metrics=lambda config: (Metric("share in the cell", +1, lambda rows: mean(floats(rows, "share"))),),
        title=lambda config: f"{'DiFull' if config['kind'] == 'full' else 'DiPart'}, {config['depth']}",
        remark=lambda config: (
            "Share of the positive relevance in the cell that the head is connected to, in per cent. "
            + ("Everything else is wrong by construction." if config["kind"] == "full" else "Almost all else is wrong.")
            + f" Chance is {100 / SIDE**2:.0f}."
        ),
        options=Options,
        needs=frozenset({"predictions", "classes"}),
        variants=_variants,
        constants={"version": 2},
        units=_units,
        network=_network,
        compose=_compose,
        classes=_classes,
        score=_score,
        nothing=lambda config, data: (
            f"There are too few confidently classified images in {data} for a grid; "
            "lower --confidence or raise --limit."
        ),
        panels=lambda table, rows: [comparison(table, chance=100 / SIDE**2)],
        picture_score=lambda rows: floats(rows, "drawn"),
        picture_score_name="the share in the first cell",
        proof=("share in the cell",),
        place=32,
    )
)
