"""Random small networks: every map is that of the plain network in float64, or is refused. `make fuzz` runs more."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fuzz_networks
import fuzzing
from classlens.methods import METHODS
from steps import back

_quiet = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # torch's, for some wrappers


@_quiet
@settings(max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False).map(fuzz_networks.drawn), st.sampled_from(sorted(METHODS)))
def test_right_or_refused(plan: fuzz_networks.Plan, method: str) -> None:
    assert fuzzing.verdict(plan, method).split(":")[0] in ("equal", "refused")


STEPS = (("skip", 1, 3), ("relu", 2, 1), ("join", 1, 1), ("max", 1, 1))
PLAN = fuzz_networks.Plan(STEPS, "flat", "float64", "hooks", 5)


@_quiet
@pytest.mark.parametrize("method", sorted(fuzzing.INDEPENDENT))
def test_the_fuzz_test_finds_a_wrong_map(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fuzzing.verdict(PLAN, method) == "equal"
    right = fuzz_networks.rectified
    monkeypatch.setattr(fuzz_networks, "rectified", lambda t, how: right(t, how).clamp(max=0.3))
    assert fuzzing.verdict(PLAN, method).startswith("off by")


@_quiet
def test_both_forms_compute_the_same() -> None:
    for seed in range(300):
        plan = replace(fuzz_networks.drawn(random.Random(seed)), dtype="float64")
        x = fuzz_networks.image_of(plan).double()
        with torch.no_grad():
            found = fuzz_networks.awkward(plan)(x)
        assert torch.allclose(found["logits"] if plan.wrap == "dict" else found, fuzz_networks.Plain(plan)(x))


SPELLED = ("attend", "skip", "relu", "minus", "times", "gate", "max", "up", "mean", "join", "same", "strided")


@_quiet
@pytest.mark.parametrize("how", range(4))
@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_map_does_not_depend_on_how_a_step_is_written(method: str, how: int) -> None:
    """`a + b` or `stack().sum(0)`, `clamp` or a write into a view, `x @ w` or `F.linear`, attention in four ways."""
    steps = tuple((kind, how, 3 if kind == "attend" else 1) for kind in SPELLED)
    assert fuzzing.verdict(fuzz_networks.Plan(steps, "flat", "float64", "none", 11, images=2), method) == "equal"


def test_a_write_to_a_view_in_another_order() -> None:
    """The view's strides are those of memory: relevance must be laid out as its base is, whatever its own layout."""
    x, r = torch.rand(1, 4, 6).double(), torch.rand(1, 4, 6).double()

    def write(x: torch.Tensor) -> torch.Tensor:
        base = x.mT.contiguous().mT * 2  # dense, but not contiguous
        base[:, 1:3].mul_(3)
        return base

    assert not write(x).is_contiguous()
    assert torch.allclose(back(write, x, r), r)
    assert torch.allclose(back(lambda x: write(x)[:, 1:2], x, r[:, 1:2])[:, 1:2], r[:, 1:2])


FOUND = {  # networks whose maps were wrong without a word
    "layercam after a pool": ("layercam", (("skip", 2, 3), ("mean", 2, 3), ("up", 1, 3)), 1),
    "agf-release before an activation": ("agf-release", (("strided", 1, 3), ("up", 1, 3), ("relu", 1, 3)), 2),
    "agf-release before a scaled activation": ("agf-release", (("times", 1, 3), ("same", 0, 3)), 1),
    "deeplift-shap at a norm": ("deeplift-shap", (("norm", 1, 3), ("same", 1, 3)), 1),
    "excitation-bp at a maximum with 0": ("excitation-bp", (("join", 2, 3), ("relu", 0, 3), ("join", 0, 1)), 1),
    "libragrad at a norm": ("libragrad", (("norm", 1, 1), ("same", 1, 1)), 1),
}


@_quiet
@pytest.mark.parametrize("case", FOUND)
def test_networks_that_once_got_a_wrong_map(case: str) -> None:
    method, steps, images = FOUND[case]
    for how in range(4):  # the last step in each of its spellings, on top of the one that was found
        every = (*steps[:-1], (steps[-1][0], how, steps[-1][2])) if steps[-1][0] in ("same", "up") else steps
        plan = fuzz_networks.Plan(every, "flat", "float64", "none", 117761661, images)
        assert fuzzing.verdict(plan, method) == "equal", plan
