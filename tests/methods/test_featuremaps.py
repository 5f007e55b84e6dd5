"""Which feature map a class activation map shows when the target reads only a part of the last ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import classlens
from classlens.core.capture import record
from classlens.errors import MethodError
from classlens.methods.featuremaps import all_maps, averaged, chosen_maps, feature_map, share_read, spatial_cuts
from classlens.methods.registry import METHODS, Case
from classlens.models._torchvision import import_torchvision
from dense import CLASSES, DENSE, dense
from networks import build, pictures
from steps import Does

CAMS = ["gradcam", "layercam", "finer-cam"]
FAR = (3, 3), (44, 60)  # two pixels
IMAGE = torch.rand(1, 3, 8, 12, generator=torch.Generator().manual_seed(0))


def logits_at(pixel: tuple[int, int]) -> Callable[[Any], Tensor]:
    def pick(result: Any) -> Tensor:
        logits = result["out"] if isinstance(result, dict) else result
        return logits[:, :, pixel[0], pixel[1]]

    return pick


def likeness(model: nn.Module, x: Tensor, method: str) -> float:
    """The largest cosine between the maps of one class at two pixels that are far apart."""
    every = list(range(CLASSES))
    a, b = (classlens.explain(model, x, every, method, output=logits_at(p)).maps[0].flatten(1) for p in FAR)
    both = a.any(1) & b.any(1)  # random weights make some maps negative, so 0
    assert both.any()
    return float(torch.nn.functional.cosine_similarity(a[both], b[both]).max())


@pytest.mark.parametrize("method", CAMS)
@pytest.mark.parametrize("name", DENSE)
def test_far_apart_pixels_have_maps_of_their_own(name: str, method: str) -> None:
    assert likeness(dense(name).double(), pictures(1, (48, 64)).double(), method) < 0.999


@pytest.mark.parametrize("name", ["unet", "pyramid"])
@pytest.mark.parametrize("method", CAMS)
def test_nothing_is_shown_where_the_pixel_reads_nothing(name: str, method: str) -> None:
    """The gradient at the shown map says what the pixel reads; on these networks that is a part of the picture."""
    model, x = dense(name).double(), pictures(1, (96, 128)).double()
    e = classlens.explain(model, x, list(range(CLASSES)), method, output=logits_at((5, 5)))
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(logits_at((5, 5))(model(leaf))[0].sum(), leaf)
    seen = (gradient != 0).any(1)[0]
    assert 0 < seen.double().mean() < 0.5
    rows, columns = (seen.any(axis).nonzero().max() for axis in (1, 0))
    reach = 16  # a cell of the coarsest map and its bilinear edge
    assert e.maps.any()
    assert not e.maps[..., rows + reach :, :].any()
    assert not e.maps[..., columns + reach :].any()
    note, *_ = e.report.notes
    assert "the target reads a part of the last feature map" in note
    assert re.search(r"shown is an earlier one, \d+x\d+, of which it reads [\d.]+ %$", note)


def test_a_misspelt_layer_is_answered_with_the_nearest_names() -> None:
    with pytest.raises(MethodError, match=r"in a layer 'featurs'; did you mean features( or [\w.]+)*\?"):
        classlens.explain(build("plain"), pictures(1), 0, "gradcam", layer="featurs")
    with pytest.raises(MethodError, match=r"in a layer 'zzz'$"):
        classlens.explain(build("plain"), pictures(1), 0, "gradcam", layer="zzz")


def test_the_map_is_the_end_of_the_encoder_against_hooks() -> None:
    """DeepLab's branch over the whole picture reads every position of what the backbone gives."""
    model, x = dense("dilated").double(), pictures(1, (48, 64)).double()
    kept: list[Tensor] = []
    handle = model.backbone.register_forward_hook(lambda module, args, output: kept.append(output))
    score = model(x)["out"][0, 2, 3, 3]
    handle.remove()
    (gradient,) = torch.autograd.grad(score, kept[0])
    cam = (kept[0] * gradient.mean((2, 3), keepdim=True)).sum(1, keepdim=True).clamp(min=0)
    expected = torch.nn.functional.interpolate(cam, size=(48, 64), mode="bilinear", align_corners=False)[0, 0]
    found = classlens.explain(model, x, 2, "gradcam", output=logits_at((3, 3))).maps[0, 0]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("method", CAMS)
