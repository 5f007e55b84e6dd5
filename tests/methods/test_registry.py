"""What the registry says of each method, how it reads names and options, and the balance of a sweep."""

import inspect

import pytest
import torch

import classlens
from classlens.core.capture import record
from classlens.core.rules.propagate import Sweep
from classlens.errors import MethodError
from classlens.methods import METHODS, check_options, method_names, resolve, split_names
from classlens.methods.registry import UNRELIABLE, Balance, Case, balance, is_release, of_colours, total
from classlens.progress import reporting
from networks import build, pictures

CAM = {"gradcam", "layercam", "odam", "finer-cam"}
AGF = {"agf", "agf-paper", "agf-release"}
LRP = {"lrp", "lrp-ab", "lrp-epsilon-gamma-box", "lrp-epsilon-plus-flat"}
CONTRASTS = {"clrp", "sglrp"}
EXCITATION = {"excitation-bp", "contrastive-excitation-bp"}
PATHS = {"integrated-gradients", "gradient-shap"}
GRADIENTS = {"gradient", "gradient-x-input", "smoothgrad", *PATHS}
PERTURBATION = {"rise", "meaningful-perturbation"}
CONTROLS = {"random", "centre", "sobel"}
ATTENTION = {"attention-rollout", "generic-attention", "transformer-attribution", "attnlrp", "libragrad", "legrad"}
REST = {"rap", "fullgrad", "deeplift-shap"}
ALL = CAM | AGF | LRP | CONTRASTS | EXCITATION | GRADIENTS | PERTURBATION | CONTROLS | ATTENTION | REST


@pytest.mark.parametrize(
    ("says", "of"),
    [
        ("class_specific", ALL - CONTROLS - {"lrp", "lrp-ab", "rap", "excitation-bp", "fullgrad", "attention-rollout"}),
        ("signed", AGF | CONTRASTS | PATHS | LRP - {"lrp"}
         | {"attnlrp", "libragrad", "contrastive-excitation-bp", "deeplift-shap", "gradient-x-input", "random", "rap"}),
        ("conserves", LRP | EXCITATION | {"agf", "deeplift-shap", "fullgrad", "rap"}),
        ("scalars", ALL - CONTRASTS - {"finer-cam"}),
        ("attention", ATTENTION - {"attnlrp"}),
        ("layers", ALL - GRADIENTS - PERTURBATION - CONTROLS),
        ("contrastive", CONTRASTS | {"finer-cam", "contrastive-excitation-bp"}),
        ("locates", AGF | CAM - {"finer-cam"} | GRADIENTS | PERTURBATION | LRP - {"lrp", "lrp-ab"} | {"deeplift-shap"}
         | ATTENTION - {"attention-rollout"}),
    ],
)  # fmt: skip
def test_what_users_are_told_of_each_method(says: str, of: set[str]) -> None:
    assert set(METHODS) == ALL
    assert {name for name, method in METHODS.items() if getattr(method, says)} == of


def test_what_each_method_keeps_in_memory_for_a_class() -> None:
    """`classlens.chunks` decides by it how many classes are explained at once."""
    kept = {holds: {name for name, m in METHODS.items() if m.holds == holds} for holds in ("maps", "inputs", "layers")}
    assert kept["maps"] == PERTURBATION | CONTROLS
    assert kept["inputs"] == GRADIENTS
    assert kept["layers"] == ALL - kept["maps"] - kept["inputs"]


def test_the_families_of_the_docs() -> None:
    families = {
        "attribution-guided factorisation": AGF, "activation maps": CAM, "attention": ATTENTION, "controls": CONTROLS,
        "gradients": GRADIENTS | {"deeplift-shap", "fullgrad"}, "perturbation": PERTURBATION,
        "relevance propagation": LRP | CONTRASTS | EXCITATION | {"rap"},
    }  # fmt: skip
    assert {name: method.family for name, method in METHODS.items()} == {
        name: family for family, names in families.items() for name in names
    }


def test_which_sweeps_are_linear_in_the_relevance() -> None:
    """With these options, relevance can be followed in parts, for concepts."""
    linear = {name: method.linear for name, method in METHODS.items() if method.linear is not None}
    assert linear == {name: {} for name in LRP | EXCITATION} | {"agf": {"only": "C"}}


def test_what_a_case_is_if_nobody_says() -> None:
    model, x = build("plain"), pictures(1)
    case = Case(model, x, record(model, x), torch.tensor([[1]]))
    assert (case.trace, case.multilabel, case.once) == (False, False, False)


