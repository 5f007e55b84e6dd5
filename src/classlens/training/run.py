"""What every training writes into its folder besides the weights: the table, the figure and the card's details."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from classlens.models.cards import CARD
from classlens.training.data import Data
from classlens.training.loop import STATE, Row, Task, TrainingError, best_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def run_folder(out: str | os.PathLike[str]) -> Path:
    """The folder of a new or a stopped training; a model from elsewhere is never overwritten."""
    folder = Path(out)
    if (folder / CARD).exists() and not (folder / STATE).exists():
        raise TrainingError(f"{folder} holds a model from elsewhere: choose another --out")
    return folder


def training_text(identity: Mapping[str, Any], data: Data, history: Sequence[Row]) -> dict[str, Any]:
    """How a network was trained, for its card."""
    pictures = {"train": len(data.train), "val": len(data.val)}
    result = {"best": asdict(best_of(history)), "classlens": version("classlens")}
    return dict(identity) | {"pictures": pictures, "skipped": len(data.skipped)} | result


def table(history: Sequence[Row]) -> str:
    """The metrics of all epochs as CSV."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, [field.name for field in fields(history[0])], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in history)
    return buffer.getvalue()


def metrics_figure(history: Sequence[Row], task: Task) -> Figure:
    """Loss and score by epoch, with the best epoch marked."""
    from matplotlib.figure import Figure

    epochs, best = [row.epoch + 1 for row in history], best_of(history)
    fig = Figure(figsize=(8, 3.2), layout="constrained")
    loss, score = fig.subplots(1, 2)
    marker = "o" if len(history) == 1 else None
    loss.plot(epochs, [row.train_loss for row in history], color="#888888", marker=marker, label="training")
    loss.plot(epochs, [row.val_loss for row in history], color="#1f6fe0", marker=marker, label="validation")
    loss.set_title(task.loss_name, loc="left", fontsize=10)
    loss.legend(frameon=False, fontsize=9)
    score.plot(epochs, [100 * row.score for row in history], color="#e4202c", marker=marker)
    score.plot(best.epoch + 1, 100 * best.score, "o", color="#e4202c")
    score.set_title(
        f"validation {task.metric}, best {100 * best.score:.1f} % in epoch {best.epoch + 1}", loc="left", fontsize=10
    )
    for axes in (loss, score):
        axes.set_xlabel("epoch", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.get_major_locator().set_params(integer=True)
    return fig