@pytest.mark.parametrize("name", DENSE)
def test_each_image_and_class_chooses_for_itself(name: str, method: str) -> None:
    model, x = dense(name).double(), pictures(2, (48, 64)).double()
    together = classlens.explain(model, x, [[1, 4], [0, 2]], method, output=logits_at((20, 30))).maps
    for row, targets in enumerate([[1, 4], [0, 2]]):
        alone = classlens.explain(model, x[row : row + 1], targets, method, output=logits_at((20, 30))).maps
        torch.testing.assert_close(together[row], alone[0], rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize(("name", "shape", "above"), [("unet", (16, 12, 16), 3), ("dilated", (16, 12, 16), 6)])
def test_the_end_of_the_encoder_is_chosen(name: str, shape: tuple[int, ...], above: int) -> None:
    """The U-Net's pixel reads no map wholly: the coarsest one. DeepLab's reads what its backbone gives wholly."""
    model, x = dense(name).double(), pictures(1, (48, 64)).double()
    tape = record(model, x, logits_at((20, 30)))
    case = Case(model, x, tape, torch.tensor([[1]]))
    (seen,) = chosen_maps(case, case.directions(), None, 0)
    assert seen.features.shape[1:] == shape
    maps = all_maps(tape)
    gradients = tape.gradients(case.directions(), [m.value for m in maps])
    shares = {m.value: float(share_read(gradients[m.value])) for m in maps}
    wholly = [m for m in maps if shares[m.value] == 1]
    least = min(m.places() for m in maps)
    expected = wholly[0] if wholly else next(m for m in maps if m.places() == least)
    assert torch.equal(seen.features, expected.value.tensor)
    assert bool(wholly) == (name == "dilated")
    assert expected.above == above
    assert [m.above for m in maps] == sorted(m.above for m in maps)  # the deepest first


def test_a_whole_picture_is_read_wholly() -> None:
    """A mean over all pixels is a classifier with a convolutional head: its own class map is shown, as before."""
    model, x = dense("unet").double(), pictures(1, (48, 64)).double()
    e = classlens.explain(model, x, 2, "gradcam", output=lambda y: y.mean((2, 3)))
    expected = model(x)[0, 2].detach().clamp(min=0) / (48 * 64)
    torch.testing.assert_close(e.maps[0, 0], expected, rtol=1e-9, atol=1e-15)
    assert not any("an earlier one" in note for note in e.report.notes)


class Queries(nn.Module):
    """As in a detection transformer: queries attend to a feature map, and the logits of all layers are stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.ReLU(), nn.Conv2d(8, 12, 3, 2, 1), nn.ReLU())
        self.queries, self.fc = nn.Parameter(torch.randn(1, 20, 12)), nn.Linear(12, 7)

    def forward(self, x: Tensor) -> Tensor:
        places = self.body(x).flatten(2).mT
        first = torch.nn.functional.scaled_dot_product_attention(self.queries.expand(len(x), -1, -1), places, places)
        second = first + torch.nn.functional.scaled_dot_product_attention(first, places, places)
        return torch.stack([self.fc(first), self.fc(second)], 1)  # (B,2,20,7)


@pytest.mark.parametrize("method", CAMS)
def test_queries_are_no_places(method: str) -> None:
    torch.manual_seed(0)
    model, x = Queries().eval().double(), pictures(1, (48, 64)).double()
    maps = classlens.explain(model, x, [0, 1, 2], method, output=lambda y: y[:, -1, 3]).maps[0].flatten(1)
    assert torch.corrcoef(maps)[0, 1:].abs().max() < 0.999
    named = classlens.explain(model, x, [0, 1, 2], method, output=lambda y: y[:, -1, 3], layer="body").maps[0]
    torch.testing.assert_close(maps, named.flatten(1))


@pytest.mark.parametrize("name", ["fcn_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"])
def test_torchvisions_segmentation_networks(name: str) -> None:
    build = getattr(import_torchvision().models.segmentation, name)
    torch.manual_seed(0)
    model, x = build(weights=None, weights_backbone=None, num_classes=5).eval(), pictures(1, (64, 96))
    assert likeness(model, x, "gradcam") < 0.999


@pytest.mark.parametrize("method", ["agf-release", "agf-paper"])
def test_a_saturated_score_says_so(method: str) -> None:
    """The softmax of sums over a region has no gradient: the map is 0, and a note says why."""
    model, x = dense("unet"), pictures(1, (48, 64))
    e = classlens.explain(model, x, 2, method, output=lambda y: 1e3 * y[:, :, 8:30, 8:30].sum((2, 3)))
    assert not e.maps.any()
    assert any("saturated" in note and "agf" in note for note in e.report.notes)
    small = classlens.explain(model, x, 2, method, output=lambda y: y[:, :, 8:30, 8:30].mean((2, 3)))
    assert small.maps.any()
    assert not any("saturated" in note for note in small.report.notes)


class ClassToken(nn.Module):
    """Patches and a class token; after they are mixed, the head reads the class token alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.head = nn.Conv2d(3, 4, 8, stride=8), nn.Linear(4, 5)

    def read(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).mT
        return torch.relu(torch.cat([torch.ones(len(x), 1, 4, dtype=x.dtype), tokens], 1))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.read(x)
        return self.head((tokens * tokens.mean(1, keepdim=True))[:, 0])


def test_the_deepest_map_whose_patches_have_gradients_is_chosen() -> None:
    """Not the mixed tokens, whose patches nobody reads, and not what comes before the ReLU."""
    model, x = ClassToken().double().eval(), pictures(2, (32, 48)).double()
    tape = record(model, x)
    case = Case(model, x, tape, torch.tensor([[1], [2]]))
    (seen,) = chosen_maps(case, case.directions(), None, 0)
    assert torch.allclose(seen.features, model.read(x)[:, 1:].mT.reshape(2, 4, 4, 6))
    assert seen.gradients.any()


@pytest.mark.parametrize("size", [(32, 8), (8, 32)])
def test_patches_in_a_single_row_are_a_map(size: tuple[int, int]) -> None:
    model, x = ClassToken().eval(), pictures(1, size)
    case = Case(model, x, record(model, x), torch.tensor([[1]]))
    (seen,) = chosen_maps(case, case.directions(), None, 0)
    assert seen.features.shape == (1, 4, size[0] // 8, size[1] // 8)
    assert torch.allclose(seen.features.flatten(2), model.read(x)[:, 1:].mT)


def test_a_class_token_that_reads_no_patch_leaves_the_map_empty() -> None:
    class Apart(ClassToken):
        def forward(self, x: Tensor) -> Tensor:
            token = torch.cat([x.mean((2, 3)), x.amax((2, 3))], 1)[:, None, :4]
            return self.head(torch.cat([token, self.patches(x).flatten(2).mT], 1)[:, 0])

    e = classlens.explain(Apart().eval(), pictures(1, (32, 48)), 1, "gradcam")
    assert not e.maps.any()


def test_the_map_before_an_average_however_it_is_written() -> None:
    """The input of an average pool is shown, also if the pool is a sum over windows, or copied after it."""
    conv, head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(16, 2)
    pools: dict[str, Callable[[Tensor], Tensor]] = {
        "pool": lambda t: F.avg_pool2d(t, 4),
        "scaled": lambda t: F.avg_pool2d(t, 4) * 2,
        "sum": lambda t: t.unflatten(3, (2, 4)).unflatten(2, (2, 4)).sum((3, 5)) / 16,
        "copy": lambda t: torch.cat(F.avg_pool2d(t, 4).split(1, 1), 1).clone(),
    }
    x, found = torch.rand(1, 3, 8, 8), {}
    for name, pool in pools.items():
        tape = record(Does(lambda x, pool=pool: head(pool(conv(x).relu()).flatten(1))).eval(), x)
        found[name] = spatial_cuts(tape)[0].value.shape
    assert set(found.values()) == {torch.Size([1, 4, 8, 8])}
    stacked = Does(lambda x: head(torch.stack([conv(x)] * 3).sum(0)[:, :, ::4, ::4].flatten(1)))
    assert len(spatial_cuts(record(stacked.eval(), x))) > 1  # a sum of branches is no pool


def test_averages_are_pools_and_sums_over_windows() -> None:
    """The same change of axes by a reshape is none."""
    x = torch.rand(2, 3, 4, 4)
    windows = record(Does(lambda x: x.reshape(2, 3, 2, 2, 2, 2).mean((3, 5))).eval(), x)
    assert averaged(windows) == {windows.output}
    reshaped = record(Does(lambda x: x.reshape(2, 3, 2, 2, 2, 2).reshape(2, 3, 4, 4)).eval(), x)
    assert averaged(reshaped) == set()
    bent = record(Does(lambda x: F.avg_pool2d(x, 2).tanh()).eval(), x)
    assert averaged(bent) == {bent.nodes[0].outputs[0]}
    pooled = record(Does(lambda x: F.avg_pool2d(x, 2).clone()).eval(), x)
    assert averaged(pooled) == {value for node in pooled.nodes for value in node.outputs}


@pytest.mark.parametrize(("size", "places"), [((1, 2), 2), ((2, 1), 2), ((3, 2), 6), ((1, 1), None)])
def test_a_map_has_all_of_its_places(size: tuple[int, int], places: int | None) -> None:
    tape = record(Does(lambda x: F.avg_pool2d(x, 2).relu()).eval(), torch.rand(2, 3, *(2 * side for side in size)))
    found = feature_map(tape, tape.output)
    assert (None if found is None else found.places()) == places


@pytest.mark.parametrize("size", [(1, 2), (2, 1), (1, 1)])
def test_a_map_with_channels_last_has_all_of_its_places(size: tuple[int, int]) -> None:
    x = torch.rand(2, 3, *(8 * side for side in size))
    tape = record(Does(lambda x: F.avg_pool2d(x, 8).repeat(1, 5, 1, 1).permute(0, 2, 3, 1).relu()).eval(), x)
    found = feature_map(tape, tape.output)
    assert (None if found is None else found.places()) == (None if size == (1, 1) else 2)


@pytest.mark.parametrize("kind", ["channels first", "channels last", "tokens"])
def test_a_map_is_put_back_where_it_was_read(kind: str) -> None:
    """The values that have a place come back, those of another token are 0; (N,B) before the value's own axes."""
    torch.manual_seed(0)
    patches, extra = nn.Conv2d(3, 4, 2, 2), torch.ones(2, 3, 4)
    layouts: dict[str, Callable[[Tensor], Tensor]] = {
        "channels first": patches, "channels last": lambda x: patches(x).permute(0, 2, 3, 1).relu(),
        "tokens": lambda x: torch.cat([extra, patches(x).flatten(2).mT], 1).relu(),
    }  # fmt: skip
    tape = record(Does(layouts[kind]).eval(), torch.rand(2, 3, 4, 6))
    found = feature_map(tape, tape.output)
    assert found is not None
    assert (found.places(), found.above) == (6, 0)
    parts = torch.rand(5, *tape.output.shape)
    expected = parts.clone()
    if kind == "tokens":
        expected[:, :, :3] = 0
    back = found.restored(torch.stack([found.as_map(part) for part in parts]))
    assert torch.equal(back, expected)


def test_candidates_and_pieces_are_no_maps_of_the_image() -> None:
    """The best four positions, laid out as a map; and quarters of the map, stacked along the batch axis."""
    torch.manual_seed(0)
    body, mix, head = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 1), nn.Linear(4, 3)

    def candidates(x: Tensor) -> Tensor:
        seen = body(x).relu()
        best = seen.mean(1).flatten(1).topk(4).indices[:, None].expand(-1, 4, -1)
        return head(mix(seen.flatten(2).gather(2, best).unflatten(2, (2, 2))).mean((2, 3)))

    def pieces(x: Tensor) -> Tensor:
        seen = body(x).relu().unflatten(3, (2, 2)).unflatten(2, (2, 2)).permute(0, 2, 4, 1, 3, 5).flatten(0, 2)
        return head(mix(seen).relu().mean((2, 3)).unflatten(0, (len(x), 4)).mean(1))

    for do in (candidates, pieces):
        tape = record(Does(do).eval(), torch.rand(2, 3, 4, 4))
        first, last = [node for node in tape.nodes if node.op == "conv2d"]
        maps = {found.value for found in (*spatial_cuts(tape), *all_maps(tape))}
        assert first.outputs[0] in maps
        assert maps.isdisjoint({last.inputs[0], last.outputs[0]})
        assert (feature_map(tape, last.outputs[0]) is None) is (do is pieces)


def test_the_output_itself_is_no_map() -> None:
    """Logits of each pixel, read by the upsampling at the end: no weights lie above them."""
    torch.manual_seed(0)
    body, last = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 3, 1)
    tape = record(Does(lambda x: F.interpolate(last(body(x).relu()), scale_factor=2)[..., 3, 5]).eval(), IMAGE)
    assert {found.above for found in all_maps(tape)} == {1}


