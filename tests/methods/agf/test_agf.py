from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import classlens
import goldens
import reference
from classlens.core.capture import record
from classlens.errors import MethodError, TargetError
from classlens.methods import METHODS, Case
from classlens.methods.agf import balanced
from classlens.methods.agf.balanced import residual_weight
from networks import build, pictures

FIELDS = {"C": "C", "A": "A", "F_x": "F_x", "F_dx": "F_dx", "M": "M", "r": "R", "Phi": "Phi_in", "gradient": "grad_in"}


# ----------------------------------------------------------------------------------- against the released code


@pytest.mark.parametrize("name", goldens.SMALL)
def test_release_agrees_on_every_target(name: str) -> None:
    model, x, arrays = goldens.load(name)
    _assert_maps_agree(classlens.explain(model, x, goldens.targets(arrays), "agf-release"), arrays)


def _assert_maps_agree(e: classlens.Explanation, arrays: Any) -> None:
    assert goldens.distance(e.logits, arrays["logits"]) < 1e-10  # the network is rebuilt as it was
    ours = goldens.stored(e.maps, arrays).transpose(0, 1)
    theirs = torch.as_tensor(arrays["agf/map"]).double().reshape(ours.shape)
    for k in range(len(ours)):
        assert goldens.distance(ours[k], theirs[k]) < goldens.tolerance(arrays)


@pytest.mark.parametrize("name", goldens.SMALL)
def test_release_agrees_on_every_layer(name: str) -> None:
    model, x, arrays = goldens.load(name)
    e = classlens.explain(model, x[:1], goldens.targets(arrays)[:1, :1], "agf-release", trace=True)
    compared = 0
    for layer in e.trace:
        for ours, theirs in FIELDS.items():
            key = f"layer/{layer.name}/{theirs}"
            if key in arrays.files and ours in layer.terms and layer.op not in ("relu", "add"):
                expected = torch.as_tensor(arrays[key]).double()
                assert goldens.distance(layer.terms[ours][0].reshape(expected.shape), expected) < 1e-6, key
                compared += 1
    stored = [
        k for k in arrays.files if k.startswith("layer/") and k.rsplit("/", 1)[1] in ("C", "A", "F_x", "F_dx", "M", "R")
    ]
    assert compared > len(stored)


@pytest.mark.parametrize("name", goldens.SMALL)
def test_release_agrees_at_residual_sums(name: str) -> None:
    """What an addition hands to its main branch and to its skip."""
    model, x, arrays = goldens.load(name)
    e = classlens.explain(model, x[:1], goldens.targets(arrays)[:1, :1], "agf-release", trace=True)
    adds = [t for t in e.trace if t.op == "add"]
    assert len(adds) == len({k.split("/")[1] for k in arrays.files if "/Phi_in_1" in k})
    for layer in adds:
        for term, key in (("Phi", "Phi_in_0"), ("Phi_1", "Phi_in_1")):
            assert goldens.distance(layer.terms[term][0], arrays[f"layer/{layer.name}.add/{key}"]) < 1e-6


@pytest.mark.parametrize("name", goldens.SMALL)
def test_release_agrees_at_every_relu(name: str) -> None:
    """A block calls its one ReLU two or three times; the release numbers the calls in the order of the pass."""
    model, x, arrays = goldens.load(name)
    e = classlens.explain(model, x[:1], goldens.targets(arrays)[:1, :1], "agf-release", trace=True)
    relus = [layer for layer in e.trace if layer.op == "relu"]
    left = Counter(layer.name for layer in relus)
    assert len(relus) > 5
    for layer in relus:  # backwards, so the last call comes first
        numbered = f"layer/{layer.name}{left[layer.name]}/Phi_in"
        left[layer.name] -= 1
        theirs = arrays[numbered if numbered in arrays.files else f"layer/{layer.name}/Phi_in"]
        assert goldens.distance(layer.terms["Phi"][0], theirs) < 1e-6