VARIANT = {"variant": "default"}
TERMS = {"without": (), "only": None}
BASELINES = "zero+dark+blur+noise"
LAYER = {"layer": None, "shallower": 0}
# What users get who ask for a name alone: the papers' numbers, where these say any.
DEFAULTS = {
    "agf": TERMS | {"residual": None}, "agf-paper": TERMS, "agf-release": TERMS | {"residual": None},
    "gradcam": LAYER | VARIANT, "layercam": LAYER, "odam": LAYER, "finer-cam": {"alpha": 0.6, "similar": 3} | LAYER,
    "random": {"cells": None, "seed": 0}, "centre": {"sigma": 0.25}, "sobel": {}, "gradient": {},
    "gradient-x-input": {}, "fullgrad": VARIANT,
    "integrated-gradients": {"steps": 50, "baseline": "zero", "seed": 0} | VARIANT,
    "gradient-shap": {"samples": 20, "baselines": BASELINES, "noise": 0.0, "seed": 0},
    "smoothgrad": {"samples": 50, "noise": 0.15, "seed": 0} | VARIANT,
    "deeplift-shap": {"baselines": BASELINES, "seed": 0},
    "rise": {"n_masks": 2000, "cells": 7, "keep": 0.5, "seed": 0},
    "meaningful-perturbation":
        {"steps": 300, "rate": 0.1, "area": 1e-4, "variation": 1e-2, "cell": 8, "jitter": 4, "seed": 0},
    "lrp": VARIANT, "lrp-ab": VARIANT, "lrp-epsilon-plus-flat": {}, "lrp-epsilon-gamma-box": {"gamma": 0.25},
    "clrp": VARIANT, "sglrp": VARIANT, "rap": VARIANT, "excitation-bp": {}, "contrastive-excitation-bp": {},
    "attention-rollout": {"start": 0}, "transformer-attribution": {"start": 0}, "generic-attention": {},
    "attnlrp": {"conv_gamma": 0.25, "linear_gamma": 0.05}, "libragrad": {"start": 0}, "legrad": {"last": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(ALL))
def test_options_and_what_they_are_if_nobody_says(name: str) -> None:
    parameters = list(inspect.signature(METHODS[name].run).parameters.values())[1:]
    assert {p.name: p.default for p in parameters} == DEFAULTS[name]
    assert METHODS[name].options == tuple(DEFAULTS[name])


@pytest.mark.parametrize(
    ("method", "option"),
    [
        ("integrated-gradients(steps={})", "steps"), ("smoothgrad(samples={})", "samples"),
        ("gradient-shap(samples={})", "samples"), ("rise(cells=2, n_masks={})", "n_masks"),
        ("rise(n_masks=2, cells={})", "cells"), ("meaningful-perturbation(cell=4, jitter=0, steps={})", "steps"),
        ("meaningful-perturbation(steps=1, cell={})", "cell"),
    ],
)  # fmt: skip
def test_one_is_enough_and_none_is_refused(method: str, option: str) -> None:
    model, x = build("plain"), pictures(1, (16, 16))
    assert torch.isfinite(classlens.explain(model, x, 1, method.format(1)).maps).all()
    with pytest.raises(MethodError, match=f"{option}=0 is not possible; give an integer from 1"):
        classlens.explain(model, x, 1, method.format(0))


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("agf", "agf", {}), (" agf () ", "agf", {}), ("agf-release(without=A)", "agf-release", {"without": "A"}),
        ("rise(cells = 5, keep=0.25)", "rise", {"cells": 5, "keep": 0.25}),
        ("gradient-shap(baselines=[0.5, 'zero'], seed=3)", "gradient-shap", {"baselines": [0.5, "zero"], "seed": 3}),
        ("agf-release(without=('A', 'M'), residual=gradcam)", "agf-release",
         {"without": ("A", "M"), "residual": "gradcam"}),
    ],
)  # fmt: skip
def test_methods_with_options_are_read(text: str, name: str, options: dict[str, object]) -> None:
    method, found = resolve(text)
    assert (method.name, found) == (name, options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("agf(", r"cannot read the method 'agf\('; write a name such as agf"),
        ("agf!", "cannot read the method"),
        ("gradcamm", r"there is no method 'gradcamm'; did you mean gradcam or "),
        ("xyzzy", "there is no method 'xyzzy'; choose one of .*agf, agf-paper"),
        ("rise(cells)", r"cannot read 'cells' in 'rise\(cells\)'; options are written name=value"),
        ("rise(=3)", "cannot read '=3'"),
        ("rise(cells=)", "cannot read 'cells='"),
        ("rise(2b=3)", "cannot read '2b=3'"),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, message: str) -> None:
    with pytest.raises(MethodError, match=message):
        resolve(text)


def test_at_most_three_names_are_suggested() -> None:
    with pytest.raises(MethodError) as raised:
        resolve("lrp-epsilon-gamm")
    assert str(raised.value).count(" or ") == 2


def test_unknown_options_are_refused_with_those_there_are() -> None:
    check_options(METHODS["rise"], {"cells": 3})
    with pytest.raises(MethodError, match="rise has no option 'cell'; it has n_masks, cells, keep, seed"):
        check_options(METHODS["rise"], {"cells": 3, "cell": 3})
    with pytest.raises(MethodError, match="excitation-bp has no option 'x'; it has none"):
        check_options(METHODS["excitation-bp"], {"x": 1})