@pytest.mark.parametrize("extra", [16, 17])
def test_tokens_besides_the_patches_are_few(extra: int) -> None:
    patches = nn.Conv2d(3, 4, 2, 2)
    do = Does(lambda x: torch.cat([torch.ones(1, extra, 4), patches(x).flatten(2).mT], 1).relu())
    tape = record(do.eval(), IMAGE)
    assert (feature_map(tape, tape.output) is None) is (extra > 16)


def test_two_patches_are_a_grid() -> None:
    model, x = ClassToken().eval(), pictures(1, (8, 16))
    found = feature_map(tape := record(Does(lambda x: model.read(x)).eval(), x), tape.output)
    assert found is not None
    assert found.as_map(tape.output.tensor).shape == (1, 4, 1, 2)


def test_tokens_have_the_grid_of_the_map_with_their_channels() -> None:
    """Another map with as many places lies the other way."""
    torch.manual_seed(0)
    first, patches = nn.Conv2d(3, 5, (4, 2), (4, 2)), nn.Conv2d(5, 4, 1)

    def do(x: Tensor) -> Tensor:
        return patches(first(x).transpose(2, 3)).flatten(2).mT.relu()

    tape = record(Does(do).eval(), torch.rand(1, 3, 8, 6))
    found = feature_map(tape, tape.output)
    assert found is not None
    assert found.as_map(tape.output.tensor).shape == (1, 4, 3, 2)


