from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import classlens
from classlens.core.capture import record
from classlens.errors import MethodError
from classlens.methods.cam import _cancels, apart_from_similar
from classlens.methods.featuremaps import feature_map, spatial_cuts
from goldens import distance, load, stored, targets
from networks import build, pictures
from steps import Does

TARGETS = [[1, 4], [0, 2]]


def hooked(model: nn.Module, layer: nn.Module, x: Tensor, score: object) -> tuple[Tensor, Tensor]:
    """Features and gradients of a layer for one image, by hooks: the way other libraries do it."""
    kept: list[Tensor] = []
    handle = layer.register_forward_hook(lambda module, args, output: kept.append(output))
    logits = model(x[None])
    handle.remove()
    (gradient,) = torch.autograd.grad(score(logits[0]), kept[0])
    return kept[0].detach(), gradient


def upsampled(cam: Tensor) -> Tensor:
    return F.interpolate(cam[None], size=(32, 32), mode="bilinear", align_corners=False)[0, 0]


class Chain(nn.Module):
    """VGG in small: ten convolutions, pooled after each second; the last pool is averaged once more."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for i in range(10):
            layers += [nn.Conv2d(3 if i == 0 else 6, 6, 3, padding=1), nn.ReLU()]
            layers += [nn.MaxPool2d(2)] if i % 2 and i < 9 else []
        self.features, self.pool = nn.Sequential(*layers), nn.AdaptiveAvgPool2d(4)
        self.fc = nn.Linear(6 * 16, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.pool(self.features(x)).flatten(1))


class Tokens(nn.Module):
    """A small vision transformer: class token, attention, only the class token is read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.token = nn.Conv2d(3, 12, 8, stride=8), nn.Parameter(torch.randn(1, 1, 12))
        self.qkv, self.norm, self.fc = nn.Linear(12, 36), nn.LayerNorm(12), nn.Linear(12, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        self.stream = x
        for _ in range(2):
            q, k, v = self.qkv(x).chunk(3, -1)
            x = x + F.scaled_dot_product_attention(q, k, v)
        return self.fc(self.norm(x)[:, 0])


# ------------------------------------------------------------------------------------------------------- the maps


@pytest.mark.parametrize("name", ["vgg_id", "vgg11_smallhead"])
def test_golden_of_the_released_code(name: str) -> None:
    model, x, arrays = load(name)
    found = classlens.explain(model, x, targets(arrays)[:, :1], "gradcam(variant=release)").maps
    assert distance(stored(found, arrays), arrays["baseline/gradcam"]) < 1e-6


def test_released_map_is_0_where_the_release_gives_nan() -> None:
    model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.Sigmoid(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2))
    nn.init.constant_(model[4].weight, -1.0)
    found = classlens.explain(model.eval(), pictures(), 1, "gradcam(variant=release)").maps
    assert torch.equal(found, torch.zeros_like(found))


def test_gradcam_and_layercam_against_hooks() -> None:
    model, x = build("plain").double(), pictures().double()
    grad, layer = (classlens.explain(model, x, TARGETS, m).maps for m in ("gradcam", "layercam"))
    for b, row in enumerate(TARGETS):
        for k, t in enumerate(row):
            features, g = hooked(model, model.features, x[b], lambda y, t=t: y[t])
            cam = sum(features[0, c] * g[0, c].mean() for c in range(12)).clamp(min=0)[None]
            assert torch.allclose(grad[b, k], upsampled(cam), atol=1e-12)
            cam = sum(features[0, c] * g[0, c].clamp(min=0) for c in range(12)).clamp(min=0)[None]
            assert torch.allclose(layer[b, k], upsampled(cam), atol=1e-12)


