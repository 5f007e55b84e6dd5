from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import classlens
from classlens.core.capture import Node, record
from classlens.core.rules import RULES, propagate, register, rule_for
from classlens.core.rules.generic import Shares, magnitude, shared
from classlens.errors import UnsupportedOp
from networks import NETWORKS, build, pictures
from steps import Does, back

X = torch.tensor([[[[1.0, -2.0], [3.0, 0.0]]]])


def test_sum_is_shared_by_magnitude() -> None:
    """Hand-computed: |1|,|-2|,|3|,0 of 6."""
    found = back(lambda x: x.sum((2, 3)), X, torch.tensor([[6.0]]))
    assert torch.allclose(found, torch.tensor([[[[1.0, 2.0], [3.0, 0.0]]]]))


def test_inputs_that_are_all_zero_share_evenly() -> None:
    found = back(lambda x: (x * 0).mean((2, 3)), X, torch.tensor([[8.0]]))
    assert torch.allclose(found, torch.full_like(X, 2.0))


def test_addition_is_shared_by_magnitude() -> None:
    """x + 3x by two paths: the second gets three quarters; both come back to x."""
    tape = record(Does(lambda x: (x * 1.0) + F.conv2d(x, torch.full((1, 1, 1, 1), -3.0))).eval(), X)
    shares: dict[str, Tensor] = {}

    def watch(node: object, arrived: object, given: object) -> None:
        if node.op == "add":  # type: ignore[attr-defined]
            shares["a"], shares["b"] = given  # type: ignore[misc]

    total = propagate(tape, {tape.output: torch.ones(1, *X.shape)}, rule_for, watch=watch).relevance[0]
    assert torch.allclose(shares["a"][0][X != 0], torch.tensor(0.25))
    assert torch.allclose(shares["b"][0][X != 0], torch.tensor(0.75))
    # Where x is 0 the two halves are even, and the convolution's half has nowhere to go.
    assert torch.allclose(total, torch.tensor([[[[1.0, 1.0], [1.0, 0.5]]]]))


@pytest.mark.parametrize(
    ("do", "of_a", "of_b"),
    [
        (lambda a, b: torch.add(a, b, alpha=3), 1, 3), (lambda a, b: torch.sub(a, b, alpha=-3), 1, 3),
        (lambda a, b: torch.rsub(a, b, alpha=3), 3, 1), (lambda a, b: torch.sub(a, b), 1, 1),
    ],
)  # fmt: skip
def test_a_summand_with_a_factor_counts_as_often(do: Callable[..., Tensor], of_a: int, of_b: int) -> None:
    x, r = torch.tensor([[[1.0, -2.0], [3.0, 5.0]]]), torch.tensor([[[4.0, 6.0]]])
    a, b = of_a * x[:, :1].abs(), of_b * x[:, 1:].abs()
    found = back(lambda x: do(x[:, :1], x[:, 1:]), x, r)
    assert torch.allclose(found, torch.cat([a / (a + b) * r, b / (a + b) * r], 1))


def test_broadcast_addition_comes_back_summed() -> None:
    found = back(lambda x: x + x.amax((2, 3), keepdim=True), X, torch.full_like(X, 4.0))
    # |x| / (|x| + 3) of 4 each, the rest to the maximum at x = 3.
    direct = 4 * X.abs() / (X.abs() + 3)
    direct[0, 0, 1, 0] += 16 - direct.sum()
    assert torch.allclose(found, direct)


def test_gate_gives_all_to_the_signal() -> None:
    """x * sigmoid(mean x), in both orders, and x * sigmoid(x)."""
    r = torch.arange(4.0).reshape(X.shape)
    for do in (
        lambda x: x * torch.sigmoid(x.mean((2, 3), keepdim=True)),
        lambda x: torch.sigmoid(x.mean((2, 3), keepdim=True)) * x,
        lambda x: torch.sigmoid(x) * x,
    ):
        assert torch.equal(back(do, X, r), r)


def test_two_plain_factors_get_half_each() -> None:
    r = torch.arange(4.0).reshape(X.shape)
    assert torch.allclose(back(lambda x: (x * 2 + 5) * (x - 7), X, r), r)  # half by each path


def test_division_gives_all_to_the_numerator() -> None:
    r = torch.arange(4.0).reshape(X.shape)
    assert torch.allclose(back(lambda x: x / x.norm(dim=(2, 3), keepdim=True), X, r), r)
    with pytest.raises(UnsupportedOp, match="rdiv"):
        back(lambda x: 1 / (x + 9), X, r)