def test_lists_of_methods() -> None:
    assert method_names("all") == list(METHODS)
    assert method_names("agf, lrp, agf") == ["agf", "lrp"]
    assert method_names(["agf", "rise(cells=5,keep=0.1)", "agf"]) == ["agf", "rise(cells=5,keep=0.1)"]
    assert split_names("a(b=[1,2],c=(3,4)), d ,, a(b=[1,2],c=(3,4))") == ["a(b=[1,2],c=(3,4))", "d"]
    for nothing in ("", " , ", []):
        with pytest.raises(MethodError, match="no method was given"):
            method_names(nothing)
    with pytest.raises(MethodError, match="there is no method"):
        method_names("agf, nonsense")


def test_variants() -> None:
    assert (is_release("release"), is_release("default")) == (True, False)
    with pytest.raises(MethodError, match="unknown variant='paper'; choose default or release"):
        is_release("paper")


def test_the_balances_error_is_relative_to_what_flowed() -> None:
    started, arrived, absorbed, size = torch.tensor([[[4.0, 0.0]], [[1.0, 0.0]], [[2.0, 0.0]], [[5.0, 0.0]]]).double()
    error = Balance(started, arrived, absorbed, size).error()
    assert torch.allclose(error, torch.tensor([[0.2, 0.0]]).double())


def test_totals_are_float64_and_do_not_round() -> None:
    relevance = torch.tensor([1e8, 1.0, -1e8]).reshape(1, 1, 3)
    assert torch.equal(total(relevance), torch.ones(1, 1, dtype=torch.float64))


def test_maps_are_sums_over_colours() -> None:
    shares = torch.arange(24.0).reshape(2, 3, 4, 1, 1)  # (K,B,C,H,W)
    result = of_colours(shares)
    assert torch.equal(result.maps, shares.sum(2).transpose(0, 1))
    assert torch.equal(result.colours, shares.transpose(0, 1))


@pytest.mark.parametrize(
    ("method", "steps"),
    [
        ("rise(n_masks=17)", 3), ("meaningful-perturbation(steps=3)", 12), ("integrated-gradients(steps=6)", 2),
        ("smoothgrad(samples=5)", 5), ("gradient-shap(samples=3)", 3), ("deeplift-shap(baselines=zero+dark)", 2),
        ("integrated-gradients(variant=release)", 101),
    ],
)  # fmt: skip
def test_long_methods_report_their_steps_under_their_name(method: str, steps: int) -> None:
    """Of two images and two classes: masks in eights, masks to learn one by one, paths in runs of eight images."""
    seen: list[tuple[str, int, int]] = []
    with reporting(lambda label, done, total: seen.append((label, done, total))):
        classlens.explain(build("plain"), pictures(2, (16, 16)), [[0, 1], [2, 3]], method)
    assert seen == [(method.partition("(")[0], done, steps) for done in range(steps + 1)]


@pytest.mark.parametrize(("arrived", "noted"), [(1.0, False), (0.96, False), (0.94, True), (1.2, True), (-1.0, True)])
def test_poor_balances_are_noted(arrived: float, noted: bool) -> None:
    sound, other, nothing = torch.ones(2, 1), torch.tensor([[1.0], [arrived]]), torch.zeros(2, 1)
    found = Balance(sound, other, nothing, torch.ones(2, 1)).notes()
    assert bool(found) == noted
    if noted:
        assert found == (f"{abs(arrived - 1):.0%} of the relevance is unaccounted for; {UNRELIABLE}",)
    lost = Balance(torch.ones(1, 1), torch.zeros(1, 1), torch.ones(1, 1), torch.ones(1, 1))
    assert lost.notes() == ()  # what biases absorbed is accounted for


def test_the_balance_of_a_sweep_adds_up_by_class_and_image() -> None:
    """Two starts, two classes, three images; magnitudes decide the scale, at the top or at the image."""
    source = torch.Generator().manual_seed(0)
    a, b = (torch.randn(2, 3, n, generator=source) for n in (4, 5))
    relevance = 0.1 * torch.randn(2, 3, 1, 2, 2, generator=source)
    relevance[1, 2] = torch.tensor([[[90.0, -90.0], [1.0, 0.0]]])
    found = balance(Sweep(relevance, torch.full((2, 3), 7.0).double()), {"a": a, "b": b})
    for k in range(2):
        for i in range(3):
            started = float(a[k, i].sum() + b[k, i].sum())
            size = max(float(a[k, i].abs().sum() + b[k, i].abs().sum()), float(relevance[k, i].abs().sum()))
            arrived = float(relevance[k, i].sum())
            assert found.started[i, k].item() == pytest.approx(started, rel=1e-5)
            assert found.size[i, k].item() == pytest.approx(size, rel=1e-5)
            assert found.error()[i, k].item() == pytest.approx(abs(arrived + 7 - started) / size, rel=1e-5)


@pytest.mark.parametrize(("lost", "noted"), [(0.0, False), (0.05, False), (0.0625, True)])
def test_a_map_that_does_not_add_up_is_noted(lost: float, noted: bool) -> None:
    one = torch.ones(1, 1).double()
    notes = Balance(lost * one, 0 * one, 0 * one, one).notes()
    assert bool(notes) is noted
    assert not noted or notes[0].startswith("6% of the relevance is unaccounted for")
