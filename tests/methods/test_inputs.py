"""Baselines, blurs, noise, and the run of a network on other inputs."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import classlens
from classlens.core.capture import Reading, record
from classlens.core.capture.reading import Pick
from classlens.errors import CaptureError, MethodError
from classlens.methods import Case, resolve
from classlens.methods.inputs import (
    above_zero,
    asked,
    baseline,
    baselines,
    gaussian_blur,
    gradients_at,
    logits_at,
    normal_noise,
    precise,
    refuse_one_pass,
    whole,
)
from networks import build, pictures


class WritesIntoItsInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2).mean((2, 3))


def case(model: nn.Module, images: Tensor) -> Case:
    targets = torch.tensor([[0, 2]]).expand(len(images), 2)
    return Case(model, images, record(model, images), targets)


def test_a_network_that_writes_into_its_input_leaves_ours_alone() -> None:
    points = pictures()
    before = points.clone()
    asked_case = case(WritesIntoItsInput().eval(), pictures())
    assert torch.allclose(logits_at(asked_case, points), 2 * before.mean((2, 3)))
    assert torch.equal(points, before)
    gradients = gradients_at(asked_case, points)
    assert torch.equal(points, before)
    assert gradients.shape == (2, *points.shape)
    expected = torch.zeros(3)
    expected[2] = 2 / 1024
    assert torch.allclose(gradients[1], expected[:, None, None])


def test_asked_scores_are_the_targets_in_float64() -> None:
    asked_case = case(build("plain"), pictures())
    scores = asked(asked_case, asked_case.tape.logits)
    assert scores.dtype == torch.float64
    assert torch.equal(scores, asked_case.tape.logits[:, [0, 2]].double())


@pytest.mark.parametrize(
    ("given", "used"),
    [(torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float32,) * 2, (torch.float64,) * 2],
)
def test_sums_are_at_least_float32(given: torch.dtype, used: torch.dtype) -> None:
    assert precise(torch.zeros(1, dtype=given)) == used


def test_every_image_meets_the_same_noise() -> None:
    noise = normal_noise(pictures(3).double(), torch.Generator().manual_seed(4))
    assert noise.shape == (1, 3, 32, 32)
    assert noise.dtype == torch.float64
    assert torch.equal(noise[0].float(), torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(4)))


@pytest.mark.parametrize("sigma", [0, 0.0, -1.0])
def test_no_blur_is_the_picture_itself(sigma: float) -> None:
    assert torch.equal(gaussian_blur(pictures(), sigma), pictures())


def test_baselines_by_their_names() -> None:
    x = pictures(2, (24, 40)).requires_grad_()
    assert torch.equal(baseline(x, "zero"), torch.zeros_like(x))
    darkest = torch.stack([torch.stack([colour.min() for colour in image]) for image in x])
    assert torch.equal(baseline(x, "dark"), darkest[:, :, None, None].expand_as(x))
    assert torch.allclose(baseline(x, "blur"), gaussian_blur(x.detach(), 3.0))  # an eighth of the shorter side
    assert torch.allclose(baseline(x.mT, "blur"), gaussian_blur(x.detach().mT, 3.0))
    for which in ("zero", "dark", "blur", "noise", 0.5):
        assert not baseline(x, which).requires_grad


def test_the_noise_baseline_fills_each_colours_range() -> None:
    x = pictures(2, (40, 40))
    noise = baseline(x, "noise")
    low, high = x.amin((2, 3)), x.amax((2, 3))
    assert (noise.amin((2, 3)) >= low).all()
    assert (noise.amax((2, 3)) <= high).all()
    assert (noise.amax((2, 3)) - noise.amin((2, 3)) > 0.99 * (high - low)).all()
    relative = (noise - low[..., None, None]) / (high - low)[..., None, None]
    assert abs(relative.mean() - 0.5) < 0.02
    assert torch.allclose(relative[0], relative[1], atol=1e-5)  # the same for each image
    assert not torch.allclose(relative[0, 0], relative[0, 1], atol=0.1)  # but not for each colour
    assert torch.equal(noise, baseline(x, "noise", 0))
    assert not torch.equal(noise, baseline(x, "noise", 1))


def test_several_baselines_in_one_word() -> None:
    x = pictures()
    found = baselines(x, "zero + dark", 3)
    assert [torch.equal(a, baseline(x, b)) for a, b in zip(found, ("zero", "dark"), strict=True)] == [True, True]
    assert torch.equal(baselines(x, ["noise", 2.0], 3)[0], baseline(x, "noise", 3))
    noise, number = baselines(x, ["noise", 2.0])
    assert torch.equal(noise, baseline(x, "noise", 0))
    assert torch.equal(number, torch.full_like(x, 2.0))
    with pytest.raises(MethodError, match="no baseline was given"):
        baselines(x, [])


def test_a_baseline_is_a_number_a_colour_or_a_picture() -> None:
    x = pictures()
    colour = torch.tensor([0.1, 0.2, 0.3])[:, None, None]
    assert torch.equal(baseline(x, colour.double()), colour.expand_as(x))
    assert torch.equal(baseline(x, x.flip(0)), x.flip(0))


def test_numbers_that_make_no_sense_are_refused_by_name() -> None:
    whole(1, steps=1)
    whole(0, seed=0)
    above_zero(sigma=1, width=0.001)
    for least, number in ((1, 0), (1, 2.5), (1, "3"), (0, -1), (1, None)):
        with pytest.raises(MethodError, match=rf"steps={number!r} is not possible; give an integer from {least}"):
            whole(least, good=7, steps=number)
    for number in (0, -0.5, "1", float("nan")):
        with pytest.raises(MethodError, match=f"sigma={number!r} is not possible; give a number above 0"):
            above_zero(good=7, sigma=number)


def test_balances_of_gradient_methods_are_float64() -> None:
    e = classlens.explain(build("plain"), pictures(), 1, "integrated-gradients", steps=2)
    assert e.report.started.dtype == e.report.arrived.dtype == torch.float64


@pytest.mark.parametrize("chosen", [True, False])
def test_a_choice_that_only_this_image_makes_is_not_run_on_others(chosen: bool) -> None:
    """A candidate that a detector chose has no counterpart on another image."""
    model, x = nn.Sequential(nn.Flatten(), nn.Linear(48, 3)).eval(), pictures(1, (4, 4))
    case = Case(model, x, record(model, x), torch.tensor([[1]]), output=Reading((Pick(chosen=chosen),)))
    if chosen:
        for runs in (lambda: refuse_one_pass(case), lambda: logits_at(case, x), lambda: gradients_at(case, x)):
            with pytest.raises(MethodError, match="chooses its candidates from the image"):
                runs()
    else:
        refuse_one_pass(case)


def test_images_of_the_callers_inference_mode_have_gradients() -> None:
    asked_case = case(build("plain"), pictures())
    with torch.inference_mode():
        points = pictures()
        found = gradients_at(asked_case, points)
    assert torch.equal(found, gradients_at(asked_case, pictures()))


@pytest.mark.parametrize("method", ["smoothgrad(samples=1)", "meaningful-perturbation(steps=1)"])
def test_operations_without_a_gradient_are_named(method: str) -> None:
    """Also where the network runs on other images: autograd would be silently wrong there too."""
    found = case(build("plain"), pictures())
    found = replace(found, tape=replace(found.tape, opaque="of_a_library"))
    chosen, options = resolve(method)
    with pytest.raises(CaptureError, match="torch has no gradient of the operation of_a_library"):
        chosen.run(found, **options)