@pytest.mark.parametrize("name", goldens.LARGE)
def test_release_agrees_on_large_networks(name: str) -> None:
    """Both targets' maps, and the stored statistics of every layer's terms."""
    model, x, arrays = goldens.load(name)
    e = classlens.explain(model, x, goldens.targets(arrays), "agf-release", trace=True)
    _assert_maps_agree(e, arrays)
    wanted = dict(zip((str(n) for n in arrays["stat_names"]), arrays["stat"], strict=True))
    compared = 0
    for layer in e.trace:
        for ours, theirs in FIELDS.items():
            key = f"{layer.name}/{theirs}"
            if key not in wanted or ours not in layer.terms or layer.op in ("relu", "add"):
                continue
            t = layer.terms[ours][0]
            t = t.expand_as(layer.terms["C"][0]) if ours in ("F_x", "F_dx", "M") and t.dim() == 4 else t
            found = [t.sum(), t.abs().sum(), t.min(), t.max(), (t != 0).sum()]
            scale = max(abs(wanted[key][1]), 1e-12)
            assert np.allclose(np.array(found) / scale, wanted[key] / scale, rtol=1e-5, atol=1e-7), key
            compared += 1
    assert compared >= 0.5 * len(wanted)


ABLATIONS = {
    "no_a": "without=A", "no_fx": "without=Fx", "no_fdx": "without=Fdx", "no_m": "without=M", "no_reg": "without=gate",
    "only_c": "only=C", "gradcam": "residual=gradcam", "gradcam_only": "residual=gradcam, without=(A, Fdx, gate)",
}  # fmt: skip


@pytest.mark.parametrize("ablation", ABLATIONS)
@pytest.mark.parametrize("name", goldens.SMALL)
def test_release_ablations_agree(name: str, ablation: str) -> None:
    model, x, arrays = goldens.load(name)
    options = ABLATIONS[ablation].replace("(A, Fdx, gate)", "('A', 'Fdx', 'gate')")
    e = classlens.explain(model, x[:1], goldens.targets(arrays)[:1, :1], f"agf-release({options})")
    assert goldens.distance(e.maps[0, 0], arrays[f"ablation/{ablation}"][0, 0]) < 1e-6


def test_release_in_float32_is_as_close_as_the_release_itself() -> None:
    model, x, arrays = goldens.load("vgg_bn_pool")
    e = classlens.explain(model.float(), x.float(), goldens.targets(arrays)[:, :1], "agf-release")
    assert goldens.distance(e.maps, torch.as_tensor(arrays["agf/map"])[0]) < 1e-4


# --------------------------------------------------------------------------- the equations, by a second derivation


class Chain(nn.Module):
    """Two convolutions and two linear layers: small enough to follow with explicit matrices."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.c, self.d = nn.Linear(3 * 20, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.b(torch.relu(self.a(x))))
        return self.d(torch.relu(self.c(x.flatten(1))))


def paper_by_hand(model: Chain, x: Tensor, t: int) -> np.ndarray:
    """Algorithm 1 for a Chain, layer by layer, from the paper's text."""
    x_a = x.clone().requires_grad_()
    pre_a = model.a(x_a)
    x_b = torch.relu(pre_a)
    pre_b = model.b(x_b)
    x_c = torch.relu(pre_b).flatten(1)
    x_d = torch.relu(model.c(x_c))
    y = model.d(x_d)
    sigma = (y - y[:, t]).abs().max()
    yhat = torch.softmax(y[:, t] * torch.exp(-0.5 * ((y - y[:, t]) / sigma) ** 2), 1)[0, t]
    grads = dict(zip("abcd", torch.autograd.grad(yhat, [x_a, x_b, x_c, x_d]), strict=True))
    value = {"a": x_a, "b": x_b, "c": x_c, "d": x_d}
    phi = (value["d"] * grads["d"]).detach().numpy().flatten()  # initial attribution

    def shift(c: np.ndarray, r: np.ndarray) -> np.ndarray:
        return c + r - r.sum() / max((c != 0).sum(), 1)

    def interaction(x: np.ndarray, g: np.ndarray) -> np.ndarray:
        m = np.maximum((x * g).mean(0), 0)
        return m / m.max() if m.max() > 0 else m

    for name in "cba":
        layer, x_n, g_n = getattr(model, name), value[name].detach()[0], grads[name][0]
        w = abs(reference.matrix(lambda v, layer=layer: layer(v[None])[0], x_n))
        flat = x_n.flatten().numpy()
        c = reference.generic_rule(abs(flat), w, phi)
        if name == "c":
            m = interaction(x_n.reshape(3, 4, 5).numpy(), g_n.reshape(3, 4, 5).numpy())
            phi = shift(c, np.broadcast_to(m, (3, 4, 5)).flatten())
            phi = np.where(flat > 0, phi, 0)  # back through the ReLU
            continue
        shape = x_n.shape
        a = reference.generic_rule(np.ones_like(flat), w, phi).reshape(shape)
        c = c.reshape(shape)
        partition = c.mean(0)
        f_x, f_g = (reference.factorised(v.numpy(), partition, 1.0, 0.0, True, True) for v in (x_n, g_n))
        r = a + f_g + (f_x + interaction(x_n.numpy(), g_n.numpy())) / (1 + np.exp(-c))
        phi = shift(c, r).flatten()
        if name == "b":
            phi = np.where(flat > 0, phi, 0)
    return phi.reshape(x.shape[1:]).sum(0)


