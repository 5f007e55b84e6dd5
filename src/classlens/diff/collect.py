"""Runs two networks over the same pictures: what each predicts, and where each finds the class in question.

A row is one class of one picture. The classes in question are those that the two networks predict (one row if they
agree), or those that the user names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from classlens.data.layouts import Item
from classlens.data.masks import IGNORE, Mask
from classlens.diff.frames import Frame
from classlens.diff.pairs import Classes
from classlens.errors import ImageError, ModelError, NotFiniteError
from classlens.progress import Progress
from classlens.report import measure
from classlens.report.collect import Subject
from classlens.report.hide import as_many_others, hide
from classlens.report.measure import Bools, Floats
from classlens.report.spots import smoothed
from classlens.report.truth import Labels

if TYPE_CHECKING:
    from classlens.diff.kept import Kept

GAINED = 0.05  # of the picture: the cells to which most of the evidence moved
_NO_EVIDENCE = "one of the maps holds no evidence for the class"
_NOT_FINITE = "a map holds NaN or infinite values"


@dataclass(frozen=True)
class Side:
    """What one network finds: shares of its evidence for the class, in [0,1], and probabilities."""

    probability: float  # of the class
    border: float  # in the outer tenth of what both networks see
    half: float  # of the picture: the smallest part that holds half of the evidence
    against: float  # of all evidence
    elsewhere: float  # outside of what both networks see
    inside: float | None = None  # on the object; None without a mask
    without_gained: float = 0.0  # probability without the cells that B marks more strongly than A,
    without_lost: float = 0.0  # without those that A marks more strongly than B,
    without_others: float = 0.0  # and without as many other cells


@dataclass(frozen=True)
class Row:
    """One class of one picture, for two networks A and B."""

    item: Item
    name: str  # of the class
    classes: tuple[int, int]  # its outputs in A and in B
    predicted: tuple[str, str]  # by A and by B
    right: tuple[bool, bool] | None  # None if the label is not known to both
    a: Side
    b: Side
    grids: tuple[Floats, Floats]  # (16,16) shares of the evidence
    correlation: float  # of the cells, with their sign
    overlap: float  # of the evidence for the class
    object: Floats | None = None  # (16,16): which share of each cell the object covers

    @property
    def change(self) -> Floats:
        """(16,16): what B finds more of in each cell than A: the evidence, counted with the probability of the class.

        A map of a class that a network does not find still lies somewhere, and must not count as much.
        """
        return weighted_change(self.grids, (self.a.probability, self.b.probability))

    @property
    def moved(self) -> float:
        """The share of the evidence that lies in other cells in B than in A."""
        return 1 - self.overlap


@dataclass(frozen=True)
class Found:
    """What was found in one picture."""

    rows: tuple[Row, ...] = ()
    skipped: str = ""  # why it has no row
    without_mask: str = ""  # why its mask could not be read
    unshared: tuple[bool, bool] = (False, False)  # whether A, or B, predicts a class that the other does not have


@dataclass(frozen=True)
class Collected:
    """All rows, and what could not be compared."""

    rows: tuple[Row, ...]
    skipped: dict[str, str] = field(default_factory=dict)  # picture -> why it has no row
    without_mask: dict[str, str] = field(default_factory=dict)  # picture -> why its mask could not be read
    unshared: tuple[int, int] = (0, 0)  # pictures that A, or B, predicts as a class that the other does not have

    @classmethod
    def of(cls, found: Mapping[str, Found]) -> Collected:
        """The findings of all pictures together, in their order."""
        return cls(
            rows=tuple(row for one in found.values() for row in one.rows),
            skipped={name: one.skipped for name, one in found.items() if one.skipped},
            without_mask={name: one.without_mask for name, one in found.items() if one.without_mask},
            unshared=(sum(one.unshared[0] for one in found.values()), sum(one.unshared[1] for one in found.values())),
        )


@dataclass(frozen=True)
class Both:
    """Two networks on the same data, by the same method."""

    a: Subject
    b: Subject
    shared: Classes
    asked: tuple[int, ...] = ()  # outputs of A that the user names; nothing: what the networks predict

    @property
    def sides(self) -> tuple[Subject, Subject]:
        return self.a, self.b


@dataclass(frozen=True)
class Told:
    """What there is to tell of the pictures of a batch, by their names; see `Found`."""

    skipped: dict[str, str] = field(default_factory=dict)
    without_mask: dict[str, str] = field(default_factory=dict)
    unshared: dict[str, tuple[bool, bool]] = field(default_factory=dict)


@dataclass(frozen=True)
class Seen:
    """One picture as both networks read it."""

    item: Item
    picture: Image.Image
    frame: Frame
    images: tuple[Tensor, Tensor]


def collect(both: Both, items: Sequence[Item], batch_size: int, progress: Progress, kept: Kept) -> Collected:
    """The rows of every picture that can be read and explained by both networks; an earlier run's are taken over."""
    found = kept.read(items)
    left = [item for item in items if item.name not in found]
    for start in range(0, len(left), batch_size):
        progress("pictures", len(items) - len(left) + start, len(items))
        some = left[start : start + batch_size]
        new = _found(both, some)
        kept.add(zip(some, new, strict=True))
        found |= {item.name: one for item, one in zip(some, new, strict=True)}
    progress("pictures", len(items), len(items))
    return Collected.of({item.name: found[item.name] for item in items})


