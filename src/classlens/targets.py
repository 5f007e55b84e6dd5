"""What to explain: a class, several, the likeliest ones; always brought to a (B,K) tensor of class indices.

>>> resolve_targets(top(3), logits)                    # the three likeliest of each image
>>> resolve_targets("tabby", logits, labels)           # by name
>>> resolve_targets([[281, 207]], logits)              # two classes of one image
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from classlens.errors import TargetError
from classlens.labels import match


@dataclass(frozen=True)
class Top:
    """The k classes with the largest logits."""

    k: int


def top(k: int) -> Top:
    """Explain the k likeliest classes of each image: `explain(model, images, targets=top(3))`."""
    if not isinstance(k, int) or k < 1:
        raise TargetError(f"top({k!r}) explains nothing; give a whole number from 1")
    return Top(k)


Targets = None | int | str | Top | Tensor | Sequence[Any]


def resolve_targets(targets: Targets, logits: Tensor, labels: Sequence[str] | None = None) -> Tensor:
    """(B,K) class indices on the logits' device.

    A flat list is one class for each image; for a single image it is the classes to explain. A nested list or a
    2-D tensor is (B,K).
    """
    batch, classes = logits.shape
    if targets is None:
        targets = Top(1)
    if isinstance(targets, Top):
        if targets.k > classes:
            raise TargetError(f"top({targets.k}) asks for more classes than the model's {classes}")
        return logits.topk(targets.k, dim=1).indices
    if isinstance(targets, Tensor):
        if targets.is_floating_point() or targets.dtype == torch.bool:
            raise TargetError(f"targets must be whole numbers, not {str(targets.dtype)[6:]}; give class indices")
        targets = targets.tolist()
    if isinstance(targets, int | str):
        targets = [[targets]] * batch
    if not isinstance(targets, Sequence):
        raise TargetError(f"targets cannot be a {type(targets).__name__}; give an index, a name, a list or top(k)")
    rows = [list(row) if isinstance(row, list | tuple) else [row] for row in targets]
    if batch == 1 and len(rows) > 1 and all(len(row) == 1 for row in rows):
        rows = [[row[0] for row in rows]]
    _check_shape(rows, batch)
    indices = [[_index(item, classes, labels) for item in row] for row in rows]
    return torch.tensor(indices, dtype=torch.int64, device=logits.device)


def _check_shape(rows: list[list[Any]], batch: int) -> None:
    if len(rows) != batch:
        raise TargetError(
            f"{len(rows)} targets for {batch} images; give one for each, or [[a, b]] * {batch} for several classes"
        )
    if not rows[0] or len({len(row) for row in rows}) != 1:
        raise TargetError("each image needs the same number of classes, at least one")


def _index(item: Any, classes: int, labels: Sequence[str] | None) -> int:
    if isinstance(item, str) and labels is not None:
        return match(labels, item)
    if isinstance(item, str) and item.strip().isdigit():
        item = int(item)
    if isinstance(item, str):
        raise TargetError(f"the model has no class names, so {item!r} cannot be found; give an index 0..{classes - 1}")
    if not isinstance(item, int) or isinstance(item, bool):
        raise TargetError(f"a class is an index or a name, not {item!r}")
    if not 0 <= item < classes:
        raise TargetError(f"class {item} is out of range; the model has classes 0..{classes - 1}")
    return item