@pytest.mark.parametrize(
    "do",
    [
        lambda x: F.max_pool2d(x, 2), lambda x: x.flip(2)[:, :, :1], lambda x: F.pad(x, (1, 0, 0, 1), mode="reflect"),
        lambda x: torch.cat([x, x.mT], 1), lambda x: x.repeat(1, 2, 1, 1), lambda x: x.roll(1, 3),
        lambda x: torch.stack(x.unbind(2), 2), lambda x: x.split([1, 1], 2)[1], lambda x: x.permute(0, 3, 2, 1),
        lambda x: F.interpolate(x, scale_factor=2, mode="nearest"), lambda x: x.max(3).values,
        lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
    ],
)  # fmt: skip
def test_moving_data_moves_relevance(do: object) -> None:
    """Everything put in comes out, and where it comes out the operation had read its value."""
    x = torch.arange(1.0, 5.0).reshape(1, 1, 2, 2)
    y = do(x)  # type: ignore[operator]
    r = torch.rand(y.shape, generator=torch.Generator().manual_seed(0)) + 0.1
    found = back(do, x, r)
    assert torch.allclose(found.sum(), r.sum())
    expected = torch.zeros_like(x)
    for value, share in zip(y.flatten(), r.flatten(), strict=True):  # each value of x is unique
        expected[x == value] += share
    assert torch.allclose(found, expected)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("name", NETWORKS)
