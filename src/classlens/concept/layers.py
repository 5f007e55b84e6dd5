"""The layers at which concepts are looked for: found on the tape, for any architecture."""

from __future__ import annotations

from classlens.core.capture import Tape, folded
from classlens.methods.featuremaps import FeatureMap, spatial_cuts

_GRIDS = 2  # resolutions at which concepts are looked for: the coarsest
COARSE = 8  # they are at least so many times smaller than the image: finer maps hold edges, not parts of things


def candidates(tape: Tape) -> list[FeatureMap]:
    """At each of the coarsest resolutions the deepest map, and the deepest with at most half of its channels.

    Where blocks widen their input and narrow it again, the narrow maps between blocks hold what the wide ones repeat.
    """
    by_grid: dict[tuple[int, ...], list[FeatureMap]] = {}
    for cut in spatial_cuts(folded(tape)):
        channels, *grid = cut.as_map(cut.value.tensor).shape[1:]
        if any(COARSE * own > side for own, side in zip(grid, tape.image.shape[2:], strict=True)):
            continue
        chosen = by_grid.setdefault(tuple(grid), [])
        if not chosen or (len(chosen) == 1 and 2 * channels <= chosen[0].as_map(chosen[0].value.tensor).shape[1]):
            chosen.append(cut)
    return [cut for chosen in list(by_grid.values())[:_GRIDS] for cut in chosen]
