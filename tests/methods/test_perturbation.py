import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import classlens
from classlens.errors import MethodError
from classlens.methods import perturbation
from classlens.methods.inputs import gaussian_blur
from classlens.methods.perturbation import Adam, _unmoved, _wider, rise_masks, total_variation
from classlens.methods.places import shortest_side
from goldens import distance
from networks import build, pictures

QUICK = {"rise": {"n_masks": 21}, "meaningful-perturbation": {"steps": 6}}


class Corner(nn.Module):
    """Class 0 is the roughness of the upper left quarter, class 1 that of the lower right, class 2 nothing."""

    def forward(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        rough = [t.diff(dim=-1).square().mean((1, 2, 3)) for t in (x[..., :half, :half], x[..., half:, half:])]
        return 8 * torch.stack([*rough, torch.zeros_like(rough[0])], 1)


def noise_picture(size: int = 32) -> Tensor:
    return torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(0))


def quarters(maps: Tensor) -> Tensor:
    """(2,2) mean of each quarter of a map (H,W)."""
    return F.adaptive_avg_pool2d(maps[None, None], 2)[0, 0]


# --------------------------------------------------------------------------------------------------------------- RISE


def test_rise_is_the_weighted_mean_of_its_masks() -> None:
    model, x, targets = build("plain").double(), pictures(2).double(), [[1, 4], [0, 2]]
    found = classlens.explain(model, x, targets, "rise", n_masks=19, cells=5, keep=0.4, seed=3).maps
    masks = [m.double() for m in rise_masks((32, 32), 19, 5, 0.4, torch.Generator().manual_seed(3))]
    for b in range(2):
        for k in range(2):
            expected = torch.zeros(32, 32).double()
            for mask in masks:
                probability = torch.softmax(model(x[b : b + 1] * mask), 1)[0, targets[b][k]].detach()
                expected += probability * mask / (19 * 0.4)
            assert torch.allclose(found[b, k], expected, rtol=1e-9)


def test_rise_masks_are_smooth_windows_that_keep_their_share() -> None:
    masks = torch.stack(list(rise_masks((30, 44), 400, 7, 0.3, torch.Generator().manual_seed(0))))
    assert masks.shape == (400, 30, 44)
    assert masks.min() >= 0
    assert masks.max() <= 1 + 1e-6
    assert abs(masks.mean() - 0.3) < 0.01
    cell = math.ceil(30 / 7)
    assert masks.diff(dim=1).abs().max() <= 1 / cell + 1e-6  # linear between cells
    inner = masks.std(0)[4:-4, 6:-6]
    assert inner.max() < 1.3 * inner.min()  # the random offset hides the grid


def test_rise_finds_the_place_of_each_class() -> None:
    maps = classlens.explain(Corner().eval(), noise_picture(), [[0, 1]], "rise", n_masks=600).maps[0]
    first, second = quarters(maps[0]), quarters(maps[1])
    assert first[0, 0] > 1.02 * max(first[0, 1], first[1, 0], first[1, 1])
    assert second[1, 1] > 1.02 * max(second[0, 0], second[0, 1], second[1, 0])


# --------------------------------------------------------------------------------------------- meaningful perturbation


def test_meaningful_perturbation_removes_the_class_by_a_small_place() -> None:
    maps = classlens.explain(Corner().eval(), noise_picture(96), [[0, 1]], "meaningful-perturbation", steps=60).maps[0]
    assert maps.min() >= 0
    assert maps.max() <= 1 + 1e-6
    first, second = quarters(maps[0]), quarters(maps[1])
    assert first[0, 0] > 3 * max(first[0, 1], first[1, 0], first[1, 1])
    assert second[1, 1] > 3 * max(second[0, 0], second[0, 1], second[1, 0])


@pytest.mark.parametrize(("jitter", "reach"), [(0, 0), (14, 2)])
def test_meaningful_perturbation_against_torchs_optimiser(jitter: int, reach: int) -> None:
    """The whole optimisation written out with torch.optim, without jitter and with shifts of up to two pixels."""
    model, x = build("plain").double(), pictures(1).double()
    found = classlens.explain(model, x, 0, "meaningful-perturbation", steps=8, cell=4, jitter=jitter, seed=6).maps[0, 0]
    shifts = torch.randint(reach + 1, (8, 2), generator=torch.Generator().manual_seed(6)).tolist()
    assert max(map(max, shifts)) == reach

    scale = 32 / 224
    sharp, blurred = (F.pad(t, (0, reach) * 2, mode="replicate") for t in (x, gaussian_blur(x, 10 * scale)))
    mask = torch.ones(1, 1, 8, 8).double().requires_grad_()
    optimiser = torch.optim.Adam([mask], lr=0.1)

    def large() -> Tensor:
        return gaussian_blur(F.interpolate(mask, size=(32, 32), mode="bilinear"), 5 * scale)

    for down, across in shifts:
        optimiser.zero_grad()
        seen, smooth = (t[..., down : down + 32, across : across + 32] for t in (sharp, blurred))
        probability = torch.softmax(model(seen * large() + smooth * (1 - large())), 1)[0, 0]
        variation = sum((a - b).abs() ** 3 for a, b in neighbours(mask[0, 0]))
        (1e-4 * (1 - mask).abs().sum() + 1e-2 * variation + probability).backward()
        optimiser.step()
        with torch.no_grad():
            mask.clamp_(0, 1)
    assert found.max() > 0.05
    assert distance(found, (1 - large())[0, 0].detach()) < 1e-9