@pytest.mark.parametrize("method", ["gradcam", "layercam"])
def test_targets_of_one_call_each_have_their_own_map(method: str) -> None:
    """One reads the whole picture, one a pixel: each has the map that it has alone, and no note is empty."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Softplus(), nn.Conv2d(4, 3, 3)).double().eval()
    x = pictures(2, (8, 9)).double()

    def pick(y: Tensor) -> Tensor:
        return torch.stack([y[:, 0].mean((1, 2)), y[:, 1, 2, 3], y[:, 2].mean((1, 2))], 1)

    case = Case(model, x, record(model, x, pick), torch.tensor([[0, 1], [1, 2]]), pick)
    first, *others = METHODS[method].run(case).notes
    assert "an earlier one, 6x7" in first
    assert [note.partition(" ")[0] for note in others] == (["gradcam"] if method == "gradcam" else [])
    together = classlens.explain(model, x, [[0, 1], [1, 2]], method, output=pick)
    for row, targets in enumerate([[0, 1], [1, 2]]):
        for k, target in enumerate(targets):
            alone = classlens.explain(model, x[row : row + 1], target, method, output=pick).maps[0, 0]
            torch.testing.assert_close(together.maps[row, k], alone, rtol=1e-9, atol=1e-15)


def test_the_shallowest_map_is_tried_too() -> None:
    """The class token is the mean of all patches, so of the two maps only the convolution's own has gradients."""
    torch.manual_seed(0)
    patches, head = nn.Conv2d(3, 4, 8, 8), nn.Linear(4, 5)

    def do(x: Tensor) -> Tensor:
        t = patches(x)
        return head(torch.cat([t.mean((2, 3))[:, None], t.flatten(2).mT], 1)[:, 0])

    model, x = Does(do).eval(), pictures(1, (32, 48))
    tape = record(model, x)
    assert len(spatial_cuts(tape)) == 2
    case = Case(model, x, tape, torch.tensor([[1]]))
    (seen,) = chosen_maps(case, case.directions(), None, 0)
    assert torch.equal(seen.features, patches(x))
    assert seen.gradients.all()


