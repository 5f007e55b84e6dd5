import itertools
import math

import pytest
import torch
from torch import nn

import classlens
from classlens.errors import MethodError
from networks import build, pictures


def maps(method: str, images: torch.Tensor) -> torch.Tensor:
    return classlens.explain(build("plain"), images, [[1, 2]] * len(images), method).maps


@pytest.mark.parametrize("method", ["random", "random(cells=5)", "centre", "sobel"])
def test_controls_do_not_know_the_class_and_say_so(method: str) -> None:
    found = maps(method, pictures(2, (24, 40)))
    assert found.shape == (2, 2, 24, 40)
    assert torch.equal(found[:, 0], found[:, 1])
    assert not classlens.METHODS[method.split("(")[0]].class_specific


def test_random_is_white_and_seeded() -> None:
    state = torch.get_rng_state()
    found = maps("random", pictures(2, (96, 96)))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(found[0], found[1])  # every image meets the same noise
    noise = found[0, 0]
    assert abs(noise.mean()) < 0.05
    assert abs(noise.std() - 1) < 0.05
    assert abs((noise[1:] * noise[:-1]).mean()) < 0.05
    assert not torch.equal(maps("random(seed=1)", pictures(2, (96, 96))), found)


def test_smooth_random_is_a_coarse_grid() -> None:
    found = maps("random(cells=4)", pictures(1, (60, 60)))[0, 0]
    grid = torch.randn(1, 1, 4, 4, generator=torch.Generator().manual_seed(0))[0, 0]
    assert torch.allclose(found[7::15, 7::15], grid, atol=1e-5)  # the cells' centres
    assert (found[1:] * found[:-1]).mean() > 0.9 * found.square().mean()


def test_centre_by_its_formula() -> None:
    found = maps("centre(sigma=0.2)", pictures(1, (20, 40)))[0, 0]
    v, u = (3 + 0.5) / 20 - 0.5, (31 + 0.5) / 40 - 0.5
    assert math.isclose(float(found[3, 31]), math.exp(-(u * u + v * v) / (2 * 0.2**2)), rel_tol=1e-5)
    assert torch.allclose(found, found.flip(0, 1))
    assert int(found.argmax()) in {9 * 40 + 19, 9 * 40 + 20, 10 * 40 + 19, 10 * 40 + 20}


def test_centre_has_a_quarter_of_the_picture_as_its_deviation_and_float64_where_asked() -> None:
    model, images = build("plain").double(), pictures(1, (20, 40)).double()
    found = classlens.explain(model, images, 1, "centre").maps[0, 0]
    v, u = (3 + 0.5) / 20 - 0.5, (31 + 0.5) / 40 - 0.5
    assert math.isclose(float(found[3, 31]), math.exp(-8 * (u * u + v * v)), rel_tol=1e-12)


@pytest.mark.parametrize("method", ["random", "random(cells=1)", "centre", "sobel"])
def test_each_class_has_a_map_of_its_own_to_write_into(method: str) -> None:
    found = maps(method, pictures(2, (24, 40)))
    found[0, 0] = -5.0
    assert (found[:, 1] != -5).all()
    assert (found[1] != -5).all()


def test_one_cell_is_the_same_everywhere() -> None:
    found = maps("random(cells=1)", pictures(1))
    assert torch.allclose(found, found[..., :1, :1])


def test_a_picture_without_edges_has_none_at_its_border() -> None:
    assert maps("sobel", torch.full((1, 3, 16, 18), 3.0)).abs().max() < 1e-5


def test_sobel_of_a_ramp_is_its_slope() -> None:
    y, x = torch.meshgrid(torch.arange(16.0), torch.arange(20.0), indexing="ij")
    ramp = torch.stack([0.3 * x + 0.4 * y, 0.1 * x, torch.full_like(x, 2.0)])[None]
    found = maps("sobel", ramp)[0, 0]
    assert torch.allclose(found[1:-1, 1:-1], torch.tensor((0.3**2 + 0.4**2 + 0.1**2) ** 0.5), rtol=1e-5)


def test_sobel_against_plain_loops() -> None:
    picture = pictures(1, (16, 18))
    found, p = maps("sobel", picture)[0, 0], picture[0]
    weights = {-1: 0.25, 0: 0.5, 1: 0.25}
    for i, j in [(4, 7), (9, 2), (14, 16)]:
        total = 0.0
        for c in range(3):
            across = sum(w * (p[c, i + d, j + 1] - p[c, i + d, j - 1]) / 2 for d, w in weights.items())
            down = sum(w * (p[c, i + 1, j + d] - p[c, i - 1, j + d]) / 2 for d, w in weights.items())
            total += across**2 + down**2
        assert torch.isclose(found[i, j], total**0.5, rtol=1e-5)


def test_sobel_of_a_volume_against_plain_loops() -> None:
    """A slope along one axis, smoothed along both others."""
    volume = torch.rand(1, 1, 5, 6, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = nn.Sequential(nn.Conv3d(1, 2, 1), nn.Flatten(), nn.Linear(420, 2)).double().eval()
    found, p = classlens.explain(model, volume, 1, "sobel").maps[0, 0], volume[0, 0]
    weights = {-1: 0.25, 0: 0.5, 1: 0.25}
    total = 0.0
    for axis in range(3):
        edge = 0.0
        for step, slope in ((1, 0.5), (-1, -0.5)):
            for (d, w), (e, v) in itertools.product(weights.items(), weights.items()):
                move = [d, e]
                move.insert(axis, step)
                edge += slope * w * v * float(p[2 + move[0], 3 + move[1], 4 + move[2]])
        total += edge**2
    assert float(found[2, 3, 4]) == pytest.approx(total**0.5)


def test_impossible_grid_is_refused() -> None:
    with pytest.raises(MethodError, match="cells=0 is not possible"):
        maps("random(cells=0)", pictures(1))
    with pytest.raises(MethodError, match="sigma=0 is not possible; give a number above 0"):
        maps("centre(sigma=0)", pictures(1))
