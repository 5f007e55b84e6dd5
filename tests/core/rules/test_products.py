"""Products, and sums with a product inside, against shares worked out by hand."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from classlens.core.capture import Axis, Value, record
from classlens.core.rules import products, propagate, rule_for
from classlens.core.rules.products import divided_among
from classlens.core.rules.propagate import images_in
from classlens.errors import UnsupportedOp
from steps import Does, back

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


# ------------------------------------------------------------------------------------- values that can be told apart

TWO = torch.tensor([[[[2.0, -3.0]], [[-1.0, 4.0]]]])  # (1,2,1,2): two channels of two places
ONE = torch.tensor([[[[5.0, 7.0]]]])


@pytest.mark.parametrize(
    ("values", "gate"),
    [([0.0, 1.0], True), ([0.2, 0.9], True), ([-0.1, 0.5], False), ([0.5, 1.1], False), ([0.0, 1.5], False)],
)
def test_a_gate_lies_within_0_and_1(values: list[float], gate: bool) -> None:
    tensor = torch.tensor(values)
    assert is_gate(tensor) is gate


def is_gate(t: Tensor) -> bool:
    """Whether a plain signal gets all of a product with it."""
    share, _ = divided_among([ONE, ONE], [Value(t, None, t.shape), Value(-ONE, None, ONE.shape)])
    return share is None


def test_the_signal_gets_all_wherever_it_stands() -> None:
    """Of sigmoid(first channel) and the second channel, the second gets everything, in either order."""
    expected = torch.cat([torch.zeros_like(ONE), ONE], 1)
    for do in (
        lambda x: torch.sigmoid(x[:, :1]) * x[:, 1:],
        lambda x: x[:, 1:] * torch.sigmoid(x[:, :1]),
        lambda x: x[:, 1:] * torch.sigmoid(x[:, :1].mean(3, keepdim=True)),
        lambda x: x[:, :1].mean(3, keepdim=True) * x[:, 1:],  # broadcast: a gate, whatever its values
    ):
        assert torch.allclose(back(do, TWO, ONE), expected)


# For each image: two factors of 2x3 places; which of them lie within [0,1].
FACTORS = torch.tensor([
    [[[0.0, 1.0, 0.5], [0.2, 1.0, 0.0]], [[3.0, -1.0, 0.5], [2.0, 2.0, 0.3]]],  # the first
    [[[0.5, 0.2, 0.3], [0.1, 0.6, 1.1]], [[0.0, 1.0, 0.4], [0.3, 0.9, 0.7]]],  # the second
    [[[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]], [[0.0, 1.0, 0.4], [0.3, 0.9, 0.7]]],  # both
    [[[0.5, 0.2, 0.3], [0.1, 0.6, 9.0]], [[0.3, 0.9, 0.4], [-5.0, 0.2, 0.7]]],  # none
])  # fmt: skip
PARTS = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.5, 0.5], [0.5, 0.5]])


@pytest.mark.parametrize(
    "do",
    [
        lambda x: x[:, :1] * x[:, 1:],
        lambda x: (x[:, :1].transpose(0, 2) * x[:, 1:].transpose(0, 2)).transpose(0, 2),  # images on the third axis
        lambda x: (x[:, 0].flatten(0, 1) * x[:, 1].flatten(0, 1)).view(-1, 1, 2, 3),  # two rows for each image
        lambda x: torch.einsum("bchw,bchw->bchw", x[:, :1], x[:, 1:]),
    ],
    ids=["first axis", "third axis", "rows", "einsum"],
)
@pytest.mark.parametrize("chosen", [[0, 1, 2, 3], [0], [1], [2], [3], [2, 3], [3, 0], [0, 0], [2, 1]])
def test_the_gate_is_told_for_each_image(do: Callable[[Tensor], Tensor], chosen: list[int]) -> None:
    """What the other images of a batch hold makes no difference."""
    relevance = 1 + torch.arange(6.0 * len(chosen)).view(-1, 1, 2, 3)
    found = back(do, FACTORS[chosen], relevance)
    torch.testing.assert_close(found, relevance * PARTS[chosen][:, :, None, None])


def test_if_the_images_of_one_factor_are_unknown_both_are_looked_at_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = (Value(FACTORS[:, k], None, FACTORS[:, k].shape) for k in range(2))
    axis = Axis(0, torch.arange(4))
    monkeypatch.setattr(products, "images_in", lambda value: axis if value is a else None)
    for share in divided_among([torch.ones(1, 4, 2, 3)] * 2, [a, b]):
        assert share is not None
        assert torch.equal(share, torch.full((1, 4, 2, 3), 0.5))


def test_a_sweep_leaves_no_images_behind() -> None:
    """A gate that is looked at outside of a sweep is one image, whatever ran before."""
    back(lambda x: x[:, :1] * x[:, 1:], FACTORS, torch.ones(4, 1, 2, 3))
    assert images_in(Value(ONE, None, ONE.shape)) is None
    tape = record(Does(lambda x: x[:, :1] * x[:, 1:]).eval(), FACTORS)
    assert images_in(tape.image) is None
    propagate(tape, {tape.output: torch.ones(1, 4, 1, 2, 3)}, rule_for)
    assert images_in(tape.image) is None


def test_equal_factors_get_half_each() -> None:
    half = torch.cat([ONE, ONE], 1) / 2
    assert torch.allclose(back(lambda x: x[:, :1] * x[:, 1:], TWO, ONE), half)
    assert torch.allclose(back(lambda x: torch.sigmoid(x[:, :1]) * torch.sigmoid(x[:, 1:]), TWO, ONE), half)


def test_the_numerator_gets_all() -> None:
    assert torch.equal(back(lambda x: x[:, :1] / x[:, 1:], TWO, ONE), torch.cat([ONE, torch.zeros_like(ONE)], 1))
    with pytest.raises(UnsupportedOp, match="a constant divided by a live value"):
        back(lambda x: torch.div(torch.ones(1, 2, 1, 2), x), TWO, torch.cat([ONE, ONE], 1))


MIX = torch.tensor([[1.0, -2.0], [3.0, 0.5]])
ADDED: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "addcmul": (lambda x: torch.addcmul(x[0, 0], MIX, x[0, 1] * 1), lambda x: MIX * x[0, 1]),
    "addcmul with a value": (lambda x: torch.addcmul(x[0, 0], MIX, x[0, 1] * 1, value=3), lambda x: 3 * MIX * x[0, 1]),
    "addmm": (lambda x: torch.addmm(x[0, 0], x[0, 1] * 1, MIX), lambda x: x[0, 1] @ MIX),
    "addmm with factors": (
        lambda x: torch.addmm(x[0, 0], x[0, 1] * 1, MIX, beta=2, alpha=3),
        lambda x: 3 * x[0, 1] @ MIX,
    ),
    "baddbmm": (lambda x: torch.baddbmm(x[:, 0], x[:, 1] * 1, MIX[None])[0], lambda x: x[0, 1] @ MIX),
    "addbmm": (
        lambda x: torch.addbmm(x[0, 0], torch.stack([x[0, 1], 2 * x[0, 1]]), torch.stack([MIX, MIX])),
        lambda x: 3 * x[0, 1] @ MIX,
    ),
    "addr": (lambda x: torch.addr(x[0, 0], x[0, 1, 0] * 1, MIX[0]), lambda x: torch.outer(x[0, 1, 0], MIX[0])),
    "addmv": (lambda x: torch.addmv(x[0, 0, 0], MIX, x[0, 1, 0] * 1)[None], lambda x: (MIX @ x[0, 1, 0])[None]),
}


@pytest.mark.parametrize("name", ADDED)
def test_a_summand_and_a_product_share_by_magnitude(name: str) -> None:
    """c + a b: |c| to |a b|. What the product gets all comes to its only live factor, the second channel."""
    do, product = ADDED[name]
    x = torch.tensor([[[[2.0, -3.0], [1.0, 0.5]], [[-1.0, 4.0], [0.5, 2.0]]]])
    out = do(x)
    r = torch.arange(1.0, 1 + out.numel()).reshape(out.shape)
    summand = out - product(x)
    to_summand = (summand.abs() / (summand.abs() + product(x).abs()) * r).sum()
    found = back(do, x, r)
    assert torch.allclose(found[:, 0].sum(), to_summand, rtol=1e-5)
    assert torch.allclose(found[:, 1].sum(), r.sum() - to_summand, rtol=1e-5)


def test_matrices_whose_products_are_added_up() -> None:
    """addbmm of three pairs of matrices: |x_bik W_bkj| of each, out of the sum over pairs and k."""
    source = torch.Generator().manual_seed(0)
    x, w, r = (torch.randn(*shape, generator=source).double() for shape in ((3, 2, 4), (3, 4, 5), (2, 5)))
    z = (x[..., None] * w[:, None]).abs()  # (pairs, i, k, j)
    expected = (z / z.sum((0, 2), keepdim=True) * r[:, None]).sum(3)
    assert torch.allclose(back(lambda x: torch.addbmm(torch.zeros(2, 5).double(), x, w), x, r), expected)


def test_a_constant_summand_takes_no_share_and_a_constant_product_neither() -> None:
    x, r = TWO[0], torch.tensor([[1.0, 2.0]])
    assert torch.allclose(back(lambda x: torch.addmm(torch.ones(2), x[0], MIX), x, r)[0].sum(), r.sum())
    assert torch.equal(back(lambda x: torch.addmm(x[0], r, MIX), x, r)[0], r)


def test_both_factors_of_an_added_product_may_be_live() -> None:
    """addcmul's factors are a product unit by unit: half each; the same value in two places gets both shares."""
    r = torch.tensor([[1.0, 2.0]])
    found = back(lambda x: torch.addcmul(torch.zeros(1, 2), x[0, 0], x[0, 1]), TWO, r)
    assert torch.allclose(found, torch.stack([r, r])[None] / 2)
    twice = back(lambda x: (y := x[0, 0] * 1, torch.addcmul(torch.zeros(1, 2), y, y))[1], TWO, r)
    assert torch.allclose(twice[:, 0], r)


