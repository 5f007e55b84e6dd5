from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import classlens
import goldens
import reference
from classlens.core.capture import record
from classlens.core.rules.generic import divide_released
from classlens.core.rules.linear import absolute, linear_map
from classlens.errors import MethodError
from classlens.methods import METHODS, Case
from classlens.methods import relevance as methods_of_relevance
from classlens.methods.relevance import (
    _released_rap,
    _unguarded,
    excited,
    grown,
    relative,
    released_alpha_beta,
    released_norm,
)
from networks import NETWORKS, build, pictures
from steps import Does

RELEASED = {"lrp": "lrp", "lrp-ab": "lrp_ab", "rap": "rap", "clrp": "clrp", "sglrp": "sglrp"}


@pytest.mark.parametrize(
    ("name", "method"),
    [
        (name, method)
        for name in ("vgg_id", "resnet_basic", "resnet_bottleneck", "vgg11_smallhead")
        for method in RELEASED
        if (name, method) != ("resnet_basic", "rap")  # where the released code crashes
    ],
)
def test_release_variant_agrees(name: str, method: str) -> None:
    model, x, arrays = goldens.load(name)
    e = classlens.explain(model, x, goldens.targets(arrays)[:, :1], method, variant="release")
    theirs = torch.as_tensor(arrays[f"baseline/{RELEASED[method]}"]).double().sum(1)
    assert goldens.distance(goldens.stored(e.maps[: len(theirs), 0], arrays), theirs) < goldens.tolerance(arrays)


def _random_layer(least: float = -3.0) -> tuple[object, nn.Conv2d, Tensor]:
    torch.manual_seed(0)
    layer = nn.Conv2d(2, 3, 3, padding=1).double()
    x = torch.randn(1, 2, 4, 5).double().clamp(min=least)
    node = record(nn.Sequential(layer).eval(), x).nodes[-1]
    return linear_map(node), layer, torch.randn(2, 1, 3, 4, 5).double()


@pytest.mark.parametrize("least", [-3.0, 0.5])  # of the input: of either sign, or none below 0
@pytest.mark.parametrize("rule", ["relative", "excited"])
def test_rule_is_its_definition(rule: str, least: float) -> None:
    found, layer, r = _random_layer(least)
    ours = {"relative": relative, "excited": excited}[rule](found, r)  # type: ignore[operator]
    x = found.x[0].flatten().numpy()  # type: ignore[attr-defined]
    w = reference.matrix(lambda t: layer(t[None])[0], found.x[0])  # type: ignore[attr-defined]
    for k in range(2):
        flat = r[k, 0].flatten().numpy()
        slow = (
            reference.relative(x, w, flat) if rule == "relative"
            else reference.generic_rule(x - min(x.min(), 0), np.maximum(w, 0), flat)
        )  # fmt: skip
        assert np.allclose(ours[k, 0].flatten(), slow)


@pytest.mark.parametrize(("tiny", "scale"), [(1e-20, 1.0), (1e-10, 1e-12)])
def test_a_unit_of_little_influence_is_active_and_one_without_any_is_not(tiny: float, scale: float) -> None:
    """What is taken off evenly is taken from the active ones, however small their share is."""
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 3, bias=False).double().eval(), torch.tensor([[1.0, -2.0, tiny, 0.0]]).double()
    r = scale * torch.tensor([[[1.0, -3.0, 2.0]]]).double()
    found = relative(linear_map(record(layer, x).nodes[0]), r)
    slow = reference.relative(x[0].numpy(), layer.weight.detach().numpy(), r[0, 0].numpy())
    assert np.allclose(found[0, 0], slow, atol=0)
    assert found[0, 0, 3] == 0 != found[0, 0, 2]


def test_next_to_nothing_is_not_active() -> None:
    """A share below all rounding of the largest one (1e-36 of it) takes no part in what is taken off evenly."""
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 3, bias=False).double().eval(), torch.tensor([[1.0, -2.0, 1e-36, 0.0]]).double()
    r = torch.tensor([[[1.0, -3.0, 2.0]]]).double()
    found = relative(linear_map(record(layer, x).nodes[0]), r)[0, 0]
    slow = reference.relative(x[0].numpy() * [1, 1, 0, 1], layer.weight.detach().numpy(), r[0, 0].numpy())
    assert np.allclose(found, slow, atol=1e-30)


@pytest.mark.parametrize(("kernel", "rule"), [((1, 1), absolute), ((1, 3), relative), ((3, 1), relative)])
def test_the_released_rap_has_another_rule_for_single_places(kernel: tuple[int, int], rule: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    layer, x = nn.Conv2d(2, 3, kernel).double().eval(), torch.randn(1, 2, 4, 5).double()
    found = linear_map((tape := record(nn.Sequential(layer), x)).nodes[-1])
    r = torch.randn(1, *tape.output.shape).double()
    assert torch.equal(_released_rap(found, r, divide_released), rule(found, r, divide_released))


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.a, self.b = nn.Conv2d(2, 3, 3, padding=1), nn.Linear(3 * 12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)).flatten(1))


