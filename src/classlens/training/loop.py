"""The training loop: a task's loss, Adam, a schedule; resumable at any time with identical results.

Order, crops and dropout of an epoch depend only on seed and epoch. All other state is in one file, replaced atomically
after each epoch. So a killed and resumed run ends with the same numbers as an uninterrupted one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from classlens.core.capture import pick_output
from classlens.errors import ClasslensError
from classlens.evaluate.tests.segmentation import average_precision
from classlens.files import replacing
from classlens.progress import Progress
from classlens.training.sources import Source

STATE = "state.pt"
SCHEDULES: dict[str, Callable[[int, int], float]] = {
    "cosine": lambda epoch, epochs: 0.5 * (1 + math.cos(math.pi * epoch / epochs)),
    "step": lambda epoch, epochs: float(0.2 ** (epoch // 20)),  # as in the AGF paper
}
"""Name -> factor of the learning rate in an epoch."""


class TrainingError(ClasslensError):
    """A training that cannot start or resume."""


@dataclass(frozen=True)
class Recipe:
    """The hyperparameters of a training.

    >>> Recipe(epochs=30, learning_rate=1e-3, schedule="step")
    """

    epochs: int = 60
    batch_size: int = 32
    learning_rate: float = 1e-4
    weight_decay: float = 5e-4
    schedule: str = "cosine"
    patience: int = 10  # stop after this many epochs without a better mAP
    seed: int = 0

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise TrainingError(f"there is no schedule {self.schedule!r}; choose one of {', '.join(SCHEDULES)}")
        if min(self.epochs, self.batch_size, self.patience) < 1 or not self.learning_rate > 0 <= self.weight_decay:
            raise TrainingError(
                "epochs, batch size, patience and learning rate must be above 0, weight decay at least 0"
            )


@dataclass(frozen=True)
class Row:
    """The metrics of one epoch; each task adds its own."""

    epoch: int
    learning_rate: float
    train_loss: float
    val_loss: float

    @property
    def score(self) -> float:
        """The metric that the best epoch maximises."""
        raise NotImplementedError


@dataclass(frozen=True)
class Epoch(Row):
    """The metrics of one epoch of a multi-label training."""

    val_map: float  # mean over classes of the average precision
    val_f1: float  # at probability 0.5, pooled over all images and classes

    @property
    def score(self) -> float:
        return self.val_map


@dataclass(frozen=True)
class Task:
    """What is trained: a loss of (logits, targets), and how an epoch is validated."""

    metric: str  # the score in words: "mAP"
    loss_name: str
    loss: Callable[[Tensor, Tensor], Tensor]
    row: Callable[..., Row]  # the metrics of an epoch
    validate: Callable[[nn.Module, Source], tuple[float, ...]]  # the loss and the metrics of `row`


R = TypeVar("R", bound=Row)


def best_of(history: Sequence[R]) -> R:
    """The epoch with the best score; the first one if several tie."""
    return max(history, key=lambda row: (row.score, -row.epoch))


def is_finished(history: Sequence[Row], recipe: Recipe) -> bool:
    """Whether all epochs are done, or patience has run out."""
    if not history:
        return False
    return len(history) >= recipe.epochs or history[-1].epoch - best_of(history).epoch >= recipe.patience


def fit(
    task: Task,
    module: nn.Module,
    train: Source,
    val: Source,
    recipe: Recipe,
    folder: Path,
    identity: Mapping[str, Any],
    on_epoch: Callable[[list[Any]], None],
    progress: Progress,
) -> list[Any]:
    """Train until finished; returns all epochs, including those of earlier runs.

    `module` takes the inputs of the sources. `on_epoch` gets the history before the epoch is saved: if the process
    dies in between, it is called again.
    """
    machine = Machine.of(module, recipe)
    history = machine.resume(folder / STATE, identity, task.row)
    while not is_finished(history, recipe):
        epoch = len(history)
        rate = recipe.learning_rate * SCHEDULES[recipe.schedule](epoch, recipe.epochs)
        best = f", best {task.metric} {100 * best_of(history).score:.1f} %" if history else ""
        say = functools.partial(progress, f"epoch {epoch + 1} of {recipe.epochs}{best}")
        loss = _train(machine, task.loss, train, epoch, recipe.seed, rate, say)
        history.append(task.row(epoch, rate, loss, *task.validate(module, val)))
        on_epoch(history)
        machine.save(folder / STATE, identity, history)
    return history


def _train(
    machine: Machine, loss_of: Callable[[Tensor, Tensor], Tensor], source: Source, epoch: int, seed: int, rate: float,
    say: Callable[[int, int], None],
) -> float:  # fmt: skip
    """Train one epoch; returns the mean loss."""
    total = count = 0.0
    machine.module.train()
    with torch.random.fork_rng():
        torch.manual_seed(int(np.random.SeedSequence([seed, epoch]).generate_state(1)[0]))  # dropout
        for done, (inputs, targets) in enumerate(source.batches(epoch), 1):
            loss = loss_of(*forward(machine.module, inputs, targets))
            if not torch.isfinite(loss):
                raise TrainingError(
                    f"the loss is {float(loss.detach())} in epoch {epoch + 1}; use a smaller learning rate"
                )
            machine.step(loss, rate)
            total, count = total + float(loss.detach()) * len(inputs), count + len(inputs)
            say(done, len(source))
    machine.module.eval()
    return total / count


def forward(module: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Logits in float32 and targets, on the module's device; mixed precision on a GPU."""
    weight = next(module.parameters())
    inputs, targets = inputs.to(weight.device), targets.to(weight.device)
    with torch.autocast(weight.device.type, enabled=weight.device.type == "cuda"):
        logits = pick_output(module(inputs), None)
    return logits.float(), targets


