"""Volumes and videos: a single slice gives the map of the image, axes may change places, three axes by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import classlens
from classlens.methods import METHODS
from classlens.methods.agf import terms
from classlens.methods.inputs import gaussian_blur
from classlens.methods.perturbation import rise_masks, total_variation
from classlens.methods.places import enlarged, filtered_along, shortest_side
from networks import build, pictures, volumes
from quick import QUICK
from slow_agf import between

DRAWN = "random", "rise"  # their random numbers depend on the number of axes
WITHOUT_ATTENTION = [name for name, method in METHODS.items() if not method.attention]


class Slices(nn.Module):
    """One network, for images or for volumes: `new` says where the kernels of 1 along the new axis are."""

    def __init__(self, new: int | None = None) -> None:
        super().__init__()
        self.new, n = new, 2 if new is None else 3
        conv, norm = getattr(nn, f"Conv{n}d"), getattr(nn, f"BatchNorm{n}d")
        self.stem, self.stem_norm = conv(3, 6, self.size(3, 1), self.size(2, 1), self.size(1, 0)), norm(6)
        self.pool, self.skip = (
            getattr(nn, f"MaxPool{n}d")(self.size(3, 1), self.size(2, 1), self.size(1, 0)),
            conv(6, 6, 1),
        )
        self.wide = conv(6, 6, self.size(3, 1), padding=self.size(2, 0), dilation=self.size(2, 1), groups=2)
        self.down, self.down_norm = conv(6, 8, self.size(3, 1), self.size(2, 1), self.size(1, 0)), norm(8)
        self.own, self.deep = getattr(nn, f"InstanceNorm{n}d")(8), conv(8, 8, self.size(3, 1), padding=self.size(1, 0))
        self.average, self.fc = getattr(nn, f"AvgPool{n}d")(self.size(2, 1)), nn.Linear(8 * 4, 7)

    def size(self, in_plane: int, along_new: int) -> tuple[int, ...]:
        sizes = [in_plane, in_plane]
        if self.new is not None:
            sizes.insert(self.new, along_new)
        return tuple(sizes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.stem_norm(self.stem(x)).relu())
        x = (self.wide(x) + self.skip(x)).relu()
        x = self.own(self.down_norm(self.down(x))).relu()
        return self.fc(self.average(self.deep(x).relu()).flatten(1))


def with_axis(new: int) -> tuple[nn.Module, nn.Module]:
    """The network for images, and the same for volumes that are one position thick along an axis."""
    torch.manual_seed(3)
    flat, thick = Slices().eval().double(), Slices(new).eval().double()
    for norm in (flat.stem_norm, flat.down_norm):
        nn.init.normal_(norm.running_mean, std=0.3)
        nn.init.uniform_(norm.running_var, 0.5, 1.5)
    weights = {k: v.unsqueeze(2 + new) if v.dim() == 4 else v for k, v in flat.state_dict().items()}
    thick.load_state_dict(weights)
    return flat, thick


@pytest.mark.parametrize("new", [0, 1, 2])
@pytest.mark.parametrize("method", [m for m in WITHOUT_ATTENTION if m not in DRAWN])
def test_a_volume_of_one_slice_has_the_map_of_the_image(method: str, new: int) -> None:
    flat, thick = with_axis(new)
    x = pictures(2, (32, 32)).double()
    options = QUICK.get(method, {}) | ({"jitter": 0} if method == "meaningful-perturbation" else {})
    of_image = classlens.explain(flat, x, [[1, 4], [2, 0]], method, **options)
    of_slice = classlens.explain(thick, x.unsqueeze(2 + new), [[1, 4], [2, 0]], method, **options)
    assert of_slice.maps.shape == of_image.maps.unsqueeze(2 + new).shape
    assert torch.allclose(
        of_slice.maps.squeeze(2 + new), of_image.maps, rtol=1e-7, atol=1e-9 * float(of_image.maps.abs().max())
    )
    if METHODS[method].conserves:
        assert torch.allclose(of_slice.report.absorbed, of_image.report.absorbed)


def cubic() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv3d(3, 6, 3, 2, 1), nn.ReLU(), nn.MaxPool3d(3, 2, 1), nn.Conv3d(6, 8, 3, 2, 1), nn.BatchNorm3d(8),
        nn.ReLU(), nn.Conv3d(8, 8, 3, 1, 1), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(8, 7),
    ).double().eval()  # fmt: skip


@pytest.mark.parametrize(
    "method", [m for m in WITHOUT_ATTENTION if m not in (*DRAWN, "gradient-shap", "smoothgrad", "deeplift-shap")]
)
def test_axes_of_a_network_and_its_volume_may_change_places(method: str) -> None:
    """No axis is special: not the first, which is depth or time, and not the last. (Noise is drawn in one order.)"""

    def turned(t: Tensor) -> Tensor:
        return t.permute(0, 1, 4, 2, 3)

    model, other, x = cubic(), cubic(), volumes(1, (16, 24, 32)).double()
    for module in other.modules():
        if isinstance(module, nn.Conv3d):
            module.weight.data = turned(module.weight.data).contiguous()
    options = QUICK.get(method, {}) | ({"jitter": 0} if method == "meaningful-perturbation" else {})
    plain = classlens.explain(model, x, 3, method, **options).maps
    moved = classlens.explain(other, turned(x).contiguous(), 3, method, **options).maps
    assert torch.allclose(moved, turned(plain), rtol=1e-6, atol=1e-8 * float(plain.abs().max()))


# -------------------------------------------------------------------------------------------------- three axes by hand


def test_the_factorisation_needs_positions_not_their_layout() -> None:
    torch.manual_seed(0)
    x, c = torch.randn(2, 5, 3, 4, 6).double(), torch.randn(3, 2, 5, 3, 4, 6).double()
    gradient = torch.randn(3, 2, 5, 3, 4, 6).double()
    of_volume = terms.residual(x, gradient, c, terms.BALANCED, terms.Options()).q
    flat = terms.residual(x.flatten(2, 3), gradient.flatten(3, 4), c.flatten(3, 4), terms.BALANCED, terms.Options()).q
    assert of_volume.shape == (3, 2, 1, 3, 4, 6)
    assert torch.allclose(of_volume.flatten(3, 4), flat)
    carrier = torch.randn(3, 2, 5, 3, 4, 6).double()
    added = terms.balanced_residual(of_volume, carrier, 0.3)
    assert torch.allclose(added.flatten(3, 4), terms.balanced_residual(flat, carrier.flatten(3, 4), 0.3))


def test_smoothing_along_three_axes_place_by_place() -> None:
    torch.manual_seed(0)
    active = (torch.rand(1, 1, 3, 4, 5) < 0.7).double()
    t = torch.randn(1, 1, 1, 3, 4, 5).double() * active
    sizes, weight = t.shape[3:], {-1: 0.25, 0: 0.5, 1: 0.25}
    expected = torch.zeros_like(t[0, 0, 0])
    for place in np.ndindex(*sizes):  # each place gives its relevance to its active neighbours
        near = {}
        for step in itertools.product((-1, 0, 1), repeat=3):
            to = tuple(p + s for p, s in zip(place, step, strict=True))
            if all(0 <= p < n for p, n in zip(to, sizes, strict=True)) and active[(0, 0, *to)]:
                near[to] = weight[step[0]] * weight[step[1]] * weight[step[2]]
        for to, share in near.items():
            expected[to] += t[(0, 0, 0, *place)] * share / sum(near.values())
    assert torch.allclose(terms.smoothed(t, active)[0, 0, 0], expected)


def test_coarse_evidence_is_trilinear() -> None:
    torch.manual_seed(0)
    places, size = torch.randn(2, 1, 2, 3, 4).double(), (5, 6, 11)
    large = torch.einsum("kbdhw,Dd,Hh,Ww->kbDHW", places, *(between(*p) for p in zip((2, 3, 4), size, strict=True)))
    assert torch.allclose(enlarged(places, size), large)
    large = large - large.mean((2, 3, 4), keepdim=True)
    expected = large / large.abs().sum((2, 3, 4), keepdim=True)
    assert torch.allclose(terms.coarse([places], size)[:, :, 0], expected)


def test_filters_run_along_their_own_axis() -> None:
    x = torch.zeros(1, 1, 5, 5, 5).double()
    x[0, 0, 2, 2, 2] = 1
    kernels = [torch.tensor(k).double() for k in ([0.0, 1.0, 2.0], [3.0, 1.0, 0.0], [0.0, 0.0, 5.0])]
    found = filtered_along(x, kernels, "replicate")[0, 0]
    # A filter that looks ahead moves a point back.
    assert {place: float(found[place]) for place in map(tuple, found.nonzero().tolist())} == {
        (2, 2, 1): 5.0, (1, 2, 1): 10.0, (2, 3, 1): 15.0, (1, 3, 1): 30.0,
    }  # fmt: skip


def test_a_blurred_volume_is_blurred_along_each_axis() -> None:
    x = torch.randn(1, 1, 6, 8, 7).double()
    by_plane = gaussian_blur(x[:, 0], 1.0)  # (1,D,H,W): within the slices
    along_depth = gaussian_blur(by_plane.permute(0, 2, 3, 1).reshape(1, 8 * 7, 6, 1), 1.0)
    assert torch.allclose(gaussian_blur(x, 1.0)[0, 0], along_depth.reshape(8, 7, 6).permute(2, 0, 1))


def test_the_masks_of_rise_are_smooth_blocks_in_three_axes() -> None:
    masks = torch.stack(list(rise_masks((10, 21, 14), 300, 5, 0.4, torch.Generator().manual_seed(0))))
    assert masks.shape == (300, 10, 21, 14)
    assert 0 <= masks.min() < 0.1 < 0.9 < masks.max() <= 1
    assert abs(float(masks.mean()) - 0.4) < 0.02
    assert float(masks.diff(dim=1).abs().max()) <= 1 / 2 + 1e-6  # a cell is 2 slices thick
    assert float(masks.diff(dim=2).abs().max()) <= 1 / 5 + 1e-6  # and 5 rows


def test_rise_of_a_volume_is_the_mean_of_its_masks_weighted_by_the_probability() -> None:
    model, x = build("volume").double(), volumes(1, (4, 16, 16)).double()
    found = classlens.explain(model, x, 2, "rise", n_masks=5, cells=3, keep=0.4, seed=7).maps[0, 0]
    expected = torch.zeros_like(found)
    for mask in rise_masks((4, 16, 16), 5, 3, 0.4, torch.Generator().manual_seed(7)):
        with torch.no_grad():
            expected += model(x * mask.double()).softmax(1)[0, 2] * mask.double() / (5 * 0.4)
    assert torch.allclose(found, expected)


def test_total_variation_of_a_volume() -> None:
    mask = torch.randn(1, 1, 3, 4, 2).double()
    total = 0.0
    for place in np.ndindex(3, 4, 2):
        for axis in range(3):
            before = list(place)
            before[axis] -= 1
            if before[axis] >= 0:
                total += abs(float(mask[(0, 0, *place)] - mask[(0, 0, *before)])) ** 3
    assert float(total_variation(mask)) == pytest.approx(total)


def test_a_single_slice_has_the_sides_of_its_image() -> None:
    assert shortest_side(torch.zeros(1, 1, 1, 30, 20)) == 20
    assert shortest_side(torch.zeros(1, 1, 8, 30, 20)) == 8
    assert shortest_side(torch.zeros(1, 1, 1, 1, 1)) == 1


def test_coarse_evidence_counts_where_there_is_relevance_nearby() -> None:
    torch.manual_seed(0)
    relevance, coarse = torch.randn(1, 1, 2, 20, 24, 22).double(), torch.randn(1, 1, 1, 20, 24, 22).double()
    fine, reach = relevance[0, 0].sum(0), 1  # a twentieth of 20
    near = torch.zeros_like(fine)
    for place in np.ndindex(20, 24, 22):
        near[place] = fine[tuple(slice(max(p - reach, 0), p + reach + 1) for p in place)].abs().mean()
    s = coarse[0, 0, 0] - (near * coarse[0, 0, 0]).sum() / near.sum()
    added = fine.abs().sum() * near * s / (near * s).abs().sum()
    assert torch.allclose(
        terms.with_coarse(relevance, coarse, terms.nearby(relevance))[0, 0], relevance[0, 0] + added / 2
    )


class Clip(nn.Module):
    """A transformer on patches of images, or of clips whose patches are one frame deep."""

    def __init__(self, axes: int) -> None:
        super().__init__()
        patch = (1, 8, 8)[3 - axes :]
        self.embed = getattr(nn, f"Conv{axes}d")(3, 8, patch, patch)
        self.norms, self.qkv, self.out = (
            nn.ModuleList(nn.LayerNorm(8) for _ in range(2)),
            nn.Linear(8, 24),
            nn.Linear(8, 8),
        )
        self.up, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).mT
        for _ in range(2):
            q, k, v = self.qkv(self.norms[0](x)).chunk(3, -1)
            x = x + self.out(nn.functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0])
            x = x + self.up(torch.relu(self.norms[1](x)))
        return self.head(x[:, 0])


@pytest.mark.parametrize("name", ["agf", *(name for name, method in METHODS.items() if method.attention)])
def test_tokens_of_a_clip(name: str) -> None:
    """One frame gives the map of the image; two frames give a map with two."""
    torch.manual_seed(0)
    flat, deep = Clip(2).double().eval(), Clip(3).double().eval()
    deep.load_state_dict({key: w if key != "embed.weight" else w[:, :, None] for key, w in flat.state_dict().items()})
    x = torch.randn(2, 3, 32, 24).double()
    expected = classlens.explain(flat, x, [[0, 1]] * 2, name).maps
    found = classlens.explain(deep, x[:, :, None], [[0, 1]] * 2, name).maps
    assert expected.abs().amax((2, 3)).gt(0).all()
    assert torch.allclose(found[:, :, 0], expected, rtol=1e-8, atol=1e-10 * float(expected.abs().max()))
    assert classlens.explain(deep, torch.stack([x, x], 2), 0, name).maps.shape == (2, 1, 2, 32, 24)