def test_finer_cam_is_gradcam_of_the_difference() -> None:
    model, x = build("plain").double(), pictures().double()
    found = classlens.explain(model, x, TARGETS, "finer-cam", alpha=0.8, similar=2).maps
    for b, row in enumerate(TARGETS):
        for k, t in enumerate(row):
            logits = model(x[b : b + 1])[0].detach()
            near = sorted((c for c in range(7) if c != t), key=lambda c: abs(float(logits[c] - logits[t])))[:2]
            difference = lambda y, t=t, near=near: y[t] - 0.8 * (y[near[0]] + y[near[1]]) / 2  # noqa: E731
            features, g = hooked(model, model.features, x[b], difference)
            cam = (features * g.mean((2, 3), keepdim=True)).sum(1).clamp(min=0)
            assert torch.allclose(found[b, k], upsampled(cam), atol=1e-12)


def test_finer_cam_refuses_more_classes_than_there_are() -> None:
    start = apart_from_similar(torch.tensor([[5.0, 1.0, 4.0, 3.0]]), torch.tensor([[0, 1]]), 0.5, 2)
    assert torch.equal(start[1, 0], torch.tensor([0.0, 1.0, -0.25, -0.25]))
    with pytest.raises(MethodError, match="give 1 to 6"):
        classlens.explain(build("plain"), pictures(), 1, "finer-cam(similar=7)")


# ---------------------------------------------------------------------------------------------- choosing the layer


def test_shallower_counts_weight_layers() -> None:
    """features: conv relu conv relu pool | ...; four convolutions before the last map's input is two pools up."""
    model, x = Chain().eval().double(), pictures().double()
    names = {0: "features.23", 4: "features.14", 8: "features.4"}
    for shallower, name in names.items():
        for method in ("gradcam", "layercam", "odam", "finer-cam"):
            by_count = classlens.explain(model, x, TARGETS, method, shallower=shallower).maps
            assert torch.equal(by_count, classlens.explain(model, x, TARGETS, method, layer=name).maps)
    with pytest.raises(MethodError, match="shallowest map is 9 weight layers up"):
        classlens.explain(model, x, 1, "gradcam(shallower=10)")


def test_layer_by_name_is_what_the_module_gives() -> None:
    model, x = build("residual").double(), pictures().double()
    found = classlens.explain(model, x, 3, "gradcam", layer="c2").maps
    features, g = hooked(model, model.c2, x[1], lambda y: y[3])
    cam = (features * g.mean((2, 3), keepdim=True)).sum(1).clamp(min=0)
    assert torch.allclose(found[1, 0], upsampled(cam), atol=1e-12)
    whole = classlens.explain(build("plain"), pictures(), 3, "gradcam", layer="features").maps
    assert torch.equal(whole, classlens.explain(build("plain"), pictures(), 3, "gradcam").maps)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ("features.66", "did you mean features.6"),
        ("head", r"returns \(2, 7\), which is not a spatial feature map"),
        ("zzz", "layer 'zzz'$"),
    ],
)
def test_a_layer_that_cannot_serve_is_named(layer: str, message: str) -> None:
    with pytest.raises(MethodError, match=message):
        classlens.explain(build("plain"), pictures(), 1, "gradcam", layer=layer)


def test_average_pools_are_passed_over() -> None:
    tape = record(Chain().eval(), pictures())
    assert tuple(spatial_cuts(tape)[0].value.shape) == (2, 6, 2, 2)


