from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import classlens
from classlens.core.capture import Reading, record
from classlens.core.capture.reading import Pick
from classlens.errors import CaptureError, MethodError, UnsupportedOp
from classlens.methods import Case, deeplift
from classlens.methods.deeplift import multipliers
from classlens.methods.inputs import baselines
from goldens import distance
from networks import NETWORKS, build, pictures
from steps import Does

TARGETS = [[1, 4], [0, 2]]
ignore_same = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
captum_warns = pytest.mark.filterwarnings(
    "ignore:(.|\\n)*Setting forward, backward hooks", "ignore:Input Tensor 0 did not"
)


class Attention(nn.Module):
    """Tokens, attention by softmax, layer norm, a product of two live values, a division."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, 8, 8, stride=8), nn.LayerNorm(8)
        self.qkv, self.fc = nn.Linear(8, 24), nn.Linear(8, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + torch.softmax(q @ k.transpose(1, 2) / 8**0.5, -1) @ v
        return self.fc((x * torch.sigmoid(x) / (1 + x.square())).mean(1))


def captum_can_serve() -> nn.Module:
    """One module for each activation, nothing functional; a max-pool only between convolutions, for beside an
    activation captum 0.9 loses a third of the logit difference (its own convergence delta says so)."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(),
        nn.Conv2d(6, 8, 3, padding=1), nn.ELU(), nn.AvgPool2d(4), nn.Flatten(),
        nn.Linear(8 * 16, 12), nn.Tanh(), nn.Linear(12, 7),
    ).eval().double()  # fmt: skip


@captum_warns
def test_agrees_with_captum_where_captum_can_serve() -> None:
    from captum.attr import DeepLiftShap

    with torch.random.fork_rng(devices=[]):
        model = captum_can_serve()
    x, generator = pictures().double(), torch.Generator().manual_seed(2)
    starts = torch.randn(3, 3, 32, 32, generator=generator).double()
    ours = classlens.explain(model, x, TARGETS, "deeplift-shap", baselines=list(starts)).maps
    for k in range(2):
        target = torch.tensor(TARGETS)[:, k]
        theirs = DeepLiftShap(model).attribute(x.clone(), starts, target=target).detach()
        assert distance(ours[:, k], theirs.sum(1)) < 1e-9


@captum_warns
def test_serves_reused_and_functional_activations_where_captum_does_not() -> None:
    from captum.attr import DeepLift

    model, x = build("residual").double(), pictures().double()
    e = classlens.explain(model, x, TARGETS, "deeplift-shap", baselines="zero")
    expected = (model(x) - model(torch.zeros_like(x))).gather(1, torch.tensor(TARGETS)).detach()
    assert torch.allclose(e.maps.sum((2, 3)), expected, rtol=1e-9)
    with pytest.raises((RuntimeError, AssertionError)):
        DeepLift(build("residual").double()).attribute(x.clone(), torch.zeros_like(x), target=1)


@ignore_same
@pytest.mark.parametrize("name", [*NETWORKS, "attention"])
def test_complete_on_every_network(name: str) -> None:
    """The map sums to the mean logit difference, which is computed here from plain forwards."""
    torch.manual_seed(0)
    model = (Attention().eval() if name == "attention" else build(name)).double()
    x = pictures().double()
    e = classlens.explain(model, x, TARGETS, "deeplift-shap")

    def logits(images: Tensor) -> Tensor:
        out = model(images)
        return (out["logits"] if isinstance(out, dict) else out).detach().gather(1, torch.tensor(TARGETS))

    starts = baselines(x, "zero+dark+blur+noise")
    expected = logits(x) - torch.stack([logits(start) for start in starts]).mean(0)
    assert torch.allclose(e.report.started, expected, atol=1e-12)
    assert torch.allclose(e.report.arrived, e.maps.sum((2, 3)))
    smooth = name in ("modern", "attention")  # layer norm and softmax are integrated numerically
    assert e.report.conservation.max() < (1e-4 if smooth else 1e-9)


