"""Converts the user's targets to those of a method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from classlens.core.targets.base import Scalar, Target
from classlens.core.targets.classes import Above, Class, Top, class_index
from classlens.core.targets.contrast import RatherThan, contrasts, named_rivals
from classlens.core.targets.numbers import Number
from classlens.core.targets.questions import Question
from classlens.errors import TargetError

Targets = (
    None | int | str | Top | Above | Tensor | np.ndarray[Any, Any] | np.generic | Scalar | Question | Sequence[Any]
)


def resolve_targets(
    targets: Targets, logits: Tensor, labels: Sequence[str] | None = None, rather_than: RatherThan = None
) -> tuple[Tensor, tuple[Target, ...]]:
    """(B,K) indices on the logits' device, and the targets that the negative ones stand for.

    A flat list is one class for each image; for a single image it is the classes to explain. A nested list or a
    2-D tensor is (B,K). A callable that returns one logit unchanged means that class. With `rather_than`, each class
    is contrasted with these rivals.
    """
    outputs = logits.shape[1]
    rows: Sequence[Sequence[Target]]
    if isinstance(targets, Top | Above) or targets is None:
        indices = (targets or Top(1)).indices(logits)
        if rather_than is None:
            return indices, ()
    else:
        rows = [
            [_number(item, y) if callable(item) else Class(class_index(item, outputs, labels)) for item in row]
            for row, y in zip(_rows(targets, len(logits)), logits, strict=True)
        ]
        if rather_than is None:
            return indexed(rows, logits.device)
        indices = torch.tensor([[_class(target) for target in row] for row in rows])
    rows = contrasts(indices, named_rivals(rather_than, outputs, labels), logits)
    for target in {target for row in rows for target in row}:
        target.fits(outputs, (lambda index: f"class {index}") if labels is None else labels.__getitem__)
    return indexed(rows, logits.device)


def questions_in(targets: Targets, batch: int, functions: bool = False) -> list[list[Any]] | None:
    """The questions about each image; None if the targets are classes. With `functions`, callables count too."""

    def asks(item: Any) -> bool:
        return isinstance(item, Question) or (functions and callable(item))

    nested = targets if isinstance(targets, list | tuple) else [targets]
    flat = [item for row in nested for item in (row if isinstance(row, list | tuple) else [row])]
    if not any(map(asks, flat)):
        return None
    for item in flat:
        if not asks(item):
            raise TargetError(f"{item!r} cannot be mixed with other questions; ask for it in another call")
    return _rows(targets, batch)


def _rows(targets: Targets, batch: int) -> list[list[Any]]:
    """The targets of each image, as the user wrote them."""
    if isinstance(targets, Tensor):
        if targets.is_floating_point() or targets.dtype == torch.bool:
            raise TargetError(f"targets must be integers, not {str(targets.dtype)[6:]}; give class indices")
        targets = targets.tolist()
    if isinstance(targets, np.ndarray | np.generic):  # what np.argmax returns
        targets = targets.tolist()
    if isinstance(targets, int | str | Question) or callable(targets):
        targets = [[targets]] * batch
    if not isinstance(targets, Sequence):
        raise TargetError(
            f"targets cannot be a {type(targets).__name__}; give an index, a name, a list, top(k) or a callable"
        )
    rows = [list(row) if isinstance(row, list | tuple) else [row] for row in targets]
    if batch == 1 and len(rows) > 1 and all(len(row) == 1 for row in rows):
        rows = [[row[0] for row in rows]]
    if len(rows) != batch:
        raise TargetError(
            f"{len(rows)} targets for {batch} images; give one for each, or [[a, b]] * {batch} for several classes"
        )
    if not rows[0] or len({len(row) for row in rows}) != 1:
        raise TargetError("each image needs the same number of classes, at least one")
    return rows


def _number(scalar: Scalar, logits: Tensor) -> Target:
    """A callable as a target: the class that it selects, or its number."""
    number = Number(scalar)
    chosen = number.picked_class(logits)
    return number if chosen is None else Class(chosen)


def _class(target: Target) -> int:
    if not isinstance(target, Class):
        raise TargetError(
            f"rather_than works only with classes, and {target.words(str)!r} is a callable; compute the difference "
            "in the callable"
        )
    return target.index


def indexed(rows: Sequence[Sequence[Target]], device: torch.device) -> tuple[Tensor, tuple[Target, ...]]:
    """(B,K) indices, in which negative ones stand for the targets that are not classes, and these targets."""
    others = list(dict.fromkeys(target for row in rows for target in row if not isinstance(target, Class)))
    indices = [[t.index if isinstance(t, Class) else -1 - others.index(t) for t in row] for row in rows]
    return torch.tensor(indices, dtype=torch.int64, device=device), tuple(others)