def test_a_pixel_of_the_only_map_has_no_earlier_one() -> None:
    model = nn.Conv2d(3, 5, 3).eval()
    with pytest.raises(MethodError, match="reads only a part of the last feature map, and there is no earlier one"):
        classlens.explain(model, pictures(1, (8, 8)), 1, "gradcam", output=lambda y: y[:, :, 2, 2])


def test_a_map_that_the_target_does_not_read_is_not_chosen() -> None:
    """However coarse it is."""
    torch.manual_seed(0)
    first, fine, down, coarse = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 3), nn.Conv2d(4, 4, 3, 4), nn.Conv2d(4, 5, 3)

    def do(x: Tensor) -> Tensor:
        t = first(x).relu()
        return fine(t)[:, :, 3, 3] + 0 * coarse(down(t).relu()).mean((2, 3))

    model, x = Does(do).eval(), pictures(1, (24, 24))
    e = classlens.explain(model, x, 1, "gradcam")
    assert any("an earlier one, 22x22" in note for note in e.report.notes)


def test_a_map_that_is_read_wholly_needs_no_share_in_its_note() -> None:
    model, x = dense("dilated").double(), pictures(1, (48, 64)).double()
    note, *_ = classlens.explain(model, x, 2, "layercam", output=logits_at((3, 3))).report.notes
    assert note.endswith("shown is an earlier one, 12x16")


