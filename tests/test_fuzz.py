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
        found = fuzz_networks.awkward(plan)(x)
        assert torch.allclose(found["logits"] if plan.wrap == "dict" else found, fuzz_networks.Plain(plan)(x))
