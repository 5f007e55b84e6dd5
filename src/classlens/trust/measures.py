"""The tests of one map, on the network that it explains. Each is a number; verdict.py says what it means.

Maps are compared on a grid of 16 x 16 cells, so that the noise of single pixels does not decide.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from classlens.core.capture import record
from classlens.errors import ClasslensError
from classlens.evaluate.tests.perturbation import blurred, ranks
from classlens.evaluate.tests.repeatability import CHANGES, moved_back
from classlens.evaluate.tests.sanity import cascade, correlation, layers
from classlens.methods import METHODS
from classlens.progress import ticker
from classlens.render.words import halves, one_sided, shares
from classlens.report.hide import hide
from classlens.report.measure import Bools, Floats, cells, half_cells, pixels, positive_shares
from classlens.report.spots import elsewhere, ninth
from classlens.trust.subject import Subject

AREAS = (0.15, 0.3)  # of the picture: how much is removed or kept
ELSEWHERE = 2  # other places of the same shape, for each area
OTHERS = ("agf", "gradcam", "lrp", "gradient-x-input")  # whose maps are compared: two of other families
_FAMILIES = 2

T = TypeVar("T")
Interval = tuple[float, float, float]  # of this map, the least and the most over the changed pictures


@dataclass(frozen=True)
class Places:
    """An interval for each cell of the grid: the least and the most share of the evidence over the changed pictures."""

    low: Floats  # (16,16), signed shares of all evidence
    high: Floats

    @property
    def certainty(self) -> Floats:
        """(16,16) in [0,1]: the weakest share of a cell over its strongest; 0 where even the sign changes."""
        weak, strong = np.minimum(abs(self.low), abs(self.high)), np.maximum(abs(self.low), abs(self.high))
        return np.where((self.low * self.high > 0) & (strong > 0), weak / np.maximum(strong, 1e-300), 0.0)


@dataclass(frozen=True)
class Measures:
    """What the tests found; NaN where a test could not be run, with the reason in `missing`."""

    spread: float  # of the picture: the smallest part that holds half of the evidence; NaN without evidence
    signal: float  # how much more of the class there is than in pictures without content, in units of the logits
    removed: float = math.nan  # of that: what is left without the marked places,
    removed_elsewhere: float = math.nan  # and without as much elsewhere
    kept: float = math.nan  # what the marked places hold on their own,
    kept_elsewhere: float = math.nan  # and as much elsewhere
    excess: float = math.nan  # the most that any altered picture holds of it; above 1, hiding adds to the class
    correspondence: float = math.nan  # correlation of what is lost without each quarter with the evidence there
    missed: str = ""  # the quarter that matters most beyond its evidence
    stability: float = math.nan  # mean correlation with the maps of the changed pictures
    changes: dict[str, float] = field(default_factory=dict)  # the same for each change
    shuffled: float = math.nan  # absolute correlation with the map of a network with shuffled weights
    others: dict[str, float] = field(default_factory=dict)  # correlation with maps by methods of other families
    conservation: float = math.nan
    arrived: float = math.nan
    missing: dict[str, str] = field(default_factory=dict)
    places: Places | None = None
    where: dict[str, Interval] = field(default_factory=dict)  # shares of the evidence: half, ninth, and against

    @property
    def removal(self) -> float:
        """How much more is lost without the marked places than without as much elsewhere."""
        return self.removed_elsewhere - self.removed

    @property
    def sufficiency(self) -> float:
        """How much more the marked places hold on their own than as much elsewhere."""
        return self.kept - self.kept_elsewhere

    @property
    def agreement(self) -> float:
        """The mean correlation with methods of other families; NaN unless two could be compared."""
        return sum(self.others.values()) / _FAMILIES if len(self.others) == _FAMILIES else math.nan


def measured(subject: Subject, seed: int = 0) -> Measures:
    """Run all tests; without any evidence in the map there is nothing to test."""
    tick = ticker(4, "trust")
    share = positive_shares(subject.evidence)
    whole, *empty = subject.scores(torch.cat([subject.image, _without_content(subject)]))
    nothing = sum(empty) / len(empty)
    signal = float(whole - nothing)
    if share is None:
        return Measures(math.nan, signal)
    grid = cells(share)
    found: dict[str, Any] = {"spread": float(half_cells(grid).mean()), "signal": signal}
    missing: dict[str, str] = {}
    if whole > nothing:  # otherwise there is nothing of the class to lose or to keep
        found |= removal(subject, grid, float(whole), float(nothing), seed)
        found |= correspondence(subject, grid)
    tick()
    changes, places, where = _tried("stability", lambda: stability(subject), missing) or ({}, None, {})
    tick()
    shuffled = _tried("shuffled", lambda: shuffled_likeness(subject, seed), missing)
    tick()
    others = agreement(subject, missing)
    tick()
    return Measures(
        **found,
        stability=float(np.mean(list(changes.values()))) if changes else math.nan,
        changes=changes,
        shuffled=math.nan if shuffled is None else shuffled,
        others=others,
        conservation=subject.conservation,
        arrived=subject.arrived,
        missing=missing,
        places=places,
        where=where,
    )


def _tried(name: str, test: Callable[[], T], missing: dict[str, str]) -> T | None:
    """The result of a test, or None with the reason in `missing`: a map that cannot be tested is not trusted."""
    try:
        return test()
    except ClasslensError as error:
        missing[name] = str(error)
        return None


def _without_content(subject: Subject) -> torch.Tensor:
    """The picture blurred, which keeps its colours, and a plain grey of its brightness, which keeps nothing else."""
    grey = subject.to_input(subject.picture.mean().expand_as(subject.picture))
    return torch.cat([blurred_out(subject.image), grey])


# ------------------------------------------------------------------------------------------- removal and sufficiency


def removal(subject: Subject, grid: Floats, whole: float, nothing: float, seed: int) -> dict[str, float]:
    """What is left of the class without the marked places and with them alone; the same for as much elsewhere.

    Everything is a share of what the picture has above pictures without content: 1 is the whole picture, 0 is nothing.
    Elsewhere, what is left counts as at most 1, and what is kept as at least 0: a distraction there is no merit here.
    """
    height, width = subject.image.shape[2:]
    chosen = [marked(grid, area, seed) for area in AREAS]
    places = [pixels(cell, (height, width)) for one in chosen for cell in (one, *elsewhere(one, ELSEWHERE, seed))]
    masks = torch.from_numpy(np.stack(places)).to(subject.image.device)
    images = subject.image.expand(len(masks), -1, -1, -1)
    # What is removed is filled from around it. What is kept must not colour the rest, which is blurred as it is.
    alone = torch.where(masks[:, None], images, blurred_out(subject.image))
    scores = subject.scores(torch.cat([hide(images, masks), alone]))
    left = ((scores - nothing) / (whole - nothing)).reshape(2, len(AREAS), 1 + ELSEWHERE)
    return {
        "removed": float(left[0, :, 0].mean()),
        "removed_elsewhere": float(np.minimum(left[0, :, 1:], 1).mean()),
        "kept": float(left[1, :, 0].mean()),
        "kept_elsewhere": float(np.maximum(left[1, :, 1:], 0).mean()),
        "excess": float(left.max()),
    }


def correspondence(subject: Subject, grid: Floats) -> dict[str, Any]:
    """Does the class lose most where the map shows most? Nine quarters of the picture are hidden, one at a time.

    A place that the map leaves out costs more than its evidence says, whatever the marked places are worth.
    """
    quarters = windows(grid.shape)
    height, width = subject.image.shape[2:]
    masks = torch.from_numpy(np.stack([pixels(cells, (height, width)) for cells in quarters]))
    images = subject.image.expand(len(masks), -1, -1, -1)
    lost = _standard(-subject.scores(hide(images, masks.to(images.device))))
    evidence = _standard(np.array([grid[cells].sum() for cells in quarters]))
    missed = int(np.argmax(lost - evidence))
    return {"correspondence": float((lost * evidence).mean()), "missed": ninth(quarters[missed])}


def _standard(values: Floats) -> Floats:
    """Less their mean, in units of their standard deviation; 0 if all are equal."""
    spread = values.std()
    return np.asarray((values - values.mean()) / spread if spread > 1e-9 * abs(values).max() else 0 * values)


def windows(shape: tuple[int, ...]) -> list[Bools]:
    """Nine windows of half the height and width each, which overlap: small things lie whole in at least one.

    >>> [int(one[:4, :4].sum()) for one in windows((16, 16))]
    [16, 0, 0, 0, 0, 0, 0, 0, 0]
    """
    height, width = (-(-size // 2) for size in shape)
    found = []
    for top in (0, (shape[0] - height) // 2, shape[0] - height):
        for left in (0, (shape[1] - width) // 2, shape[1] - width):
            window = np.zeros(shape, bool)
            window[top : top + height, left : left + width] = True
            found.append(window)
    return found


def blurred_out(image: torch.Tensor) -> torch.Tensor:
    """The image without shapes: only its colours are left, roughly where they were."""
    return blurred(image, sigma=min(image.shape[2:]) / 10)


def marked(grid: Floats, area: float, seed: int) -> Bools:
    """The cells with the most evidence, this share of all; ties are broken at random, not by position."""
    count = max(1, round(area * grid.size))
    order = ranks(torch.from_numpy(grid)[None], seed)[0].numpy()
    return np.asarray(order >= grid.size - count)


# ------------------------------------------------------------------------------------------------- similar maps


def stability(subject: Subject) -> tuple[dict[str, float], Places, dict[str, Interval]]:
    """Correlation with the maps of changed pictures, and intervals over them: of each cell, and of the summary."""
    changed = [subject.to_input(change(subject.picture)) for change in CHANGES.values()]
    maps = torch.from_numpy(subject.explain(subject.network, torch.cat(changed)))
    first = torch.from_numpy(subject.evidence)[None]
    pairs = [moved_back(name, first, maps[i : i + 1]) for i, name in enumerate(CHANGES)]
    found = {name: alike(one[0].numpy(), two[0].numpy()) for name, (one, two) in zip(CHANGES, pairs, strict=True)}
    back = [subject.evidence, *(_as_before(name, maps[i], first[0].shape) for i, name in enumerate(CHANGES))]
    grids = [_shares(evidence) for evidence in back]
    return found, Places(np.nanmin(grids, 0), np.nanmax(grids, 0)), _summary(back)


def _summary(maps: list[Floats]) -> dict[str, Interval]:
    """What the summary of the map says (`render.where`), with an interval over all maps.

    The shares of the half of the picture that it names, of the strongest ninth, and of the evidence against the class.
    """
    known = [np.nan_to_num(evidence) for evidence in maps]
    ninths, against = zip(*(shares(evidence) for evidence in known), strict=True)
    strongest, side = max(ninths[0], key=ninths[0].__getitem__), one_sided(known[0])
    rows = {} if side is None else {f"{side[0]} half": [halves(evidence)[side[0]] for evidence in known]}
    rows |= {strongest: [ninth.get(strongest, 0.0) for ninth in ninths], "against": list(against)}
    return {name: (values[0], min(values), max(values)) for name, values in rows.items()}


def _as_before(change: str, evidence: torch.Tensor, shape: tuple[int, ...]) -> Floats:
    """The map of a changed picture at the places of the first; NaN where a shift moved them out of the picture."""
    back = moved_back(change, evidence[None], evidence[None])[1][0].numpy()
    whole = np.full(shape, np.nan)
    whole[: back.shape[0], : back.shape[1]] = back
    return whole


def _shares(evidence: Floats) -> Floats:
    """The cells of a map as signed shares of all its evidence; NaN for cells that lie partly outside."""
    size = np.nansum(np.abs(evidence))
    return cells(evidence / size if size > 0 else evidence)


def shuffled_likeness(subject: Subject, seed: int) -> float:
    """The likeness to the map of the same network with shuffled weights; near 1, the map ignores the network."""
    names = layers(subject.network, record(subject.network, subject.image, subject.output))
    (network,) = cascade(subject.network, names, seed, stages=(1.0,))
    return abs(alike(subject.evidence, subject.explain(network, subject.image)[0]))


def agreement(subject: Subject, missing: dict[str, str]) -> dict[str, float]:
    """The likeness to the maps of two methods of other families."""
    found: dict[str, float] = {}
    failed: list[str] = []
    families = {subject.family}
    for name in OTHERS:
        if METHODS[name].family in families or len(found) == _FAMILIES:
            continue
        try:
            found[name] = alike(subject.evidence, subject.other(name))
            families.add(METHODS[name].family)
        except ClasslensError as error:
            failed.append(f"{name}: {error}")
    if len(found) < _FAMILIES:
        missing["agreement"] = "; ".join(failed)
    return found


def alike(one: Floats, other: Floats) -> float:
    """The correlation of two maps' cells; 0 if one of them is constant."""
    grids = [torch.from_numpy(cells(np.asarray(evidence, np.float64)).reshape(1, -1)) for evidence in (one, other)]
    return float(correlation(grids[0], grids[1])[0])