@pytest.mark.parametrize("size", [(32, 32), (32, 64)])
def test_channels_last_maps_are_read_as_such(size: tuple[int, int]) -> None:
    """As in ConvNeXt's head, (B,1,1,C) is no map of C places; as in Swin, (B,h,w,C) is one of h*w."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.norm, self.fc = nn.Conv2d(3, 9, 4, stride=4), nn.LayerNorm(9), nn.Linear(9, 7)

        def forward(self, x: Tensor) -> Tensor:
            x = F.gelu(self.stem(x).permute(0, 2, 3, 1))
            return self.fc(self.norm(x.mean((1, 2), keepdim=True))).flatten(1)

    model, x = Last().eval(), pictures(2, size)
    cut = spatial_cuts(record(model, x))[0]
    assert tuple(cut.value.shape) == (2, size[0] // 4, size[1] // 4, 9)
    assert torch.equal(cut.as_map(cut.value.tensor), cut.value.tensor.permute(0, 3, 1, 2))
    assert classlens.explain(model, x, 1, "gradcam").maps.shape == (2, 1, *size)


def read_last(do: Callable[[Tensor], Tensor], size: tuple[int, int], batch: int = 2) -> Tensor | None:
    """What a function gives at the end, read as a feature map."""
    tape = record(Does(do).eval(), pictures(batch, size))
    found = feature_map(tape, tape.output)
    return None if found is None else found.as_map(tape.output.tensor)


@pytest.mark.parametrize(
    ("do", "size", "shape"),
    [
        (lambda x: x[:, :, ::4, ::4], (32, 64), (2, 3, 8, 16)),
        (lambda x: x[:, :, ::4, ::4].permute(0, 2, 3, 1), (32, 64), (2, 3, 8, 16)),
        (lambda x: x[:, :, ::4, ::4].permute(0, 2, 3, 1), (64, 32), (2, 3, 16, 8)),
        (lambda x: x[:, :1, ::4, ::4].expand(-1, 8, -1, -1), (32, 32), (2, 8, 8, 8)),  # could be either: first
        (lambda x: x[:, :, :1, :1], (32, 32), None), (lambda x: x[:, :, :1, :2], (32, 32), (2, 3, 1, 2)),
        (lambda x: x[:, :, :1, :1].permute(0, 2, 3, 1), (32, 32), None),
        (lambda x: x.mean((2, 3)), (32, 32), None), (lambda x: x[..., None], (8, 8), None),
    ],
)  # fmt: skip
def test_where_a_values_places_are(do: Callable[[Tensor], Tensor], size: tuple[int, int], shape: object) -> None:
    found = read_last(do, size)
    assert (None if found is None else tuple(found.shape)) == shape
    if found is not None and shape == (2, 3, 8, 16):
        assert torch.equal(found, pictures(2, size)[:, :, ::4, ::4])


WEIGHT = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("extra", [-1, 0, 1, 16, 17])
def test_tokens_are_read_on_the_grid_of_the_patches(extra: int) -> None:
    """A convolution with as many channels gave the grid; at most 16 tokens stand beside it, in front."""

    def tokens(x: Tensor) -> Tensor:
        patches = F.conv2d(F.conv2d(x, WEIGHT[:4, :, :4, :4], stride=4).sum(1, keepdim=True) + x[..., ::4, ::4],
                           WEIGHT[:, :, :2, :2], stride=2)  # fmt: skip
        flat = patches.flatten(2).mT
        return torch.cat([torch.ones(2, extra, 5), flat], 1) if extra >= 0 else flat[:, 1:]

    found = read_last(tokens, (24, 40))
    if extra in (-1, 17):
        assert found is None
        return
    tape = record(Does(tokens).eval(), pictures(2, (24, 40)))
    patches = [n.outputs[0].tensor for n in tape.nodes if n.op == "conv2d"][-1]
    assert patches.shape == (2, 5, 3, 5)
    assert torch.equal(found, patches)


def test_a_grid_of_one_place_is_none() -> None:
    def squeezed(x: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(x, WEIGHT, stride=8), torch.ones(5, 5, 3, 5)).flatten(2).mT

    assert read_last(squeezed, (24, 40)) is None


def test_nothing_to_see_is_no_reason_to_look_elsewhere() -> None:
    """A class without any gradient: the deepest map all the same, and 0 on it."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
                          nn.Flatten(), nn.Linear(5, 3)).eval()  # fmt: skip
    nn.init.zeros_(model[6].weight[1:2])
    found = classlens.explain(model, pictures(), 1, "gradcam").maps
    assert torch.equal(found, torch.zeros_like(found))


