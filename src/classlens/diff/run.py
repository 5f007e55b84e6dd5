"""Compares two networks on the same pictures: read and measure, find places, draw, write."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from classlens.core.names import match
from classlens.data.layouts import open_dataset
from classlens.diff import words
from classlens.diff.collect import Both, Collected, Row, collect
from classlens.diff.draw import draw
from classlens.diff.frames import same_view
from classlens.diff.kept import Kept
from classlens.diff.measures import Condition, condition, measured
from classlens.diff.page import About, counted, page
from classlens.diff.pairs import matched
from classlens.diff.places import Place, places
from classlens.errors import DataError, TargetError, printable
from classlens.evaluate import SettingsError
from classlens.evaluate.manifest import versions
from classlens.evaluate.stats import Estimate
from classlens.files import write_text
from classlens.methods import check_options, resolve
from classlens.models import LoadedModel
from classlens.models.network import Network
from classlens.progress import Progress, silent
from classlens.report import batch_size_of
from classlens.report.collect import Subject
from classlens.report.draw import legend
from classlens.report.report import TOP_MOST
from classlens.report.words import Finding, count

SURE = 0.2  # the least probability of a class, by one of the networks, whose row is shown


@dataclass(frozen=True)
class Diff:
    """What changed between two networks, and the path of the page.

    `measures` has every measure with its interval, `places` where evidence gathered or vanished, `failed` the
    conditions that hold.
    """

    path: Path
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    measures: dict[str, Estimate]
    places: tuple[Place, ...]
    failed: tuple[str, ...]
    collected: Collected


def diff(
    a: LoadedModel,
    b: LoadedModel,
    data: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    classes: Sequence[str] = (),
    fail_if: Sequence[str] = (),
    method: str = "agf",
    limit: int | None = 200,
    seed: int = 0,
    top: int = 12,
    batch_size: int | None = None,
    progress: Progress = silent,
    command: Sequence[str] = (),
) -> Diff:
    """Explain the same pictures by two networks, and write a page about what changed from `a` to `b`.

    >>> made = diff(load("before/card.json"), load("after/card.json"), "photos", "diff.html")
    >>> made.measures["border"].value, made.places[0].shortcut
    (0.21, True)

    The networks may have different preprocessing and classes; classes match by name. `classes` are those in question,
    by default those that either network predicts. A stopped diff resumes from `diff.html.rows`.
    """
    begun, path = time.perf_counter(), _checked(out, top, method)
    conditions = [condition(text) for text in fail_if]
    both = _both(a, b, data, classes, method, seed)
    _check_conditions(conditions, both)
    items = both.a.dataset.select(limit, seed)
    kept = Kept(path, both)
    collected = _some(collect(both, items, batch_size or min(batch_size_of(a), batch_size_of(b)), progress, kept), kept)
    found = measured(collected.rows, seed)
    spots = places(both, collected.rows, seed, progress)
    checked = _held(conditions, found, spots, len(collected.rows))
    findings, notes = words.findings(collected, found, spots, _names(both)), _notes(both, collected)
    most = sorted(filter(_sure, collected.rows), key=_by_move)[:top]
    drawn = draw(both, [*most, *(place.rows[0] for place in spots[:top])], progress)
    about = _about(both, collected, notes, len(items), command, time.perf_counter() - begun)
    write_text(path, page(about, both, collected, found, spots[:top], most, drawn, findings, checked))
    kept.remove()
    failed = tuple(text for text, holds in checked if holds)
    return Diff(path, tuple(findings), notes, found, tuple(spots), failed, collected)


def _held(
    conditions: Sequence[Condition], found: dict[str, Estimate], spots: Sequence[Place], pictures: int
) -> list[tuple[str, bool]]:
    """Each condition, and whether it holds of what was measured and of the places that were found."""
    known = found | {name: Estimate(n, n, n, pictures) for name, n in counted(spots).items()}
    return [(one.text, one.holds(known)) for one in conditions]


def _sure(row: Row) -> bool:
    return max(row.a.probability, row.b.probability) >= SURE


def _checked(out: str | os.PathLike[str], top: int, method: str) -> Path:
    check_options(*resolve(method))
    path = Path(out)
    if path.is_dir():
        raise DataError(f"{path} is a folder: give a file name, such as {path / 'diff.html'}")
    if not 1 <= top <= TOP_MOST:
        raise SettingsError(f"a section cannot have {top} entries; give 1 to {TOP_MOST}")
    return path


def _some(collected: Collected, kept: Kept) -> Collected:
    if not collected.rows:
        kept.remove()  # there is nothing to resume
        name, why = next(iter(collected.skipped.items()))
        raise DataError(f"no picture could be compared; the first, {name}: {why}")
    return collected


def _by_move(row: Row) -> tuple[float, str]:
    return -row.moved, row.item.name


def _both(
    a: LoadedModel, b: LoadedModel, data: str | os.PathLike[str], classes: Sequence[str], method: str, seed: int
) -> Both:
    check_options(*resolve(method))
    dataset = open_dataset(data)
    one, other = Subject(a, dataset, method, seed), Subject(b, dataset, method, seed)
    shared = matched(a, b, one.network.classes, other.network.classes)
    for side in (one, other):
        if side.network.classes < 2:
            raise DataError(f"{side.model.name} has a single output; a diff needs at least two classes")
    asked = []
    for name in classes:
        index = match(a.labels, name) if a.labels else int(name) if name.isdigit() else -1
        if index not in shared.to_b:
            raise TargetError(f"{name!r} is not a class of both networks")
        asked.append(index)
    return Both(one, other, shared, tuple(dict.fromkeys(asked)))


def _check_conditions(conditions: Sequence[Condition], both: Both) -> None:
    """Refuse conditions on what the data cannot tell, before the work rather than after it."""
    for one in conditions:
        if one.measure == "off_object" and not both.a.dataset.has_masks:
            raise DataError(f"--fail-if {one.text!r} cannot be checked: the data have no masks")


def _names(both: Both) -> tuple[str, str]:
    """Short names of the networks; with a fingerprint if they are called the same."""
    ids = [Network(side.model).id for side in both.sides]
    first, second = (text.partition("@")[0] for text in ids)
    return (first, second) if first != second else (ids[0], ids[1])


def _notes(both: Both, collected: Collected) -> tuple[str, ...]:
    found = []
    one, other = (Network(side.model).id.partition("@")[2] for side in both.sides)
    if one == other:
        found.append("Both networks have the same weights and the same preprocessing: nothing can differ but the code.")
    if not same_view(both.a.model.preprocess, both.b.model.preprocess):
        a, b = (100 * sum(side) / len(collected.rows) for side in zip(
            *((row.a.elsewhere, row.b.elsewhere) for row in collected.rows), strict=True))  # fmt: skip
        found.append(
            "The networks see different parts of a picture: only what both see is compared. "
            f"A has {a:.0f} % of its evidence elsewhere, B {b:.0f} %."
        )
    for which, times in enumerate(collected.unshared):
        if times:
            mine, theirs = ("A", "B") if which == 0 else ("B", "A")
            found.append(f"{mine} predicts a class that {theirs} does not have for {count(times, 'picture')}.")
    if not both.a.dataset.has_masks:
        found.append("Without masks, a place counts as off the object if it lies outside of the middle of the picture.")
    if collected.skipped:
        found.append(f"{count(len(collected.skipped), 'picture')} could not be compared; they are named at the end.")
    if collected.without_mask:
        found.append(f"The masks of {count(len(collected.without_mask), 'picture')} could not be read; see the end.")
    return tuple(found)


def _about(
    both: Both, collected: Collected, notes: tuple[str, ...], asked: int, command: Sequence[str], seconds: float
) -> About:
    names, dataset, chosen = _names(both), both.a.dataset, resolve(both.a.method)[0]
    pictures = len({row.item.name for row in collected.rows})
    facts = {
        "A": names[0],
        "B": names[1],
        "data": f"{dataset.name} ({dataset.layout})",
        "pictures": f"{pictures} of {len(dataset.items)}",
        "classes in common": str(len(both.shared.to_b)),
        "masks": "yes" if any(row.object is not None for row in collected.rows) else "none",
        "method": both.a.method,
    }
    made = {
        "command": printable(shlex.join(command)),
        "A": Network(both.a.model).id,
        "B": Network(both.b.model).id,
        "pictures": f"{asked} chosen of {len(dataset.items)} by seed {both.a.seed}",
        "method": f"{both.a.method}: {chosen.summary}",
        "versions": ", ".join(f"{package} {number}" for package, number in versions().items()),
        "made": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, in {seconds:.0f} s",
    }
    return About(
        names=names, data=dataset.name, facts=facts, made={k: v for k, v in made.items() if v}, notes=notes,
        legend=legend(chosen.signed), signed=chosen.signed,
    )  # fmt: skip