@pytest.mark.parametrize("t", [0, 1, 2, 3])
def test_paper_is_algorithm_1(t: int) -> None:
    model = Chain().double().eval()
    x = torch.randn(1, 2, 4, 5, generator=torch.Generator().manual_seed(1)).double()
    ours = classlens.explain(model, x, t, "agf-paper").maps[0, 0].numpy()
    slow = paper_by_hand(model, x, t)
    assert np.allclose(ours, slow, rtol=1e-6, atol=1e-8 * abs(slow).max())


# ---------------------------------------------------------------------------------------------------- balanced


@pytest.mark.parametrize("name", ["plain", "residual", "dense", "gated", "conv-head", "dense-head", "modern"])
def test_balanced_rule_accounts_for_all_relevance(name: str) -> None:
    e = classlens.explain(build(name).double(), pictures().double(), classlens.top(2))
    assert e.report.conservation.max() < 1e-10
    assert not torch.allclose(e.maps[:, 0], e.maps[:, 1])


def test_a_network_of_few_layers_has_more_of_the_residual_in_each() -> None:
    assert [residual_weight(n) for n in (0, 3, 6, 12, 15, 40)] == [1.0, 1.0, 1.0, 0.25, 0.2, 0.2]
    torch.manual_seed(0)
    body = [m for _ in range(12) for m in (nn.Conv2d(6, 6, 1), nn.Tanh())]
    model = nn.Sequential(
        nn.Conv2d(3, 6, 8, 8), nn.ReLU(), *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)
    )
    x = torch.randn(1, 3, 64, 64)
    for layers in (4, 12):
        shallow = nn.Sequential(*model[: 2 + 2 * layers], *model[-3:]).eval()
        e = classlens.explain(shallow, x, 0, trace=True)
        deepest = next(t.terms for t in e.trace if t.op == "conv2d")
        plain = deepest["C"]
        added = (deepest["Phi"] - plain).abs().sum()
        assert float(added / plain.abs().sum()) == pytest.approx(residual_weight(layers), rel=1e-3)


def _down_to_stride_16() -> nn.Sequential:
    torch.manual_seed(0)
    sizes = [(3, 6, 2), (6, 6, 2), (6, 8, 2), (8, 8, 1), (8, 10, 2), (10, 10, 1)]
    body = [m for i, o, step in sizes for m in (nn.Conv2d(i, o, 3, step, 1), nn.Tanh())]  # no unit is off
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(10, 4)).eval()


def test_coarse_evidence_is_added_at_the_image_where_relevance_is_near() -> None:
    """By a second way: the shares of the deep convolutions, from the trace, upsampled and added to the map without."""
    model, x = _down_to_stride_16().double(), torch.randn(2, 3, 128, 128, dtype=torch.float64)
    e = classlens.explain(model, x, classlens.top(2), trace=True)
    plain = classlens.explain(model, x, classlens.top(2), without="coarse").maps
    seen: dict[int, Tensor] = {}
    for layer in e.trace:
        side = layer.terms["Phi"].shape[-1] if layer.op == "conv2d" else 128
        if side <= 16:
            seen[side] = seen.get(side, 0) + layer.terms["Phi"].sum(2).transpose(0, 1)
    assert sorted(seen) == [8, 16]
    coarse = torch.zeros_like(plain)
    for places in seen.values():
        large = nn.functional.interpolate(places, (128, 128), mode="bilinear")
        large = large - large.mean((2, 3), keepdim=True)
        coarse += large / large.abs().sum((2, 3), keepdim=True)
    difference = e.maps - plain
    size = plain.abs().sum((2, 3), keepdim=True)
    assert (difference.sum((2, 3), keepdim=True).abs() < 1e-9 * size).all()
    assert torch.allclose(difference.abs().sum((2, 3), keepdim=True), size)
    window = nn.functional.unfold(plain.abs().flatten(0, 1)[:, None], 13)  # six pixels, a twentieth, on each side
    near = window.mean(1).reshape(2, 2, 116, 116)
    inner = difference[:, :, 6:-6, 6:-6] / near
    expected = coarse[:, :, 6:-6, 6:-6]
    for b, k in np.ndindex(2, 2):  # the difference over the relevance nearby is S, but for scale and level
        both = torch.stack([inner[b, k].flatten(), expected[b, k].flatten()])
        assert float(torch.corrcoef(both)[0, 1]) == pytest.approx(1, abs=1e-9)


