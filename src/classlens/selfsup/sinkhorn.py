"""Sinkhorn-Knopp: assigns labels to unlabelled images, each label equally often (SeLa; Asano et al., 2020).

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

    It maximises <Q, scores> + entropy(Q) / sharpness among all matrices with these sums. Row sums are exact;
    column sums have a relative `tolerance`. It stops after at most `iterations`. `scores` are log-probabilities.

    >>> sinkhorn(torch.tensor([[0.0, -1.0], [0.0, -2.0]]), sharpness=1.0).sum(0)
    tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    count, labels = scores.shape
    if not torch.isfinite(scores).all():
        raise ClasslensError("the scores of self-labelling are not finite; use a smaller learning rate")
    kernel = sharpness * scores.double()  # in logarithms: with lambda 25 the values would underflow
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
    """(N,): for each image, the label with the largest entry in its row of Q."""
    return sinkhorn(scores, sharpness).argmax(1)
