"""Does an audit bundle still hold? Its files, the weights, the pictures, and a sample of its rows computed again."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from classlens.data.divide import shuffled
from classlens.data.layouts import Item, open_dataset
from classlens.errors import DataError, ModelError
from classlens.evaluate.manifest import versions
from classlens.models import LoadedModel
from classlens.models.network import fingerprint
from classlens.progress import Progress, silent
from classlens.report.collect import Subject, collect
from classlens.trust.bundle import SETTINGS, file_hashes, numbers, read, read_rows

TOLERANCE = 1e-3  # of shares and probabilities: another machine rounds differently
SAMPLE = 8  # rows


@dataclass(frozen=True)
class Verified:
    """What was compared: rows, and the largest difference of a number."""

    rows: int
    of: int
    difference: float
    versions: tuple[str, ...]  # packages with another version than in the bundle

    def __str__(self) -> str:
        text = (
            f"the bundle holds: every file is unchanged, the weights and the pictures are the same, and {self.rows} of "
            f"{self.of} rows computed again differ by at most {self.difference:.1g}"
        )
        return f"{text} (other versions now: {', '.join(self.versions)})" if self.versions else text


def verify(
    bundle: str | os.PathLike[str], model: LoadedModel, data: str | os.PathLike[str], *, sample: int = SAMPLE,
    seed: int = 0, progress: Progress = silent,
) -> Verified:  # fmt: skip
    """Check a bundle against its model and its data; the first thing that does not hold is refused by its name.

    >>> print(verify("audit.zip", load("efficientnet-lite0"), "photos"))
    the bundle holds: ...
    """
    files = read(bundle)
    settings, rows = json.loads(files[SETTINGS]), {row["image"]: row for row in read_rows(files)}
    if fingerprint(model, letters=64) != settings["weights"]:
        raise ModelError(f"the bundle does not hold: {model.name} has other weights or another preprocessing")
    subject = Subject(model, open_dataset(data), settings["method"], settings["seed"])
    items = {item.name: item for item in subject.dataset.items}
    missing = [name for name in rows if name not in items]
    if missing:
        raise DataError(f"the bundle does not hold: {missing[0]} is not in {data}")
    for name, row in rows.items():
        hashes = file_hashes(subject.dataset, items[name])
        for what in ("image", "mask"):
            if hashes[f"{what}_sha256"] != row[f"{what}_sha256"]:
                raise DataError(f"the bundle does not hold: the {what} of {name} has changed")
    chosen = shuffled([items[name] for name in rows], seed)[:sample]
    difference = _largest(_again(subject, chosen, settings, progress), rows)
    return Verified(len(chosen), len(rows), difference, _other_versions(settings["versions"]))


def _again(
    subject: Subject, items: Sequence[Item], settings: Mapping[str, Any], progress: Progress
) -> dict[str, dict[str, Any]]:
    """The numbers of a sample, computed now."""
    collected = collect(subject, items, settings["batch_size"], progress)
    if collected.skipped:
        name, why = next(iter(collected.skipped.items()))
        raise DataError(f"the bundle does not hold: {name} has no row now: {why}")
    return {record.item.name: numbers(record) for record in collected.records}


def _largest(now: Mapping[str, Mapping[str, Any]], then: Mapping[str, Mapping[str, Any]]) -> float:
    """The largest difference of a number; the first that is too large is refused by its name."""
    largest = 0.0
    for image, values in now.items():
        for name, value in values.items():
            difference = _difference(value, then[image][name])
            if not difference <= TOLERANCE:
                raise DataError(
                    f"the bundle does not hold: {name} of {image} was {then[image][name]}, and is {value} now"
                )
            largest = max(largest, difference)
    return largest


def _difference(now: Any, then: Any) -> float:
    if now is None or then is None or isinstance(now, int):
        return 0.0 if now == then else math.inf
    return float(abs(now - then))


def _other_versions(stated: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(f"{name} {number}" for name, number in versions().items() if stated.get(name) != number)
