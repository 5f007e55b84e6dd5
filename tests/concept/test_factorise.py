"""The solver against scikit-learn's, against scipy's least squares, and on matrices whose factors are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import nnls
from sklearn.decomposition import NMF
from torch import Tensor

from classlens.concept.factorise import amounts_of, factorise


def _random(rows: int, columns: int, rank: int, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.rand(rows, rank, generator=random).double() @ torch.rand(rank, columns, generator=random).double() ** 4


@pytest.mark.parametrize("shape", [(120, 30), (30, 120)])
def test_the_error_is_that_of_scikit_learn(shape: tuple[int, int]) -> None:
    x = _random(*shape, rank=9)
    u, w = factorise(x, 4)
    theirs = NMF(4, init="nndsvd", solver="cd", max_iter=3000, tol=1e-4).fit(x.numpy()).reconstruction_err_
    assert float((x - u @ w).norm()) < 1.02 * theirs
    assert u.min() >= 0
    assert w.min() >= 0
    torch.testing.assert_close(w.sum(1), torch.ones(4).double())


def test_known_parts_are_found_again() -> None:
    parts = torch.eye(3, 8).double()
    rows = torch.cat([a * parts[k : k + 1] for k in range(3) for a in (0.5, 1.0, 2.0)])
    _, w = factorise(rows, 3)
    assert {int(row.argmax()) for row in w} == {0, 1, 2}
    assert float(w.max(1).values.min()) > 0.999


def test_amounts_are_the_least_squares() -> None:
    x, w = _random(20, 12, rank=6), _random(4, 12, rank=4, seed=1)
    slow = np.stack([nnls(w.T.numpy(), row.numpy())[0] for row in x])
    np.testing.assert_allclose(amounts_of(x, w, rounds=5000).numpy(), slow, atol=5e-4 * slow.max())


def test_more_directions_than_the_rows_hold() -> None:
    u, w = factorise(torch.ones(5, 3), 3)
    torch.testing.assert_close(u @ w, torch.ones(5, 3).double(), atol=1e-4, rtol=0)
