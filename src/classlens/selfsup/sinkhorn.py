"""Sinkhorn-Knopp: labels for pictures that have none, every label used equally often (SeLa; Asano et al., 2020).

>>> labels = self_labels(network(images).log_softmax(1))
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from classlens.errors import ClasslensError

SHARPNESS = 25.0  # lambda of SeLa: how close to a hard assignment


def sinkhorn(scores: Tensor, sharpness: float = SHARPNESS, tolerance: float = 1e-3, iterations: int = 1000) -> Tensor:
    """The matrix Q (N,K) of shape exp(u_i + sharpness * scores_ik + v_k) whose rows sum to 1/N, columns to 1/K.

    Of all matrices with these sums it has the largest <Q, scores> + entropy(Q) / sharpness. Rows are met exactly,
    columns up to `tolerance` of their sum; it ends after `iterations` at the latest. `scores`: log-probabilities.

    >>> sinkhorn(torch.tensor([[0.0, -1.0], [0.0, -2.0]]), sharpness=1.0).sum(0)
    tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    count, labels = scores.shape
    if not torch.isfinite(scores).all():
        raise ClasslensError("the scores of self-labelling are not finite; give a smaller learning rate")
    kernel = sharpness * scores.double()  # in logarithms: with lambda 25 the numbers themselves would underflow
    v = torch.zeros(labels, dtype=torch.float64, device=scores.device)
    for _ in range(iterations):
        u = -math.log(count) - torch.logsumexp(kernel + v, 1)
        columns = torch.logsumexp(kernel + u[:, None], 0)
        off = float((labels * (columns + v).exp() - 1).abs().max())
        if off < tolerance:
            break
        v = -math.log(labels) - columns
    else:
        u = -math.log(count) - torch.logsumexp(kernel + v, 1)
    return (kernel + u[:, None] + v).exp()


def self_labels(scores: Tensor, sharpness: float = SHARPNESS) -> Tensor:
    """(N,): for each picture the label that its row of Q holds most of."""
    return sinkhorn(scores, sharpness).argmax(1)
