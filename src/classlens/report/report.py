"""From a model and a folder to a page: read and measure, choose, draw, write."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from classlens.data.layouts import open_dataset
from classlens.errors import DataError, printable
from classlens.evaluate import SettingsError
from classlens.evaluate.manifest import versions
from classlens.files import write_text
from classlens.methods import check_options, resolve
from classlens.models import LoadedModel
from classlens.progress import Progress, silent
from classlens.report import words
from classlens.report.choose import choose_all
from classlens.report.collect import Collected, Record, Subject, collect
from classlens.report.draw import draw, legend
from classlens.report.page import About, page
from classlens.report.words import Finding, count

TOP_MOST = 25  # entries of a section: with more, the page would be too large to mail (8 MB)
_ON_CPU, _ON_GPU = 4, 32  # pictures at once; on a CPU larger batches are slower


@dataclass(frozen=True)
class Report:
    """What was found, and where it was written."""

    path: Path
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    collected: Collected


def report(
    model: LoadedModel,
    data: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    method: str = "agf",
    limit: int | None = 200,
    seed: int = 0,
    top: int = 12,
    batch_size: int | None = None,
    progress: Progress = silent,
    command: Sequence[str] = (),
) -> Report:
    """Explain what a model says of the pictures in a folder, and write a page about it.

    >>> report(load("torchvision:resnet50"), "photos", "report.html", limit=50).path

    `data` is a data set in any layout that `classlens evaluate` knows, or a folder of pictures. Masks and labels are
    used where there are any. Of a large set a stable choice of `limit` pictures is taken, which the seed decides.
    """
    begun = time.perf_counter()
    path = Path(out)
    if path.is_dir():
        raise DataError(f"{path} is a folder: give the file to write, as {path / 'report.html'}")
    if not 1 <= top <= TOP_MOST:
        raise SettingsError(f"a section cannot have {top} entries; give 1 to {TOP_MOST}")
    check_options(*resolve(method))
    subject = Subject(model, open_dataset(data), method, seed)
    items = subject.dataset.select(limit, seed)
    collected = collect(subject, items, batch_size or _at_once(subject), progress)
    if not collected.records:
        name, why = next(iter(collected.skipped.items()))
        raise DataError(f"none of {count(len(items), 'picture')} could be used; the first, {name}: {why}")
    chosen = choose_all(collected.records, top)
    drawn = draw(subject, chosen.wanted(), progress)
    findings = words.findings(collected.records, subject.name)
    notes = _notes(subject, collected)
    about = _about(subject, collected, notes, len(items), command, time.perf_counter() - begun)
    write_text(path, page(about, findings, collected, chosen, drawn, subject.name))
    return Report(path, tuple(findings), notes, collected)


def _at_once(subject: Subject) -> int:
    weight = next(subject.network.module.parameters(), None)
    return _ON_CPU if weight is None or weight.device.type == "cpu" else _ON_GPU


def _about(
    subject: Subject, collected: Collected, notes: tuple[str, ...], asked: int, command: Sequence[str], seconds: float
) -> About:
    dataset, records, chosen = subject.dataset, collected.records, resolve(subject.method)[0]
    name, _, fingerprint = subject.network.id.partition("@")
    known = [record.right for record in records if record.right is not None]
    facts = {
        "model": name,
        "data": f"{dataset.name} ({dataset.layout})",
        "pictures": f"{len(records)} of {len(dataset.items)}",
        "right": f"{sum(known)} of {len(known)} with a known label" if known else "not known",
        "masks": f"{sum(record.where.inside is not None for record in records)}" if dataset.has_masks else "none",
        "method": subject.method,
        "question": "evidence for the class, " + ("against its rivals" if chosen.contrastive else "by itself"),
    }
    made = {
        "command": printable(shlex.join(command)),
        "model": f"{name}, weights and preprocessing {fingerprint}",
        "pictures": f"{asked} chosen of {len(dataset.items)} by seed {subject.seed}",
        "method": f"{subject.method}: {chosen.summary}",
        "versions": ", ".join(f"{package} {number}" for package, number in versions().items()),
        "made": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, in {seconds:.0f} s",
    }
    return About(
        model=name,
        data=dataset.name,
        facts=facts,
        made={key: value for key, value in made.items() if value},
        notes=notes,
        legend=legend(chosen.signed),
        signed=chosen.signed,
        locates=chosen.locates,
    )


def _notes(subject: Subject, collected: Collected) -> tuple[str, ...]:
    """What the reader must know before believing the numbers."""
    found = [_label_note(subject, collected.records), _method_note(subject.method)]
    if not any(record.where.inside is not None for record in collected.records):
        found.append(
            "There are no masks: whether evidence lies on the object is not known, only whether on the border."
        )
    elif subject.dataset.classes is not None and not any(record.truth.outputs for record in collected.records):
        found.append("The masks tell other classes apart than the model's: the object is whatever is labelled.")
    if collected.skipped:
        found.append(f"{count(len(collected.skipped), 'picture')} could not be used; they are named at the end.")
    if collected.without_mask:
        found.append(f"The masks of {count(len(collected.without_mask), 'picture')} could not be read; see the end.")
    return tuple(note for note in found if note)


def _method_note(method: str) -> str:
    chosen = resolve(method)[0]
    if chosen.locates:
        return ""
    why = "sets a class against its rivals" if chosen.contrastive else "shows much the same for every class"
    return f"{chosen.name} {why}: its maps do not say whether two classes are found on different things."


def _label_note(subject: Subject, records: Sequence[Record]) -> str:
    if any(record.truth.outputs for record in records):
        return ""
    if all(record.truth.label is None for record in records):
        return "The data have no labels: predictions are taken as they are."
    if subject.model.labels is None:
        return "The model has no names for its classes, so labels cannot be matched: predictions are taken as they are."
    return "None of the data's labels is a class of the model: predictions are taken as they are."
