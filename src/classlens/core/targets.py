"""What to explain: a class, several, the likeliest ones, or any number made of the logits.

>>> resolve_targets(top(3), logits)                    # the three likeliest of each image
>>> resolve_targets("tabby", logits, labels)           # by name
>>> resolve_targets([[281, 207]], logits)              # two classes of one image
>>> resolve_targets(lambda y: y[281:286].logsumexp(0), logits)      # any cat

All are brought to a (B,K) tensor of class indices. A callable that is no class has a negative one: -1 is the first
of the callables, -2 the second. What a method needs of either are `scores` and `directions`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from classlens.core.names import match
from classlens.errors import TargetError


@dataclass(frozen=True)
class Top:
    """The k classes with the largest logits."""

    k: int


def top(k: int) -> Top:
    """Explain the k likeliest classes of each image: `explain(model, images, targets=top(3))`."""
    if not isinstance(k, int) or k < 1:
        raise TargetError(f"top({k!r}) explains nothing; give a whole number from 1")
    return Top(k)


@dataclass(frozen=True)
class Above:
    """The classes of a multi-label network whose own probability (sigmoid) is above a threshold."""

    threshold: float


def above(threshold: float = 0.5) -> Above:
    """Explain every class that a multi-label network finds: `explain(model, "photo.jpg", targets=above(0.5))`."""
    if not 0 < threshold < 1:
        raise TargetError(f"above({threshold!r}) makes no sense; give a probability between 0 and 1")
    return Above(threshold)


Scalar = Callable[[Tensor], Tensor]  # the logits (classes,) of one image -> the number to explain
OfClass = Callable[[Tensor, Tensor], Tensor]  # logits (N,classes), indices (N,K) -> the classes' scores (N,K)
Targets = None | int | str | Top | Above | Tensor | Scalar | Sequence[Any]


def resolve_targets(
    targets: Targets, logits: Tensor, labels: Sequence[str] | None = None
) -> tuple[Tensor, tuple[Scalar, ...]]:
    """(B,K) indices on the logits' device, and the callables that the negative ones stand for.

    A flat list is one class for each image; for a single image it is the classes to explain. A nested list or a
    2-D tensor is (B,K). A callable that gives back one logit as it is means that class.
    """
    batch, classes = logits.shape
    if targets is None:
        targets = Top(1)
    if isinstance(targets, Top):
        if targets.k > classes:
            raise TargetError(f"top({targets.k}) asks for more classes than the model's {classes}")
        return logits.topk(targets.k, dim=1).indices, ()
    if isinstance(targets, Above):
        return _above(targets.threshold, logits), ()
    if isinstance(targets, Tensor):
        if targets.is_floating_point() or targets.dtype == torch.bool:
            raise TargetError(f"targets must be whole numbers, not {str(targets.dtype)[6:]}; give class indices")
        targets = targets.tolist()
    if isinstance(targets, int | str) or callable(targets):
        targets = [[targets]] * batch
    if not isinstance(targets, Sequence):
        raise TargetError(
            f"targets cannot be a {type(targets).__name__}; give an index, a name, a list, top(k) or a callable"
        )
    rows = [list(row) if isinstance(row, list | tuple) else [row] for row in targets]
    if batch == 1 and len(rows) > 1 and all(len(row) == 1 for row in rows):
        rows = [[row[0] for row in rows]]
    _check_shape(rows, batch)
    scalars: list[Scalar] = []
    indices = [
        [_scalar(item, y, scalars) if callable(item) else _index(item, classes, labels) for item in row]
        for row, y in zip(rows, logits, strict=True)
    ]
    return torch.tensor(indices, dtype=torch.int64, device=logits.device), tuple(scalars)


def _above(threshold: float, logits: Tensor) -> Tensor:
    """(B,K), the likeliest first."""
    probability = logits.detach().double().sigmoid()
    counts = (probability > threshold).sum(1)
    if counts.min() == 0:
        row = int(counts.argmin())
        raise TargetError(
            f"no class of image {row} has a probability above {threshold:g}, the likeliest has "
            f"{float(probability[row].max()):.2g}: give a lower threshold"
        )
    if counts.min() != counts.max():
        raise TargetError(
            f"the images have {int(counts.min())} to {int(counts.max())} classes above {threshold:g}: explain them one "
            "by one"
        )
    return logits.topk(int(counts[0]), dim=1).indices


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


# ----------------------------------------------------------------------------------------- numbers made of the logits


def picked(logits: Tensor, targets: Tensor) -> Tensor:
    """The asked classes' logits, (N,K)."""
    return logits.gather(1, targets)