def test_float32_is_complete_too() -> None:
    e = classlens.explain(build("gated"), pictures(), TARGETS, "deeplift-shap")
    assert e.report.conservation.max() < 1e-5


def two_records(function: object, x: Tensor, x0: Tensor) -> Tensor:
    class Wrapped(nn.Module):
        def forward(self, t: Tensor) -> Tensor:
            return function(t)

    tape, other = record(Wrapped().eval(), x), record(Wrapped().eval(), x0)
    return multipliers(tape, other, torch.ones_like(tape.logits)[None])[0]


def test_rescale_rule_by_hand() -> None:
    x, x0 = torch.tensor([[2.0, -1.0, 3.0, 1.0]]).double(), torch.tensor([[-1.0, 2.0, 1.0, 1.0]]).double()
    assert torch.allclose(two_records(F.relu, x, x0), torch.tensor([[2 / 3, 2 / 3, 1.0, 1.0]]).double())
    slope = two_records(torch.exp, x, x0)
    assert torch.allclose(slope[:, :3], ((x.exp() - x0.exp()) / (x - x0))[:, :3])
    assert torch.allclose(slope[:, 3], x[:, 3].exp())  # the same at both: the derivative


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "abs": lambda t: (t - 9).abs(), "exp": torch.exp, "expm1": torch.expm1, "log": torch.log, "log1p": torch.log1p,
    "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "reciprocal": torch.reciprocal, "square": torch.square,
    "pow": lambda t: t**0.3, "erf": lambda t: torch.erf(t - 9), "sin": lambda t: torch.sin(3 * t),
    "cos": lambda t: torch.cos(3 * t), "floor": torch.floor, "round": torch.round, "sign": lambda t: (t - 9).sign(),
    "tanh": lambda t: torch.tanh(t - 9), "hardtanh": lambda t: F.hardtanh(t - 9),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_one_unit_has_its_mean_slope(name: str) -> None:
    """However far apart image and baseline are: no points between them would do."""
    x, x0 = torch.tensor([[40.0, 2.0, 0.01]]).double(), torch.tensor([[0.001, 30.0, 25.3]]).double()
    function = FUNCTIONS[name]
    assert torch.allclose(two_records(function, x, x0), (function(x) - function(x0)) / (x - x0), rtol=1e-12)


def overwritten(t: Tensor) -> Tensor:
    y = 2 * t
    y[:, :2].copy_(t[:, 2:])
    return y


def halves(t: Tensor) -> tuple[Tensor, Tensor]:
    return t[:, :2], t[:, 2:]