def test_options_change_the_map_and_unknown_ones_are_refused() -> None:
    # It has layers whose feature map is eight times smaller than the image: only these have a residual.
    model, x = _down_to_stride_16(), pictures(1, (64, 64))
    full = classlens.explain(model, x).maps
    for option in ({"without": "Fx"}, {"without": "Fdx"}, {"without": "M"}, {"without": "coarse"}, {"only": "C"}):
        changed = classlens.explain(model, x, **option).maps
        assert (changed - full).norm() > 1e-3 * full.norm(), option
    for option, message in (
        ({"without": "A"}, "unknown without='A'; the terms are Fx, Fdx, M, coarse$"),
        ({"without": "gate"}, "unknown without='gate'"),
        ({"only": "A"}, "unknown only='A'"),
        ({"residual": "cam"}, "unknown residual='cam'; the only choice is residual=gradcam"),
        ({"colour": 1}, "agf has no option 'colour'; it has without, only, residual"),
    ):
        with pytest.raises(MethodError, match=message):
            classlens.explain(model, x, **option)
    with pytest.raises(MethodError, match=r"unknown without='coarse'; the terms are A, Fx, Fdx, M, gate$"):
        classlens.explain(model, x, 0, "agf-paper", without="coarse")


def test_trace_has_every_term_of_every_layer() -> None:
    e = classlens.explain(build("residual"), pictures(), 3, "agf-paper", trace=True)
    convs = [t for t in e.trace if t.op == "conv2d"]
    assert [t.name for t in convs] == ["skip", "c3", "c2", "c1", "stem"]
    for layer in convs:
        assert {"C", "A", "F_x", "F_dx", "M", "r", "gradient", "Phi"} == set(layer.terms)
        c, r = layer.terms["C"], layer.terms["r"]
        assert torch.isfinite(c).all()
        assert c.shape == r.shape


@pytest.mark.parametrize("method", ["agf", "agf-paper"])
def test_no_trace_is_kept_unless_it_is_requested(method: str) -> None:
    assert classlens.explain(build("plain"), pictures(), 3, method).trace == ()


def test_influence_alone_has_nothing_to_factorise_and_no_note() -> None:
    shallow = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    (note,) = classlens.explain(shallow.eval(), pictures(), 1).report.notes
    assert "nothing could be factorised" in note
    assert classlens.explain(shallow.eval(), pictures(), 1, "agf(only=C)").report.notes == ()


def test_trace_of_the_layer_that_reads_a_flattened_map() -> None:
    e = classlens.explain(build("dense-head"), pictures(), 3, "agf-release", trace=True)
    (layer,) = [t for t in e.trace if {"C", "M"} <= set(t.terms) and t.op == "linear"]
    assert set(layer.terms) == {"C", "M", "gradient", "Phi"}
    assert float(layer.terms["M"].max()) == pytest.approx(1, rel=1e-3)  # divided by its maximum


