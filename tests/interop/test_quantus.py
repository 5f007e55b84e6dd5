"""`explain_func` with Quantus's own metrics."""

from __future__ import annotations

import numpy as np
import pytest
import quantus
import torch

import classlens
from classlens.errors import MethodError
from classlens.interop.quantus import explain_func
from classlens.methods import METHODS
from networks import build, pictures
from quick import QUICK, suited

# Quantus tells of its parameters by warnings, and uses scikit-image names that are to go.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

X = pictures(3).numpy()
Y = np.array([1, 4, 2])


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_what_quantus_asks_for(method: str) -> None:
    model = build(suited("residual", method))
    found = explain_func(model, X, Y, method=method, device="cpu", **QUICK.get(method, {}))
    quantus.helpers.asserts.assert_attributions(x_batch=X, a_batch=found)
    assert found.shape == (3, 1, 32, 32)
    e = classlens.explain(model, torch.from_numpy(X), Y.tolist(), method, **QUICK.get(method, {}))
    np.testing.assert_array_equal(found, e.maps.numpy())


def test_one_class_for_all_and_one_image() -> None:
    model = build("plain")
    assert np.array_equal(explain_func(model, X, 2), explain_func(model, X, np.array([2, 2, 2])))
    assert np.array_equal(explain_func(model, X[:1], np.array([1])), explain_func(model, X[:1], 1))
    with pytest.raises(MethodError, match="no method 'Saliency'"):
        explain_func(model, X, Y, method="Saliency")


def test_a_faithfulness_metric_is_the_one_of_our_maps() -> None:
    """Pixels are removed in our order: the same curve as with the maps computed beforehand."""
    model = build("residual")
    metric = quantus.PixelFlipping(
        features_in_step=128, perturb_baseline="black", disable_warnings=True, display_progressbar=False
    )
    called = metric(model, X, Y, explain_func=explain_func, explain_func_kwargs={"method": "agf"}, device="cpu")
    given = metric(model, X, Y, a_batch=classlens.explain(model, torch.from_numpy(X), Y.tolist()).maps.numpy())
    np.testing.assert_allclose(called, given, rtol=1e-5)
    other = metric(model, X, Y, explain_func=explain_func, explain_func_kwargs={"method": "sobel"}, device="cpu")
    assert not np.allclose(called, other)


def test_a_robustness_metric_explains_again_and_again() -> None:
    metric = quantus.MaxSensitivity(nr_samples=2, lower_bound=0.05, disable_warnings=True, display_progressbar=False)
    model = build("residual")
    options = {"explain_func": explain_func, "device": "cpu"}
    moved = metric(model, X, Y, explain_func_kwargs={"method": "agf"}, **options)
    still = metric(model, X, Y, explain_func_kwargs={"method": "centre"}, **options)
    assert (np.array(moved) > 0).all()
    assert np.array_equal(still, np.zeros(3))


def test_a_randomisation_metric_changes_a_copy_of_the_model() -> None:
    model = build("residual")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    metric = quantus.MPRT(similarity_func=quantus.similarity_func.correlation_spearman, seed=0, disable_warnings=True,
                          display_progressbar=False, return_average_correlation=True)  # fmt: skip
    agf = metric(model, X, Y, explain_func=explain_func, explain_func_kwargs={"method": "agf"}, device="cpu")
    sobel = metric(model, X, Y, explain_func=explain_func, explain_func_kwargs={"method": "sobel"}, device="cpu")
    assert np.mean(agf) < np.mean(sobel)
    assert np.mean(sobel) == pytest.approx(1.0)  # edges know nothing of the weights
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_evaluate_takes_our_names() -> None:
    quiet = {"disable_warnings": True, "display_progressbar": False}
    metrics = {
        "sparseness": quantus.Sparseness(**quiet),
        "sensitivity": quantus.MaxSensitivity(nr_samples=2, lower_bound=0.05, **quiet),
    }
    methods = {"agf": explain_func, "centre": explain_func}
    model = build("plain")
    found = quantus.evaluate(metrics, methods, model, X, Y, explain_func_kwargs={}, agg_func=np.mean)
    for name in methods:
        value = np.mean(metrics["sparseness"](model, X, Y, a_batch=explain_func(model, X, Y, name)))
        assert found[name]["sparseness"] == pytest.approx(float(value))
    assert found["agf"]["sensitivity"] > 0
    assert found["centre"]["sensitivity"] == 0
