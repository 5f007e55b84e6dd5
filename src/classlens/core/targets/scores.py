"""What methods need from targets: their values, and the gradients of these at the logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from classlens.core.targets.base import Target

OfClass = Callable[[Tensor, Tensor], Tensor]  # logits (N,classes), indices (N,K) -> the classes' scores (N,K)


def picked(logits: Tensor, targets: Tensor) -> Tensor:
    """The logits of the target classes, (N,K)."""
    return logits.gather(1, targets)


def scores(logits: Tensor, targets: Tensor, others: Sequence[Target] = (), of_class: OfClass = picked) -> Tensor:
    """The explained numbers, (N,K): `of_class` for classes, and the values of the other targets.

    >>> scores(torch.tensor([[1.0, 4.0]]), torch.tensor([[1, -1]]), [Number(lambda y: y.sum())])
    tensor([[4., 5.]])
    """
    found = of_class(logits, targets.clamp(min=0)) if (targets >= 0).any() else logits
    if not others:
        return found
    rows = [
        [found[i, k] if t >= 0 else others[-1 - t].value(logits[i]) for k, t in enumerate(row)]
        for i, row in enumerate(targets.tolist())
    ]
    return torch.stack([torch.stack(row) for row in rows]).to(found)


def directions(logits: Tensor, targets: Tensor, others: Sequence[Target] = ()) -> Tensor:
    """(K,N,classes): the gradient of each target at the logits; for a class, 1 at the class.

    >>> directions(torch.tensor([[1.0, 4.0]]), torch.tensor([[1, -1]]), [Number(lambda y: y.sum())])
    tensor([[[0., 1.]], [[1., 1.]]])
    """
    if not others:
        hot = torch.zeros_like(logits)[None].repeat(targets.shape[1], 1, 1)
        return hot.scatter_(2, targets.T[:, :, None], 1.0)
    with torch.enable_grad():
        leaf = logits.detach().clone().requires_grad_()
        columns = scores(leaf, targets, others).unbind(1)
        return torch.stack([torch.autograd.grad(column.sum(), leaf, retain_graph=True)[0] for column in columns])