def neighbours(mask: Tensor) -> list[tuple[Tensor, Tensor]]:
    rows, columns = mask.shape
    right = [(mask[i, j], mask[i, j + 1]) for i in range(rows) for j in range(columns - 1)]
    return right + [(mask[i, j], mask[i + 1, j]) for i in range(rows - 1) for j in range(columns)]


def test_total_variation_by_hand() -> None:
    mask = torch.tensor([[[[0.0, 1.0], [0.5, 1.0]]]])
    assert torch.isclose(total_variation(mask), torch.tensor(1.0 + 0.125 + 0.125 + 0.0))


def test_adam_moves_by_its_rate_at_first() -> None:
    assert torch.allclose(Adam(0.1).step(torch.tensor([3.0, -0.02])), torch.tensor([-0.1, 0.1]), rtol=1e-5)


# ------------------------------------------------------------------------------------------------------- promises


@pytest.mark.parametrize("method", QUICK)
def test_batch_and_classes_are_independent_and_seeded(method: str) -> None:
    model, x = build("residual"), pictures(3)
    chosen = [[1, 4], [0, 2], [5, 3]]
    state = torch.get_rng_state()
    whole = classlens.explain(model, x, chosen, method, **QUICK[method]).maps
    assert torch.equal(torch.get_rng_state(), state)
    for b, row in enumerate(chosen):
        for k, t in enumerate(row):
            single = classlens.explain(model, x[b : b + 1], t, method, **QUICK[method]).maps[0, 0]
            assert distance(whole[b, k], single) < 1e-5  # products of other shapes may be summed in another order
    large = noise_picture(128)  # jitter is a pixel or more only here
    one, two = (classlens.explain(model, large, 1, method, seed=s, **QUICK[method]).maps for s in (0, 1))
    assert not torch.equal(one, two)


def test_shifts_are_given_in_pixels_of_224(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a picture of 64 pixels, 14 of 224 are 4: each shift is 0 to 4 pixels down and across."""
    seen: list[list[list[int]]] = []

    def kept(case: Any, image: Tensor, target: Tensor, shifts: list[list[int]], *rest: Any) -> Tensor:
        seen.append(shifts)
        return torch.ones(1, 1, *image.shape[2:])

    monkeypatch.setattr(perturbation, "best_mask", kept)
    classlens.explain(build("plain"), pictures(1, (64, 80)), 1, "meaningful-perturbation", steps=60, jitter=14)
    down, across = zip(*seen[0], strict=True)
    assert set(down) == set(across) == set(range(5))


@pytest.mark.parametrize("option", ["rise(n_masks=0)", "rise(cells=0)", "meaningful-perturbation(steps=0)"])
def test_impossible_options_are_refused(option: str) -> None:
    with pytest.raises(MethodError, match="=0 is not possible; give an integer from 1"):
        classlens.explain(build("plain"), pictures(), 1, option)


def test_masks_that_keep_nothing_are_refused() -> None:
    with pytest.raises(MethodError, match="keep=0 is not possible; give a number above 0"):
        classlens.explain(build("plain"), pictures(), 1, "rise(keep=0)")


def test_a_shift_cannot_be_negative() -> None:
    with pytest.raises(MethodError, match="jitter=-1 is not possible; give an integer from 0"):
        classlens.explain(build("plain"), pictures(1), 1, "meaningful-perturbation", steps=1, jitter=-1)


def test_a_wider_picture_repeats_its_border() -> None:
    wide = _wider(torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]]), 2)
    assert wide[0, 0].tolist() == [[1.0, 2.0, 2.0, 2.0]] + [[3.0, 4.0, 4.0, 4.0]] * 3


@pytest.mark.parametrize(("size", "side"), [((2, 5), 2), ((1, 7, 6), 6), ((1, 1), 1)])
def test_a_side_of_one_does_not_count(size: tuple[int, ...], side: int) -> None:
    assert shortest_side(torch.zeros(1, 3, *size)) == side


@pytest.mark.parametrize(
    ("low", "high", "noted"),
    [
        (1.0, 1.005, True), (1.0, 1.02, False), (1.0, 1.01005, True), (-1.0, -0.5, False), (-1.01005, -1.0, True),
        (0.0, 0.0, True), (1e-6, 3e-6, False), (-0.3, 0.2, False), (0.0, 1e-9, False),
    ],
)  # fmt: skip
def test_a_change_below_a_hundredth_of_the_score_says_nothing(low: float, high: float, noted: bool) -> None:
    """Relative to the larger magnitude; one such target among others is enough."""
    others = torch.tensor([0.0, 0.1]).double(), torch.tensor([1.0, 0.9]).double()
    bounds = (torch.cat([t, torch.tensor([one]).double()]) for t, one in zip(others, (low, high), strict=True))
    assert bool(_unmoved(*bounds)) is noted


def test_a_picture_smaller_than_a_cell_has_one() -> None:
    method = "meaningful-perturbation(cell=32, steps=3)"
    (found,) = classlens.explain(build("plain"), pictures(1, (16, 24)), 1, method).maps[0]
    assert 0.01 < found.min() > found.max() - 1e-6


@pytest.mark.parametrize("count", [8, 16])  # masks at once, and in two goes
@pytest.mark.parametrize(("slope", "noted"), [(10.0, False), (1e-6, True)])
def test_rise_says_when_the_masks_do_not_matter(slope: float, noted: bool, count: int) -> None:
    """The logit is slope * mean of the image: with a slope of almost 0, the mean of the masks is no answer about it."""

    class Nearly(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return slope * x.mean((1, 2, 3))[:, None] * torch.tensor([1.0, 0.0])

    e = classlens.explain(Nearly().eval(), torch.rand(1, 3, 16, 16), 0, "rise", n_masks=count)
    assert any("shows the masks, not the target" in note for note in e.report.notes) == noted
