"""Callables as targets: those of pytorch-grad-cam, and any other number made of one image's logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_grad_cam import GradCAM
from pytorch_grad_cam.utils.model_targets import (
    ClassifierOutputSoftmaxTarget,
    ClassifierOutputTarget,
    RawScoresOutputTarget,
    SemanticSegmentationTarget,
)
from torch import Tensor

import classlens
from classlens.core.targets import Scalar
from classlens.errors import MethodError
from classlens.methods import METHODS
from classlens.methods.agf.terms import above_rivals, highlighted
from dense import dense
from networks import build, pictures
from quick import ANYWHERE, QUICK

SCALARS = [name for name in ANYWHERE if METHODS[name].scalars]
WATCHES_PROBABILITY = ("rise", "meaningful-perturbation")
HAS_ITS_OWN_SCORE = [name for name in SCALARS if name.startswith("agf")]  # of a class; of a callable, its own number


def run(targets: Any, method: str, images: Tensor, model: str = "residual") -> classlens.Explanation:
    return classlens.explain(build(model).double(), images.double(), targets, method, **QUICK.get(method, {}))


@pytest.mark.parametrize("method", ANYWHERE)
def test_a_target_that_picks_a_logit_is_the_class(method: str) -> None:
    x = pictures(2)
    by_index = run([1, 4], method, x)
    by_target = run([ClassifierOutputTarget(1), ClassifierOutputTarget(4)], method, x)
    assert torch.equal(by_target.maps, by_index.maps)
    assert by_target.targets.tolist() == [[1], [4]]
    assert torch.equal(by_target.report.conservation, by_index.report.conservation) or not METHODS[method].conserves


@pytest.mark.parametrize("method", [name for name in SCALARS if name not in (*WATCHES_PROBABILITY, *HAS_ITS_OWN_SCORE)])
@pytest.mark.parametrize("model", ["residual", "conv-head"])
def test_a_constant_beside_the_logit_changes_nothing(method: str, model: str) -> None:
    """Such a scalar is no class for `explain`: this is the general way, held to the classes' own."""
    x = pictures(2)
    general = run([lambda y: y[1] + 1, lambda y: y[4] + 1], method, x, model)
    assert general.targets.tolist() == [[-1], [-2]]
    torch.testing.assert_close(general.maps, run([1, 4], method, x, model).maps, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", WATCHES_PROBABILITY)
def test_methods_that_watch_the_probability_watch_the_scalar(method: str) -> None:
    x = pictures(2)
    general = run([ClassifierOutputSoftmaxTarget(1), ClassifierOutputSoftmaxTarget(4)], method, x)
    assert general.targets.tolist() == [[-1], [-2]]
    torch.testing.assert_close(general.maps, run([1, 4], method, x).maps, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(run(lambda y: y[1] + 1, method, x).maps, run(1, method, x).maps)


@pytest.mark.parametrize("method", HAS_ITS_OWN_SCORE)
def test_that_score_as_a_callable_is_the_class(method: str) -> None:
    score = above_rivals if method == "agf" else highlighted

    def of(index: int) -> Scalar:
        return lambda y: score(y[None], torch.tensor([[index]]))[0, 0]

    x = pictures(2)
    general = run([of(1), of(4)], method, x)
    assert general.targets.tolist() == [[-1], [-2]]
    torch.testing.assert_close(general.maps, run([1, 4], method, x).maps, rtol=1e-6, atol=1e-9)


def test_the_gradient_of_a_scalar_is_autograds() -> None:
    model, x = build("residual").double(), pictures(1).double().requires_grad_()
    (expected,) = torch.autograd.grad(model(x)[0].softmax(0)[3], x)
    e = classlens.explain(model, x, ClassifierOutputSoftmaxTarget(3), "gradient-x-input")
    torch.testing.assert_close(e.maps[0, 0], (expected * x).sum(1)[0].detach())


def test_gradcam_of_a_scalar_is_pytorch_grad_cams() -> None:
    model, x = build("plain"), pictures(2)
    targets = [ClassifierOutputSoftmaxTarget(3), RawSquares()]
    with GradCAM(model, [model.features]) as theirs:
        expected = torch.from_numpy(theirs(x, targets))  # scaled to [0,1] for each image
    maps = classlens.explain(model, x, targets, "gradcam", layer="features").maps[:, 0]
    assert maps.amax((1, 2)).min() > 0
    ours = maps - maps.amin((1, 2), keepdim=True)
    # They enlarge with another library: alike, not equal.
    assert torch.nn.functional.cosine_similarity(ours.flatten(1), expected.flatten(1)).min() > 0.999


class RawSquares(RawScoresOutputTarget):
    """Theirs gives all scores back; a target gives one number."""

    def __call__(self, model_output: Tensor) -> Tensor:
        return super().__call__(model_output).square().sum()


@pytest.mark.parametrize("method", ["lrp", "lrp-epsilon-gamma-box", "lrp-ab"])
def test_relevance_starts_with_logits_times_gradient(method: str) -> None:
    """LRP is linear in its start: a scalar's map is its gradient's mix of all classes' maps."""
    x = pictures(1)
    classes = run(list(range(7)), method, x)
    logits = classes.logits[0].clone().requires_grad_()
    (direction,) = torch.autograd.grad(logits.softmax(0)[2], logits)
    expected = torch.einsum("k,khw->hw", direction, classes.maps[0])
    e = run(ClassifierOutputSoftmaxTarget(2), method, x)
    torch.testing.assert_close(e.maps[0, 0], expected, rtol=1e-6, atol=1e-9)
    assert e.report.started[0, 0] == pytest.approx(float(direction @ classes.logits[0]), rel=1e-6)


@pytest.mark.parametrize(("method", "tolerance"), [("deeplift-shap", 1e-6), ("integrated-gradients", 0.05)])
def test_maps_that_are_complete_add_up_to_the_scalars_difference(method: str, tolerance: float) -> None:
    model, x = build("residual").double(), 3 * pictures(2).double()
    zero = torch.zeros_like(x)
    with torch.no_grad():
        difference = model(x).softmax(1)[:, 5] - model(zero).softmax(1)[:, 5]
    options: dict[str, Any] = {"baselines": "zero"} if method == "deeplift-shap" else {"steps": 200}
    e = classlens.explain(model, x, ClassifierOutputSoftmaxTarget(5), method, **options)
    torch.testing.assert_close(e.maps.sum((1, 2, 3)), difference, rtol=tolerance, atol=tolerance * 1e-2)
    torch.testing.assert_close(e.report.started[:, 0], difference, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("method", [name for name in METHODS if not METHODS[name].scalars])
def test_methods_that_need_a_class_say_so(method: str) -> None:
    with pytest.raises(MethodError, match=f"{method} contrasts a class with the others: .*'ClassifierOutputSoft"):
        run(ClassifierOutputSoftmaxTarget(1), method, pictures(1))


def test_every_image_its_own_callable_as_one_by_one() -> None:
    x, targets = pictures(2), [ClassifierOutputSoftmaxTarget(1), lambda y: y[2] - y[0]]
    for method in ("lrp", "integrated-gradients", "rise", "deeplift-shap"):
        together = run(targets, method, x).maps
        apart = torch.cat([run([[t]], method, x[i : i + 1]).maps for i, t in enumerate(targets)])
        torch.testing.assert_close(together, apart, rtol=1e-6, atol=1e-9)


def test_an_explanation_of_a_scalar_has_a_name_a_figure_and_files(tmp_path: Path) -> None:
    def cat_minus_dog(y: Tensor) -> Tensor:
        return y[1] - y[2]

    e = classlens.explain(build("plain"), pictures(1), [cat_minus_dog, 3], "lrp")
    assert [e.name(0, k) for k in range(2)] == ["cat minus dog", "class 3"]
    assert e.probability(0, 0) != e.probability(0, 0)
    headings = [axes.get_title("left") for axes in e.figure().axes]
    assert headings[:3] == ["picture", "cat minus dog", "class 3"]
    assert e.figure().axes[1].get_title("right") == ""
    e.save(tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["images"][0]["classes"][0]["probability"] is None
    assert report["images"][0]["classes"][1]["probability"] == e.probability(0, 1)


@pytest.mark.parametrize("method", ["lrp", "gradient-x-input", "rise"])
def test_a_target_of_a_segmentation_network_is_a_region(method: str) -> None:
    """Theirs sums over the mask, ours is the mean."""
    model, x, mask = dense("unet").double(), pictures(1, (48, 64)).double(), torch.zeros(48, 64)
    mask[8:20, 30:50] = 1
    theirs = run_on(model, x, SemanticSegmentationTarget(2, mask.numpy()), method)
    ours = run_on(model, x, classlens.region(2, mask), method)
    torch.testing.assert_close(theirs.maps, ours.maps * mask.sum(), rtol=1e-6, atol=1e-9)
    assert theirs.name() == "SemanticSegmentationTarget"


def run_on(model: Any, images: Tensor, targets: Any, method: str) -> classlens.Explanation:
    return classlens.explain(model, images, targets, method, **QUICK.get(method, {}))