def lrp_by_hand(model: TwoLayers, x: Tensor, start: np.ndarray, alpha: float) -> np.ndarray:
    hidden = torch.relu(model.a(x)).detach()[0]
    w_b = reference.matrix(lambda t: model.b(t.flatten()[None])[0], hidden)
    w_a = reference.matrix(lambda t: model.a(t[None])[0], x[0])
    r = reference.alpha_beta(hidden.flatten().numpy(), w_b, start, alpha)
    return reference.zbox(x[0].flatten().numpy(), w_a, r).reshape(x.shape[1:]).sum(0)


@pytest.mark.parametrize(("method", "alpha"), [("lrp", 1.0), ("lrp-ab", 2.0)])
def test_lrp_by_hand(method: str, alpha: float) -> None:
    model, x = TwoLayers().double().eval(), torch.randn(1, 2, 3, 4).double()
    e = classlens.explain(model, x, 2, method)
    start = np.zeros(4)
    start[2] = e.logits[0, 2]
    assert np.allclose(e.maps[0, 0], lrp_by_hand(model, x, start, alpha))


@pytest.mark.parametrize("method", ["clrp", "sglrp"])
def test_contrast_by_hand(method: str) -> None:
    model, x = TwoLayers().double().eval(), torch.randn(1, 2, 3, 4, generator=torch.Generator().manual_seed(0)).double()
    e = classlens.explain(model, x, 1, method)
    y = e.logits[0].numpy()
    p = np.exp(y) / np.exp(y).sum()
    target, rest = np.zeros(4), np.zeros(4)
    target[1] = y[1] if method == "clrp" else p[1] * (1 - p[1]) + 1e-8
    for i in (0, 2, 3):
        rest[i] = y[1] / 3 if method == "clrp" else p[1] * p[i]
    of_target, of_rest = (lrp_by_hand(model, x, s, 1.0) for s in (target, rest))
    expected = of_target - of_rest * of_target.sum() / of_rest.sum()
    assert np.allclose(e.maps[0, 0], expected)


def test_contrastive_excitation_is_the_difference_of_two_walks() -> None:
    model, x = TwoLayers().double().eval(), torch.randn(1, 2, 3, 4, generator=torch.Generator().manual_seed(0)).double()
    e = classlens.explain(model, x, 1, "contrastive-excitation-bp")
    negated = TwoLayers().double().eval()
    negated.b.weight.data.neg_()
    walks = [classlens.explain(m, x, 1, "excitation-bp").maps for m in (model, negated)]
    assert torch.allclose(e.maps, walks[0] - walks[1])


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("name", NETWORKS)
def test_excitation_is_a_probability(name: str) -> None:
    e = classlens.explain(build(name).double(), pictures().double(), 1, "excitation-bp")
    assert (e.maps >= 0).all()
    assert torch.allclose(e.report.arrived + e.report.absorbed, torch.ones(2, 1).double())