@torch.no_grad()
def validate(module: nn.Module, source: Source) -> tuple[float, float, float]:
    """Loss, mAP and F1 without augmentation."""
    module.eval()
    logits, targets = (
        torch.cat(parts).cpu()
        for parts in zip(*(forward(module, *batch) for batch in source.batches(None)), strict=True)
    )
    loss = float(F.binary_cross_entropy_with_logits(logits, targets))
    guess, truth = logits > 0, targets > 0
    f1 = 2 * int((guess & truth).sum()) / max(1, int(guess.sum() + truth.sum()))
    return loss, mean_average_precision(logits.numpy(), truth.numpy()), f1


def mean_average_precision(scores: NDArray[Any], truth: NDArray[np.bool_]) -> float:
    """Mean over classes of the average precision; classes without a positive image (N,classes) are ignored.

    >>> mean_average_precision(np.array([[0.9, 0.1], [0.2, 0.3]]), np.array([[True, False], [False, False]]))
    1.0
    """
    found = [average_precision(scores[:, k], truth[:, k]) for k in range(truth.shape[1])]
    known = [value for value in found if value is not None]
    return float(np.mean(known)) if known else 0.0


MULTILABEL = Task("mAP", "binary cross-entropy", F.binary_cross_entropy_with_logits, Epoch, validate)


# --------------------------------------------------------------------------------------------------------- state


@dataclass(frozen=True)
class Machine:
    """The training state: the weights, and the state of Adam and of mixed precision."""

    module: nn.Module
    optimiser: torch.optim.Optimizer
    scaler: torch.amp.GradScaler

    @classmethod
    def of(cls, module: nn.Module, recipe: Recipe) -> Machine:
        optimiser = torch.optim.Adam(module.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
        on_gpu = next(module.parameters()).device.type == "cuda"
        return cls(module, optimiser, torch.amp.GradScaler(enabled=on_gpu))

    def step(self, loss: Tensor, rate: float) -> None:
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimiser)
        self.scaler.update()

    def save(self, path: Path, identity: Mapping[str, Any], history: Sequence[Row]) -> None:
        """Save everything that the next epoch needs; the file is replaced atomically."""
        state = {"identity": dict(identity), "history": [vars(row) for row in history]}
        state |= {name: part.state_dict() for name, part in vars(self).items()}
        with replacing(path) as draft, draft.open("wb") as stream:  # a stream: torch.save would store a path's name
            torch.save(state, stream)

    def resume(self, path: Path, identity: Mapping[str, Any], row: Callable[..., Row]) -> list[Row]:
        """Restore the state after the last complete epoch; returns the epochs so far."""
        if not path.is_file():
            self.save(path, identity, [])  # marks the folder as a training
            return []
        try:
            state = torch.load(path, map_location=next(self.module.parameters()).device, weights_only=True)
        except Exception as error:  # a foreign or broken file may raise anything
            raise TrainingError(f"{path} is not a training state: choose another --out, or remove it") from error
        check_identity(state["identity"], identity, path.parent)
        for name, part in vars(self).items():
            part.load_state_dict(state[name])
        return [row(**one) for one in state["history"]]


def check_identity(old: Mapping[str, Any], new: Mapping[str, Any], folder: Path) -> None:
    """Refuse to resume a training that was started with other settings."""
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    other = [f"{key} was {old.get(key)!r}, not {new.get(key)!r}" for key in keys]
    if other:
        raise TrainingError(
            f"{folder} holds another training ({'; '.join(other)}): use the same settings, or another --out"
        )