def test_maps_that_are_too_far_up() -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten()]
    model, x = nn.Sequential(*layers, nn.Linear(16, 3)).eval(), pictures(1, (8, 8))
    tape = record(model, x)
    case = Case(model, x, tape, torch.tensor([[1]]))
    seen = [next(chosen_maps(case, case.directions(), None, n)) for n in (0, 1, 2)]
    assert [one.features.shape[2] for one in seen] == [2, 4, 6]
    assert all(one.gradients.shape[1:] == one.features.shape for one in seen)
    with pytest.raises(MethodError, match="shallower=-1 is not possible"):
        next(chosen_maps(case, case.directions(), None, -1))
    with pytest.raises(MethodError, match="shallower=3 is not possible; the shallowest map is 2 weight layers up"):
        next(chosen_maps(case, case.directions(), None, 3))


def test_maps_of_a_single_column_and_maps_that_are_enlarged_by_weights_count() -> None:
    """No cut goes through two branches. What a transposed convolution reads is a map, also if it is one pixel wide."""
    torch.manual_seed(0)
    first, up, other = nn.Conv2d(3, 4, 2, 2), nn.ConvTranspose2d(4, 2, 2, 2), nn.ConvTranspose2d(4, 2, 2, 2)

    def do(x: Tensor) -> Tensor:
        t = first(x)
        return up(t.relu()) + other(t.tanh())

    tape = record(Does(do).eval(), torch.rand(1, 3, 4, 2))
    ops = [tape.producer[found.value].op for found in all_maps(tape)]
    assert ops == ["tanh", "relu", "conv2d"]
