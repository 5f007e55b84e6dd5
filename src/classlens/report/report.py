"""Writes a report on a model and a folder of images: read and measure, select, draw, write."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from classlens.data.layouts import open_dataset
from classlens.errors import DataError, printable
from classlens.evaluate import SettingsError
from classlens.evaluate.manifest import versions
from classlens.files import write_text
from classlens.methods import check_options, resolve
from classlens.models import LoadedModel
from classlens.models.choice import named
from classlens.progress import Progress, silent
from classlens.report import words
from classlens.report.choose import choose_all
from classlens.report.collect import Collected, Record, Subject, collect
from classlens.report.draw import draw, legend
from classlens.report.groups import group_examples, group_findings, groups
from classlens.report.made_of import made_of
from classlens.report.page import About, page
from classlens.report.words import Finding, count

TOP_MOST = 25  # entries of a section: with more, the page would be too large to send by mail (8 MB)
_ON_CPU, _ON_GPU = 4, 32  # images per batch; on a CPU larger batches are slower


@dataclass(frozen=True)
class Report:
    """The findings, and the path of the page."""

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
    concepts: str | os.PathLike[str] | None = None,
    progress: Progress = silent,
    command: Sequence[str] = (),
) -> Report:
    """Explain the predictions of a model for a folder of images, and write a page about it.

    >>> report(load("torchvision:resnet50"), "photos", "report.html", limit=50).path

    `data` is a data set in any layout that `classlens evaluate` knows, or a folder of images. Masks and labels are used
    if available. At most `limit` images are used: a deterministic subset for each seed. With `concepts`, a folder, the
    page also says what classes are made of; the folder keeps what was computed, so that a stopped report resumes.
    """
    begun = time.perf_counter()
    path = Path(out)
    if path.is_dir():
        raise DataError(f"{path} is a folder: give a file name, such as {path / 'report.html'}")
    if not 1 <= top <= TOP_MOST:
        raise SettingsError(f"a section cannot have {top} entries; give 1 to {TOP_MOST}")
    subject = Subject(model, open_dataset(data), _checked(method, model), seed)
    items = subject.dataset.select(limit, seed)
    collected = collect(subject, items, batch_size or batch_size_of(model), progress)
    if not collected.records:
        name, why = next(iter(collected.skipped.items()))
        raise DataError(f"none of {count(len(items), 'picture')} could be used; the first, {name}: {why}")
    chosen = choose_all(collected.records, top)
    alike = groups(subject, collected.records, seed, progress)[:top]
    drawn = draw(subject, {**group_examples(alike), **chosen.wanted()}, progress)
    found = None if concepts is None else made_of(subject, chosen.views, chosen.pairs, top, concepts, progress)
    findings = [*group_findings(alike), *words.findings(collected.records, subject.name)]
    notes = _notes(subject, collected)
    about = _about(subject, collected, notes, len(items), command, time.perf_counter() - begun)
    about = about if found is None else replace(about, made=about.made | {"concepts": found.made})
    write_text(path, page(about, findings, collected, chosen, drawn, subject.name, alike, found))
    return Report(path, tuple(findings), notes, collected)


def _checked(method: str, model: LoadedModel) -> str:
    """The name of the method, which exists and has the options that were given."""
    name = named(method, model)
    check_options(*resolve(name))
    return name


def batch_size_of(model: LoadedModel) -> int:
    """Images per batch, if none are given: fewer on a CPU."""
    weight = next(model.model.parameters(), None)
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
    """What the reader must know before trusting the numbers."""
    found = [_label_note(subject, collected.records), _method_note(subject.method)]
    if not any(record.where.inside is not None for record in collected.records):
        found.append(
            "Without masks, the page cannot say whether evidence lies on the object, only whether on the border."
        )
    elif subject.dataset.classes is not None and not any(record.truth.outputs for record in collected.records):
        found.append("The classes of the masks are not those of the model: every labelled pixel counts as the object.")
    if collected.skipped:
        found.append(f"{count(len(collected.skipped), 'picture')} could not be used; they are named at the end.")
    if collected.without_mask:
        found.append(f"The masks of {count(len(collected.without_mask), 'picture')} could not be read; see the end.")
    return tuple(note for note in found if note)


def _method_note(method: str) -> str:
    chosen = resolve(method)[0]
    if chosen.locates:
        return ""
    why = "contrasts a class with its rivals" if chosen.contrastive else "shows much the same for every class"
    return f"{chosen.name} {why}: its maps do not show whether two classes are found on different things."


def _label_note(subject: Subject, records: Sequence[Record]) -> str:
    if any(record.truth.outputs for record in records):
        return ""
    if all(record.truth.label is None for record in records):
        return "The data set has no labels: the page cannot say which predictions are right."
    if subject.model.labels is None:
        return "The model has no class names to match labels with: the page cannot say which predictions are right."
    return "None of the labels is a class of the model: the page cannot say which predictions are right."
