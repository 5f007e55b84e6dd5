"""The captum-style classes, with captum's own classes, tools and metrics."""

from __future__ import annotations

import importlib
import json
import pickle
import subprocess
import sys
from typing import Any

import captum.attr
import numpy as np
import pytest
import torch
from captum.attr import NoiseTunnel
from captum.attr import visualization as captum_pictures
from captum.metrics import infidelity, sensitivity_max
from torch import Tensor, nn

import classlens
from classlens.errors import MethodError, MissingPackage, ModelError, TargetError
from classlens.interop import captum as adapters
from classlens.interop.captum import AGF, AGFRelease, class_name, image_attr
from classlens.methods import METHODS, Case, Result, registry
from networks import build, pictures
from quick import QUICK, suited

SAME_AS_CAPTUM: dict[str, tuple[type, dict[str, Any], dict[str, Any]]] = {
    "gradient-x-input": (captum.attr.InputXGradient, {}, {}),
    "integrated-gradients": (captum.attr.IntegratedGradients, {"steps": 20}, {"n_steps": 20}),
    "deeplift-shap": (captum.attr.DeepLift, {"baselines": "zero"}, {}),
}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_class_whose_channels_add_up_to_the_map(method: str) -> None:
    model, x = build(suited("residual", method)).double(), pictures(2).double()
    attributor = getattr(adapters, class_name(method))
    found = attributor(model, **QUICK.get(method, {})).attribute(x, target=[1, 4])
    assert found.shape == x.shape
    maps = classlens.explain(model, x, [1, 4], method, **QUICK.get(method, {})).maps[:, 0]
    torch.testing.assert_close(found.sum(1), maps, rtol=1e-9, atol=1e-12)
    assert METHODS[method].summary[1:] in attributor.__doc__


def test_names_are_those_people_know() -> None:
    known = {
        "agf": "AGF", "agf-release": "AGFRelease", "gradcam": "GradCAM", "finer-cam": "FinerCAM", "clrp": "CLRP",
        "lrp-epsilon-plus-flat": "LRPEpsilonPlusFlat", "integrated-gradients": "IntegratedGradients",
        "gradient-x-input": "GradientXInput", "deeplift-shap": "DeepLiftSHAP", "rise": "RISE", "some-new": "SomeNew",
    }  # fmt: skip
    assert {method: class_name(method) for method in known} == known
    listed = dir(adapters)
    assert len({class_name(method) for method in METHODS}) == len(METHODS)
    assert all(class_name(method) in listed for method in METHODS)
    with pytest.raises(AttributeError, match="no class 'Saliency'; it has AGF, "):
        _ = adapters.Saliency


def test_a_method_of_the_users_has_a_class_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "my-own", METHODS["centre"])

    @registry.method(
        "my-own", family="", summary="ones", class_specific=False, signed=False, conserves=False, paper="none"
    )
    def ones(case: Case) -> Result:
        return Result(torch.ones(len(case.images), 1, *case.images.shape[2:]))

    found = adapters.MyOwn(build("plain")).attribute(pictures(1), target=0)
    torch.testing.assert_close(found, torch.full((1, 3, 32, 32), 1 / 3))


@pytest.mark.parametrize("method", SAME_AS_CAPTUM)
@pytest.mark.filterwarnings("ignore:Setting forward, backward hooks:UserWarning")
def test_equals_captums_own_class_channel_by_channel(method: str) -> None:
    theirs, our_options, their_options = SAME_AS_CAPTUM[method]
    torch.manual_seed(0)
    model = nn.Sequential(  # captum's DeepLift needs modules, each used once
        nn.Conv2d(3, 6, 3, stride=2), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5)
    ).double().eval()  # fmt: skip
    x = pictures(2, (16, 16)).double()
    model(x)
    ours = getattr(adapters, class_name(method))(model, **our_options).attribute(x, target=torch.tensor([3, 1]))
    expected = theirs(model).attribute(x.clone().requires_grad_(), target=torch.tensor([3, 1]), **their_options)
    torch.testing.assert_close(ours, expected.detach(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("steps", [1, 7, 50])
def test_integrated_gradients_are_captums(steps: int) -> None:
    """In float32: in float64 captum rounds the weights of the rule to float32; ours are exact."""
    model, x = build("plain"), pictures(3)
    ours = adapters.IntegratedGradients(model, steps=steps).attribute(x, target=torch.tensor([3, 1, 0]))
    theirs = captum.attr.IntegratedGradients(model)
    expected = theirs.attribute(x, target=torch.tensor([3, 1, 0]), n_steps=steps, internal_batch_size=8)
    expected = expected.detach().to(ours)  # captum 0.7 sums in float64
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6 * float(ours.abs().max()))


def test_without_captum_an_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "captum.attr", None)
    with pytest.raises(MissingPackage, match=r"need captum: pip install 'classlens\[captum\]'"):
        importlib.reload(adapters)
    assert not any(name.startswith("captum") for name in _imported("import classlens; classlens.METHODS"))


def _imported(code: str) -> list[str]:
    """The modules that are there after some lines in a process of their own."""
    ask = f"{code}; import sys, json; print(json.dumps(sorted(sys.modules)))"
    found: list[str] = json.loads(subprocess.run([sys.executable, "-c", ask], capture_output=True, check=True).stdout)
    return found


class Dense(nn.Module):
    """A class for each place: output (B,7,2,2)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = build("plain").features
        self.head = nn.Conv2d(12, 7, 1)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.adaptive_avg_pool2d(self.head(self.body(x)), 2)


class OneOutput(nn.Module):
    """One number for each image: output (B,)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = build("plain")

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)[:, 2]