@pytest.mark.parametrize("bias", [False, True])
def test_a_constant_through_weights_that_are_made_of_the_image(bias: bool) -> None:
    """Learnt queries, one for each class, times the features: the features get the relevance, as in a product."""
    queries = torch.tensor([[1.0, -2.0, 0.5], [3.0, 1.0, -1.0]]).double()
    x, r = torch.tensor([[2.0, -1.0, 4.0]]).double(), torch.tensor([[5.0], [7.0]]).double()
    extra = torch.zeros(1).double() if bias else None
    found = back(lambda x: nn.functional.linear(queries, x, extra), x, r)
    z = (queries * x).abs()
    assert torch.allclose(found, (z / z.sum(1, keepdim=True) * r).sum(0, keepdim=True))


def test_a_factor_that_addcmul_broadcasts_is_a_gate() -> None:
    """As in an ordinary product, also where it is outside of [0,1]."""
    x, r = torch.rand(1, 2, 3, 3) + 2, torch.rand(1, 2, 3, 3)
    found = back(lambda x: torch.addcmul(torch.zeros(1), x, x.mean((2, 3), keepdim=True)), x, r)
    assert torch.allclose(found, r)


def test_nothing_is_no_gate() -> None:
    """A level of a feature pyramid without proposals is empty."""
    nothing, gate = torch.empty(0, 4), torch.tensor([0.0, 1.0])
    assert [is_gate(t) for t in (nothing, gate, 2 * gate, -gate)] == [0, 1, 0, 0]
