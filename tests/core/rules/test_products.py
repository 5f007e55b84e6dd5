"""Products, and sums with a product inside, against shares worked out by hand."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from steps import back

W, C = torch.tensor([[1.0, -2.0], [3.0, 0.5], [-1.0, 4.0]]).double(), torch.tensor([5.0, -6.0]).double()
X = torch.tensor([[1.0, -2.0, 0.5]]).double()
R = torch.tensor([[3.0, 8.0]]).double()


def through(weights: Tensor, x: Tensor, relevance: Tensor) -> Tensor:
    """R_j = sum_i |x_j w_ji| / sum_j |x_j w_ji| R_i."""
    parts = (x[0, :, None] * weights).abs()
    return (parts / parts.sum(0) * relevance).sum(1)[None]


def test_a_constant_added_to_a_product_takes_no_share() -> None:
    for do in (
        lambda x: torch.addmm(C, x, W), lambda x: C.expand(1, 2).addmm(mat1=x, mat2=W, beta=2, alpha=-3),
        lambda x: torch.addmv(C, W.T, x[0])[None], lambda x: torch.addbmm(C, x[None], W[None]),
        lambda x: torch.baddbmm(C, x[None], W[None])[0], lambda x: C + x @ W,
    ):  # fmt: skip
        assert torch.allclose(back(do, X, R), through(W, X, R))


@pytest.mark.parametrize("beta", [1.0, 0.5])
def test_a_live_summand_and_a_product_share_by_magnitude(beta: float) -> None:
    """x and x W: (beta |x_i| , |(x W)_i|) of R_i each; the product's part goes on through W."""
    square = W[:, [0, 1, 0]]
    own, inside = beta * X.abs(), (X @ square).abs()
    r = torch.tensor([[3.0, 8.0, -1.0]]).double()
    expected = own / (own + inside) * r + through(square, X, inside / (own + inside) * r)
    assert torch.allclose(back(lambda x: torch.addmm(x, x, square, beta=beta), X, r), expected)
    by_parts = back(lambda x: beta * x + x @ square, X, r)
    assert torch.allclose(expected, by_parts)


def test_a_value_that_is_summand_and_factor_gets_both_shares() -> None:
    scale, r = torch.tensor([[3.0, -0.25, 1.0]]).double(), torch.tensor([[3.0, 8.0, -1.0]]).double()
    assert torch.allclose(back(lambda x: torch.addcmul(x, scale, x), X, r), r)
    assert torch.allclose(back(lambda x: torch.addcmul(x, scale, scale), X, r), r)  # the product is a bias


def test_an_outer_product_added() -> None:
    """c + a b^T with a = x and b constant: a_i gets what its row got."""
    r = torch.rand(3, 2).double()
    assert torch.allclose(back(lambda x: torch.addr(torch.ones(3, 2).double(), x[0], C), X, r), r.sum(1)[None])


@pytest.mark.parametrize("squash", [lambda x: x, torch.sigmoid])
def test_factors_broadcast_over_each_other_get_shares_of_their_own_shape(squash: Callable[[Tensor], Tensor]) -> None:
    """A column times a row: neither is broadcast over the other as a whole."""
    r = torch.rand(1, 3, 3).double()
    found = back(lambda x: x[:, :, None] * squash(x[:, None, :]), X, r)
    rows, columns = r.sum(2), r.sum(1)
    plain = squash(X) is X
    assert torch.allclose(found, (rows + columns) / 2 if plain else rows)