def test_the_released_division_is_that_of_every_layer() -> None:
    """1e-9 is added to every denominator; where weights are that small, most of the relevance is lost."""
    torch.manual_seed(0)
    thin = nn.Conv2d(4, 5, 1, bias=False)
    thin.weight.data *= 1e-8
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), thin, nn.Softplus(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 4)
    ).eval()
    x = pictures(1)
    found = {t.name: t.terms["Phi"] for t in classlens.explain(model, x, 3, "agf-release", trace=True).trace}
    seen, w, r = model[:2](x), thin.weight.abs(), found["3"][0]
    expected = seen * nn.functional.conv_transpose2d(r / (nn.functional.conv2d(seen, w) + 1e-9), w)
    assert torch.allclose(found["2"][0], expected.detach(), rtol=1e-4, atol=1e-12)
    assert abs(expected.sum()) < 0.9 * abs(r.sum())


def test_the_layers_of_image_and_head_do_not_count_as_deep(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of these convolutions read a map eight times smaller than the image; one lies between image and head."""
    model = nn.Sequential(
        nn.MaxPool2d(8), nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.ReLU(), nn.Conv2d(5, 3, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    ).eval()  # fmt: skip
    counted: list[int] = []

    def weight(layers: int) -> float:
        counted.append(layers)
        return residual_weight(layers)

    monkeypatch.setattr(balanced, "residual_weight", weight)
    layers = classlens.explain(model, pictures(size=(48, 48)), 1, trace=True).trace
    assert counted == [1]
    assert [t.name for t in layers if "F_x" in t.terms] == ["3"]


def test_the_released_rule_is_full_where_an_activation_follows_before_a_sum() -> None:
    """Not in a 3x3 convolution whose output is added to something first, nor in one of single places."""
    trace = classlens.explain(build("residual"), pictures(), 3, "agf-release", trace=True).trace
    assert [t.name for t in trace if "F_x" in t.terms] == ["c2"]
    assert "C" not in next(t for t in trace if t.name == "c1").terms


def test_a_stride_over_two_positions_is_smoothed_too() -> None:
    """A stride of 2 reads one of four positions; the others get relevance by smoothing."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 8, 8), nn.Softplus(), nn.Conv2d(4, 5, 1, 2), nn.Softplus(), nn.Flatten(), nn.Linear(5, 4)
    ).eval()
    e = classlens.explain(model, pictures(size=(16, 16)), 3, trace=True)
    (layer,) = [t for t in e.trace if t.name == "2"]
    assert set(layer.terms) == {"C", "F_x", "F_dx", "M", "gradient", "Phi"}
    assert (layer.terms["Phi"] != 0).all()
    assert (layer.terms["C"][..., 1:, :] == 0).all()


@pytest.mark.parametrize(("padding", "skips"), [(1, True), (2, False)])
def test_a_stride_over_three_positions_is_smoothed_if_it_skips_one(padding: int, skips: bool) -> None:
    """From three positions to two by a stride of 2, or to three by a stride of 1 and a wider border."""
    torch.manual_seed(0)
    step = nn.Conv2d(4, 5, 3, 2, 1) if skips else nn.Conv2d(4, 5, 5, 1, padding)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 8, 8), nn.Softplus(), step, nn.Softplus(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(5, 4),
    ).eval()  # fmt: skip
    e = classlens.explain(model, pictures(size=(24, 24)), 3, without=("Fx", "Fdx", "M"), trace=True)
    (layer,) = [t for t in e.trace if t.name == "2"]
    assert torch.allclose(layer.terms["Phi"], layer.terms["C"]) is not skips


def test_trace_of_a_convolution_with_the_full_rule() -> None:
    e = classlens.explain(build("plain"), pictures(), 3, "agf-release", trace=True)
    full = [t for t in e.trace if "F_x" in t.terms]
    assert full
    assert all(set(t.terms) == {"A", "C", "F_x", "F_dx", "M", "gradient", "r", "Phi"} for t in full)


