"""Non-negative factorisation: X (n,C) is nearly U (n,M) W (M,C), with nothing below 0. W are the directions.

>>> amounts, directions = factorise(rows, 4)
>>> amounts_of(other_rows, directions).shape        # how much of each direction other rows hold
torch.Size([200, 4])

The solver is HALS (Cichocki and Phan, 2009): each column of U, and each row of W, in turn gets its best value while the
others are fixed. It starts from the singular vectors of X (NNDSVD; Boutsidis and Gallopoulos, 2008), so that the same
rows always give the same directions.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ROUNDS = 200
_SETTLED = 1e-5  # relative change of the error between rounds at which the solver stops
_STILL = 1e-7  # the same of the amounts, where the directions are fixed


def factorise(x: Tensor, count: int, rounds: int = _ROUNDS) -> tuple[Tensor, Tensor]:
    """(U, W): amounts (n,M), and directions (M,C) that each sum to 1."""
    x = x.double()
    u, w = _start(x, count)
    size, before = x.square().sum(), torch.inf
    for _ in range(rounds):
        _improve(u, x @ w.T, w @ w.T)
        _improve(w.T, x.T @ u, u.T @ u)
        # |X - UW|^2 without forming UW.
        error = float(size - 2 * (u.T @ x * w).sum() + ((u.T @ u) * (w @ w.T)).sum())
        if abs(before - error) <= _SETTLED * float(size):
            break
        before = error
    total = w.sum(1).clamp(min=torch.finfo(w.dtype).tiny)
    return u * total, w / total[:, None]


def amounts_of(x: Tensor, directions: Tensor, rounds: int = _ROUNDS) -> Tensor:
    """(n,M): the amounts with which fixed directions come nearest to rows; none is below 0."""
    x, w = x.double(), directions.double()
    u = x.new_zeros(len(x), len(w))
    product, gram = x @ w.T, w @ w.T
    for _ in range(rounds):
        before = u.clone()
        _improve(u, product, gram)
        if (u - before).abs().sum() <= _STILL * u.sum():
            break
    return u


def _improve(u: Tensor, product: Tensor, gram: Tensor) -> None:
    """One round over the columns of U, in place: u_j = (u_j + (X w_j - U W w_j) / |w_j|^2)+."""
    for j in range(u.shape[1]):
        if gram[j, j] > 0:
            u[:, j] = (u[:, j] + (product[:, j] - u @ gram[:, j]) / gram[j, j]).clamp(min=0)


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
        if scale > 0:
            u[:, j], w[j] = scale * a / a.norm(), scale * b / b.norm()
    return u, w