class OnlyTheToken(nn.Module):
    """Nothing but the class token is ever read: no place has a gradient anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token, self.fc = nn.Conv2d(3, 6, 8, 8), nn.Parameter(torch.randn(1, 1, 6)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), self.patches(x).flatten(2).mT], 1)
        return self.fc(x.relu()[:, 0] + 0 * x.mean(1))


def test_where_no_place_has_a_gradient_the_map_is_0() -> None:
    found = classlens.explain(OnlyTheToken().eval(), pictures(), 1, "gradcam").maps
    assert torch.equal(found, torch.zeros_like(found))


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(MethodError, match="shallower=-1 is not possible; give an integer from 0"):
        classlens.explain(build("plain"), pictures(), 1, "gradcam(shallower=-1)")
    with pytest.raises(MethodError, match="similar=0 is not possible with 7 classes; give 1 to 6"):
        classlens.explain(build("plain"), pictures(), 1, "finer-cam(similar=0)")
    one = apart_from_similar(torch.tensor([[5.0, 1.0, 4.0, 3.0]]), torch.tensor([[0]]), 0.5, 1)
    assert torch.equal(one[0, 0], torch.tensor([1.0, 0.0, -0.5, 0.0]))


def test_finer_cams_paper_takes_three_classes_and_six_tenths() -> None:
    model, x = build("plain"), pictures()
    ours = classlens.explain(model, x, TARGETS, "finer-cam").maps
    assert torch.equal(ours, classlens.explain(model, x, TARGETS, "finer-cam(alpha=0.6, similar=3)").maps)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stage = nn.ModuleDict({f"block{i}": nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU()) for i in range(4)})
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.stage.values():
            x = block(x)
        return self.head(x * 1)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ("stages", "layer 'stages'; did you mean stage"),  # a part of a name that holds layers
        ("stage.block9", r"did you mean stage.block\d or stage.block\d or stage.block\d\?$"),  # three at most
        ("stage.block2.7", r"did you mean stage.block2.\d or"), ("qqq", "layer 'qqq'$"), ("hea", "did you mean head"),
    ],
)  # fmt: skip
def test_a_misspelt_layer_brings_names_that_are_near(layer: str, message: str) -> None:
    with pytest.raises(MethodError, match=message):
        classlens.explain(Nested().eval(), pictures(), 1, "gradcam", layer=layer)


def test_transformers_are_read_before_their_last_attention() -> None:
    model, x = Tokens().eval().double(), pictures().double()
    found = classlens.explain(model, x, 3, "gradcam").maps
    cuts = spatial_cuts(record(model, x))
    assert [tuple(cut.as_map(cut.value.tensor).shape) for cut in cuts[:3]] == [(2, 12, 4, 4)] * 3
    chosen = cuts[2].value.tensor  # the stream between the two attentions
    leaf = chosen.clone().requires_grad_()
    q, k, v = model.qkv(leaf).chunk(3, -1)
    logits = model.fc(model.norm(leaf + F.scaled_dot_product_attention(q, k, v))[:, 0])
    (gradient,) = torch.autograd.grad(logits[:, 3].sum(), leaf)
    for b in range(2):
        weight = gradient[b, 1:].mean(0)
        cam = torch.tensor([[float(chosen[b, 1 + 4 * i + j] @ weight) for j in range(4)] for i in range(4)])
        assert torch.allclose(found[b, 0], upsampled(cam.double().clamp(min=0)[None]), atol=1e-9)


def test_a_network_without_places_says_so() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 7)).eval()
    with pytest.raises(MethodError, match="no spatial feature map"):
        classlens.explain(model, pictures(), 1, "layercam")


@pytest.mark.parametrize("method", ["gradcam", "layercam", "odam", "finer-cam"])
def test_batch_and_classes_are_independent(method: str) -> None:
    model, x = build("gated"), pictures(3)
    chosen = [[1, 4], [0, 2], [5, 3]]
    whole = classlens.explain(model, x, chosen, method).maps
    for b, row in enumerate(chosen):
        for k, t in enumerate(row):
            single = classlens.explain(model, x[b : b + 1], t, method).maps[0, 0]
            assert (whole[b, k] - single).abs().max() <= 1e-5 * whole.abs().max()


def test_odam_weighs_each_position_by_its_signed_gradient() -> None:
    model, x = Chain().eval(), pictures(2)
    e = classlens.explain(model, x, TARGETS, "odam(layer=features)")
    for i in range(2):
        for k in range(2):
            features, gradient = hooked(model, model.features, x[i], lambda y, i=i, k=k: y[TARGETS[i][k]])
            expected = upsampled((features * gradient).sum(1).clamp(min=0))
            torch.testing.assert_close(e.maps[i, k], expected, atol=1e-6, rtol=1e-4)
    layercam = classlens.explain(model, x, TARGETS, "layercam(layer=features)")
    assert not torch.allclose(e.maps, layercam.maps)


@pytest.mark.parametrize("method", ["gradcam", "layercam", "finer-cam"])
def test_a_class_needs_no_note(method: str) -> None:
    """Notes on places are for questions about places."""
    notes = classlens.explain(build("plain"), pictures(1), 1, method).report.notes
    assert [note for note in notes if "0 everywhere" not in note] == []


def test_a_map_of_two_places_is_a_map() -> None:
    """And its places are told apart: by hand, for the last map of a network."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 4, 4), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)).double().eval()
    x = torch.rand(1, 3, 4, 8).double()
    features = model[:2](x)
    weights = model[3].weight[1].reshape(4, 1, 2).mean(2)
    expected = (features[0] * weights[:, :, None]).sum(0).clamp(min=0)
    found = classlens.explain(model, x, 1, "gradcam").maps[0, 0]
    assert torch.allclose(found[:, 0], expected[0, 0].expand(4))
    assert torch.allclose(found[:, -1], expected[0, 1].expand(4))


