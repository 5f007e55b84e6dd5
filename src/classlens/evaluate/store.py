"""What a run has found so far, on disk: rows in Parquet parts, each written whole or not at all.

    RUN/rows/perturbation/0b5f....parquet     one row per (model, method, test, data, image, config, content)
    RUN/timings.jsonl                         seconds by stage; not part of the results
    RUN/manifest.json                         what was run, with which versions, when
    RUN/contents.json                         hashes of the pictures, so that they are read once

A part's name is made from the keys of its rows, so writing it a second time replaces it by itself. A process may die
at any moment: a row is then there or not there, and what is not there is computed again.
"""

from __future__ import annotations

import functools
import json
import os
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from classlens import files
from classlens.errors import ClasslensError, MissingPackage
from classlens.evaluate.registry import TESTS

if TYPE_CHECKING:
    import pyarrow as pa

KEY = ("model", "method", "test", "data", "image", "config", "content")
_COMPACT_FROM = 200  # parts of a test, before they are put together
_ATTEMPTS = 10  # to read parts while another process puts them together
_STALE = 3600.0  # seconds after which a draft has no writer any more

_PREDICTION = {"label": "int32", "predicted": "int32", "confidence": "float64"}
_SKIPPED = {"reason": "string"}


@functools.cache
def arrow() -> Any:
    """pyarrow with its `compute` and `parquet`: an extra, because it is larger than all the rest of classlens.

    >>> arrow().Table.from_pylist([{"image": "cat.jpg", "share": 0.7}])
    """
    try:
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError:
        raise MissingPackage("an evaluation keeps its rows in Parquet: pip install 'classlens[evaluate]'") from None
    return pyarrow


def schemas() -> dict[str, pa.Schema]:
    """The columns of each kind of row: of every test, of predictions, and of what was skipped.

    A skipped row is a picture (or a picture with a method) that gave none, and why.
    """
    pa = arrow()
    tests = {name: test.columns for name, test in TESTS.items() if test.kind == name}
    keys = [(name, pa.string()) for name in KEY]
    return {
        kind: pa.schema([*keys, *((name, _type(text)) for name, text in columns.items())])
        for kind, columns in {"prediction": _PREDICTION, **tests, "skipped": _SKIPPED}.items()
    }


def _type(text: str) -> pa.DataType:
    """An Arrow type by its name: `int32`, `list<float64>`."""
    inside = re.fullmatch(r"list<(\w+)>", text)
    return arrow().list_(_type(inside[1])) if inside else getattr(arrow(), text)()


Row = dict[str, Any]


class StoreError(ClasslensError):
    """A run's folder with something in it that this version did not write."""


def foreign(path: Path) -> StoreError:
    """The error about a file that is whole, but not as this version writes it."""
    return StoreError(f"{path} was written by another version of classlens, or not by it: give another --out")


