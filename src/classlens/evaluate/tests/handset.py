"""Handset: a map of a network that was set by hand should say what each pixel contributes, with its sign.

The networks, their pictures and the exact contributions are in `classlens.evaluate.known`. A map is compared with
them up to its scale:

    sign      the share of the contributions whose objects have the right sign in the map
    place     the share of the map (by magnitude) on the very pixels that contribute
    ignored   the share on objects that the network provably ignores for this class
    amount    the overlap of the objects' signed shares in the map with their shares of the contributions

An object lies in a cell of 8x8 pixels alone. Its sign and its amount in the map are those of the sum over its cell, so
that a coarse or smooth map is not wrong about them; `place` is strict. A perfect map has sign, place and amount 1, and
ignored 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from classlens.data.layouts import Item
from classlens.evaluate.known import BUILDS, CELL, CLASSES, Picture, draw, loaded
from classlens.evaluate.metrics import Metric, floats, mean
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
)
from classlens.evaluate.scene import Explained, Scene, maps_of, seed_of
from classlens.evaluate.stats import Floats
from classlens.methods import resolve
from classlens.models.network import Network

if TYPE_CHECKING:
    import pyarrow as pa

SCORES = {"sign": +1, "place": +1, "ignored": -1, "amount": +1}


def scores(evidence: Tensor, picture: Picture, name: str) -> dict[str, float]:
    """A map (64,64) of a class of a picture -> its scores. An empty map has none of the contributions: 0 everywhere."""
    evidence, truth = evidence.double(), picture.truth[CLASSES.index(name)]
    size = evidence.abs()
    if not size.any():
        return dict.fromkeys(SCORES, 0.0)
    found, right = (_shares(by_cell(values)) for values in (evidence, truth))
    same = found.sign() == right.sign()
    there = by_cell(picture.image.sum(0).double()) > 0
    # Two signed distributions overlap where they have the same sign, by the smaller of the two.
    return {
        "sign": float(right.abs()[same].sum()),
        "place": float(size[truth != 0].sum() / size.sum()),
        "ignored": float(by_cell(size)[there & (right == 0)].sum() / size.sum()),
        "amount": float(found.abs().minimum(right.abs())[same].sum()),
    }


def by_cell(values: Tensor) -> Tensor:
    """(64,64) -> (8,8): the sum over each cell; a cell holds one object at most."""
    cells: Tensor = values.unflatten(1, (-1, CELL)).unflatten(0, (-1, CELL)).sum((1, 3))
    return cells


def _shares(values: Tensor) -> Tensor:
    return values / values.abs().sum().clamp(min=1e-300)


# ---------------------------------------------------------------------------------------------------------- the test


@dataclass(frozen=True)
class Options:
    """Which networks, and how many pictures."""

    networks: tuple[str, ...] = option(tuple(BUILDS), "networks set by hand", choices=tuple(BUILDS), each="network")
    ask: tuple[str, ...] = option(
        ("class", "logit"), "ask for a `class` as users do, or for its `logit` alone, without rivals",
        choices=("class", "logit"), each="ask",
    )  # fmt: skip
    drawings: int = option(12, "number of pictures", least=1, decides=False)


def _units(
    subject: Subject, items: Sequence[Item], config: Config, predictions: Mapping[str, Prediction]
) -> list[Unit]:
    """Pictures that are drawn: no image is read."""
    everything = tuple(range(len(CLASSES)))
    return [
        Unit(f"picture {i}", (), tuple(f"picture {i}: {name}" for name in CLASSES), everything)
        for i in range(config.options.drawings)
    ]


def _picture(unit: Unit, config: Config) -> Picture:
    return draw(1000 * config["seed"] + int(unit.name.split()[-1]))


def _compose(subject: Subject, unit: Unit, config: Config, read: Read) -> Seen:
    return Seen(_picture(unit, config).image)


def _classes(scene: Scene, config: Config) -> Mapping[str, Classes]:
    return {"all": [list(unit.classes) for unit in scene.units]}


def _score(scene: Scene, config: Config, found: Explained) -> list[Values]:
    maps = found.maps if config["ask"] == "class" else _of_logits(scene, config, found.method)
    values: list[Values] = []
    for row, unit in enumerate(scene.units):
        picture = _picture(unit, config)
        for k in unit.classes:
            judged = scores(maps[row, k], picture, CLASSES[k]) if maps is not None else dict.fromkeys(SCORES)
            drawn = judged["amount"] if config["ask"] == "class" else None
            values.append({"picture": unit.name, "explained": k, "drawn": drawn, **judged})
    return values


def _of_logits(scene: Scene, config: Config, method: str) -> Tensor | None:
    """(B,classes,64,64): maps of the logits themselves; None for a method that explains classes only.

    Some methods contrast a class with its rivals. A multiple of a logit is no class, so it has none.
    """
    if not resolve(method)[0].scalars:
        return None
    seed = seed_of(config["seed"], method)

    def twice(k: int) -> Callable[[Tensor], Tensor]:
        return lambda logits: 2 * logits[k]

    with scene.watch("further method"):
        maps = [maps_of(scene.network, scene.tape, twice(k), method, seed) for k in range(len(CLASSES))]
    return torch.cat(maps, 1)


def _mean_of(score: str, only: int | None = None) -> Callable[[pa.Table], Floats]:
    """The mean of a score, over all classes or of one."""

    def columns(rows: pa.Table) -> Floats:
        mine = True if only is None else floats(rows, "explained") == only
        return mean(np.where(mine, floats(rows, score), np.nan))

    return columns


def _metrics(config: Config) -> tuple[Metric, ...]:
    overall = [Metric(score, better, _mean_of(score)) for score, better in SCORES.items()]
    return (*overall, *(Metric(f"amount, {name}", +1, _mean_of("amount", k)) for k, name in enumerate(CLASSES)))


TEST = register(
    Test(
        name="handset",
        question="on networks that were set by hand, does the map say what each pixel contributes?",
        columns={"picture": "string", "explained": "int32", "drawn": "float64"} | dict.fromkeys(SCORES, "float64"),
        metrics=_metrics,
        title=lambda config: f"Set by hand ({config['network']}, asked for the {config['ask']})",
        remark=lambda config: (
            "In per cent: how much of the sign, the place and the amount of each object's contribution is right, and "
            "the share on objects that the network ignores. The right answers are 100, 100, 100 and 0."
        ),
        options=Options,
        needs=frozenset({"classes"}),
        constants={"version": 1},
        units=_units,
        compose=_compose,
        network=lambda subject, config: Network(loaded(config["network"])),
        own="classlens.evaluate.known:loaded",
        classes=_classes,
        score=_score,
        group="picture",
        picture_score=lambda rows: floats(rows, "drawn"),
        picture_score_name="the amount that is right",
        proof=("amount",),
        place=5,
    )
)