class Normalised(nn.Module):
    """Tokens whose length the norm after them removes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.norm, self.head = nn.Conv2d(3, 8, 4, 4), nn.LayerNorm(8, eps=0.0), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.patches(x).flatten(2).mT).mean(1))


def test_terms_that_cancel_are_said() -> None:
    """Features times gradients before a layer norm are 0: what is left of them in float32 is rounding."""
    model, x = Normalised().eval(), pictures(1)
    e = classlens.explain(model, x, 1, "odam", layer="patches")
    assert [note for note in e.report.warnings if "rounding decides" in note]
    assert not classlens.explain(build("plain"), x, 1, "odam").report.warnings


def test_terms_cancel_if_every_position_of_an_image_does() -> None:
    """Up to a hundred times the precision; one image of a batch is enough, a map of zeros is none."""
    eps = torch.finfo(torch.float32).eps
    ones = torch.ones(1, 2, 3, 4, 5)  # (K,B,C,h,w)

    def cancels(*sums: float) -> bool:
        """Terms 1, -1 and a sum, the same at all positions; one sum for each image."""
        terms = ones * torch.tensor([1.0, -1.0, 0.0]).view(3, 1, 1)
        terms[:, :, 2] = torch.tensor(sums).view(1, 2, 1, 1)
        return _cancels(terms, torch.ones_like(terms))

    assert cancels(0.0, 0.0)
    assert cancels(0.0, 1.0)
    assert cancels(1.0, 150 * eps)
    assert not cancels(1.0, 250 * eps)
    assert not _cancels(0 * ones, ones)
    mixed = ones * torch.tensor([1.0, -1.0, 0.0]).view(3, 1, 1)
    mixed[..., 2, 0, 0] = 0.5
    assert not _cancels(mixed, ones)  # one position is left
    assert not _cancels(torch.full_like(ones, 0.1), ones)


def test_the_note_is_there_if_one_of_several_maps_cancels() -> None:
    """Two images are weighed at once, and their note is one."""
    model, x = Normalised().eval(), pictures(2)
    assert len(classlens.explain(model, x, [[0], [1]], "odam", layer="patches").report.warnings) == 1
