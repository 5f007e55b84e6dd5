"""How much each unit of a layer gives to the logit of a class: integrated gradients of the network above the layer.

    R = x * the mean of d logit / d x on the way from no features to the features x

The sum of R is the logit, less that of the layer without features (Sundararajan et al., 2017). Rules that propagate
relevance do not promise this: they add up in the units of an earlier layer what speaks for several classes.

At one place of a layer many units speak for a class and nearly as many against it. `by_sign` lets them balance each
other, so that a place is for the class or against it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from classlens.core.capture import autocast_off
from classlens.machine import onednn_errors
from classlens.methods.featuremaps import FeatureMap
from classlens.methods.tail import Tail

STEPS = (3, 9, 27, 81)  # the midpoints of each are among those of the next
MOST_PASSES = 2 + STEPS[-1]
NEAR = 0.05  # of the logit: how far the sum may be from it; then the units of more steps differ by a thousandth


def evidence(tail: Tail, layer: FeatureMap, targets: Tensor) -> tuple[Tensor, int]:
    """(B,C,*places) for one class of each image (B,), and how many passes it took: as few steps as suffice.

    `tail` is the network after the layer.
    """
    value = layer.value.tensor.detach()
    features = layer.as_map(value)

    def logits(share: float) -> tuple[Tensor, Tensor]:
        # A class token is no feature of a place: it stays.
        begins = (value - layer.restored(((1 - share) * features)[None])[0]).requires_grad_(torch.is_grad_enabled())
        return begins, tail(begins).gather(1, asked)[:, 0]

    with onednn_errors(), torch.inference_mode(False), autocast_off(value.device):
        asked = targets.to(value.device, copy=True)[:, None]  # a copy of one that was made in inference mode
        with torch.no_grad():
            gained = logits(1.0)[1] - logits(0.0)[1]
        total, passes = torch.zeros_like(value), 2
        with torch.enable_grad():
            for steps in STEPS:
                for step in _new(steps):
                    begins, found = logits((step + 0.5) / steps)
                    total += torch.autograd.grad(found.sum(), begins)[0]
                    passes += 1
                each = features * layer.as_map(total) / steps
                if ((each.flatten(1).sum(1) - gained).abs() <= NEAR * gained.abs()).all():
                    break
    return each, passes


def _new(steps: int) -> list[int]:
    """The steps whose midpoints are not among those of a third as many.

    >>> _new(9)
    [0, 2, 3, 5, 6, 8]
    """
    return [step for step in range(steps) if step % 3 != 1 or steps == STEPS[0]]


def by_sign(found: Tensor) -> Tensor:
    """(2,B,C,*places): evidence (B,C,*places) for the class and against it, where units of a place balance each other.

    A place at which more speaks for the class keeps of it what is more, and nothing against the class. So the two sum
    to the same at each place as the evidence itself.

    >>> by_sign(torch.tensor([3.0, 1.0, -2.0]).reshape(1, 3, 1)).flatten(1).tolist()
    [[1.5, 0.5, 0.0], [0.0, 0.0, 0.0]]
    """
    left, sides = found.sum(1, keepdim=True), []
    for sign in (1, -1):
        side = (sign * found).clamp(min=0)
        whole = side.sum(1, keepdim=True).clamp(min=torch.finfo(found.dtype).tiny)
        sides.append(sign * side * ((sign * left).clamp(min=0) / whole))
    return torch.stack(sides)