def scores(logits: Tensor, targets: Tensor, scalars: Sequence[Scalar] = (), of_class: OfClass = picked) -> Tensor:
    """What is explained, (N,K): `of_class` of the classes, and of the callables what they give.

    >>> scores(torch.tensor([[1.0, 4.0]]), torch.tensor([[1, -1]]), [lambda y: y.sum()])
    tensor([[4., 5.]])
    """
    found = of_class(logits, targets.clamp(min=0))
    if not scalars:
        return found
    rows = [
        [found[i, k] if t >= 0 else _number(scalars[-1 - t], logits[i]) for k, t in enumerate(row)]
        for i, row in enumerate(targets.tolist())
    ]
    return torch.stack([torch.stack(row) for row in rows]).to(found)


def directions(logits: Tensor, targets: Tensor, scalars: Sequence[Scalar] = ()) -> Tensor:
    """(K,N,classes): the gradient of each asked number at the logits; for a class, 1 at the class.

    >>> directions(torch.tensor([[1.0, 4.0]]), torch.tensor([[1, -1]]), [lambda y: y.sum()])
    tensor([[[0., 1.]], [[1., 1.]]])
    """
    if not scalars:
        hot = torch.zeros_like(logits)[None].repeat(targets.shape[1], 1, 1)
        return hot.scatter_(2, targets.T[:, :, None], 1.0)
    with torch.enable_grad():
        leaf = logits.detach().clone().requires_grad_()
        columns = scores(leaf, targets, scalars).unbind(1)
        return torch.stack([torch.autograd.grad(column.sum(), leaf, retain_graph=True)[0] for column in columns])


def name_of(scalar: Scalar) -> str:
    """What to call a callable in pictures: its own name, or its type's."""
    name = getattr(scalar, "__name__", type(scalar).__name__)
    return "function of the logits" if name == "<lambda>" else name.replace("_", " ")


def _scalar(scalar: Scalar, logits: Tensor, known: list[Scalar]) -> int:
    """The index of a callable: the class that it picks, or -1 - its place in `known`, which it joins."""
    chosen = _picked_class(scalar, logits)
    if chosen is not None:
        return chosen
    if not any(scalar is other for other in known):
        known.append(scalar)
    return -1 - next(i for i, other in enumerate(known) if scalar is other)


def _picked_class(scalar: Scalar, logits: Tensor) -> int | None:
    """The class whose logit a callable hands back, both here and at the opposite point (which a maximum does not)."""
    with torch.enable_grad():
        leaf = logits.detach().clone().requires_grad_()
        value = _number(scalar, leaf)
        (direction,) = torch.autograd.grad(value, leaf)
    chosen = int(direction.argmax())
    one_hot = direction[chosen] == 1 and direction.count_nonzero() == 1
    with torch.no_grad():
        same = one_hot and value == leaf[chosen] and _number(scalar, -leaf) == -leaf[chosen]
    return chosen if same else None


def _number(scalar: Scalar, logits: Tensor) -> Tensor:
    value = scalar(logits)
    if not isinstance(value, Tensor) or value.numel() != 1:
        what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise TargetError(
            f"the target {name_of(scalar)!r} gives {what} for the logits {tuple(logits.shape)} of one image; "
            "it must give one number, as a tensor"
        )
    if logits.requires_grad and not value.requires_grad:
        raise TargetError(
            f"the target {name_of(scalar)!r} has no gradient; make its number of the logits, with torch operations"
        )
    return value.reshape(())
