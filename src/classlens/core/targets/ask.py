"""Runs a network once and finds what the targets read: `ask(network, batch, targets, models)`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from classlens.core.capture import Picker, Tape, record
from classlens.core.targets.answers import Models
from classlens.core.targets.base import Target
from classlens.core.targets.called import Called
from classlens.core.targets.contrast import RatherThan
from classlens.core.targets.likeness import Embedding
from classlens.core.targets.questions import Asking, Question
from classlens.core.targets.resolve import Targets, indexed, questions_in, resolve_targets
from classlens.errors import ModelError, TargetError

Taped = Callable[[Picker], tuple[Tape, bool]]  # the tape of a forward pass, and whether it holds all operations


@dataclass(frozen=True, eq=False)
class Answered:
    """A forward pass, and the targets as a method needs them."""

    tape: Tape
    targets: Tensor  # (B,K) class indices; negative ones stand for `scalars`
    scalars: tuple[Target, ...]
    output: Picker  # what the tape's output is, to read it again in other forward passes
    whole: bool = True  # whether the tape holds all operations that a method needs


def ask(
    network: nn.Module, batch: Tensor, targets: Targets, models: Models, output: Picker = None,
    rather_than: RatherThan = None, taped: Taped | None = None, recorded: Tape | None = None,
) -> Answered:  # fmt: skip
    """Record a forward pass and resolve the targets: classes and functions of logits, or questions.

    `taped` records it as a method needs it. `recorded` is the tape of an earlier pass, for classes.
    """
    rows = questions_in(targets, len(batch), functions=models.embed_text is not None)
    if rows is None and models.embed_text is not None:
        raise TargetError(
            "this model embeds images and texts and has no classes; ask with --text, classlens.text(...) or "
            "classlens.like(...)"
        )
    tape, whole = recorded, True
    if rows is None and tape is None:
        tape, whole = (record(network, batch, output), True) if taped is None else taped(output)
        if tape.logits.dim() > 2:  # a function of an output of another shape is asked like a question
            rows = questions_in(targets, len(batch), functions=True)
    if rows is None:
        assert tape is not None
        check_logits(tape.logits, len(batch))
        labels = fitting(models.labels, tape.logits.shape[1])
        return Answered(tape, *resolve_targets(targets, tape.logits, labels, rather_than), output, whole)
    if rather_than is not None:
        raise TargetError("rather_than works only with classes; subtract one question from the other instead")
    asking = _asking(rows, models, batch, output)
    tape = record(network, batch, asking)
    check_logits(tape.logits, len(batch))
    return Answered(tape, *indexed(asking.targets, batch.device), asking.reading)


def _asking(rows: Sequence[Sequence[Any]], models: Models, batch: Tensor, output: Picker) -> Asking:
    questions = [[item if isinstance(item, Question) else Called(item) for item in row] for row in rows]
    return Asking(questions, models, (batch.shape[-2], batch.shape[-1]), output)


def embedder(network: nn.Module, prepared: Callable[[Any], Tensor], output: Picker) -> Callable[[Any], Tensor]:
    """A function that embeds one image with the network; `prepared` makes the network's input of it."""

    def embed(image: Any) -> Tensor:
        batch = prepared(image)
        if len(batch) != 1:
            raise TargetError(f"like(...) takes one image, not {len(batch)}")
        return record(network, batch, _asking([[Embedding()]], Models(), batch, output)).logits[0].detach()

    return embed


def check_logits(logits: Tensor, batch: int) -> None:
    """Refuse outputs that are not (B,n), or not finite."""
    if logits.dim() != 2 or logits.shape[0] != batch:
        dense = logits.dim() == 4 and logits.shape[0] == batch
        ask = "ask with classlens.region(class, ...), or " if dense else ""
        raise ModelError(
            f"the model's output has shape {tuple(logits.shape)}, expected ({batch}, classes); "
            f"{ask}select the logits with output= (a key, an index or a function)"
        )
    finite = logits.isfinite().all(1)
    if not finite.all():
        row = int((~finite).nonzero()[0])
        raise ModelError(f"the logits of image {row} are NaN or infinite; check the weights and the input's range")


def fitting(labels: Sequence[str] | None, classes: int) -> Sequence[str] | None:
    """The labels, if there is one for each class."""
    if labels is not None and len(labels) != classes:
        raise ModelError(
            f"the model has {classes} classes but {len(labels)} labels; give one label for each class, or none"
        )
    return labels
