"""Ranks and decisions, from numbers alone."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from classlens.choice.rank import Duel, decide, mean_ranks
from classlens.choice.words import against, verdict
from classlens.evaluate.stats import Estimate

AHEAD, BEHIND, LEVEL = Estimate(4.0, 1.0, 7.0, 20), Estimate(-4.0, -7.0, -1.0, 20), Estimate(1.0, -1.0, 3.0, 20)
ROUNDING = Estimate(1e-13, 1e-14, 2e-13, 20)  # two maps that are the same but for rounding


def slow_mean_ranks(scores: dict[str, dict[str, float]]) -> dict[str, float]:
    """Sort, number the places, and let equal scores share the mean of their places."""
    found: dict[str, list[float]] = {}
    for by_method in scores.values():
        order = sorted(by_method.values(), reverse=True)
        for method, score in by_method.items():
            places = [i + 1 for i, other in enumerate(order) if other == score]
            found.setdefault(method, []).append(sum(places) / len(places))
    return {method: sum(ranks) / len(ranks) for method, ranks in found.items()}


def test_mean_ranks_match_a_slow_derivation() -> None:
    draw = random.Random(0)
    for _ in range(20):
        scores = {t: {m: float(draw.randint(0, 4)) for m in "abcdef"} for t in ("x", "y", "z")}
        found = mean_ranks(scores)
        assert found == pytest.approx(slow_mean_ranks(scores))
        assert list(found.values()) == sorted(found.values())


def test_of_equal_methods_the_first_leads() -> None:
    scores = {"x": {"agf": 50.0, "b": 60.0}, "y": {"agf": 60.0, "b": 50.0}}
    assert list(mean_ranks(scores)) == ["agf", "b"]
    assert mean_ranks({"x": {"agf": 50.0, "b": 50.0 + 1e-9}}) == {"agf": 1.5, "b": 1.5}  # rounding decides nothing


@pytest.mark.parametrize(
    ("differences", "chosen"),
    [
        ({"masks": AHEAD, "pointing": LEVEL}, "b"),
        ({"masks": LEVEL, "pointing": LEVEL}, "agf"),  # a tie keeps the default
        ({"masks": AHEAD, "pointing": BEHIND}, "agf"),
        ({"masks": AHEAD, "pointing": BEHIND, "stability": AHEAD}, "b"),
        ({"masks": BEHIND, "pointing": LEVEL}, "agf"),
        ({"masks": ROUNDING, "pointing": ROUNDING}, "agf"),
    ],
)
def test_the_default_stays_unless_half_b_confirms_the_leader(differences: dict[str, Estimate], chosen: str) -> None:
    duel = Duel("b", "agf", differences)
    assert decide("b", "agf", [duel]) == chosen
    mirrored = {t: Estimate(-e.value, -e.high, -e.low, e.n) for t, e in differences.items()}
    assert replace(duel, differences=mirrored).ahead == duel.behind


def test_without_a_duel_or_a_default() -> None:
    assert decide("agf", "agf", []) == "agf"
    assert decide("b", "agf", []) == "agf"  # the leader has no maps on half B
    assert decide("b", None, []) == "b"


def test_the_text_says_where_half_b_disagrees() -> None:
    ranks = {"b": 1.0, "agf": 2.0, "c": 3.0}
    lost = Duel("b", "agf", {"segmentation": BEHIND, "repeatability": LEVEL})
    text = verdict("net", "agf", "b", "agf", ranks, [lost])
    assert text == (
        "net: agf, the default, stays. b has the best mean rank on half A (1.0 among 3 methods), but half B does not "
        "confirm it: b is ahead of agf in no test; behind in masks (-4.0 [-7.0, -1.0]); level in stability "
        "(+1.0 [-1.0, +3.0])."
    )
    won = Duel("b", "agf", {"segmentation": AHEAD})
    assert "b is chosen" in (
        said := verdict("net", "b", "b", "agf", ranks, [won, Duel("b", "c", {"pointing": BEHIND})])
    )
    assert said.endswith(
        "Against the runner-up, on half B: b is ahead of c in no test; behind in grids (-4.0 [-7.0, -1.0])."
    )
    # The default may lead on half A and lose on half B: that is said too.
    assert "behind in masks" in verdict("net", "agf", "agf", "agf", ranks, [Duel("agf", "b", {"segmentation": BEHIND})])
    assert "cannot explain" in verdict("net", "b", "b", None, ranks, [])
    assert "too few pictures of half B" in verdict("net", "agf", "b", "agf", ranks, [])
    assert against(won) == "b is ahead of agf in masks (+4.0 [+1.0, +7.0]); behind in no test"
