"""Trains a small network without labels and writes it to a folder that `load` reads.

>>> trained = train_selfsup(Choices("rotnet", data=("data/voc",)), "runs/rotnet")
>>> trained.history[-1].scores["rotation_accuracy"]
0.61
>>> classlens.load("runs/rotnet").labels
('upright', 'turned left', 'upside down', 'turned right')

Order, views and random numbers of an epoch depend only on seed and epoch. All other state is in one file, replaced
atomically after each epoch. So a killed and resumed run ends with the same weights as an uninterrupted one.
"""

from __future__ import annotations

import csv
import functools
import io
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Generator

from classlens.files import replacing, write_text
from classlens.models.cards import CARD, WEIGHTS, card_text, write_weights
from classlens.models.heads import Head
from classlens.progress import Progress, silent
from classlens.render import write_png
from classlens.selfsup.collection import Store, find_pictures, read_pictures
from classlens.selfsup.networks import NETWORKS, SmallNetwork, TwoParts
from classlens.selfsup.recipes import Choices, Phase, SelfSupervised, chosen
from classlens.selfsup.tasks import Options, Task
from classlens.selfsup.views import TURNS
from classlens.training.data import order, pieces
from classlens.training.loop import SCHEDULES, STATE, Machine, Recipe, TrainingError, check_identity

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_REDRAW = 20.0  # seconds between updates of the curves during training


@dataclass(frozen=True)
class Row:
    """The metrics of one epoch."""

    epoch: int  # of all phases
    phase: str
    learning_rate: float
    loss: float
    scores: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Trained:
    """The result of a training."""

    folder: Path
    history: tuple[Row, ...]
    skipped: tuple[str, ...]


def train_selfsup(
    choices: Choices,
    out: str | os.PathLike[str],
    progress: Progress = silent,
) -> Trained:
    """Train, or resume a stopped training with the same settings.

    The folder holds card.json and model.safetensors (the last complete epoch), metrics.csv, metrics.png, state.pt and
    the cached images.
    """
    recipe = chosen(choices)
    network = NETWORKS[recipe.network]
    folder = Path(out)
    if (folder / CARD).exists() and not (folder / STATE).exists():
        raise TrainingError(f"{folder} holds a model from elsewhere: choose another --out")
    found = find_pictures(choices.data, choices.seed, choices.limit)
    identity = _identity(choices, recipe, found.name, found.hash)
    saved = _read_state(folder / STATE, identity, choices.device)
    store = read_pictures(found, network.room, folder, progress)
    _check_enough(store, recipe)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(choices.seed)
        net = network.build(recipe.clusters or len(TURNS)).to(choices.device)
    history = [Row(**row) for row in saved.get("history", [])]

    draw = _Pause(_REDRAW)

    def on_epoch(rows: list[Row]) -> None:
        write_weights(folder / WEIGHTS, net)
        write_text(folder / CARD, _card(choices, recipe, network, net, store, rows, identity))
        write_text(folder / "metrics.csv", _table(rows))
        if draw.is_due() or len(rows) == sum(phase.epochs for phase in recipe.phases):
            write_png(folder / "metrics.png", metrics_figure(rows, recipe.score))

    options = Options(clusters=net.head.out_features)
    run = _Run(folder / STATE, identity, saved, history, on_epoch, progress)
    for number, phase in enumerate(recipe.phases):
        if number >= saved.get("phase", 0):  # the result of an earlier phase is in the state of the later one
            _fit(_make(phase, net, store, network, options, choices), phase, number, choices.seed, run)
    return Trained(folder, tuple(history), store.skipped)


@dataclass(frozen=True)
class _Run:
    """The state that the phases of a training share."""

    file: Path  # of the state
    identity: Mapping[str, Any]
    saved: Mapping[str, Any]  # the state to resume from; empty at the beginning
    history: list[Row]  # grows
    on_epoch: Callable[[list[Row]], None]
    progress: Progress