def _found(both: Both, items: Sequence[Item]) -> list[Found]:
    """What both networks find in each of a few pictures."""
    told = Told()
    batch = list(_readable(both, items, told.skipped))
    _check_sizes(batch)
    rows = list(_rows(both, batch, told)) if batch else []
    return [
        Found(
            tuple(row for row in rows if row.item.name == item.name), told.skipped.get(item.name, ""),
            told.without_mask.get(item.name, ""), told.unshared.get(item.name, (False, False)),
        )
        for item in items
    ]  # fmt: skip


def read(both: Both, item: Item) -> Seen:
    """A picture as both networks read it."""
    image, picture = both.a.read(item)
    frame = Frame.of(both.a.model.preprocess, both.b.model.preprocess, picture)
    return Seen(item, picture, frame, (image, both.b.model.preprocess(picture)))


def _readable(both: Both, items: Sequence[Item], skipped: dict[str, str]) -> Iterator[Seen]:
    for item in items:
        try:
            yield read(both, item)
        except ImageError as error:
            skipped[item.name] = both.a.dataset.why(error)


def _check_sizes(batch: Sequence[Seen]) -> None:
    if any(len({seen.images[which].shape for seen in batch}) > 1 for which in (0, 1)):
        raise ModelError("a model accepts images of any size, so they cannot form a batch; use --batch-size 1")


def _rows(both: Both, batch: Sequence[Seen], told: Told) -> Iterator[Row]:
    images = [torch.stack([seen.images[which] for seen in batch]) for which in (0, 1)]
    logits = [side.network.forward(x) for side, x in zip(both.sides, images, strict=True)]
    asked = [_asked(both, seen, logits, row, told) for row, seen in enumerate(batch)]
    kept = [row for row, classes in enumerate(asked) if classes]
    for row in set(range(len(batch))) - set(kept):
        told.skipped[batch[row].item.name] = "each network predicts a class that the other does not have"
    if not kept:
        return
    most = max(len(asked[row]) for row in kept)
    full = [[asked[row][min(k, len(asked[row]) - 1)] for k in range(most)] for row in kept]
    try:
        maps = [
            side.explain(images[which][kept], [[pair[which] for pair in pairs] for pairs in full]).maps
            for which, side in enumerate(both.sides)
        ]
    except torch.OutOfMemoryError as error:
        raise ModelError(f"out of memory; use a smaller --batch-size than {len(batch)}") from error
    except NotFiniteError:
        if len(batch) > 1:  # one bad picture must not affect the others
            for single in batch:
                yield from _rows(both, [single], told)
        else:
            told.skipped[batch[0].item.name] = _NOT_FINITE
        return
    for position, row in enumerate(kept):
        for k, pair in enumerate(asked[row]):
            evidence = tuple(one[position, k].cpu().double().numpy() for one in maps)
            found = _row(both, batch[row], pair, (evidence[0], evidence[1]), logits, row, told.without_mask)
            if found is None:
                told.skipped.setdefault(batch[row].item.name, _NO_EVIDENCE)
            else:
                yield found


def _asked(both: Both, seen: Seen, logits: Sequence[Tensor], row: int, told: Told) -> list[tuple[int, int]]:
    """The classes in question of a picture, as pairs of outputs."""
    if both.asked:
        return [(index, both.shared.to_b[index]) for index in both.asked]
    first, second = (int(one[row].argmax()) for one in logits)
    back = both.shared.to_a.get(second)
    told.unshared[seen.item.name] = (first not in both.shared.to_b, back is None)
    found = [index for index in (first, back) if index in both.shared.to_b]
    return [(index, both.shared.to_b[index]) for index in dict.fromkeys(found)]


def _row(
    both: Both, seen: Seen, pair: tuple[int, int], evidence: tuple[Floats, Floats], logits: Sequence[Tensor], row: int,
    without_mask: dict[str, str],
) -> Row | None:  # fmt: skip
    one, other = (measure.positive_shares(found) for found in evidence)
    if one is None or other is None:
        return None
    sums = [seen.frame.cells(which, share) for which, share in enumerate((one, other))]
    if not all(found.sum() > 0 for found in sums):  # all of it lies where the other network does not look
        return None
    grids = (sums[0] / sums[0].sum(), sums[1] / sums[1].sum())
    signed = [seen.frame.cells(which, found) for which, found in enumerate(evidence)]
    probabilities = [side.probabilities(x)[row] for side, x in zip(both.sides, logits, strict=True)]
    found = (float(probabilities[0][pair[0]]), float(probabilities[1][pair[1]]))
    parts = _parts(both, seen, weighted_change(grids, found))
    masks = [_mask(both, which, seen, pair[which], without_mask) for which in (0, 1)]
    sides = [
        _side(both, which, seen, parts, pair, found[which], share, evidence[which], masks[which])
        for which, share in enumerate((one, other))
    ]
    said = tuple(side.name(int(one.argmax())) for side, one in zip(both.sides, probabilities, strict=True))
    return Row(
        item=seen.item,
        name=both.a.name(pair[0]),
        classes=pair,
        predicted=(said[0], said[1]),
        right=_right(both, seen.item, masks, probabilities),
        a=sides[0],
        b=sides[1],
        grids=grids,
        correlation=_correlation(*signed),
        overlap=float(np.minimum(*grids).sum()),
        object=None if masks[0] is None else _coverage(seen.frame, masks[0]),
    )