def test_composites_differ_from_their_parts_only_where_they_should() -> None:
    """A network of one linear layer: both composites are z^B or flat, whatever comes above."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 900, 5)).double().eval()
    x = pictures(1).double()
    box, flat = (classlens.explain(model, x, 1, f"lrp-epsilon-{n}") for n in ("gamma-box", "plus-flat"))
    assert torch.allclose(box.report.started, flat.report.started)
    hidden = model[0](x).detach()
    dense = hidden.flatten() * model[2].weight[1].detach()
    z = dense.sum()
    r = (dense / (z + 1e-6 * z.sign()) * model(x)[0, 1]).detach().reshape(hidden.shape)
    node = record(model, x).nodes[0]
    from classlens.core.rules import linear

    assert torch.allclose(box.maps[0, 0], linear.boxed(linear_map(node), r[None]).sum((0, 1, 2)))
    assert torch.allclose(flat.maps[0, 0], linear.flat(linear_map(node), r[None]).sum((0, 1, 2)))


def test_unknown_variant() -> None:
    with pytest.raises(MethodError, match="unknown variant='paper'; choose default or release"):
        classlens.explain(build("plain"), pictures(), method="lrp", variant="paper")


class Cancels(nn.Module):
    """Patches of a symmetric image less nearly the same patches of its mirror image.

    A dense layer multiplies the two by 1 and gap - 1, so it divides by gap times the first: relevance grows by 2 / gap.
    """

    def __init__(self, gap: float) -> None:
        super().__init__()
        self.patch, self.head = nn.Conv2d(3, 1, 8, 8, bias=False), nn.Linear(16, 3, bias=False)
        self.difference = nn.Linear(32, 16, bias=False)
        for layer in (self.patch, self.head):
            nn.init.uniform_(layer.weight, 0.5, 1.5)
        with torch.no_grad():
            self.difference.weight.copy_(torch.cat([torch.eye(16), (gap - 1) * torch.eye(16)], 1))

    def forward(self, x: Tensor) -> Tensor:
        seen, mirrored = self.patch(x).flatten(1), self.patch(x.flip(3)).flatten(1)
        return self.head(self.difference(torch.cat([seen, mirrored], 1)))


def test_relevance_that_grows_is_noted_or_refused() -> None:
    torch.manual_seed(0)
    half = torch.rand(2, 3, 32, 16).double()
    x = torch.cat([half, half.flip(3)], 3)
    assert classlens.explain(Cancels(1.0).double().eval(), x, 1, "lrp-epsilon-plus-flat").report.notes == ()
    (note,) = classlens.explain(Cancels(0.01).double().eval(), x, 1, "lrp-epsilon-plus-flat").report.notes
    assert "times larger on its way" in note
    with pytest.raises(MethodError, match="times larger on its way: layers divide by sums near 0, so the map would be"):
        classlens.explain(Cancels(1e-7).double().eval(), x, 1, "lrp-epsilon-plus-flat")


@pytest.mark.parametrize(("times", "says"), [(10.0, None), (10.1, "became more than 10 times"), (9e5, "times larger")])
def test_relevance_that_grew_much_is_noted(times: float, says: str | None) -> None:
    """The sums of magnitudes over both starts, for each class and image; the worst of them counts."""
    start = {"a": torch.tensor([1.0, -2.0]).expand(2, 3, 2), "b": torch.tensor([-3.0]).expand(2, 3, 1)}
    relevance = torch.tensor([1.0, -5.0]).expand(2, 3, 2).clone()
    relevance[1, 2] *= times
    notes = grown(start, relevance)
    assert says in notes[0] if says else notes == ()


def test_relevance_that_is_nothing_but_growth_is_refused() -> None:
    relevance = torch.ones(2, 3, 1)
    relevance[0, 1] = torch.nan  # refused image by image, after the sweep
    assert grown({"a": torch.ones(2, 3, 1)}, relevance) == ()
    relevance[1, 0] = 1e6
    with pytest.raises(MethodError, match=r"became 1e\+06 times larger"):
        grown({"a": torch.ones(2, 3, 1)}, relevance)
    relevance[1, 0] = 1.1e6
    with pytest.raises(MethodError, match=r"became 1.1e\+06 times larger on its way: .*, so the map would be noise"):
        grown({"a": torch.ones(2, 3, 1)}, relevance)


def shared_by(z: np.ndarray, r: np.ndarray) -> np.ndarray:
    """sum over outputs j of z_ij / sum_i z_ij R_j, one term at a time."""
    return np.array([sum(z[i, j] / z[:, j].sum() * r[j] for j in range(len(r))) for i in range(len(z))])


@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_the_released_parts_are_each_divided_by_their_own_sum(alpha: float) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(30, 4, bias=False).double().eval(), torch.randn(1, 30).double()
    r = torch.randn(1, 1, 4).double()
    found = released_alpha_beta(linear_map(record(layer, x).nodes[0]), r, torch.div, alpha)
    w = layer.weight.detach().numpy().T
    x_pos, x_neg = (x.clamp(**{side: 0}).numpy()[0][:, None] for side in ("min", "max"))
    signed = [shared_by(a * b, r[0, 0].numpy()) for a, b in ((x_pos, w.clip(0)), (x_neg, w.clip(max=0)))]
    against = [shared_by(a * b, r[0, 0].numpy()) for a, b in ((x_pos, w.clip(max=0)), (x_neg, w.clip(0)))]
    expected = alpha * sum(signed) - (alpha - 1) * sum(against)
    assert np.allclose(found[0, 0].numpy(), expected)


def test_the_released_norm_passes_relevance_on() -> None:
    """Also where the variance is so small that its square is less than eps."""
    norm, x = nn.BatchNorm2d(2).double().eval(), torch.randn(1, 2, 3, 3).double()
    nn.init.constant_(norm.running_var, 1e-3)
    node = record(norm, x).nodes[0]
    r = torch.randn(1, *x.shape).double()
    assert torch.allclose(released_norm(node, r)[0], r, rtol=1e-6)


def test_the_released_box_guards_with_a_billionth() -> None:
    assert float(_unguarded(torch.tensor(3.0), torch.tensor(0.0))) == pytest.approx(3e9)


def test_gamma_of_the_composite_is_the_one_that_is_given() -> None:
    """At 0 it is epsilon in the convolutions too; the larger it is, the nearer it comes to positive contributions."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(80, 3)
    ).double().eval()  # fmt: skip
    x = pictures(1, (8, 8)).double()
    maps = [classlens.explain(model, x, 1, "lrp-epsilon-gamma-box", gamma=g).maps for g in (0.0, 0.25, 3.0, 1e9)]
    assert torch.equal(maps[1], classlens.explain(model, x, 1, "lrp-epsilon-gamma-box").maps)
    from_limit = [float((m - maps[-1]).norm()) for m in maps]
    assert from_limit[0] > 1.1 * from_limit[1] > 1.2 * from_limit[2] > 0