def test_every_kind_of_target_means_what_it_means_in_captum() -> None:
    model, x = build("plain").double(), pictures(2).double()
    ours, theirs = adapters.GradientXInput(model), captum.attr.InputXGradient(model)
    for target in (3, torch.tensor(3), torch.tensor([3]), torch.tensor([3, 1]), [3, 1], (3,), [(3,), (1,)]):
        expected = theirs.attribute(x.clone().requires_grad_(), target=target).detach()
        torch.testing.assert_close(ours.attribute(x, target=target), expected)
    one = x[:1]
    torch.testing.assert_close(ours.attribute(one, target=[3]), ours.attribute(one, target=3))


@pytest.mark.filterwarnings("ignore:Setting forward, backward hooks:UserWarning")
def test_outputs_of_other_dimensions() -> None:
    x = pictures(2).double()
    for model, target in ((Dense(), (3, 1, 0)), (Dense(), [(3, 1, 0), (6, 0, 1)]), (OneOutput(), None)):
        model = model.double().eval()
        expected = captum.attr.InputXGradient(model).attribute(x.clone().requires_grad_(), target=target).detach()
        torch.testing.assert_close(adapters.GradientXInput(model).attribute(x, target=target), expected)


def test_a_tuple_of_one_tensor_gives_a_tuple() -> None:
    model, x = build("plain"), pictures(1)
    (found,) = AGF(model).attribute((x,), target=2)
    assert torch.equal(found, AGF(model).attribute(x, target=2))


def test_options_come_with_the_class_or_the_call() -> None:
    model, x = build("residual"), pictures(1)
    a = AGFRelease(model, without="A").attribute(x, target=1)
    assert torch.equal(a, AGFRelease(model).attribute(x, target=1, without="A"))
    assert not torch.equal(a, AGFRelease(model).attribute(x, target=1))
    with pytest.raises(MethodError, match="agf-release has no option 'n_steps'"):
        AGFRelease(model, n_steps=3)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"target": None}, TargetError, "the model has 7 outputs: choose one with target="),
        ({"target": (1, 2)}, TargetError, r"target \(1, 2\) is outside the output, which has shape \(7,\)"),
        ({"target": [(9,), (1,)]}, TargetError, r"target \(9,\) is outside the output"),
        ({"target": torch.tensor([[1, 2], [3, 4]])}, TargetError, "one class for each image"),
        ({"target": 9}, TargetError, "class 9 is out of range"),
        ({"target": 1, "additional_forward_args": (1,)}, ModelError, "only models with one input"),
    ],
)
def test_what_cannot_be_explained_is_one_line(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        AGF(build("plain")).attribute(pictures(2), **arguments)
    assert "\n" not in str(caught.value)


def test_loaded_models_and_pickles() -> None:
    loaded = classlens.LoadedModel("tiny", build("plain"), classlens.models.Preprocess(), None)
    x = pictures(1)
    again = pickle.loads(pickle.dumps(AGF(loaded)))
    assert type(again) is AGF
    assert torch.equal(again.attribute(x, target=1), AGF(loaded.model).attribute(x, target=1))


# ------------------------------------------------------------------------------------------------------ captum's tools


def test_noise_tunnel_averages_our_maps() -> None:
    model, x = build("residual"), pictures(2)
    torch.manual_seed(3)
    found = NoiseTunnel(AGF(model)).attribute(x, nt_samples=3, stdevs=0.1, target=torch.tensor([1, 4]))
    torch.manual_seed(3)
    noisy = x.repeat_interleave(3, dim=0) + torch.normal(0, torch.full((6, 3, 32, 32), 0.1))
    expected = AGF(model).attribute(noisy, target=[1, 1, 1, 4, 4, 4]).reshape(2, 3, 3, 32, 32).mean(1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max()))


def test_metrics_take_our_attributions() -> None:
    model, x = build("residual"), pictures(2)

    def perturb(inputs: Tensor) -> tuple[Tensor, Tensor]:
        noise = 0.1 * torch.randn_like(inputs)
        return noise, inputs - noise

    torch.manual_seed(0)
    ixg = adapters.GradientXInput(model).attribute(x, target=3)
    error = infidelity(model, perturb, x, ixg, target=3, n_perturb_samples=4)
    assert error.shape == (2,)
    assert torch.isfinite(error).all()
    moved = sensitivity_max(AGF(model).attribute, x, perturb_radius=0.05, n_perturb_samples=3, target=3)
    assert ((moved > 0) & (moved < 10)).all()
    still = sensitivity_max(adapters.Centre(model).attribute, x, n_perturb_samples=2, target=3)
    assert torch.equal(still, torch.zeros(2))


@pytest.mark.parametrize("kind", ["heat_map", "blended_heat_map", "masked_image", "alpha_scaling"])
def test_captums_pictures_take_our_maps(kind: str) -> None:
    e = classlens.explain(build("plain"), pictures(1), [1, 0])
    attr, picture = image_attr(e, k=1)
    assert attr.shape == (32, 32, 1)
    np.testing.assert_allclose(attr[..., 0], e.maps[0, 1] / e.maps[0, 1].abs().max(), rtol=1e-6)
    sign = "all" if "heat" in kind else "positive"
    figure, axes = captum_pictures.visualize_image_attr(attr, picture, method=kind, sign=sign, use_pyplot=False)
    assert figure.axes == [axes]
    assert axes.images