class Pieces(nn.Module):
    """A convolution over the quarters of a feature map, stacked along the batch axis."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Conv2d(3, 4, 8, 8), nn.Conv2d(4, 5, 3, padding=1), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.relu(self.embed(x)).unflatten(3, (2, 2)).unflatten(2, (2, 2))  # (B,4,2,2,2,2)
        pieces = seen.permute(0, 2, 4, 1, 3, 5).flatten(0, 2)
        return self.head(torch.relu(self.mix(pieces)).mean((2, 3)).unflatten(0, (len(x), 4)).mean(1))


def test_convolutions_over_pieces_of_images_are_no_coarse_evidence() -> None:
    torch.manual_seed(0)
    model, x = Pieces().double().eval(), pictures(size=(32, 32)).double()
    whole = classlens.explain(model, x, [[0, 1], [1, 2]], "agf")
    assert whole.report.conservation.max() < 1e-6
    without = classlens.explain(model, x, [[0, 1], [1, 2]], "agf", without="coarse")
    assert torch.equal(whole.maps, without.maps)


class OneChannel(nn.Module):
    """Patches as tokens; a layer over them reads their first channel alone."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.mix, self.head = nn.Conv2d(3, 8, 8, 8), nn.Linear(8, 4), nn.Linear(4, 3)
        self.mix.weight.data[:, 1:] = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = nn.functional.softplus(self.patch(x)).flatten(2).mT
        return self.head(nn.functional.softplus(self.mix(tokens)).mean(1))


def test_fewer_channels_of_a_token_are_no_stride() -> None:
    """Smoothing is for positions: channels beside each other have nothing in common."""
    torch.manual_seed(0)
    e = classlens.explain(OneChannel().eval(), pictures(size=(32, 32)), 1, trace=True)
    (layer,) = [t for t in e.trace if t.name == "mix"]
    assert (layer.terms["Phi"][..., 0] != 0).all()
    assert (layer.terms["Phi"][..., 1:] == 0).all()


@pytest.mark.parametrize("method", ["agf", "agf-paper", "agf-release"])
def test_a_negative_scale_of_a_norm_is_a_matter_of_writing(method: str) -> None:
    """Weights and scale with the opposite signs compute the same, so they have the same map."""
    model, x = build("plain").double(), pictures().double()
    before = classlens.explain(model, x, 3, method)
    conv, norm = model.features[4], model.features[5]
    with torch.no_grad():
        for t in (conv.weight, conv.bias, norm.weight, norm.running_mean):
            t[::2] *= -1
    after = classlens.explain(model, x, 3, method)
    assert torch.allclose(after.logits, before.logits)
    assert torch.allclose(after.maps, before.maps, rtol=1e-6, atol=1e-12)


class Shifts(nn.Module):
    """Adds a constant to a feature map."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 3), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.b(torch.relu(self.a(x)) + 0.5).relu().mean((2, 3)))


@pytest.mark.parametrize("method", ["agf-paper", "agf-release"])
def test_a_constant_that_is_added_gets_no_share(method: str) -> None:
    torch.manual_seed(0)
    layers = classlens.explain(Shifts().eval(), pictures(), 1, method, trace=True).trace
    phi = {t.name or t.op: t.terms["Phi"] for t in layers}
    assert torch.equal(phi["add"], phi["b"])


def test_equal_logits_are_refused_with_the_image_named() -> None:
    model = build("plain")
    nn.init.zeros_(model.head[3].weight)
    nn.init.zeros_(model.head[3].bias)
    with pytest.raises(TargetError, match="logits of image 0 are all equal"):
        classlens.explain(model, pictures())


def test_one_image_with_equal_logits_is_enough_to_refuse() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 900, 3, bias=False))
    x = pictures()
    x[1] = 0  # nothing is seen
    for targets in (None, 0):
        with pytest.raises(TargetError, match="logits of image 1 are all equal"):
            classlens.explain(model.eval(), x, targets)


def test_one_saturated_score_is_enough_for_a_note() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 900, 3)).eval()
    x = pictures()
    assert classlens.explain(model, x, classlens.top(1), "agf-release").report.notes == ()
    x[1] *= 1e6
    note, *_ = classlens.explain(model, x, classlens.top(1), "agf-release").report.notes  # another says: it is empty
    assert note.startswith("a score is saturated")


def test_a_network_without_weights_is_refused() -> None:
    with pytest.raises(MethodError, match="no linear or convolutional layer"):
        classlens.explain(nn.Sequential(nn.Flatten(), nn.Tanh()).eval(), pictures())


def test_works_on_a_network_without_feature_maps() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    e = classlens.explain(model, pictures(), classlens.top(2))
    assert e.report.conservation.max() < 1e-4
    assert not torch.allclose(e.maps[:, 0], e.maps[:, 1])


def test_methods_are_in_the_registry_with_their_papers() -> None:
    assert {"agf", "agf-paper", "agf-release"} <= set(METHODS)
    tape = record(build("plain"), pictures())
    case = Case(build("plain"), pictures(), tape, torch.zeros(2, 1, dtype=torch.int64))
    assert METHODS["agf"].run(case).maps.shape == (2, 1, 32, 32)


@pytest.mark.parametrize("name", ["agf", "agf-paper", "agf-release"])
def test_a_network_of_one_output_is_explained(name: str) -> None:
    """Eq. 7 compares a class with the others; where there is none, the logit itself is the score."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(4, 1),
    ).eval()  # fmt: skip
    found = classlens.explain(model, torch.rand(2, 3, 16, 16), 0, name)
    assert torch.isfinite(found.maps).all()
    assert (found.maps.abs().amax((2, 3)) > 0).all()