@pytest.mark.parametrize("variant", ["default", "release"])
@pytest.mark.parametrize("method", ["lrp", "lrp-ab", "rap"])
def test_a_norm_is_a_matter_of_writing_but_not_as_released(method: str, variant: str) -> None:
    """A norm inside of the weights: the same map; the released code passes relevance through the norm unchanged."""
    torch.manual_seed(3)
    conv, norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
    for t in (norm.weight, norm.bias, norm.running_mean):
        nn.init.normal_(t)
    norm.weight.data[::2] = -norm.weight.data[::2].abs()  # turns what speaks for these units into what speaks against
    after = [nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)]
    written = nn.Sequential(nn.Conv2d(3, 3, 1), conv, norm, *after).double().eval()
    inside = nn.Sequential(written[0], nn.utils.fusion.fuse_conv_bn_eval(conv, norm), *after).eval()
    x = pictures(1, (8, 8)).double()
    one, other = (classlens.explain(m, x, 1, method, variant=variant).maps for m in (written, inside))
    assert other.any()
    assert torch.allclose(one, other, rtol=1e-6, atol=1e-12) is (variant == "default")


@pytest.mark.parametrize("once", [True, False])
def test_values_are_freed_behind_a_sweep_that_is_the_last(once: bool) -> None:
    model, x = build("plain"), pictures(1)
    tape = record(model, x)
    METHODS["lrp"].run(Case(model, x, tape, torch.tensor([[1]]), once=once))
    assert (tape.output.edge is None) is once


@pytest.mark.parametrize("method", ["lrp", "rap"])
def test_the_released_division_loses_relevance_in_thin_layers(method: str) -> None:
    """1e-9 is added to every denominator: of weights that are that small, most is lost; by the equations nothing is."""
    torch.manual_seed(0)
    thin = nn.Conv2d(4, 5, 1, bias=False)
    thin.weight.data.abs_().mul_(1e-9)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False), nn.ReLU(), thin, nn.Flatten(), nn.Linear(180, 4, bias=False)
    ).double().eval()  # fmt: skip
    sums = []
    for variant in ("default", "release"):
        e = classlens.explain(model, pictures(1, (8, 8)).double(), 3, method, variant=variant)
        sums.append(float(e.maps.sum() / e.logits[0, 3]))
    assert sums[0] == pytest.approx(1)
    assert abs(sums[1]) < 0.9


@pytest.mark.parametrize("method", ["rap", "excitation-bp"])
def test_images_behind_their_tokens_are_told_apart(method: str) -> None:
    """(tokens, images, channels): the smallest response and the largest share are those of each image."""
    torch.manual_seed(0)
    patch, mix, head = nn.Conv2d(3, 4, 2, 2).double(), nn.Linear(4, 5).double(), nn.Linear(5, 3).double()

    def do(x: Tensor) -> Tensor:
        return head(mix(patch(x).flatten(2).permute(2, 0, 1)).relu().mean(0))

    x = torch.randn(2, 3, 4, 6).double() * torch.tensor([1.0, 3.0]).double()[:, None, None, None]
    together = classlens.explain(Does(do).eval(), x, 1, method).maps
    alone = torch.cat([classlens.explain(Does(do).eval(), one, 1, method).maps for one in x.split(1)])
    assert torch.allclose(together, alone, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(("method", "notes"), [("lrp-ab", ()), ("rap", ()), ("lrp-epsilon-gamma-box", ("grown",))])
def test_only_rules_that_divide_by_signed_sums_are_watched(
    monkeypatch: pytest.MonkeyPatch, method: str, notes: tuple[str, ...]
) -> None:
    monkeypatch.setattr(methods_of_relevance, "grown", lambda start, relevance: ("grown",))
    assert classlens.explain(build("plain"), pictures(1), 1, method).report.notes == notes


@pytest.mark.parametrize("method", ["clrp", "sglrp", "contrastive-excitation-bp"])
def test_three_classes_at_once_are_contrasted_one_by_one(method: str) -> None:
    model, x = build("residual").double(), pictures(1).double()
    together = classlens.explain(model, x, [[1, 5, 0]], method).maps
    alone = torch.cat([classlens.explain(model, x, one, method).maps for one in (1, 5, 0)], 1)
    assert torch.allclose(together, alone, rtol=1e-6, atol=1e-12)
