"""The layers at which concepts are looked for: found on the tape, for any architecture."""

from __future__ import annotations

from classlens.core.capture import Tape, folded
from classlens.core.ops import LINEAR_OPS
from classlens.methods.featuremaps import FeatureMap, spatial_cuts

_GRIDS = 2  # resolutions at which concepts are looked for: the coarsest
COARSE = 8  # they are at least so many times smaller than the image: finer maps hold edges, not parts of things


def candidates(tape: Tape) -> list[FeatureMap]:
    """At each of the coarsest resolutions the deepest map, and the deepest with at most half of its channels.

    Where blocks widen their input and narrow it again, the narrow maps between blocks hold what the wide ones repeat.
    A map that no layer with weights follows has a channel for each class, not features: one channel would be all of it.
    """
    by_grid: dict[tuple[int, ...], list[FeatureMap]] = {}
    for cut in spatial_cuts(folded(tape)):
        if not _weighed_after(tape, cut):
            continue
        channels, *grid = cut.as_map(cut.value.tensor).shape[1:]
        if any(COARSE * own > side for own, side in zip(grid, tape.image.shape[2:], strict=True)):
            continue
        chosen = by_grid.setdefault(tuple(grid), [])
        if not chosen or (len(chosen) == 1 and 2 * channels <= chosen[0].as_map(chosen[0].value.tensor).shape[1]):
            chosen.append(cut)
    return [cut for chosen in list(by_grid.values())[:_GRIDS] for cut in chosen]


def _weighed_after(tape: Tape, cut: FeatureMap) -> bool:
    """Whether a linear layer or a convolution follows."""
    live = {cut.value}
    for node in tape.nodes:
        if live.intersection(node.inputs):
            if node.op in LINEAR_OPS:
                return True
            live.update(node.outputs)
    return False
