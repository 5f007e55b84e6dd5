"""Pointing: in a grid of images of different classes, the map of a class should lie on its own image.

Images that the network classifies confidently form a grid of 2x1, 2x2 or 3x3. The class of each cell is explained in
the whole grid. The scores are the share of the positive relevance in the right cell, and whether the maximum lies
there. Chance is 1 / cells.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from classlens.data.layouts import Item
from classlens.errors import ImageError
from classlens.evaluate.metrics import Metric, floats, mean
from classlens.evaluate.panels import comparison
from classlens.evaluate.registry import (
    Classes,
    Config,
    Prediction,
    Read,
    Seen,
    SettingsError,
    Subject,
    Test,
    Unit,
    Values,
    option,
    register,
)
from classlens.evaluate.scene import Explained, Scene
from classlens.files import text_hash

SHAPES = ("2x1", "2x2", "3x3")  # columns x rows


@dataclass(frozen=True)
class Cell:
    """One image of a grid, by its name in the data set, and its predicted class."""

    image: str
    target: int


Grid = tuple[Cell, ...]  # row by row


def cells(shape: str) -> tuple[int, int]:
    """'2x1' -> (1 row, 2 columns)."""
    columns, rows = shape.split("x")
    return int(rows), int(columns)


def plan(confident: Iterable[Cell], shape: str) -> list[Grid]:
    """Grids from images in order: each image goes into the first open grid that lacks its class, and is used once.

    Later images never change full grids, so a longer list only adds grids.
    """
    rows, columns = cells(shape)
    full: list[Grid] = []
    open_grids: list[list[Cell]] = []
    for cell in confident:
        grid = next((g for g in open_grids if all(cell.target != other.target for other in g)), None)
        if grid is None:
            grid = []
            open_grids.append(grid)
        grid.append(cell)
        if len(grid) == rows * columns:
            full.append(tuple(grid))
            open_grids.remove(grid)
    return full


def compose(pictures: Sequence[Tensor], shape: str, size: tuple[int, int]) -> Tensor:
    """Images (3,h,w) -> one (3,H,W). Each is scaled to cover its cell and cropped at the centre."""
    rows, columns = cells(shape)
    vertical, horizontal = edges(size[0], rows), edges(size[1], columns)
    canvas = pictures[0].new_empty(3, *size)
    for index, picture in enumerate(pictures):
        row, column = divmod(index, columns)
        top, bottom = vertical[row], vertical[row + 1]
        left, right = horizontal[column], horizontal[column + 1]
        canvas[:, top:bottom, left:right] = _cover(picture, bottom - top, right - left)
    return canvas


def edges(length: int, parts: int) -> list[int]:
    """The edges of the cells: 224 in 3 parts -> [0, 75, 149, 224]."""
    return [round(i * length / parts) for i in range(parts + 1)]


def scores(maps: Tensor, shape: str) -> tuple[Tensor, Tensor]:
    """Maps (cells,H,W), the k-th for the class in cell k -> share of positive relevance there, and hit; each (cells,).

    If several pixels have the maximum, the hit is the fraction of them in the cell, so a constant map scores chance. A
    map without positive values scores 0.
    """
    share, hit = maps.new_zeros(len(maps), dtype=torch.float64), maps.new_zeros(len(maps), dtype=torch.float64)
    for k, evidence in enumerate(maps.double()):
        highest = evidence == evidence.max()
        share[k] = share_in(evidence, shape, k)
        if (evidence > 0).any():
            hit[k] = highest[inside(evidence, shape, k)].sum().double() / highest.sum()
    return share, hit


def share_in(evidence: Tensor, shape: str, cell: int) -> Tensor:
    """The share of the positive part of a map (H,W) that lies in a cell; 0 if nothing is positive."""
    return share_on(evidence, inside(evidence, shape, cell))


def share_on(evidence: Tensor, place: Tensor | tuple[slice, slice]) -> Tensor:
    """The share of the positive part of a map (H,W) on a place (a mask, or slices); 0 if nothing is positive."""
    positive = evidence.double().clamp(min=0)
    return positive[place].sum() / positive.sum().clamp(min=torch.finfo(torch.float64).tiny)


def inside(evidence: Tensor, shape: str, cell: int) -> tuple[slice, slice]:
    """Where a cell lies in a map (H,W)."""
    rows, columns = cells(shape)
    vertical, horizontal = edges(evidence.shape[0], rows), edges(evidence.shape[1], columns)
    row, column = divmod(cell, columns)
    return slice(vertical[row], vertical[row + 1]), slice(horizontal[column], horizontal[column + 1])


def _cover(picture: Tensor, height: int, width: int) -> Tensor:
    scale = max(height / picture.shape[1], width / picture.shape[2])
    size = (max(height, round(picture.shape[1] * scale)), max(width, round(picture.shape[2] * scale)))
    if size != picture.shape[1:]:
        picture = F.interpolate(picture[None], size=size, mode="bilinear", antialias=True, align_corners=False)[0]
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    return picture[:, top : top + height, left : left + width]


# ---------------------------------------------------------------------------------------------------------- the test


@dataclass(frozen=True)
class Options:
    """The shapes of the grids, and which images they use."""

    shapes: tuple[str, ...] = option(SHAPES, "grids, columns x rows", each="shape")
    cells: str = option(
        "fit", "`fit` the grid into one input, or use `full` cells of that size", choices=("fit", "full")
    )
    confidence: float = option(0.5, "minimum probability of the class of an image")
    max_grids: int = option(500, "maximum number of grids per shape", least=1, decides=False)

    def __post_init__(self) -> None:
        for shape in self.shapes:
            if not re.fullmatch(r"[1-9]x[1-9]", shape) or shape == "1x1":
                raise SettingsError(f"a grid must be written as columns x rows, such as 2x1 or 3x3, not {shape!r}")


def _chance(config: Config) -> float:
    rows, columns = cells(config["shape"])
    return 100 / (rows * columns)


def _units(
    subject: Subject, items: Sequence[Item], config: Config, predictions: Mapping[str, Prediction]
) -> list[Unit]:
    return grids(items, config["shape"], config["confidence"], predictions)[: config.options.max_grids]


def grids(
    items: Sequence[Item], shape: str, confidence: float, predictions: Mapping[str, Prediction], mixed: bool = False
) -> list[Unit]:
    """The grids of one shape, from images whose prediction is confident and, if they have a label, correct.

    `mixed`: if there are too few classes for a grid, images of the same class may share one.
    """
    confident = []
    for item in items:
        said = predictions.get(item.name, Prediction(None, 0, 0.0))
        if said.confidence >= confidence and said.label in (None, said.predicted):
            confident.append(Cell(item.name, said.predicted))
    by_name = {item.name: item for item in items}
    planned = plan(confident, shape)
    if mixed and not planned:
        size = cells(shape)[0] * cells(shape)[1]
        planned = [tuple(confident[i : i + size]) for i in range(0, len(confident) - size + 1, size)]
    return [
        Unit(
            _grid_name(grid),
            tuple(by_name[cell.image] for cell in grid),
            tuple(cell.image for cell in grid),
            tuple(cell.target for cell in grid),
        )
        for grid in planned
    ]


def _grid_name(grid: Grid) -> str:
    return text_hash("\n".join(cell.image for cell in grid), 12)


def _compose(subject: Subject, unit: Unit, config: Config, read: Read) -> Seen:
    return Seen(composed(unit, config["shape"], config["cells"], read))


def composed(unit: Unit, shape: str, how: str, read: Read) -> Tensor:
    """The grid of a unit: `fit` into one input, or with `full` cells of that size."""
    try:
        pictures = [read(item).image for item in unit.items]
    except ImageError:
        raise ImageError("an image of its grid cannot be read") from None
    rows, columns = cells(shape)
    height, width = pictures[0].shape[1:]
    size = (height, width) if how == "fit" else (rows * height, columns * width)
    return compose(pictures, shape, size)


def _classes(scene: Scene, config: Config) -> Mapping[str, Classes]:
    """The class of each cell is explained in the whole grid."""
    return {"cells": [list(unit.classes) for unit in scene.units]}


def _score(scene: Scene, config: Config, found: Explained) -> list[Values]:
    values = []
    for row, unit in enumerate(scene.units):
        share, hit = scores(found.maps[row], config["shape"])
        values += [
            {"grid": unit.name, "cell": k, "explained": target, "share": float(share[k]), "hit": float(hit[k])}
            for k, target in enumerate(unit.classes)
        ]
    return values


register(
    Test(
        name="pointing",
        question="in a grid of images, does the map of a class lie on the image of that class?",
        columns={"grid": "string", "cell": "int32", "explained": "int32", "share": "float64", "hit": "float64"},
        metrics=lambda config: (
            Metric("share in the right cell", +1, lambda rows: mean(floats(rows, "share"))),
            Metric("hits of the maximum", +1, lambda rows: mean(floats(rows, "hit"))),
        ),
        title=lambda config: f"Pointing game {config['shape']}",
        remark=lambda config: f"In per cent. Chance is {_chance(config):.1f}.",
        options=Options,
        needs=frozenset({"predictions", "classes"}),
        units=_units,
        compose=_compose,
        classes=_classes,
        score=_score,
        nothing=lambda config, data: (
            f"There are too few confidently classified images of different classes in {data} for a grid of "
            f"{config['shape']}; lower --confidence or raise --limit."
        ),
        panels=lambda table, rows: [comparison(table, chance=_chance(table.config))],
        group="grid",
        picture_score=lambda rows: floats(rows, "share"),
        picture_score_name="the share in the right cell",
        chooses="grids",
        place=30,
    )
)