def test_default_rules_conserve_on_every_network(name: str) -> None:
    tape = record(build(name).double(), pictures().double())
    start = torch.rand(2, *tape.logits.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = propagate(tape, {tape.output: start}, rule_for).relevance
    kept = found.sum((2, 3, 4)) / start.sum(2)
    if name == "gated":  # some depthwise units see nothing but zeros: what they say is their bias's word
        assert ((kept > 0.9) & (kept < 1)).all()
    else:
        assert torch.allclose(kept, torch.ones_like(kept), rtol=1e-9)


def test_unknown_operations_are_named() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Does(lambda x: torch.cdist(x, x))

        def forward(self, x: Tensor) -> Tensor:
            return self.part(x).flatten(1)

    with pytest.raises(UnsupportedOp, match=r"no rule for the operation cdist in 1.part; register one"):
        classlens.explain(nn.Sequential(nn.Conv2d(3, 2, 3), Odd()).eval(), pictures(), method="lrp")


def test_a_user_registers_a_rule_for_an_operation() -> None:
    model = nn.Sequential(nn.Conv2d(3, 2, 3), Does(torch.sinc), nn.Flatten(), nn.Linear(1800, 4)).eval()
    with pytest.raises(UnsupportedOp, match="sinc"):
        classlens.explain(model, pictures(), method="lrp")
    try:

        @register("sinc")
        def sinc(node: object, relevance: Tensor) -> list[Tensor]:
            return [relevance]

        assert classlens.explain(model, pictures(), method="lrp").report.conservation.max() < 1e-5
    finally:
        del RULES["sinc"]


def test_sum_and_product_in_one_operation() -> None:
    r = torch.arange(4.0).reshape(X.shape)
    scale, offset = torch.full((1, 1, 1), 3.0), torch.ones(1, 1, 1)
    assert torch.equal(back(lambda x: torch.addcmul(offset, scale, x), X, r), r)  # an affine map
    assert torch.equal(back(lambda x: torch.addcmul(offset, torch.sigmoid(x), x), X, r), r)  # gated
    # x + 3 * x: a quarter and three quarters, and both come back.
    assert torch.allclose(back(lambda x: torch.addcmul(x, scale, x * 1.0), X, r), r)


class Mixed(nn.Module):
    """A quarter of a learnt constant is mixed into the features."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv2d(3, 4, 3, bias=False), nn.Linear(4, 5, bias=False)
        self.token = nn.Parameter(torch.rand(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.lerp(self.conv(x).relu(), self.token, 0.25).mean((2, 3)))


def mixed(node: Node, relevance: Tensor) -> Shares:
    """(1 - w) a, of (1 - w) a + w c with a and c positive."""
    return shared(node.call, [magnitude(v.tensor) for v in node.inputs], relevance)


@pytest.mark.parametrize("absorbs", [True, False])
def test_a_rule_that_absorbs_relevance_says_so(absorbs: bool) -> None:
    """What the constant draws is written down, or else conservation tells that it is missing."""
    model, x = Mixed().double().eval(), pictures().double()
    try:
        register("lerp", absorbs=absorbs)(mixed)
        report = classlens.explain(model, x, [[0, 1], [2, 3]], "lrp").report
    finally:
        register("lerp")(mixed)
        del RULES["lerp"]
    if not absorbs:
        assert (report.conservation > 1e-2).all()
        return
    assert (report.conservation < 1e-12).all()
    features = model.conv(x).relu()
    drawn = 0.25 * model.token / (0.75 * features + 0.25 * model.token)  # of each unit's relevance
    pooled = torch.lerp(features, model.token, 0.25)
    for b, row in enumerate([[0, 1], [2, 3]]):
        for k, target in enumerate(row):
            logits = model(x)[b]
            share = (model.head.weight[target] * pooled[b].mean((1, 2))).clamp(min=0)  # z+ of the head
            unit = share[:, None, None] / share.sum() * pooled[b] / pooled[b].sum((1, 2), keepdim=True)
            expected = logits[target] * (unit * drawn[b]).sum()
            assert report.absorbed[b, k].item() == pytest.approx(expected.item(), rel=1e-9)


def test_relevance_that_stays_is_credited_to_its_image_where_tokens_come_first() -> None:
    """Three tokens of two images, and a border around the tokens."""

    class TokensFirst(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            tokens = F.pad(x.flatten(2).permute(2, 0, 1)[:2], (0, 0, 0, 0, 0, 1))
            return tokens.sum(0)

    model, x = nn.Sequential(nn.Conv2d(3, 4, 1), TokensFirst(), nn.Linear(4, 3)).double().eval(), pictures().double()
    e = classlens.explain(model, x, 0, "lrp")
    assert e.report.conservation.max() < 1e-10
    single = [classlens.explain(model, x[i : i + 1], 0, "lrp").report.absorbed for i in range(2)]
    assert torch.allclose(e.report.absorbed, torch.cat(single))


def test_a_constant_that_wins_keeps_its_relevance() -> None:
    for do in (torch.maximum, torch.max):
        limits = torch.tensor([[2.0, 2.1], [2.0, 2.1]])  # the same number everywhere would be an activation
        tape = record(Does(lambda x, do=do, limits=limits: do(x, limits)).eval(), X)
        sweep = propagate(tape, {tape.output: torch.ones(1, *X.shape)}, rule_for)
        assert sweep.relevance.sum() == 1
        assert sweep.absorbed.sum() == 3


def test_a_change_of_sign_does_not_change_who_it_came_from() -> None:
    r = torch.arange(4.0).reshape(X.shape)
    for do in (lambda x: -x, lambda x: 1 - x, lambda x: x - 3, lambda x: x.abs(), lambda x: torch.rsub(x, 1)):
        assert torch.equal(back(do, X, r), r)


def test_masked_places_keep_their_relevance() -> None:
    found = back(lambda x: x.masked_fill(x < 0, 5.0), X, torch.ones_like(X))
    assert torch.equal(found, torch.tensor([[[[1.0, 0.0], [1.0, 1.0]]]]))


def test_a_function_of_one_unit_hands_it_everything() -> None:
    r = torch.arange(4.0).reshape(X.shape)
    for do in (lambda x: x.square(), lambda x: x**3, lambda x: torch.relu(x) ** 2, lambda x: x.exp(), torch.erf):
        assert torch.equal(back(do, X, r), r)


def test_relevance_of_joined_branches_belongs_to_its_image() -> None:
    """Two branches stacked before the images: the ledger must not take branches for images."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(48, 5, bias=False) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([head(x.flatten(1)) for head in self.heads]).mean(0)

    torch.manual_seed(0)
    found = classlens.explain(Two().eval(), torch.randn(2, 3, 4, 4), [[0, 1], [2, 3]], "lrp")
    assert found.report.conservation.max() < 1e-6


def test_patches_that_overlap_share_the_places_they_meet_in() -> None:
    """Two patches of two columns on three: the middle column is the sum of 1 and -3, so it goes to them as 1 to 3."""

    def overlapping(x: Tensor) -> Tensor:
        return torch.nn.functional.fold(x, output_size=(1, 3), kernel_size=(1, 2))

    x = torch.tensor([[[5.0, -3.0], [1.0, 7.0]]])  # (1, places in a patch, patches)
    found = back(overlapping, x, torch.tensor([[[[2.0, 8.0, 3.0]]]]))
    assert torch.allclose(found, torch.tensor([[[2.0, 6.0], [2.0, 3.0]]]))


def test_an_input_that_is_all_but_off_does_not_blow_up() -> None:
    """SiLU leaves 1e-37 of a large negative unit; divided by its share of nothing, relevance would be infinite."""

    class Nearly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(2, 2, bias=False)
            self.head.weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, 1e-3]]))

        def forward(self, x: Tensor) -> Tensor:
            return 1e6 * self.head(torch.nn.functional.silu(x).flatten(1))

    for method in ("lrp", "agf"):
        found = classlens.explain(Nearly().eval(), torch.tensor([[[[-90.0, -88.0]]]]), [[0, 1]], method)
        assert torch.isfinite(found.maps).all()
        assert (found.report.conservation < 1e-5).all()


def test_whole_numbers_are_decisions_and_get_no_share() -> None:
    """x - floor(x), with the place as an integer: the distance from a place is about x, not about the place."""
    found = back(lambda x: x * 1.0 - x.int(), X, torch.full((1, 1, 1, 2, 2), 5.0))
    assert torch.equal(found.flatten(), torch.full((4,), 5.0))
