"""Places at which evidence gathered or vanished in many pictures of a class, and whether they decide.

A place is a connected group of cells of the 16 x 16 grid whose share of the evidence, counted with the probability of
the class, grew from one network to the other: in the same cells in all pictures, as with a watermark or a frame
(`fixed`), or wherever it grew most in each picture (`wandering`). Each is tested on the networks: it is hidden, and so
is as much elsewhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from classlens.diff.collect import Both, Row, Seen, hidden_probabilities, read, strongest_gain
from classlens.diff.measures import estimated
from classlens.evaluate.stats import Estimate
from classlens.progress import Progress
from classlens.report.measure import Bools, Floats
from classlens.report.spots import central, connected, elsewhere, smoothed

Falls = dict[str, tuple[float, ...]]  # picture -> what A and B lose

LEAST = 6  # pictures of a class: with fewer, no place can be told from chance
LEVEL = 0.05  # of finding a place in a class where nothing moved
PEAK = 0.5  # of the largest gain of a cell: cells with less are no part of the place
GREW = 0.05  # of the evidence: a smaller gain of a place is not shown
DECIDES = 0.1  # of the probability: what hiding a place must cost more than hiding as much elsewhere
ELSEWHERE = 3  # other places of the same shape that are hidden to compare with
_FLIPS = 1000
_TESTED = 40  # pictures of a class on which a place is hidden


@dataclass(frozen=True)
class Place:
    """Where the evidence for a class gathered in B (`appeared`), or in A before it went (`gone`)."""

    name: str  # of the class
    appeared: bool
    cells: Bools | None  # the same in all pictures; None: another place in each
    before: float  # share of the evidence there, counted with the probability of the class, by A
    after: float  # and by B
    gain: Estimate  # of B over A, or of A over B
    falls: tuple[Estimate, Estimate]  # probability lost without the place beyond that without as much elsewhere: A, B
    excess: Estimate  # how much more the network that uses the place loses than the other
    on_object: float | None  # of the evidence that came to the place, or left it; None without masks
    rows: tuple[Row, ...]

    @property
    def decides(self) -> bool:
        """Whether the network that marks the place needs it, and the other does not."""
        return self.excess.value >= DECIDES and self.excess.low > 0

    @property
    def shortcut(self) -> bool:
        """Whether it decides although it is hardly the object."""
        if not self.decides:
            return False
        if self.on_object is not None:
            return self.on_object < 0.5
        return self.cells is not None and not central(self.cells)


def places(both: Both, rows: Sequence[Row], seed: int, progress: Progress) -> list[Place]:
    """The places of all classes; those that decide come first, then those with the largest gain."""
    groups: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.name].append(row)
    jobs = [(group, appeared) for group in groups.values() if len(group) >= LEAST for appeared in (True, False)]
    found: list[Place] = []
    progress("places", 0, len(jobs))
    for done, (group, appeared) in enumerate(jobs, 1):
        found += _of_class(both, group, appeared, seed)
        progress("places", done, len(jobs))
    return sorted(found, key=lambda place: (not place.shortcut, not place.decides, -place.gain.value))


def _of_class(both: Both, group: list[Row], appeared: bool, seed: int) -> list[Place]:
    change = np.stack([row.change for row in group]) * (1 if appeared else -1)
    cells = gathered(change, seed)
    if cells is not None:
        place = _fixed(both, group, appeared, cells, seed)
        return [place] if place.gain.value >= GREW else []
    wandering = _wandering(group, appeared, seed)
    return [wandering] if wandering.gain.value >= GREW and wandering.decides else []


def gathered(change: Floats, seed: int) -> Bools | None:
    """The connected cells where the share (n,16,16) grew over pictures; None if chance explains every growth.

    Chance: if nothing moved, each picture's change could as well have the other sign. Cells count that exceed the
    largest cell of 95 % of such draws (a permutation test of the maximum, so the level holds for all cells together).
    """
    values = smoothed(change).reshape(len(change), -1)
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], (_FLIPS, len(values)))
    scale = np.sqrt((values**2).mean(0)) + 1e-12  # the same for all draws of signs
    drawn = (signs @ values / len(values) / scale).max(1)
    mean = values.mean(0)
    chosen = (mean / scale > np.quantile(drawn, 1 - LEVEL)) & (mean > 1 / values.shape[1] / 2)
    if not chosen.any():
        return None
    shape = (change.shape[1], change.shape[2])
    chosen &= mean >= PEAK * mean.max()  # what gained little beside the peak would hide where it is
    return max(connected(chosen.reshape(shape)), key=lambda part: float(change.mean(0)[part].sum()))


def _fixed(both: Both, group: list[Row], appeared: bool, cells: Bools, seed: int) -> Place:
    """A place in the same cells of all pictures, hidden in each."""
    falls = _hidden(both, group[:_TESTED], cells, seed)
    return _place(group, appeared, cells, falls, seed)


def _wandering(group: list[Row], appeared: bool, seed: int) -> Place:
    """A place of its own in each picture: the cells of the largest change, hidden when the row was made."""
    falls: Falls = {}
    for row in group:
        left = [side.without_gained if appeared else side.without_lost for side in (row.a, row.b)]
        falls[row.item.name] = (row.a.without_others - left[0], row.b.without_others - left[1])
    return _place(group, appeared, None, falls, seed)


def _hidden(both: Both, rows: Sequence[Row], cells: Bools, seed: int) -> Falls:
    """What each network loses without a place, beyond what it loses without the same shape elsewhere."""
    others = elsewhere(cells, ELSEWHERE, seed)
    found: Falls = {}
    for row in rows:
        seen = read(both, row.item)
        found[row.item.name] = tuple(_fall(both, which, seen, [cells, *others], row) for which in (0, 1))
    return found


def _fall(both: Both, which: int, seen: Seen, parts: Sequence[Bools], row: Row) -> float:
    here, *there = hidden_probabilities(both, which, seen, parts, row.classes[which])
    return float(np.mean(there)) - here


def _place(group: list[Row], appeared: bool, cells: Bools | None, falls: Falls, seed: int) -> Place:
    sign = 1 if appeared else -1
    parts = {row.item.name: cells_of(row, appeared) if cells is None else cells for row in group}

    def share(row: Row, which: int) -> float:
        return (row.a, row.b)[which].probability * float(row.grids[which][parts[row.item.name]].sum())

    def fall(row: Row, which: int) -> float | None:
        return falls[row.item.name][which] if row.item.name in falls else None

    def excess(row: Row) -> float | None:
        found = falls.get(row.item.name)
        return None if found is None else sign * (found[1] - found[0])

    covered = [
        _on_object(row.object, sign * row.change * parts[row.item.name]) for row in group if row.object is not None
    ]
    return Place(
        name=group[0].name,
        appeared=appeared,
        cells=cells,
        before=float(np.mean([share(row, 0) for row in group])),
        after=float(np.mean([share(row, 1) for row in group])),
        gain=estimated(group, lambda row: sign * (share(row, 1) - share(row, 0)), seed=seed),
        falls=(
            estimated(group, lambda row: fall(row, 0), seed=seed),
            estimated(group, lambda row: fall(row, 1), seed=seed),
        ),
        excess=estimated(group, excess, seed=seed),
        on_object=float(np.mean(covered)) if covered else None,
        rows=tuple(sorted(group, key=lambda row: -sign * (share(row, 1) - share(row, 0)))),
    )


def _on_object(covered: Floats, change: Floats) -> float:
    """Of the evidence that came to a place, the share that lies on the object."""
    came = np.maximum(change, 0)
    return float((came * covered).sum() / came.sum()) if came.sum() > 0 else 0.0


def cells_of(row: Row, appeared: bool) -> Bools:
    """Where the evidence of a picture grew most from A to B, or from B to A."""
    return strongest_gain(row.change * (1 if appeared else -1))
