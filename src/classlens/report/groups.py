"""Groups of pictures of a class whose evidence lies at a place where the others have none.

Twenty pictures that a watermark decides are lost among two hundred in every mean. Here the maps of a class are
clustered (spectral.py), and a group is shown if its evidence gathers at a place that the rest of the class does not
use. The place is hidden in the pictures of the group, to see whether it decides.

>>> groups(subject, collected.records, seed=0, progress=silent)[0].text
'5 of 100 pictures predicted as dog have 48 % of their evidence in the bottom-left (the others 2 %). ...'
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from classlens.progress import Progress
from classlens.report.alike import alike_somewhere
from classlens.report.collect import Record, Subject
from classlens.report.draw import Drawn
from classlens.report.entries import Figure
from classlens.report.hide import hide
from classlens.report.measure import Bools, Floats, pixels
from classlens.report.spectral import clusters, described
from classlens.report.spots import central, connected, elsewhere, ninth, smoothed
from classlens.report.words import Finding, count, percent

Looks = NDArray[np.float16]  # (n,3,32,32), the pictures

LEAST = 20  # pictures of a class: fewer are not clustered
SMALLEST = 3  # pictures of a group
STANDS_OUT = 0.15  # of the evidence: what a group has at its place beyond what the others have there
MOST_OTHERS = 0.25  # of what the group has at its place: what the others may have there on average
ALIKE = 0.4  # mean likeness of the pictures of a group where they have evidence
GAPS = 3  # numbers of groups that are tried: those of the largest eigengaps
DECIDES = 0.1  # of the probability: what hiding the place costs beyond hiding as much elsewhere
EXAMPLES = 6
_TESTED = 20  # pictures of a group in which its place is hidden
_EVEN = 2.0  # times an even share: cells with less of a gain are no part of a place


@dataclass(frozen=True)
class Cluster:
    """A group that stands out, among the maps of one class."""

    members: tuple[int, ...]  # those with most evidence at the place first
    cells: Bools  # (16,16), the place
    share: float  # mean share of the evidence at the place, in the group
    others: float  # and among the other pictures
    on_object: float | None  # of the evidence at the place; None without masks


@dataclass(frozen=True)
class Group:
    """A group of pictures of one class, and what hiding its place costs."""

    predicted: int
    name: str  # of the class
    records: tuple[Record, ...]
    cluster: Cluster
    of: int  # pictures of the class
    whole: float  # mean probability of the class,
    hidden: float  # without the place,
    elsewhere: float  # and without as much elsewhere

    @property
    def decides(self) -> bool:
        """Whether hiding the place costs much more than hiding as much elsewhere."""
        return self.elsewhere - self.hidden >= DECIDES

    @property
    def alarming(self) -> bool:
        """Whether the place decides although it is hardly the object."""
        return self.decides and off_object(self.cluster)

    @property
    def title(self) -> str:
        return f"{self.name}: {len(self.records)} of {count(self.of, 'picture')}, {ninth(self.cluster.cells)}"

    @property
    def text(self) -> str:
        """Where the evidence of the group lies, and what that place is worth."""
        place = ninth(self.cluster.cells)
        text = (
            f"{len(self.records)} of {count(self.of, 'picture')} predicted as {self.name} have "
            f"{percent(self.cluster.share)} of their evidence at a place in the {place} (the others "
            f"{percent(self.cluster.others)}). Hiding it lowers the probability from {percent(self.whole)} to "
            f"{percent(self.hidden)}; hiding as much elsewhere, to {percent(self.elsewhere)}."
        )
        if self.cluster.on_object is not None:
            text += f" {percent(self.cluster.on_object)} of the evidence there lies on the object."
        if self.alarming:
            return f"{text} Something other than the object may decide these pictures: look at them."
        return text if self.decides else f"{text} The place matters little."


@dataclass(frozen=True)
class GroupEntry:
    """A group on the page: six pictures, and below them their maps."""

    title: str
    photos: tuple[Figure, ...]
    maps: tuple[Figure, ...]
    text: str
    flag: bool


def group_entry(group: Group, drawn: Mapping[str, Drawn]) -> GroupEntry:
    """The examples with most of their evidence at the place."""
    shown = group.records[:EXAMPLES]
    photos = tuple(Figure(drawn[record.item.name].photo, record.item.name) for record in shown)
    maps = tuple(Figure(drawn[record.item.name].map, f"{group.name} ", percent(record.confidence)) for record in shown)
    return GroupEntry(group.title, photos, maps, group.text, group.alarming)


def group_examples(found: Sequence[Group]) -> dict[str, tuple[Record, list[int]]]:
    """The pictures that the page shows of each group, by name, each with further classes to explain: none."""
    return {record.item.name: (record, []) for group in found for record in group.records[:EXAMPLES]}


def group_findings(found: Sequence[Group]) -> list[Finding]:
    """A finding for each group that alarms, at most three."""
    return [
        Finding(
            str(len(group.records)), f"a group: {group.name}, {ninth(group.cluster.cells)}", group.text, "groups", True
        )
        for group in found
        if group.alarming
    ][:3]


def groups(subject: Subject, records: Sequence[Record], seed: int, progress: Progress) -> list[Group]:
    """The groups of all classes with enough pictures; those that alarm come first, then the largest gain."""
    classes: defaultdict[int, list[Record]] = defaultdict(list)
    for record in records:
        if record.seen is not None:
            classes[record.predicted].append(record)
    jobs = [group for group in classes.values() if len(group) >= LEAST]
    found: list[Group] = []
    progress("groups", 0, len(jobs))
    for done, group in enumerate(jobs, 1):
        found += [_group(subject, group, cluster, seed) for cluster in stand_out(*_grids(group), seed)]
        progress("groups", done, len(jobs))
    return sorted(found, key=lambda one: (not one.alarming, not one.decides, one.cluster.others - one.cluster.share))


def stand_out(grids: Floats, looks: Looks, covered: Floats | None, seed: int = 0) -> list[Cluster]:
    """The minorities of maps (n,16,16) whose evidence gathers where the others have little, one for each place."""
    candidates = [
        cluster
        for inside in [*_divided(grids, looks, seed), *_at_one_place(grids, looks)]
        if (cluster := _cluster(grids, covered, inside)) is not None
    ]
    found: list[Cluster] = []
    for cluster in sorted(candidates, key=lambda one: one.others - one.share):
        if not any((cluster.cells & other.cells).any() for other in found):
            found.append(cluster)
    return found


def _divided(grids: Floats, looks: Looks, seed: int) -> list[Bools]:
    """Groups of pictures that are alike as a whole, where they have evidence."""
    vectors = described(grids, looks)
    found = [labels == label for labels in clusters(vectors, seed, gaps=GAPS) for label in range(int(labels.max()) + 1)]
    return [one for one in found if SMALLEST <= one.sum() <= len(grids) / 2 and _alike(vectors[one]) >= ALIKE]


def _at_one_place(grids: Floats, looks: Looks) -> list[Bools]:
    """Groups of pictures that are alike at one place with much of their evidence, however few they are."""
    return [np.isin(np.arange(len(grids)), chosen) for chosen in alike_somewhere(grids, looks, SMALLEST)]


def _alike(vectors: Floats) -> float:
    """The mean likeness of the pairs of a group."""
    count = len(vectors)
    return float(((vectors @ vectors.T).sum() - count) / (count * (count - 1)))


def off_object(cluster: Cluster) -> bool:
    """Whether most of the evidence at the place is not on the object; without masks, whether it is off the middle."""
    return not central(cluster.cells) if cluster.on_object is None else cluster.on_object < 0.5


def _cluster(grids: Floats, covered: Floats | None, inside: Bools) -> Cluster | None:
    gain = smoothed(grids[inside].mean(0) - grids[~inside].mean(0))
    chosen = gain > _EVEN / gain.size
    if not chosen.any():
        return None
    cells = max(connected(chosen), key=lambda part: float(gain[part].sum()))
    shares = grids[:, cells].sum(1)
    members = np.flatnonzero(inside)
    on_object = None
    if covered is not None:
        there = grids[inside][:, cells]
        on_object = float((there * covered[inside][:, cells]).sum() / there.sum())
    share, others = float(shares[inside].mean()), float(shares[~inside].mean())

    if share - others < STANDS_OUT or others > MOST_OTHERS * share:
        return None
    return Cluster(
        members=tuple(members[np.argsort(-shares[members], kind="stable")].tolist()),
        cells=cells,
        share=share,
        others=others,
        on_object=on_object,
    )


def _grids(records: Sequence[Record]) -> tuple[Floats, Looks, Floats | None]:
    grids, looks = zip(*((record.seen.grid, record.seen.look) for record in records if record.seen), strict=True)
    covered = [record.seen.covered for record in records if record.seen and record.seen.covered is not None]
    return np.stack(grids), np.stack(looks), np.stack(covered) if len(covered) == len(records) else None


@torch.no_grad()
def _group(subject: Subject, records: Sequence[Record], cluster: Cluster, seed: int) -> Group:
    """Hide the place of a group in its pictures, and the same shape elsewhere."""
    members = [records[index] for index in cluster.members]
    parts = [cluster.cells, *elsewhere(cluster.cells, 3, seed)]
    left = []
    for record in members[:_TESTED]:
        image, _ = subject.read(record.item)
        masks = torch.from_numpy(np.stack([pixels(part, (image.shape[1], image.shape[2])) for part in parts]))
        images = hide(image.expand(len(parts), -1, -1, -1), masks)
        left.append(subject.probabilities(subject.network.forward(images))[:, record.predicted].numpy())
    without, *others = np.mean(left, 0)
    return Group(
        predicted=members[0].predicted,
        name=subject.name(members[0].predicted),
        records=tuple(members),
        cluster=cluster,
        of=len(records),
        whole=float(np.mean([record.confidence for record in members[:_TESTED]])),
        hidden=float(without),
        elsewhere=float(np.mean(others)),
    )
