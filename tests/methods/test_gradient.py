import numpy as np
import pytest
import torch
from torch import Tensor, nn

import classlens
from classlens.core.capture import record
from classlens.errors import MethodError
from classlens.methods import METHODS, Case
from classlens.methods.gradient import complete, released_path, smoothed
from classlens.methods.inputs import baseline, baselines, gaussian_blur
from goldens import distance, load, targets
from networks import build, pictures

TARGETS = [[1, 4], [0, 2]]
QUICK = {
    "gradient": {}, "gradient-x-input": {}, "integrated-gradients": {"steps": 6}, "smoothgrad": {"samples": 3},
    "gradient-shap": {"samples": 5, "noise": 0.1},
}  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")


def gradient_of(model: nn.Module, x: Tensor, target: int) -> Tensor:
    """dy_t/dx of one image (C,H,W), the plain way."""
    leaf = x[None].clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(leaf)[0, target], leaf)
    return grad[0]


def maps(method: str, network: str = "plain", **options: object) -> Tensor:
    return classlens.explain(build(network).double(), pictures().double(), TARGETS, method, **options).maps


def by_hand(per_image: object, network: str = "plain") -> Tensor:
    """(B,K,H,W) of a function (model, x, target) -> (H,W)."""
    model, x = build(network).double(), pictures().double()
    return torch.stack([torch.stack([per_image(model, x[b], t) for t in row]) for b, row in enumerate(TARGETS)])


# --------------------------------------------------------------------------------------------- at the image itself


def test_gradient_is_the_largest_finite_difference_over_colours() -> None:
    model, x, found = build("gated").double(), pictures().double(), maps("gradient", "gated")
    step = 1e-6
    for row, column in [(3, 5), (17, 20), (31, 0)]:
        slopes = []
        for colour in range(3):
            shift = torch.zeros_like(x)
            shift[:, colour, row, column] = step
            slopes.append((model(x + shift) - model(x - shift)) / (2 * step))
        expected = torch.stack(slopes).abs().amax(0).gather(1, torch.tensor(TARGETS))
        assert torch.allclose(found[:, :, row, column], expected.detach(), rtol=1e-5, atol=1e-9)


def test_gradient_x_input_is_the_sum_over_colours() -> None:
    expected = by_hand(lambda model, x, t: (x * gradient_of(model, x, t)).sum(0))
    assert torch.allclose(maps("gradient-x-input"), expected, rtol=1e-9, atol=1e-12)


def test_goldens_of_the_released_code() -> None:
    model, x, arrays = load("vgg_id")
    case = Case(model, x, record(model, x), targets(arrays)[:, :1])
    image = case.tape.image
    assert distance(case.tape.gradients(case.one_hot(), [image])[image][0], arrays["baseline/vanilla"]) < 1e-6
    assert distance(released_path(case)[0], arrays["baseline/ig"]) < 1e-6
    noises = torch.from_numpy(arrays["baseline/smoothgrad4_noise"]).double().unbind(1)
    assert distance(smoothed(case, noises, 4)[0], arrays["baseline/smoothgrad4"]) < 1e-6


def test_release_variant_shows_magnitudes() -> None:
    model, x, arrays = load("vgg_id")
    found = classlens.explain(model, x, targets(arrays)[:, :1], "integrated-gradients(variant=release)").maps
    assert distance(found, np.abs(arrays["baseline/ig"]).sum(1, keepdims=True)) < 1e-6


# ------------------------------------------------------------------------------------------------- along a path


@pytest.mark.parametrize("network", ["modern", "awkward"])
def test_integrated_gradients_against_a_fine_midpoint_sum(network: str) -> None:
    found = maps("integrated-gradients", network, steps=60, baseline=0.3)

    def fine(model: nn.Module, x: Tensor, t: int) -> Tensor:
        leaf = (0.3 + (torch.arange(200).double()[:, None, None, None] + 0.5) / 200 * (x - 0.3)).requires_grad_()
        case = Case(model, leaf, record(model, leaf), torch.full((200, 1), t))
        (path,) = case.tape.gradients(case.one_hot(), [case.tape.image])[case.tape.image]
        return (path.mean(0) * (x - 0.3)).sum(0)

    assert distance(found, by_hand(fine, network)) < (1e-5 if network == "modern" else 1e-2)


def test_an_error_of_completeness_is_relative_to_the_larger_sum() -> None:
    """A map of 3 and -5 for a difference of 1, and for one of -20."""
    shares = torch.tensor([[1.0, -6.0], [2.0, 1.0]]).reshape(1, 1, 2, 1, 2).repeat(1, 2, 1, 1, 1)
    balance = complete(shares, torch.tensor([[1.0], [-20.0]]).double()).balance
    assert balance.arrived.flatten().tolist() == [-2.0, -2.0]
    assert balance.size.flatten().tolist() == [8.0, 20.0]
    assert torch.allclose(balance.error().flatten(), torch.tensor([3 / 8, 18 / 20]).double())


