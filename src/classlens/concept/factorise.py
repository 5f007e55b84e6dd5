"""Non-negative factorisation: X (n,C) is nearly U (n,M) W (M,C), with nothing below 0. W are the directions.

>>> amounts, directions = factorise(rows, 4)
>>> amounts_of(other_rows, directions).shape        # how much of each direction other rows hold
torch.Size([200, 4])

The error is the Kullback-Leibler divergence, sum x log(x / (UW)) - x + UW: the rows are amounts of evidence, and at its
minimum U W sums to the same as X along each row and each column. Squared errors would count a place with twice the
evidence four times. The updates are those of Lee and Seung (2001). They start from the singular vectors of X (NNDSVD;
Boutsidis and Gallopoulos, 2008), so that the same rows always give the same directions.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ROUNDS = 500
_LOOK = 10  # rounds between two looks at the error
_SETTLED = 3e-4  # relative change of the error between two looks at which the solver stops
_STILL = 1e-4  # the same of the amounts, where the directions are fixed
_FLOOR = 1e-2  # of the mean: what a factor has at least at the start, because a product with 0 stays 0
_RANK = 1e-6  # of the largest singular value: those below are rounding errors
_TINY = 1e-30  # far above the numbers that are slow


def factorise(x: Tensor, count: int, rounds: int = _ROUNDS) -> tuple[Tensor, Tensor]:
    """(U, W): amounts (n,M), and directions (M,C) that each sum to 1."""
    u, w = (one.to(x) for one in _start(x.double(), count))
    there = u.sum(0) > 0  # fewer than `count` where X holds no more: the others stay 0
    u, w = u + _FLOOR * u.mean() * there, w + _FLOOR * w.mean() * there[:, None]
    before = torch.inf
    for done in range(1, rounds + 1):
        u *= _share(x, u, w) @ w.T / (w.sum(1) + _TINY)
        w *= u.T @ _share(x, u, w) / (u.sum(0) + _TINY)[:, None]
        if done % _LOOK == 0:
            u, w = (torch.where(one < _TINY, 0, one) for one in (u, w))
            error = divergence(x, u @ w)
            if before - error <= _SETTLED * error:
                break
            before = error
    total = w.sum(1)
    return u * total, w / (total + _TINY)[:, None]


def amounts_of(x: Tensor, directions: Tensor, rounds: int = _ROUNDS) -> Tensor:
    """(n,M): the amounts with which fixed directions come nearest to rows; none is below 0."""
    w = directions.to(x)
    u = x.sum(1, keepdim=True).expand(-1, len(w)) / max(len(w), 1)
    for _ in range(rounds):
        before = u
        u = u * (_share(x, u, w) @ w.T / (w.sum(1) + _TINY))
        u = torch.where(u < _TINY, 0, u)
        if (u - before).abs().sum() <= _STILL * u.sum():
            break
    return u


def divergence(x: Tensor, product: Tensor) -> float:
    """The error of a product that should be x."""
    ratio = torch.where(x > 0, x / (product + _TINY), 1)
    return float((x * ratio.log() - x + product).sum(dtype=torch.float64))


def _share(x: Tensor, u: Tensor, w: Tensor) -> Tensor:
    return x / (u @ w + _TINY)


def _start(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """NNDSVD: of each pair of singular vectors, the larger of its positive and its negative part."""
    wide = x.shape[1] > len(x)  # the singular vectors of the smaller side are found first: its matrix is smaller
    values, vectors = torch.linalg.eigh(x @ x.T if wide else x.T @ x)
    u, w = x.new_zeros(len(x), count), x.new_zeros(count, x.shape[1])
    for j in range(min(count, len(values))):
        one, size = vectors[:, -1 - j], values[-1 - j].clamp(min=0).sqrt()
        other = (one @ x if wide else x @ one) / size.clamp(min=torch.finfo(x.dtype).tiny)
        left, right = (one, other) if wide else (other, one)
        sides = [(left.clamp(min=0), right.clamp(min=0)), ((-left).clamp(min=0), (-right).clamp(min=0))]
        a, b = max(sides, key=lambda side: float(side[0].norm() * side[1].norm()))
        scale = (size * a.norm() * b.norm()).sqrt()
        if scale > _RANK * values[-1].clamp(min=0).sqrt():
            u[:, j], w[j] = scale * a / a.norm(), scale * b / b.norm()
    return u, w
