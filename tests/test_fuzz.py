"""Random small networks: every map is that of the plain network in float64, or is refused. `make fuzz` runs more."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fuzzing
from classlens.methods import METHODS

_quiet = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # torch's, for some wrappers


@_quiet
@settings(max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(fuzzing.plans, st.sampled_from(sorted(METHODS)))
def test_right_or_refused(plan: fuzzing.Plan, method: str) -> None:
    assert fuzzing.verdict(plan, method) in ("equal", "refused")


PLAN = fuzzing.Plan((("skip", 1, 3), ("relu", 2), ("join", 1, 1), ("max", 1)), "flat", "float64", "hooks", 5)


@_quiet
@pytest.mark.parametrize("method", sorted(fuzzing.INDEPENDENT))
def test_the_fuzz_test_finds_a_wrong_map(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fuzzing.verdict(PLAN, method) == "equal"
    right = fuzzing._rectified
    monkeypatch.setattr(fuzzing, "_rectified", lambda t, how: right(t, how).clamp(max=0.3))
    assert fuzzing.verdict(PLAN, method).startswith("off by")


def test_both_forms_compute_the_same() -> None:
    for wrap in fuzzing.WRAPS:
        plan = fuzzing.Plan(PLAN.steps, "pool", "float64", wrap, 3)
        x = fuzzing.image_of(plan).double()
        assert torch.allclose(fuzzing.awkward(plan)(x), fuzzing.Plain(plan)(x))