def test_integrated_gradients_report_their_completeness() -> None:
    model, x = build("modern").double(), pictures().double()
    e = classlens.explain(model, x, TARGETS, "integrated-gradients", baseline="blur")
    expected = (model(x) - model(baseline(x, "blur"))).gather(1, torch.tensor(TARGETS))
    assert torch.allclose(e.report.started, expected.detach(), atol=1e-12)
    assert torch.allclose(e.maps.sum((2, 3)), expected.detach(), rtol=1e-4)
    assert e.report.conservation.max() < 1e-4


def test_gradient_shap_of_a_linear_network_is_exact() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 7)).eval().double()
    x = pictures().double()
    found = classlens.explain(model, x, TARGETS, "gradient-shap", samples=8)
    way = x - torch.stack(baselines(x, "zero+dark+blur+noise")).mean(0)
    weight = model[1].weight.detach().reshape(7, 3, 32, 32)
    expected = (weight[torch.tensor(TARGETS)] * way[:, None]).sum(2)
    assert torch.allclose(found.maps, expected, atol=1e-12)
    assert found.report.conservation.max() < 1e-12


def test_gradient_shap_tends_to_the_mean_of_integrated_gradients() -> None:
    names = ["zero", "dark"]
    expected = torch.stack([maps("integrated-gradients", baseline=name) for name in names]).mean(0)
    few, many = (distance(maps("gradient-shap", baselines="zero+dark", samples=n), expected) for n in (4, 200))
    assert many < 0.03
    assert many < few / 3


def test_one_sample_of_gradient_shap_by_hand() -> None:
    model, x = build("plain").double(), pictures(1).double()
    found = classlens.explain(model, x, 1, "gradient-shap", samples=1, baselines="dark", seed=3).maps[0, 0]
    fraction = torch.rand(1, generator=torch.Generator().manual_seed(3)).double()
    start = baseline(x, "dark")[0]
    expected = ((x[0] - start) * gradient_of(model, start + fraction * (x[0] - start), 1)).sum(0)
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-12)


# ----------------------------------------------------------------------------------------------------- over noise


@pytest.mark.parametrize("variant", ["default", "release"])
def test_smoothgrad_against_a_plain_loop(variant: str) -> None:
    found = maps("smoothgrad", samples=4, noise=0.2, seed=5, variant=variant)

    def loop(model: nn.Module, x: Tensor, t: int) -> Tensor:
        source, spread = torch.Generator().manual_seed(5), x.max() - x.min()
        deviation = 0.2 * spread if variant == "default" else (4 / spread) ** 2
        noisy = [x + deviation * torch.randn(x.shape, generator=source).double() for _ in range(4)]
        return torch.stack([gradient_of(model, point, t) for point in noisy]).mean(0).abs().sum(0)

    assert torch.allclose(found, by_hand(loop), rtol=1e-6, atol=1e-12)


def test_smoothgrad_agrees_with_captums_noise_tunnel() -> None:
    from captum.attr import NoiseTunnel, Saliency

    model, x = build("plain").double(), pictures(1).double()
    deviation = 0.15 * float(x.max() - x.min())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = NoiseTunnel(Saliency(model)).attribute(
            x.clone().requires_grad_(), nt_samples=400, stdevs=deviation, target=1, abs=False
        )
    ours = classlens.explain(model, x, 1, "smoothgrad", samples=400).maps
    again = classlens.explain(model, x, 1, "smoothgrad", samples=400, seed=1).maps
    # Two random means: as near to captum's as to our own with another seed.
    assert distance(ours[0], theirs.detach().abs().sum(1)) < 1.3 * distance(ours, again)


# ------------------------------------------------------------------------------------------------------- promises


@pytest.mark.parametrize("method", QUICK)
def test_batch_and_classes_are_independent_and_seeded(method: str) -> None:
    model, x = build("residual"), pictures(3)
    chosen = [[1, 4], [0, 2], [5, 3]]
    state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    whole = classlens.explain(model, x, chosen, method, **QUICK[method]).maps
    assert torch.equal(torch.get_rng_state(), state[0])
    assert (np.random.get_state()[1] == state[1]).all()  # noqa: NPY002
    assert torch.equal(classlens.explain(model, x, chosen, method, **QUICK[method]).maps, whole)
    for b, row in enumerate(chosen):
        for k, t in enumerate(row):
            single = classlens.explain(model, x[b : b + 1], t, method, **QUICK[method]).maps[0, 0]
            assert distance(whole[b, k], single) < 1e-5
    if "seed" in classlens.METHODS[method].options and method != "integrated-gradients":
        other = classlens.explain(model, x, chosen, method, seed=7, **QUICK[method]).maps
        assert distance(other, whole) > 1e-2