class _Pause:
    """A timer: something is due again after some seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._last = seconds, time.monotonic()

    def is_due(self) -> bool:
        due = time.monotonic() - self._last >= self._seconds
        if due:
            self._last = time.monotonic()
        return due


def _make(phase: Phase, net: TwoParts, store: Store, network: SmallNetwork, options: Options, choices: Choices) -> Task:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(choices.seed + 1)
        return phase.task(net, store, network, options).to(choices.device)


def _fit(task: Task, phase: Phase, number: int, seed: int, run: _Run) -> None:
    """Train one phase, resuming if possible."""
    machine = Machine.of(task, Recipe(phase.epochs, phase.batch_size, phase.learning_rate, phase.weight_decay))
    saved = run.saved if run.saved.get("phase") == number else {}
    if saved:
        task.load_state_dict(saved["task"])
        machine.optimiser.load_state_dict(saved["optimiser"])
        machine.scaler.load_state_dict(saved["scaler"])
    else:
        task.prepare()
    for epoch in range(saved.get("epoch", 0), phase.epochs):
        rate = phase.learning_rate * SCHEDULES["cosine"](epoch, phase.epochs)
        what = f"{phase.name}, epoch {epoch + 1} of {phase.epochs}{_so_far(run.history)}"
        loss = _epoch(machine, task, phase, (seed, number, epoch), rate, functools.partial(run.progress, what))
        task.eval()
        with torch.no_grad():
            scores = task.scores()
        run.history.append(Row(len(run.history), phase.name, rate, loss, scores))
        run.on_epoch(run.history)
        state = {"identity": dict(run.identity), "phase": number, "epoch": epoch + 1, "task": task.state_dict()}
        state |= {"history": [asdict(row) for row in run.history]}
        state |= {"optimiser": machine.optimiser.state_dict(), "scaler": machine.scaler.state_dict()}
        _write_state(run.file, state)


def _epoch(
    machine: Machine,
    task: Task,
    phase: Phase,
    draw: tuple[int, int, int],
    rate: float,
    say: Callable[[int, int], None],
) -> float:
    """One pass over the images; returns the mean loss."""
    seed = int(np.random.SeedSequence(draw).generate_state(1)[0])
    task.begin(draw[-1])
    task.train()
    # An incomplete last batch is dropped: contrast and entropy depend on the batch size.
    count = len(task.store.train)
    batches = pieces(order(count, seed, 0)[: count - count % phase.batch_size], phase.batch_size)
    total = 0.0
    for step, positions in enumerate(batches):
        generator = Generator().manual_seed(int(np.random.SeedSequence([*draw, step]).generate_state(1)[0]))
        loss = task.loss(positions, generator)
        if not torch.isfinite(loss):
            raise TrainingError(f"the loss is {float(loss.detach())}; use a smaller --learning-rate")
        machine.step(loss, rate)
        total += float(loss.detach())
        say(step + 1, len(batches))
    return total / len(batches)


def _so_far(history: Sequence[Row]) -> str:
    """The scores of the last epoch, for the progress bar."""
    if not history:
        return ""
    shown = {name: value for name, value in history[-1].scores.items() if "accuracy" in name or name == "purity"}
    return "".join(f", {name.replace('_', ' ')} {100 * value:.1f} %" for name, value in shown.items())


def _check_enough(store: Store, recipe: SelfSupervised) -> None:
    need = max(*(phase.batch_size for phase in recipe.phases), recipe.clusters or 0)
    if len(store.train) < need:
        raise TrainingError(
            f"{len(store.train)} pictures are too few for a batch of {need} (or as many clusters): give more pictures, "
            "a smaller --batch-size or fewer --clusters"
        )


def _identity(choices: Choices, recipe: SelfSupervised, data: str, data_hash: str) -> dict[str, Any]:
    """What decides the outcome, and must be the same when a training goes on."""
    phases = [{key: value for key, value in vars(phase).items() if key != "task"} for phase in recipe.phases]
    return {
        "recipe": choices.recipe, "network": recipe.network, "clusters": recipe.clusters, "phases": phases,
        "seed": choices.seed, "data": data, "data_hash": data_hash,
    }  # fmt: skip


# --------------------------------------------------------------------------------------------------------- files


def _write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Replace the file whole: a kill leaves the old one or the new one."""
    with replacing(path) as draft, draft.open("wb") as stream:  # a stream: a path's name would go into the file
        torch.save(dict(state), stream)


