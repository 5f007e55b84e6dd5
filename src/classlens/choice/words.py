"""The result of a choice in sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from classlens.choice.contest import title
from classlens.choice.rank import Duel
from classlens.evaluate.stats import Estimate


def verdict(
    model: str, chosen: str, leader: str, default: str | None, ranks: Mapping[str, float], duels: Sequence[Duel]
) -> str:
    """Which method was chosen and why, and where half B does not agree."""
    first = f"{leader} has the best mean rank on half A ({ranks[leader]:.1f} among {len(ranks)} methods)"
    facing = next((duel for duel in duels if duel.against == default), None)
    if default is None:
        said = f"{model}: {chosen} is chosen. The default cannot explain this network, and {first}."
    elif leader == default:
        said = f"{model}: {chosen}, the default, stays. {first}."
    elif chosen == leader:
        assert facing is not None  # a leader takes the default's place only after a comparison
        said = f"{model}: {chosen} is chosen. {first}, and half B confirms it: {against(facing)}."
    elif facing is None:
        said = f"{model}: {chosen}, the default, stays. {first}, but it explained too few pictures of half B."
    else:
        said = f"{model}: {chosen}, the default, stays. {first}, but half B does not confirm it: {against(facing)}."
    others = [f"Against the runner-up, on half B: {against(duel)}." for duel in duels if duel.against != default]
    return " ".join([said, *others])


def against(duel: Duel) -> str:
    """A duel in words: "layercam is ahead of agf in stability (+4.1 [+1.0, +7.2]); behind in no test; ...".

    A difference counts if its 95 % interval excludes 0.
    """
    level = [test for test in duel.differences if test not in (*duel.ahead, *duel.behind)]
    parts = [
        f"{duel.method} is ahead of {duel.against} in {_tests(duel.ahead, duel.differences)}",
        f"behind in {_tests(duel.behind, duel.differences)}",
    ]
    if level:
        parts.append(f"level in {_tests(level, duel.differences)}")
    return "; ".join(parts)


def points(found: Estimate) -> str:
    """A difference in percentage points, with its interval.

    >>> points(Estimate(4.13, 1.0, 7.2, 30))
    '+4.1 [+1.0, +7.2]'
    """
    return f"{found.value:+.1f} [{found.low:+.1f}, {found.high:+.1f}]"


def _tests(tests: Sequence[str], differences: Mapping[str, Estimate]) -> str:
    return ", ".join(f"{title(test)} ({points(differences[test])})" for test in tests) or "no test"