@pytest.mark.parametrize("method", QUICK)
def test_networks_that_switch_gradients_off_are_explained_all_the_same(method: str) -> None:
    """`awkward` runs under no_grad; the same layers outside it give the same map."""
    model, x = build("awkward"), pictures()
    with torch.no_grad():
        found = classlens.explain(model, x, TARGETS, method, **QUICK[method]).maps
    assert found.abs().sum() > 0
    type(model).plain = type(model).forward.__wrapped__
    try:
        model.forward = model.plain
        assert distance(classlens.explain(model, x, TARGETS, method, **QUICK[method]).maps, found) < 1e-5
    finally:
        del type(model).plain


def test_baselines() -> None:
    x = pictures().double()
    assert torch.equal(baseline(x, "zero"), torch.zeros_like(x))
    assert baseline(x, "dark")[1, 2, 3, 4] == x[1, 2].min()
    assert torch.equal(baseline(x, torch.arange(3.0)[:, None, None])[0, :, 5, 6], torch.arange(3.0).double())
    noise = baseline(x, "noise")
    assert (noise >= x.amin((2, 3), keepdim=True)).all()
    assert (noise <= x.amax((2, 3), keepdim=True)).all()
    assert torch.equal(baseline(x[1:], "noise"), noise[1:])
    with pytest.raises(MethodError, match="choose one of zero, dark, blur, noise"):
        baseline(x, "black hole")
    with pytest.raises(MethodError, match=r"shape \(5,\) does not fit"):
        baseline(x, torch.zeros(5))


def test_gaussian_blur_against_its_definition() -> None:
    x, sigma = pictures(1, (9, 11)).double(), 0.8
    places = np.arange(-3, 4)
    kernel = np.exp(-(places**2) / (2 * sigma**2))
    kernel = np.outer(kernel, kernel) / kernel.sum() ** 2
    padded = np.pad(x[0, 1].numpy(), 3, mode="edge")
    expected = [[(padded[i : i + 7, j : j + 7] * kernel).sum() for j in range(11)] for i in range(9)]
    assert np.allclose(gaussian_blur(x, sigma)[0, 1].numpy(), expected)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("integrated-gradients(steps=0)", "steps=0 is not possible"),
        ("smoothgrad(samples=2.5)", "samples=2.5 is not possible"),
        ("smoothgrad(variant=best)", "choose default or release"),
        ("smoothgrad(seed=-1)", "seed=-1 is not possible; give an integer from 0"),
        ("gradient-shap(baselines=[])", "at least one"),
    ],
)
def test_impossible_options_are_refused(method: str, message: str) -> None:
    with pytest.raises(MethodError, match=message):
        classlens.explain(build("plain"), pictures(), 1, method)


class Counts(nn.Module):
    """A network that writes down how many images go through it at once."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.seen = build("plain"), []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        return self.body(x)


@pytest.mark.parametrize("method", ["integrated-gradients(steps=7)", "smoothgrad(samples=7)"])
@pytest.mark.parametrize(("images", "at_once"), [(1, 8), (3, 6), (9, 9)])
def test_at_most_eight_images_go_through_the_network_at_once(method: str, images: int, at_once: int) -> None:
    """So that memory does not grow with the steps: together, or image after image where there are more."""
    model = Counts().eval()
    x = pictures(images, (16, 16))
    classlens.explain(model, x, 1, method)  # the first call also checks the record
    model.seen.clear()
    classlens.explain(model, x, 1, method)
    assert max(model.seen) == min(at_once, 7 * images)


def test_a_tape_that_serves_others_too_is_left_whole() -> None:
    model, x = build("plain"), pictures()
    tape = record(model, x)
    case = Case(model, x, tape, torch.tensor([[1], [2]]), once=False)
    first, second = (METHODS["gradient"].run(case).maps for _ in range(2))
    assert torch.equal(first, second)


def test_gradient_shap_with_noise_sample_by_sample() -> None:
    """Seeded, so a result can be had again: fractions, their order, then noise for each sample."""
    model, x = build("plain").double(), pictures(1).double()
    ours = classlens.explain(model, x, 2, "gradient-shap", samples=5, noise=0.3, seed=4, baselines="zero+dark").maps
    source = torch.Generator().manual_seed(4)
    fractions = [(i + float(f)) / 5 for i, f in enumerate(torch.rand(5, generator=source))]
    order = torch.randperm(5, generator=source).tolist()
    starts, total = baselines(x, "zero+dark"), torch.zeros_like(x[0])
    for i in range(5):
        noisy = x[0] + 0.3 * torch.randn(3, 32, 32, generator=source)
        start = starts[i % 2][0]
        total += (noisy - start) * gradient_of(model, start + fractions[order[i]] * (noisy - start), 2) / 5
    assert distance(ours[0, 0], total.sum(0)) < 1e-6