def _read_state(path: Path, identity: Mapping[str, Any], device: str) -> dict[str, Any]:
    """What the last whole epoch left; empty before the first."""
    if not path.is_file():
        return {}
    try:
        state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
        old = state["identity"]
    except Exception as error:  # whatever a foreign or broken file gives
        raise TrainingError(f"{path} is not a training state: choose another --out, or remove it") from error
    check_identity(old, identity, path.parent)
    return state


def _card(
    choices: Choices,
    recipe: SelfSupervised,
    network: SmallNetwork,
    net: TwoParts,
    store: Store,
    history: Sequence[Row],
    identity: Mapping[str, Any],
) -> str:
    outputs = net.head.out_features
    labels = TURNS if recipe.clusters is None else tuple(f"cluster {k}" for k in range(outputs))
    epochs = sum(phase.epochs for phase in recipe.phases)
    return card_text(
        architecture=network.architecture,
        preprocess=network.preprocess,
        labels=labels,
        head=Head("head", (net.head.in_features, outputs)),
        training=dict(identity)
        | {"pictures": {"train": len(store.train), "val": len(store.val)}, "skipped": len(store.skipped)}
        | {"epochs": {"done": len(history), "of": epochs}, "last": asdict(history[-1])}
        | {"classlens": version("classlens")},
        about=f"trained without labels: {choices.recipe}, {recipe.about}",
    )


def _table(history: Sequence[Row]) -> str:
    names = list(dict.fromkeys(name for row in history for name in row.scores))
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["epoch", "phase", "learning_rate", "loss", *names])
    for row in history:
        scores = [row.scores.get(name, "") for name in names]
        writer.writerow([row.epoch + 1, row.phase, row.learning_rate, row.loss, *scores])
    return buffer.getvalue()


def metrics_figure(history: Sequence[Row], score: str) -> Figure:
    """Loss of each phase, and what was measured on held-out pictures, by epoch."""
    from matplotlib.figure import Figure

    phases = list(dict.fromkeys(row.phase for row in history))
    fig = Figure(figsize=(4 * (len(phases) + 1), 3.2), layout="constrained")
    *losses, scores = fig.subplots(1, len(phases) + 1)
    for axes, phase in zip(losses, phases, strict=True):
        rows = [row for row in history if row.phase == phase]
        _line(axes, rows, [row.loss for row in rows], "#888888", "training")
        if all("val_loss" in row.scores for row in rows):
            _line(axes, rows, [row.scores["val_loss"] for row in rows], "#1f6fe0", "held out")
            axes.legend(frameon=False, fontsize=9)
        axes.set_title(f"loss of {phase}", loc="left", fontsize=10)
    _draw_scores(scores, history, score)
    for axes in (*losses, scores):
        axes.set_xlabel("epoch", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.get_major_locator().set_params(integer=True)
    return fig


_CHANCE: dict[str, Callable[[Row], float]] = {
    "rotation_accuracy": lambda row: 1 / len(TURNS),
    "purity": lambda row: row.scores["purity_by_chance"],
}


def _draw_scores(axes: Any, history: Sequence[Row], score: str) -> None:
    """The recipe's score, that of an earlier phase beside it, and what chance gives."""
    shown = {"neighbour_accuracy": "#009e73", score: "#e4202c"}
    drawn = [name for name in shown if any(name in row.scores for row in history)]
    for name in drawn:
        rows = [row for row in history if name in row.scores]
        _line(axes, rows, [100 * row.scores[name] for row in rows], shown[name], name.replace("_", " "))
        if name in _CHANCE:
            axes.plot(
                [row.epoch + 1 for row in rows], [100 * _CHANCE[name](row) for row in rows], "--", color="#888888",
                label="chance",
            )  # fmt: skip
    axes.set_title("on held-out pictures, %", loc="left", fontsize=10)
    if drawn:
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=9)
    else:
        axes.text(0.5, 0.5, "no labels to measure with", ha="center", transform=axes.transAxes, color="#666666")


def _line(axes: Any, rows: Sequence[Row], values: Sequence[float], colour: str, label: str) -> None:
    marker = "o" if len(rows) == 1 else None
    axes.plot([row.epoch + 1 for row in rows], values, color=colour, marker=marker, label=label)
