"""An audit bundle: a report with all that is needed to check it later, in one folder or one zip file.

    report.html        the page                     rows.parquet      a row for each picture, with the hash of its file
    settings.json      what was run, on what        protocol.md       how it was measured
    limitations.md     what it does not show        manifest.json     the SHA-256 of every file

>>> made = report(model, "photos", "report.html")
>>> write(made, model, "photos", "audit.zip", settings={"method": "agf", "limit": 200, "seed": 0, "batch_size": 4})
>>> print(verify("audit.zip", model, "photos"))
the bundle holds: ...
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from classlens.data.layouts import Dataset, Item, open_dataset
from classlens.errors import ClasslensError, DataError
from classlens.evaluate.manifest import now, versions
from classlens.evaluate.store import arrow
from classlens.files import creating, write_bytes
from classlens.methods import resolve
from classlens.models import LoadedModel
from classlens.models.network import fingerprint, short_name
from classlens.report import Report
from classlens.report.collect import Record
from classlens.trust import texts

MANIFEST, ROWS, SETTINGS = "manifest.json", "rows.parquet", "settings.json"
Files = dict[str, bytes]


def write(
    made: Report, model: LoadedModel, data: str | os.PathLike[str], out: str | os.PathLike[str], *,
    settings: Mapping[str, Any],
) -> Path:  # fmt: skip
    """Write the bundle of a report to a folder, or to a zip file if the name ends with .zip.

    `settings` are those of the report: method, limit, seed, and what else the reader should know.
    """
    path = Path(out)
    if path.exists():
        raise ClasslensError(f"{path} exists already, and a bundle is never overwritten; choose another name")
    dataset = open_dataset(data)
    about = _settings(made, model, dataset, settings)
    files = {
        "report.html": made.path.read_bytes(),
        ROWS: _parquet([_row(dataset, record) for record in made.collected.records]),
        SETTINGS: _json(about),
        "protocol.md": texts.PROTOCOL.format(**about, summary=resolve(about["method"])[0].summary).encode(),
        "limitations.md": _limitations(made, about).encode(),
    }
    files[MANIFEST] = _json(_manifest(files))
    return _packed(files, path)


def _settings(made: Report, model: LoadedModel, dataset: Dataset, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model": short_name(model.name),
        "weights": fingerprint(model, letters=64),
        "preprocess": model.preprocess.to_json(),
        "name": dataset.name,
        "layout": dataset.layout,
        "skipped": made.collected.skipped,
        "findings": [finding.text for finding in made.findings],
        "notes": list(made.notes),
        "versions": versions(),
        "made": now(),
        **settings,
    }


def _limitations(made: Report, about: Mapping[str, Any]) -> str:
    records = made.collected.records
    return texts.LIMITATIONS.format(
        model=about["model"],
        count=len(records),
        trust=made.findings[-1].text,  # the report's own test of its maps
        masks=texts.WITH_MASKS if any(r.where.inside is not None for r in records) else texts.WITHOUT_MASKS,
        labels=texts.WITH_LABELS if any(r.right is not None for r in records) else texts.WITHOUT_LABELS,
    )


# ------------------------------------------------------------------------------------------------------- rows


def _row(dataset: Dataset, record: Record) -> dict[str, Any]:
    """All numbers of a record, and the hashes of its files."""
    return {
        "image": record.item.name,
        **file_hashes(dataset, record.item),
        "label": record.truth.label,
        "right": record.right,
        **numbers(record),
    }


def numbers(record: Record) -> dict[str, Any]:
    """What `verify` computes again."""
    return {
        "predicted": record.predicted,
        "confidence": record.confidence,
        "second": record.second,
        "second_confidence": record.second_confidence,
        **asdict(record.where),
        **{f"hidden_{name}": value for name, value in asdict(record.hidden).items()},
    }


def file_hashes(dataset: Dataset, item: Item) -> dict[str, str | None]:
    """The SHA-256 of the files of a picture and its mask; inside of a larger file, of their pixels."""
    pixels = {"image": lambda: dataset.picture(item).tobytes(), "mask": lambda: dataset.mask(item).tobytes()}
    return {
        f"{what}_sha256": None if part is None else hashlib.sha256(
            part.read_bytes() if isinstance(part, Path) else pixels[what]()
        ).hexdigest()
        for what, part in (("image", item.image), ("mask", item.mask))
    }  # fmt: skip


def _parquet(rows: Sequence[dict[str, Any]]) -> bytes:
    buffer = io.BytesIO()
    arrow().parquet.write_table(arrow().Table.from_pylist(list(rows)), buffer)
    return buffer.getvalue()


def read_rows(files: Files) -> list[dict[str, Any]]:
    """The rows of a bundle."""
    rows: list[dict[str, Any]] = arrow().parquet.read_table(io.BytesIO(files[ROWS])).to_pylist()
    return rows


# ------------------------------------------------------------------------------------------------------ files


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _manifest(files: Files) -> dict[str, Any]:
    """The hash of every file, and of these hashes, so that the manifest itself cannot change unnoticed."""
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in sorted(files.items())}
    return {"files": hashes, "sha256": hashlib.sha256(_json(hashes)).hexdigest()}


def _packed(files: Files, path: Path) -> Path:
    if path.suffix == ".zip":
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as packed:
            for name, content in files.items():
                packed.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
        return write_bytes(path, buffer.getvalue())
    path.parent.mkdir(parents=True, exist_ok=True)
    with creating(path) as draft:
        for name, content in files.items():
            (draft / name).write_bytes(content)
    return path


def read(bundle: str | os.PathLike[str]) -> Files:
    """The files of a bundle, each checked against the manifest; the first that has changed is refused by its name."""
    path = Path(bundle)
    files = _unpacked(path)
    if MANIFEST not in files:
        raise DataError(f"{path} is not a bundle: it has no {MANIFEST}")
    try:
        stated = json.loads(files[MANIFEST])
        hashes, own = dict(stated["files"]), stated["sha256"]
    except (ValueError, KeyError, TypeError):
        raise _changed(path, MANIFEST) from None
    if files[MANIFEST] != _json({"files": hashes, "sha256": own}) or hashlib.sha256(_json(hashes)).hexdigest() != own:
        raise _changed(path, MANIFEST)
    for name in sorted(hashes.keys() | files.keys() - {MANIFEST}):
        if name not in files:
            raise DataError(f"{path} is refused: {name} is missing")
        if name not in hashes:
            raise DataError(f"{path} is refused: {name} was added after the bundle was written")
        if hashlib.sha256(files[name]).hexdigest() != hashes[name]:
            raise _changed(path, name)
    return files


def read_settings(bundle: str | os.PathLike[str]) -> dict[str, Any]:
    """What a bundle says was run."""
    found: dict[str, Any] = json.loads(read(bundle)[SETTINGS])
    return found


def _changed(path: Path, name: str) -> DataError:
    return DataError(f"{path} is refused: {name} has changed since the bundle was written")


def _unpacked(path: Path) -> Files:
    if path.is_dir():
        found = {p.relative_to(path).as_posix(): p for p in path.rglob("*") if p.is_file()}
        return {name: file.read_bytes() for name, file in found.items()}
    if not path.exists():
        raise DataError(f"{path} does not exist: give the folder or the zip file of a bundle")
    if not zipfile.is_zipfile(path):
        raise DataError(f"{path} is not a bundle: give a folder or a zip file that --bundle wrote")
    with zipfile.ZipFile(path) as packed:
        return {name: _member(packed, name, path) for name in packed.namelist()}


def _member(packed: zipfile.ZipFile, name: str, path: Path) -> bytes:
    try:
        return packed.read(name)
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        raise _changed(path, name) from error
