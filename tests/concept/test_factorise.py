"""The solver against scikit-learn's, against scipy's minimum, and on matrices whose factors are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.decomposition import NMF
from torch import Tensor

from classlens.concept.factorise import amounts_of, divergence, factorise


def _random(rows: int, columns: int, rank: int, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.rand(rows, rank, generator=random).double() @ torch.rand(rank, columns, generator=random).double() ** 4


@pytest.mark.parametrize("shape", [(120, 30), (30, 120)])
def test_the_error_is_that_of_scikit_learn(shape: tuple[int, int]) -> None:
    x = _random(*shape, rank=9)
    u, w = factorise(x, 4)
    model = NMF(4, init="nndsvda", solver="mu", beta_loss="kullback-leibler", max_iter=3000, tol=1e-5).fit(x.numpy())
    theirs = model.reconstruction_err_**2 / 2
    assert divergence(x, u @ w) < 1.05 * theirs
    assert u.min() >= 0
    assert w.min() >= 0
    torch.testing.assert_close(w.sum(1), torch.ones(4).double())


def test_the_product_sums_to_the_same_as_the_matrix() -> None:
    """What squared errors do not promise: no evidence is added or lost."""
    x = _random(60, 40, rank=9)
    u, w = factorise(x, 3, rounds=1000)
    torch.testing.assert_close((u @ w).sum(0), x.sum(0), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close((u @ w).sum(1), x.sum(1), rtol=0.02, atol=0)


def test_known_parts_are_found_again() -> None:
    parts = torch.eye(3, 8).double()
    rows = torch.cat([a * parts[k : k + 1] for k in range(3) for a in (0.5, 1.0, 2.0)])
    _, w = factorise(rows, 3)
    assert {int(row.argmax()) for row in w} == {0, 1, 2}
    assert float(w.max(1).values.min()) > 0.999


def test_amounts_are_the_minimum() -> None:
    """Slowly: scipy's minimum of the divergence of each row."""
    x, w = _random(6, 12, rank=6), _random(4, 12, rank=4, seed=1)
    found = amounts_of(x, w, rounds=5000)

    def error(amounts: np.ndarray, row: Tensor) -> float:
        return divergence(row, torch.from_numpy(amounts) @ w)

    for row, mine in zip(x, found, strict=True):
        start = np.full(4, float(row.sum()) / float(w.sum()))
        slow = minimize(error, start, args=(row,), bounds=[(1e-12, None)] * 4, method="L-BFGS-B").fun
        assert error(mine.numpy(), row) <= slow + 1e-3 * abs(slow)
    torch.testing.assert_close((found @ w).sum(1), x.sum(1), rtol=1e-3, atol=0)


def test_more_directions_than_the_rows_hold() -> None:
    u, w = factorise(torch.ones(5, 3).double(), 3)
    torch.testing.assert_close(u @ w, torch.ones(5, 3).double(), atol=1e-4, rtol=0)
    assert (u.sum(0) > 0).tolist() == [True, False, False]


def test_rows_without_evidence_have_no_amounts() -> None:
    rows = torch.eye(3, 5).double()
    rows[1] = 0
    u, w = factorise(rows, 2)
    assert not u[1].any()
    assert not amounts_of(torch.zeros(2, 5), w).any()
    assert amounts_of(rows, w[:0]).shape == (3, 0)