W = torch.tensor([[1.0, -2.0], [3.0, 0.5]]).double()
PLACES = torch.tensor([[[[0.1, -0.3], [0.4, 0.2]]]]).double()  # (1,1,2,2): two places to read a picture at
PICTURE = torch.tensor([[[[1.0, 5.0, -2.0], [0.5, -3.0, 4.0], [2.0, 1.0, 7.0]]]]).double()
EXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "add": lambda t: torch.add(*halves(t)), "sub": lambda t: torch.sub(*halves(t)),
    "mul": lambda t: torch.mul(*halves(t)), "matmul": lambda t: halves(t)[0] @ halves(t)[1].mT,
    "einsum": lambda t: torch.einsum("bi,bj->bij", *halves(t)).flatten(1),
    "addmm": lambda t: torch.addmm(t[:, 2:], t[:, :2], W), "div": lambda t: t / 3,
    "baddbmm": lambda t: torch.baddbmm(t[:, None, 2:], t[:, None, :2], W[None]).flatten(1),
    "bilinear": lambda t: F.bilinear(*halves(t), torch.stack([W, W.mT])), "mean": lambda t: t.mean(1, keepdim=True),
    "cat": lambda t: torch.cat([t, t], 1), "chunk": lambda t: t.chunk(2, 1)[1],
    "linear": lambda t: F.linear(t[:, :2], W), "dropout": lambda t: F.dropout(t, 0.5, False), "relu": F.relu,
    "a live weight": lambda t: F.linear(t[:, :2], t[:, 2:]), "a constant input": lambda t: F.linear(W, t[:, :2]).mT,
    "batch_norm": lambda t: F.batch_norm(t[:, :2], W[0] + 3, W[1]), "detach": lambda t: t.detach() * 2,
    "max_pool1d": lambda t: F.max_pool1d(t[None], 2)[0], "amax": lambda t: t.amax(1, keepdim=True),
    "adaptive_max_pool1d": lambda t: F.adaptive_max_pool1d(t[None], 2)[0], "clone": lambda t: t.clone(),
    "maximum": lambda t: torch.maximum(*halves(t)), "max": lambda t: t.max(1).values[:, None],
    "max_pool2d": lambda t: F.max_pool2d(t.reshape(1, 1, 2, 2), 2).flatten(1),
    "adaptive_max_pool2d": lambda t: F.adaptive_max_pool2d(t.reshape(1, 1, 2, 2), 1).flatten(1),
    "max_pool3d": lambda t: F.max_pool3d(t.reshape(1, 1, 1, 2, 2), (1, 2, 1)).flatten(1),
    "adaptive_max_pool3d": lambda t: F.adaptive_max_pool3d(t.reshape(1, 1, 1, 2, 2), 1).flatten(1),
    "grid_sample": lambda t: F.grid_sample(t.reshape(1, 1, 2, 2), PLACES, align_corners=False).flatten(1),
    "a part that is overwritten": lambda t: overwritten(t),
    "live indices": lambda t: t.gather(1, (t > -9).long()[:, :2]),
    "indices": lambda t: F.max_pool1d(t[None], 2, return_indices=True)[0][0],
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_what_can_be_settled_exactly_is_not_integrated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any points to integrate over, the multipliers of these still add up to the difference."""
    monkeypatch.setattr(deeplift, "POINTS", 0)
    x, x0 = torch.tensor([[3.0, -1.0, 2.0, 0.5]]).double(), torch.tensor([[-2.0, 4.0, 1.0, 5.0]]).double()
    difference = (EXACT[name](x) - EXACT[name](x0)).sum()
    assert torch.allclose((two_records(EXACT[name], x, x0) * (x - x0)).sum(), difference, rtol=1e-12)


@pytest.mark.parametrize(
    "function",
    [
        lambda t: t.softmax(1)[:, :1], lambda t: (t[:, :2].abs() + 1) ** t[:, 2:], lambda t: t[:, :2] / (9 + t[:, 2:]),
        lambda t: 7 / (9 + t), lambda t: F.batch_norm(t[None], None, None, training=True)[0, :, 1:],
        lambda t: F.layer_norm(t, (4,))[:, 1:], lambda t: torch.div(PICTURE[0, 0, :1, :1], 9 + t),
        lambda t: F.grid_sample(PICTURE, 0.3 + 0.05 * t.reshape(1, 1, 2, 2), align_corners=False).flatten(1),
        lambda t: torch.einsum("bi,bi,bi->bi", t, t + 1, 2 * t),
    ],
)  # fmt: skip
def test_the_rest_is_the_mean_jacobian(function: Callable[[Tensor], Tensor]) -> None:
    """By 400 points half way between 401: m = the mean over a of J(x0 + a dx)^T 1."""
    x, x0 = torch.tensor([[3.0, 1.0, 2.0, 0.5]]).double(), torch.tensor([[2.0, 4.0, 1.0, -3.0]]).double()
    places = ((torch.arange(400) + 0.5) / 400).double()[:, None]
    leaf = (x0 + places * (x - x0)).requires_grad_()
    slow = sum(torch.autograd.grad(function(row[None]).sum(), row)[0] for row in leaf.unbind(0)) / 400
    assert torch.allclose(two_records(function, x, x0)[0], slow, rtol=1e-4, atol=1e-6)


def test_a_bound_that_is_larger_than_what_it_bounds() -> None:
    """One unit against three bounds: the slopes of all three add up in it."""
    x, x0, bounds = (
        torch.tensor([[4.0]]).double(),
        torch.tensor([[0.0]]).double(),
        torch.tensor([[1.0, 2.0, 9.0]]).double(),
    )
    found = two_records(lambda t: torch.clamp(t, max=bounds), x, x0)
    assert torch.allclose(found, torch.tensor([[(1 + 2 + 4) / 4]]).double(), rtol=0.1)


def test_a_number_made_of_logits_is_complete_too() -> None:
    model, x = build("plain").double(), pictures().double()

    def product(y: Tensor) -> Tensor:
        return y[0] * y[1] ** 2

    e = classlens.explain(model, x, product, "deeplift-shap", baselines="zero")
    expected = torch.stack([product(a) - product(b) for a, b in zip(model(x), model(0 * x), strict=True)])
    assert torch.allclose(e.maps.sum((1, 2, 3)), expected, rtol=1e-9)
    assert e.report.conservation.max() < 1e-9


def test_an_output_that_cannot_be_followed_is_refused() -> None:
    class Second(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.std_mean(x, (2, 3))[1]

    with pytest.raises(UnsupportedOp, match="needs the first output of std_mean in the model itself"):
        classlens.explain(Second().eval(), pictures(), 1, "deeplift-shap")


@pytest.mark.parametrize("step", [3e-7, 3e-5])
def test_nearly_equal_inputs_keep_their_digits(step: float) -> None:
    x0 = torch.linspace(-3, 3, 50)[None]
    x = x0 * (1 + step * torch.arange(50))
    found = two_records(F.silu, x, x0)
    leaf = ((x + x0) / 2).double().requires_grad_()
    (expected,) = torch.autograd.grad(F.silu(leaf).sum(), leaf)
    assert (found - expected).abs().max() < 1e-6


def test_equal_inputs_have_their_derivative() -> None:
    x = torch.tensor([[0.0, 2.0]]).double()
    assert torch.allclose(two_records(torch.exp, x, x), x.exp())


def test_maximum_by_hand() -> None:
    """It rose from 2 to 5 by its second entry; it fell from 4 to 1 by its first."""
    x = torch.tensor([[[1.0, 5.0], [0.5, 1.0]]]).double()
    x0 = torch.tensor([[[2.0, 0.0], [4.0, 3.0]]]).double()
    found = two_records(lambda t: F.max_pool1d(t, 2).flatten(1), x, x0)
    assert torch.allclose(found, torch.tensor([[[0.0, 3 / 5], [3 / 3.5, 0.0]]]).double())


def test_minimum_by_hand() -> None:
    """It rose from 0 to 1 by the second entry, the baseline's smallest; it fell from 3 to 0.5 by the image's smallest.

    A bound that is a whole number takes part without a share of its own.
    """
    x = torch.tensor([[[1.0, 5.0], [0.5, 1.0]]]).double()
    x0 = torch.tensor([[[2.0, 0.0], [4.0, 3.0]]]).double()
    found = two_records(lambda t: t.amin(2), x, x0)
    assert torch.allclose(found, torch.tensor([[[0.0, 1 / 5], [2.5 / 3.5, 0.0]]]).double())
    bounded = two_records(lambda t: torch.minimum(t.flatten(1), 2 + (t > 9).long().flatten(1)), x, x0)
    assert torch.allclose(bounded, torch.tensor([[[1.0, 2 / 5], [1.5 / 3.5, 1 / 2]]]).double())


def test_product_is_shared_half_way() -> None:
    x, x0 = torch.tensor([[3.0, 5.0]]).double(), torch.tensor([[1.0, 2.0]]).double()
    found = two_records(lambda t: t[:, :1] * t[:, 1:], x, x0)
    assert torch.allclose(found, torch.tensor([[(5.0 + 2) / 2, (3.0 + 1) / 2]]).double())


def test_three_factors_and_places_that_move_are_integrated() -> None:
    """One point half way is exact for a product of two, not of three, nor where the places that are read move."""
    x, x0 = torch.tensor([[3.0, 5.0, 2.0]]).double(), torch.tensor([[1.0, 2.0, -1.0]]).double()

    def cubic(t: Tensor) -> Tensor:
        return torch.einsum("bi,bi,bi->b", t[:, :1], t[:, 1:2], t[:, 2:])[:, None]

    def sampled(t: Tensor) -> Tensor:  # between two columns, at a place that the image says
        row, place = t[:, None, None, :2], t[:, None, None, 2:] / 10
        grid = torch.cat([place, torch.zeros_like(place)], 3)
        return F.grid_sample(row.expand(-1, -1, 2, -1), grid, align_corners=True).flatten(1) * t[:, :1]

    for do in (cubic, sampled):
        parts = two_records(do, x, x0) * (x - x0)
        assert torch.allclose(parts.sum(), (do(x) - do(x0)).sum())


def test_batch_and_classes_are_independent() -> None:
    model, x = build("gated"), pictures(3)
    chosen = [[1, 4], [0, 2], [5, 3]]
    whole = classlens.explain(model, x, chosen, "deeplift-shap").maps
    for b, row in enumerate(chosen):
        for k, t in enumerate(row):
            single = classlens.explain(model, x[b : b + 1], t, "deeplift-shap").maps[0, 0]
            assert distance(whole[b, k], single) < 1e-5


def test_another_path_for_the_baseline_is_an_error() -> None:
    class Fork(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.mean((2, 3))
            return y.relu() if float(x.detach().sum()) != 0 else y

    with pytest.raises(CaptureError, match="different operations for the baseline"):
        classlens.explain(Fork().eval(), pictures(), 1, "deeplift-shap", baselines="zero")


def test_a_choice_that_only_this_image_makes_is_refused() -> None:
    model, x = nn.Sequential(nn.Flatten(), nn.Linear(48, 3)).eval(), pictures(1, (4, 4))
    case = Case(model, x, record(model, x), torch.tensor([[1]]), Reading((Pick(chosen=True),)))
    with pytest.raises(MethodError, match="chooses its candidates from the image"):
        deeplift.deeplift_shap(case)


def test_unknown_baseline_is_refused() -> None:
    with pytest.raises(MethodError, match="there is no baseline 'grey'"):
        classlens.explain(build("plain"), pictures(), 1, "deeplift-shap(baselines=zero+grey)")


BEYOND = torch.ones(6, 6).double().tril() > 0
MIXING: dict[str, tuple[dict[str, object], Callable[[Tensor], Tensor]]] = {
    "plain": ({}, lambda s: s / 2), "scaled": ({"scale": 0.3}, lambda s: 0.3 * s),
    "causal": ({"is_causal": True}, lambda s: (s / 2).masked_fill(~BEYOND, -1e30)),
    "additive": ({"attn_mask": BEYOND.double()}, lambda s: s / 2 + BEYOND),
    "boolean": ({"attn_mask": BEYOND}, lambda s: (s / 2).masked_fill(~BEYOND, -1e30)),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXING)
def test_fused_attention_has_the_multipliers_of_attention_that_is_written_out(name: str) -> None:
    options, scores = MIXING[name]
    torch.manual_seed(0)
    patch, head = nn.Conv2d(3, 4, 2, 2).double(), torch.randn(4, 3).double()

    def tokens(x: Tensor) -> Tensor:
        return patch(x).flatten(2).mT

    def fused(x: Tensor) -> Tensor:
        t = tokens(x)
        return F.scaled_dot_product_attention(t, t.flip(1), 2 * t, **options).mean(1) @ head

    def written(x: Tensor) -> Tensor:
        t = tokens(x)
        return (scores(t @ t.flip(1).mT).softmax(-1) @ (2 * t)).mean(1) @ head

    x = torch.randn(2, 3, 4, 6).double()
    found = [classlens.explain(Does(do).eval(), x, 1, "deeplift-shap", baselines="zero") for do in (fused, written)]
    assert torch.allclose(found[0].maps, found[1].maps, rtol=1e-6, atol=1e-9)
    assert max(e.report.conservation.max() for e in found) < 1e-6


def test_an_additive_mask_that_the_image_makes_has_multipliers_of_its_own() -> None:
    """Of queries, keys and values that are learnt too: what is added to the scores is all that differs."""
    torch.manual_seed(0)
    learnt, head = torch.randn(6, 4).double(), torch.randn(4, 3).double()
    patch = nn.Conv2d(3, 6, 2, 2).double()  # a row of scores for each of the six patches

    def fused(x: Tensor) -> Tensor:
        t, mask = learnt.expand(len(x), 6, 4), patch(x).flatten(2).mT
        return F.scaled_dot_product_attention(t, t, t, attn_mask=mask).mean(1) @ head

    def written(x: Tensor) -> Tensor:
        t, mask = learnt.expand(len(x), 6, 4), patch(x).flatten(2).mT
        return ((t @ t.mT / 2 + mask).softmax(-1) @ t).mean(1) @ head

    x = torch.randn(2, 3, 4, 6).double()
    found = [classlens.explain(Does(do).eval(), x, 1, "deeplift-shap", baselines="zero") for do in (fused, written)]
    assert torch.allclose(found[0].maps, found[1].maps, rtol=1e-6, atol=1e-12)
    assert max(e.report.conservation.max() for e in found) < 1e-6
    assert found[0].maps.abs().min() > 0


@pytest.mark.parametrize("live", ["query", "key", "value"])
def test_fused_attention_of_which_one_argument_is_made_of_the_image(live: str) -> None:
    torch.manual_seed(0)
    learnt = dict(zip(("query", "key", "value"), torch.randn(3, 6, 4).double(), strict=True))

    def fused(t: Tensor) -> Tensor:
        given = {name: t if name == live else constant for name, constant in learnt.items()}
        return F.scaled_dot_product_attention(**given)

    x, x0 = torch.randn(2, 1, 6, 4).double()
    assert torch.allclose((two_records(fused, x, x0) * (x - x0)).sum(), (fused(x) - fused(x0)).sum(), rtol=1e-6)


@pytest.mark.parametrize("live", [False, True])  # the picture, as well as the positions
def test_positions_that_move_across_the_picture_are_integrated(live: bool) -> None:
    """Half way between them, the slope of another cell would be found."""

    def do(t: Tensor) -> Tensor:
        picture = PICTURE * t.mean() if live else PICTURE
        return F.grid_sample(picture, t.reshape(1, 1, 2, 2), align_corners=True).flatten(1)

    x, x0 = torch.tensor([[0.9, 0.8, 0.7, -0.2]]).double(), torch.tensor([[-0.9, -0.7, 0.1, 0.6]]).double()
    difference = (do(x) - do(x0)).sum()
    assert abs((two_records(do, x, x0) * (x - x0)).sum() - difference) < 0.15 * abs(difference)


def test_the_first_of_two_outputs_is_complete() -> None:
    model = Does(lambda x: torch.std_mean(x, (2, 3))[0]).eval()
    e = classlens.explain(model, torch.rand(2, 3, 4, 4).double(), 1, "deeplift-shap", baselines="noise")
    assert e.report.conservation.max() < 1e-3


def test_sampling_positions_of_the_image_are_complete() -> None:
    """Linear in what is sampled, but not in where: one point would not do."""
    grid = torch.rand(1, 4, 4, 2, generator=torch.Generator().manual_seed(0)).double()

    def do(x: Tensor) -> Tensor:
        where = grid * (1 + 0.1 * x.mean((1, 2, 3))[:, None, None, None].sin())
        return F.grid_sample(x.square(), where, align_corners=False).mean((2, 3))

    x = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(1)).double()
    e = classlens.explain(Does(do).eval(), x, 1, "deeplift-shap", baselines="zero")
    assert e.report.conservation.max() < 1e-3
