"""The recipes of `classlens selfsup train`, and the user's settings.

>>> chosen(Choices("scan", data=("data/cifar10",), clusters=20)).clusters
20
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from classlens.selfsup.collection import Store
from classlens.selfsup.networks import NETWORKS, SmallNetwork, TwoParts
from classlens.selfsup.tasks import Clusters, Contrast, Options, Rotations, SelfLabels, Task
from classlens.training.loop import TrainingError

MakeTask = Callable[[TwoParts, Store, SmallNetwork, Options], Task]


@dataclass(frozen=True)
class Phase:
    """A part of a recipe: one task for a number of epochs."""

    name: str
    task: MakeTask
    epochs: int
    batch_size: int
    learning_rate: float
    weight_decay: float = 1e-5


@dataclass(frozen=True)
class SelfSupervised:
    """A recipe: its phases one after the other, on a network."""

    about: str
    network: str
    phases: tuple[Phase, ...]
    clusters: int | None = None  # outputs of the head; None: the four rotations
    score: str = "purity"  # what the figure shows


RECIPES: dict[str, SelfSupervised] = {
    "rotnet": SelfSupervised(
        "predict which of four angles an image was rotated by",
        "alexnet-96",
        (Phase("rotations", Rotations, 30, 32, 1e-3, 1e-4),),
        score="rotation_accuracy",
    ),
    "sela": SelfSupervised(
        "its own labels, balanced by Sinkhorn-Knopp",
        "resnet-32",
        (Phase("self-labels", SelfLabels, 30, 128, 1e-3),),
        clusters=64,
    ),
    "scan": SelfSupervised(
        "contrast of views, then clusters of nearest neighbours",
        "resnet-32",
        (Phase("contrast", Contrast, 30, 128, 1e-3), Phase("clusters", Clusters, 10, 128, 1e-4)),
        clusters=10,
    ),
}
"""Every recipe of `classlens selfsup train`."""


@dataclass(frozen=True)
class Choices:
    """The recipe, the data and the settings of a training. None uses the recipe's default."""

    recipe: str
    data: tuple[str, ...]
    network: str | None = None
    clusters: int | None = None
    epochs: tuple[int, ...] | None = None  # one for each phase
    batch_size: int | None = None
    learning_rate: float | None = None
    limit: int | None = None  # use at most this many training images
    seed: int = 0
    device: str = "cpu"


def chosen(choices: Choices) -> SelfSupervised:
    """The recipe with the user's settings."""
    if choices.recipe not in RECIPES:
        raise TrainingError(f"there is no recipe {choices.recipe!r}; choose one of {', '.join(RECIPES)}")
    recipe = RECIPES[choices.recipe]
    name = choices.network or recipe.network
    if name not in NETWORKS:
        raise TrainingError(f"there is no network {name!r} to train; choose one of {', '.join(NETWORKS)}")
    if choices.clusters is not None and (recipe.clusters is None or choices.clusters < 2):
        raise TrainingError("clusters are for sela and scan, and there must be at least 2")
    epochs = choices.epochs or tuple(phase.epochs for phase in recipe.phases)
    if len(epochs) != len(recipe.phases) or min(epochs) < 1:
        names = " and ".join(phase.name for phase in recipe.phases)
        raise TrainingError(f"{choices.recipe} needs a number of epochs for {names}, not {epochs}")
    if choices.batch_size is not None and choices.batch_size < 2:
        raise TrainingError("a batch needs at least 2 images")
    if choices.learning_rate is not None and not choices.learning_rate > 0:
        raise TrainingError("the learning rate must be above 0")
    phases = tuple(
        replace(
            phase,
            epochs=count,
            batch_size=choices.batch_size or phase.batch_size,
            learning_rate=choices.learning_rate or phase.learning_rate,
        )
        for phase, count in zip(recipe.phases, epochs, strict=True)
    )
    return replace(recipe, network=name, clusters=choices.clusters or recipe.clusters, phases=phases)
