"""Quantus: nine metrics of the library Quantus, computed by Quantus itself on the maps.

A second opinion by other people's code (`pip install quantus`; Hedström et al., JMLR 2023). The metrics need many
forward passes, some of them many maps, so few images are used, one at a time, and with the settings below.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from classlens.data.layouts import Item
from classlens.data.masks import IGNORE
from classlens.errors import DataError
from classlens.evaluate.metrics import Metric, floats, mean
from classlens.evaluate.registry import (
    Config,
    Prediction,
    Subject,
    Test,
    Unit,
    Values,
    every_picture,
    option,
    register,
    variants_of_fields,
)
from classlens.evaluate.scene import Explained, Scene, maps_of, seed_of
from classlens.evaluate.stats import Floats
from classlens.models._torchvision import import_torchvision

if TYPE_CHECKING:
    import pyarrow as pa

STEPS = 16  # of pixel flipping: a 16th of the pixels at a time; as many pixels are in a subset of the correlation
RUNS = 30  # subsets of the faithfulness correlation
PERCENTAGES = (10, 50, 90)  # of ROAD
SAMPLES = 4  # neighbours of an image for the Lipschitz estimate


@dataclass(frozen=True)
class Judge:
    """A metric of Quantus."""

    name: str  # of its class
    better: int
    settings: Callable[[int], dict[str, Any]] = lambda pixels: {}
    masked: bool = False  # it needs a mask
    result: Callable[[Any], float] = lambda found: float(found[0])


def _road_settings(pixels: int) -> dict[str, Any]:
    """Quantus 0.6 orders a map once for each colour channel, but imputes pixels: the places are reduced to pixels."""
    impute = library().functions.perturb_func.noisy_linear_imputation
    return {
        "percentages": [3 * percentage for percentage in PERCENTAGES],
        "perturb_func": lambda arr, indices, **settings: impute(arr, np.unique(indices % pixels), **settings),
    }


JUDGES = {
    "faithfulness correlation": Judge(
        "FaithfulnessCorrelation", +1,
        lambda pixels: {"nr_runs": RUNS, "subset_size": pixels // STEPS, "return_aggregate": False},
    ),
    "pixel flipping": Judge(
        "PixelFlipping", -1, lambda pixels: {"features_in_step": pixels // STEPS},
        result=lambda found: float(np.mean(found[0])),  # of the curve; Quantus 0.6 cannot integrate with numpy 2.4
    ),
    "road": Judge(
        "ROAD", -1, _road_settings,
        result=lambda found: float(np.mean(list(found.values()))),
    ),
    "rank accuracy": Judge("RelevanceRankAccuracy", +1, masked=True),
    "mass accuracy": Judge("RelevanceMassAccuracy", +1, masked=True),
    "mprt": Judge("MPRT", -1, lambda pixels: {"skip_layers": True, "return_last_correlation": True}),
    "sparseness": Judge("Sparseness", 0),
    "complexity": Judge("Complexity", 0),
    "local lipschitz": Judge("LocalLipschitzEstimate", -1, lambda pixels: {"nr_samples": SAMPLES}),
}  # fmt: skip


def library() -> Any:
    """Quantus; it imports torchvision, whose build may not go with torch."""
    import_torchvision()
    import quantus

    return quantus


def judged(scene: Scene, config: Config, found: Explained, row: int) -> dict[str, float | None]:
    """All metrics of one image's map."""
    quantus, network = library(), scene.network
    image = network.placed(scene.images[row : row + 1]).cpu().numpy().astype(np.float32)
    evidence = found.of("predicted")[row][None, None].numpy()
    target = np.array([found.explained("predicted")[row]])
    mask = scene.seen[row].mask
    area = np.zeros((1, 1, 1, 1), bool) if mask is None else ((mask > 0) & (mask != IGNORE))[None, None]

    def explain_func(model: torch.nn.Module, inputs: Any, targets: Any, **_: Any) -> NDArray[Any]:
        tape = network.record(torch.as_tensor(inputs, dtype=torch.float32), model)
        asked = torch.as_tensor(np.asarray(targets)).reshape(-1, 1)
        maps = maps_of(network, tape, asked, found.method, seed_of(config["seed"], found.method), model)
        array: NDArray[Any] = maps.numpy()
        return array

    values: dict[str, float | None] = {}
    for name, judge in JUDGES.items():
        values[name] = None
        if judge.masked and not area.any():
            continue
        np.random.seed(config["seed"])  # noqa: NPY002 - Quantus draws from it
        metric = getattr(quantus, judge.name)(**judge.settings(evidence.size), disable_warnings=True)
        a = evidence.clip(min=0) if judge.masked else evidence  # shares of a signed map have no meaning
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a perturbation without effect, such as black on black, is an answer too
            result = metric(
                model=network.module, x_batch=image, y_batch=target, a_batch=a, s_batch=area,
                explain_func=explain_func, channel_first=True,
                device=str(next(network.module.parameters()).device),
            )  # fmt: skip
        value = judge.result(result)
        values[name] = value if np.isfinite(value) else None
    return values


# ---------------------------------------------------------------------------------------------------------- the test


@dataclass(frozen=True)
class Options:
    """Quantus is slow, so few images are used."""

    quantus_images: int = option(10, "use at most N images", least=1, decides=False)


def _variants(options: Options, subject: Subject) -> list[Values]:
    if subject.offers and importlib.util.find_spec("quantus") is None:
        raise DataError("Quantus is not installed: pip install quantus")
    return variants_of_fields(options, subject)


def _units(
    subject: Subject, items: Sequence[Item], config: Config, predictions: Mapping[str, Prediction]
) -> list[Unit]:
    return every_picture(subject, items[: config.options.quantus_images], config, predictions)


def _score(scene: Scene, config: Config, found: Explained) -> list[Values]:
    with scene.watch("further method"):
        return [
            {"explained": k} | {_column(name): value for name, value in judged(scene, config, found, row).items()}
            for row, k in enumerate(found.explained("predicted"))
        ]


def _column(name: str) -> str:
    return name.replace(" ", "_")


def _mean_of(name: str) -> Callable[[pa.Table], Floats]:
    return lambda rows: mean(floats(rows, _column(name)))


register(
    Test(
        name="quantus",
        question="what do metrics of the library Quantus say about the map?",
        columns={"explained": "int32"} | {_column(name): "float64" for name in JUDGES},
        metrics=lambda config: tuple(
            Metric(name, judge.better, _mean_of(name), scale=1) for name, judge in JUDGES.items()
        ),
        title=lambda config: "Quantus",
        remark=lambda config: (
            "Metrics of Quantus, computed by Quantus, in its own units. Sparseness and complexity describe a map; they "
            "do not judge it."
        ),
        options=Options,
        needs=frozenset({"classes", "masks"}),
        variants=_variants,
        constants={"steps": STEPS, "runs": RUNS, "percentages": PERCENTAGES, "samples": SAMPLES},
        units=_units,
        alone=True,
        score=_score,
        place=60,
    )
)
