import numpy as np
import pytest
import torch
from torch import nn

import classlens
from classlens.comparison import compare
from classlens.errors import MethodError
from classlens.methods import METHODS, method_names, split_names
from networks import build, pictures


def test_every_method_is_the_explanation_of_its_own() -> None:
    model, x = build("residual"), pictures(1)
    c = compare(model, x, [1, 4], "agf, lrp,gradcam")
    assert list(c.explanations) == ["agf", "lrp", "gradcam"]
    for name, e in c.explanations.items():
        assert torch.equal(e.maps, classlens.explain(model, x, [1, 4], name).maps)


def test_likeness_is_the_mean_correlation() -> None:
    c = compare(build("residual"), pictures(1), [1, 4, 2], "agf,random")
    maps = c.explanations["agf"].maps[0].flatten(1).numpy()
    r = np.corrcoef(maps)
    assert c.likeness("agf") == pytest.approx((r[0, 1] + r[0, 2] + r[1, 2]) / 3, rel=1e-5)
    assert c.likeness("random") == pytest.approx(1.0)
    assert compare(build("residual"), pictures(1), 1, "agf").likeness("agf") is None


def test_a_method_that_cannot_serve_the_model_is_named_and_the_others_go_on() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 4)).eval()
    c = compare(model, pictures(1), 1, ["gradcam", "lrp"])
    assert list(c.explanations) == ["lrp"]
    assert "no spatial feature map" in c.failures["gradcam"]
    assert c.figure().axes
    with pytest.raises(MethodError, match="no method could explain this image"):
        compare(model, pictures(1), 1, ["gradcam"]).figure()


def test_names_of_methods() -> None:
    split = split_names("agf, lrp ,agf-release(without=[A,M], x=1),agf")
    assert split == ["agf", "lrp", "agf-release(without=[A,M], x=1)"]
    assert method_names("all") == list(METHODS)
    assert method_names("agf, agf-release(without=['A', 'M']),agf") == ["agf", "agf-release(without=['A', 'M'])"]
    with pytest.raises(MethodError, match="did you mean lrp"):
        method_names("agf,lrpp")
    with pytest.raises(MethodError, match="no method was given"):
        method_names(",")


def test_in_a_notebook_it_shows_its_figure_and_elsewhere_a_line() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 4)).eval()
    c = compare(model, pictures(1), 1, ["lrp", "gradcam"])
    data, size = c._repr_png_()
    assert data.startswith(b"\x89PNG")
    assert size["width"] > 200
    assert repr(c) == "<Comparison of lrp; gradcam failed>"