def _parts(both: Both, seen: Seen, change: Floats) -> list[Bools]:
    """What is hidden in a picture: where B found more, where A did, and as many other cells."""
    gained, lost = strongest_gain(change), strongest_gain(-change)
    return [gained, lost, as_many_others(gained | lost, both.a.seed, seen.item.name)]


def _side(
    both: Both, which: int, seen: Seen, parts: Sequence[Bools], pair: tuple[int, int], probability: float,
    share: Floats, evidence: Floats, mask: Mask | None,
) -> Side:  # fmt: skip
    without = hidden_probabilities(both, which, seen, parts, pair[which])
    return Side(
        probability=probability,
        border=seen.frame.border(which, share),
        half=float(measure.half_cells(seen.frame.cells(which, share)).mean()),
        against=measure.against(evidence),
        elsewhere=seen.frame.outside(which, share),
        inside=_inside(seen, which, share, mask),
        without_gained=without[0],
        without_lost=without[1],
        without_others=without[2],
    )


def weighted_change(grids: tuple[Floats, Floats], probabilities: tuple[float, float]) -> Floats:
    """The evidence of B minus that of A, each counted with the probability of the class."""
    return probabilities[1] * grids[1] - probabilities[0] * grids[0]


def strongest_gain(change: Floats) -> Bools:
    """The cells that gained most, with their neighbours: a twentieth of the picture.

    >>> strongest_gain(np.eye(16)).sum()
    13
    """
    order = np.argsort(-smoothed(change), axis=None, kind="stable")
    chosen = np.zeros(change.size, bool)
    chosen[order[: max(1, round(GAINED * change.size))]] = True
    return chosen.reshape(change.shape)


@torch.no_grad()
def hidden_probabilities(both: Both, which: int, seen: Seen, parts: Sequence[Bools], output: int) -> list[float]:
    """The probability of a class without each part of the grid, by one network."""
    side, image = both.sides[which], seen.images[which]
    shape = (image.shape[1], image.shape[2])
    masks = torch.from_numpy(np.stack([seen.frame.hidden(which, part, shape) for part in parts]))
    images = hide(image.expand(len(parts), -1, -1, -1), masks)
    found: list[float] = side.probabilities(side.network.forward(images))[:, output].tolist()
    return found


# ------------------------------------------------------------------------------------------------ masks and labels


def _mask(both: Both, which: int, seen: Seen, output: int, without_mask: dict[str, str]) -> Mask | None:
    """Where the object is, in a network's own input."""
    side = both.sides[which]
    try:
        mask = side.mask(seen.item, seen.picture)
    except ImageError as error:
        without_mask[seen.item.name] = side.dataset.why(error)
        return None
    if mask is None:
        return None
    return Labels(side.dataset, side.model.labels, side.network.classes).object_mask(mask, output)


def _inside(seen: Seen, which: int, share: Floats, mask: Mask | None) -> float | None:
    """The share of the evidence on the object, in the part that both networks see."""
    if mask is None:
        return None
    everything = np.ones((measure.CELLS, measure.CELLS), bool)
    common = seen.frame.hidden(which, everything, (share.shape[0], share.shape[1]))
    area = measure.area(np.where(common, mask, IGNORE).astype(np.uint8))
    return measure.inside(share * common, mask) if area and area < 1 else None


def _coverage(frame: Frame, mask: Mask) -> Floats:
    """Which share of each cell's labelled pixels the object covers."""
    known = np.asarray(mask != IGNORE)
    labelled, covered = frame.cells(0, known), frame.cells(0, known & (mask > 0))
    return np.asarray(np.divide(covered, labelled, out=np.zeros_like(covered), where=labelled > 0))


def _right(
    both: Both, item: Item, masks: Sequence[Mask | None], probabilities: Sequence[Tensor]
) -> tuple[bool, bool] | None:
    """Whether each network is right; None if the label is not a class of both."""
    found = []
    for which, side in enumerate(both.sides):
        outputs = Labels(side.dataset, side.model.labels, side.network.classes).truth(item, None).outputs
        if not outputs:
            return None
        found.append(int(probabilities[which].argmax()) in outputs)
    return found[0], found[1]


def _correlation(one: Floats, other: Floats) -> float:
    """Of two grids; 0 if one of them is constant."""
    if one.std() == 0 or other.std() == 0:
        return 0.0
    return float(np.corrcoef(one.ravel(), other.ravel())[0, 1])