class Store:
    """The folder of a run."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        arrow()  # rather now than after the first picture
        self.root = Path(root)
        self.root.mkdir(parents=True, exist_ok=True)

    def append(self, rows: Sequence[Row]) -> None:
        """Write rows, those of each test as one new part."""
        for test in dict.fromkeys(row["test"] for row in rows):
            chosen = [row for row in rows if row["test"] == test]
            keys = json.dumps([[row[name] for name in KEY] for row in chosen])
            self._write(test, files.text_hash(keys, 24), arrow().Table.from_pylist(chosen, schemas()[test]))

    def read(self, test: str) -> pa.Table:
        """All rows of a test, each key once, in a fixed order."""
        return self._whole(test)[0]

    def _whole(self, test: str) -> tuple[pa.Table, list[Path]]:
        """All rows of a test, and the parts they are from."""
        read: dict[Path, pa.Table | None] = {}
        for _ in range(_ATTEMPTS):
            read = {path: _read(path, schemas()[test]) for path in self._parts(test)}
            if all(table is not None or path.exists() for path, table in read.items()):
                break  # else another process has just put the parts together: read what it made
        parts = {path: table for path, table in read.items() if table is not None}
        if not parts:
            return schemas()[test].empty_table(), []
        whole = _unique(arrow().concat_tables(parts.values()))
        return whole.sort_by([(name, "ascending") for name in KEY]), list(parts)

    def compact(self) -> None:
        """Put the many small parts of a test into one. If this is cut short, some rows lie there twice, read once."""
        for test in schemas():
            files.remove_drafts(self.root / "rows" / test, seconds=_STALE)
            if len(self._parts(test)) >= _COMPACT_FROM:
                table, parts = self._whole(test)
                kept = self._write(test, f"compact-{uuid.uuid4().hex[:16]}", table)
                for path in parts:
                    if path != kept:
                        path.unlink(missing_ok=True)  # two processes may do this at once

    def add_timing(self, entry: dict[str, Any]) -> None:
        with (self.root / "timings.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def timings(self) -> list[dict[str, Any]]:
        file = self.root / "timings.jsonl"
        entries = []
        for line in file.read_bytes().splitlines() if file.exists() else []:
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):  # the line that was being written when the process died
                continue
            if not _is_timing(entry):
                raise foreign(file)
            entries.append(entry)
        return entries

    def write_text(self, name: str, text: str) -> Path:
        return files.write_text(self.root / name, text)

    def write_bytes(self, name: str, content: bytes) -> Path:
        """A file of the run, whole or not at all."""
        return files.write_bytes(self.root / name, content)

    def _parts(self, test: str) -> list[Path]:
        return sorted((self.root / "rows" / test).glob("*.parquet"))

    def _write(self, test: str, name: str, table: pa.Table) -> Path:
        path = self.root / "rows" / test / f"{name}.parquet"
        with files.replacing(path) as draft, draft.open("wb") as file:  # Arrow takes no path that is not UTF-8
            arrow().parquet.write_table(table, file)
        return path


def _is_timing(entry: Any) -> bool:
    of_seconds = entry.get("seconds") if isinstance(entry, dict) else None
    return (
        isinstance(of_seconds, dict)
        and all(isinstance(entry.get(name), str) for name in ("model", "kind", "method"))
        and all(isinstance(number, int | float) for number in (entry.get("images"), *of_seconds.values()))
    )


def finished(table: pa.Table) -> dict[tuple[str, str, str, str], set[tuple[str, str]]]:
    """(model, data, method, config) -> the images that have a row, each with its content."""
    found: dict[tuple[str, str, str, str], set[tuple[str, str]]] = {}
    columns = [table[name].to_pylist() for name in ("model", "data", "method", "config", "image", "content")]
    for model, data, method, config, *picture in zip(*columns, strict=True):
        found.setdefault((model, data, method, config), set()).add((picture[0], picture[1]))
    return found


def current(table: pa.Table, contents: Mapping[str, str]) -> pa.Table:
    """The rows of these images that were computed from what they hold: `current(rows, {"cat.jpg": "5f0c1a"})`."""
    pictures = zip(table["image"].to_pylist(), table["content"].to_pylist(), strict=True)
    return table.filter(arrow().array([contents.get(image) == held for image, held in pictures], arrow().bool_()))


def where(table: pa.Table, **equal: str | Iterable[str]) -> pa.Table:
    """Rows with these values: `where(rows, method="agf", image=names)`."""
    pa = arrow()
    for name, wanted in equal.items():
        column = table[name]
        values = pa.array([wanted] if isinstance(wanted, str) else list(wanted), pa.string())
        table = table.filter(pa.compute.is_in(column, value_set=values))
    return table


def same_pictures(rows: pa.Table, others: pa.Table) -> tuple[pa.Table, pa.Table]:
    """The rows of two methods on the pictures that both have, in one order: to be compared row by row."""
    both = set(rows["image"].to_pylist()) & set(others["image"].to_pylist())
    return where(rows, image=both).sort_by("image"), where(others, image=both).sort_by("image")


def _read(path: Path, schema: pa.Schema) -> pa.Table | None:
    """A part, None if it cannot be read. Where rows do not say their content yet, it is ""."""
    try:
        with path.open("rb") as file:
            table = arrow().parquet.read_table(file, partitioning=None)
    except (arrow().ArrowException, OSError):  # cut short by a power failure: its rows are computed again
        return None
    if "content" not in table.column_names:
        table = table.append_column("content", arrow().array([""] * len(table), arrow().string()))
    if sorted(table.column_names) != sorted(schema.names):
        raise foreign(path)
    try:
        return table.select(schema.names).cast(schema)
    except arrow().ArrowException:  # other types
        raise foreign(path) from None


def _unique(table: pa.Table) -> pa.Table:
    position = arrow().array(range(len(table)), arrow().int64())
    first = table.append_column("_row", position).group_by(list(KEY)).aggregate([("_row", "min")])
    return table.take(first["_row_min"].sort())