# ------------------------------------------------------------------------------------------------- on patch grids


class Patches(nn.Module):
    """A transformer block on 16-pixel patches with a class token; `windows` cuts the images up along the batch."""

    def __init__(self, windows: bool = False, token: bool = True) -> None:
        super().__init__()
        self.embed, self.token = nn.Conv2d(3, 8, 16, 16), nn.Parameter(torch.randn(1, 1, 8))
        self.norm, self.up, self.down, self.head = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 4)
        self.windows, self.has_token = windows, token

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).mT
        if self.has_token:
            tokens = torch.cat([self.token.expand(len(x), -1, -1), tokens], 1)
        tokens = tokens.reshape(-1, 8, 8) if self.windows else tokens
        tokens = tokens + self.down(torch.relu(self.up(self.norm(tokens))))
        return self.head(tokens.reshape(len(x), -1, 8).mean(1))


def test_factorisation_reads_a_patch_grid() -> None:
    torch.manual_seed(0)
    model, x = Patches().eval(), torch.randn(2, 3, 64, 64)
    whole = classlens.explain(model, x, [[0, 1], [2, 3]], "agf")
    alone = classlens.explain(model, x, [[0, 1], [2, 3]], "agf", without=("M", "Fx", "Fdx"))
    assert not any("relevance stream alone" in note for note in whole.report.notes)
    assert whole.report.conservation.max() < 1e-5
    assert (whole.maps - alone.maps).norm() > 1e-3 * alone.maps.norm()
    single = classlens.explain(model, x[1:], [2, 3], "agf").maps
    assert torch.allclose(single, whole.maps[1:], rtol=1e-4, atol=1e-6 * float(single.abs().max()))


def test_residual_on_tokens_is_the_one_on_a_feature_map() -> None:
    """A linear layer on tokens is a 1x1 convolution: the same terms, by another way of writing the network."""

    class Written(nn.Module):
        def __init__(self, tokens: bool) -> None:
            super().__init__()
            self.embed, self.mix, self.head = nn.Conv2d(3, 6, 16, 16), nn.Conv2d(6, 5, 1), nn.Linear(5, 3)
            self.tokens = tokens

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.embed(x))
            if self.tokens:
                mixed = torch.nn.functional.linear(x.flatten(2).mT, self.mix.weight.flatten(1), self.mix.bias)
                return self.head(torch.relu(mixed).mean(1))
            return self.head(torch.relu(self.mix(x)).mean((2, 3)))

    torch.manual_seed(0)
    as_features = Written(tokens=False).eval()
    as_patches = Written(tokens=True).eval()
    as_patches.load_state_dict(as_features.state_dict())
    x = torch.randn(2, 3, 64, 64)
    ours, theirs = (classlens.explain(m, x, [[0, 1], [1, 2]], "agf").maps for m in (as_patches, as_features))
    assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6 * float(theirs.abs().max()))


@pytest.mark.parametrize("images", [1, 2])
def test_windows_give_the_map_of_the_whole_grid(images: int) -> None:
    """Where the layers read each patch alone, cutting the grid into windows changes nothing."""
    torch.manual_seed(0)
    whole = Patches(windows=False, token=False).eval()
    cut = Patches(windows=True, token=False).eval()
    cut.load_state_dict(whole.state_dict())
    x = torch.randn(images, 3, 64, 64)
    ours, theirs = (classlens.explain(m, x, [[0, 1]] * images, "agf") for m in (cut, whole))
    assert not ours.report.notes
    assert torch.allclose(ours.maps, theirs.maps, rtol=1e-4, atol=1e-6 * float(theirs.maps.abs().max()))
