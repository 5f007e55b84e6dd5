"""Files that are there whole or not at all, and the hashes by which things are known again.

    >>> write_text(Path("out/table.md"), "| method | score |")
    >>> with replacing(Path("out/weights.safetensors")) as draft:
    ...     save_file(tensors, draft)

Everything is written to a draft beside its place, flushed to the disk, and then moved there in one step. So a reader,
a second process or the next run never sees half a file; an error or Ctrl-C removes the draft, a kill leaves it behind.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# ------------------------------------------------------------------------------------------------------ atomic writes


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The path of a draft, which takes the place of the file when the block ends well.

    >>> with replacing(Path("rows.parquet")) as draft:
    ...     pq.write_table(table, draft)

    The folder is made if it is not there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = _draft(path)
    try:
        yield draft
        with draft.open("rb+") as file:  # without this, a power failure may leave an empty file in the new place
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def creating(folder: Path) -> Iterator[Path]:
    """The same for a new folder: the path of a draft folder, which gets its name when the block ends well.

    >>> with creating(Path("pets")) as draft:
    ...     (draft / "labels.txt").write_text("abyssinian")
    """
    draft = _draft(folder)
    try:
        draft.mkdir(parents=True)
        yield draft
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_bytes(path: Path, content: bytes) -> Path:
    """Write a file, whole or not at all; returns its path."""
    with replacing(path) as draft:
        draft.write_bytes(content)
    return path


def write_text(path: Path, text: str) -> Path:
    """Write a text file (UTF-8, line ends as given), whole or not at all."""
    return write_bytes(path, text.encode())


def write_json(path: Path, value: Any, indent: int | None = 2) -> Path:
    """Write a JSON document, whole or not at all.

    >>> write_json(Path("out/card.json"), {"labels": ["cat", "dog"]})
    """
    return write_text(path, json.dumps(value, indent=indent) + "\n")


def remove_drafts(folder: Path, name: str = "*", seconds: float = 0.0) -> None:
    """Delete the drafts of killed runs: those of `name`, at least so many seconds old.

    >>> remove_drafts(Path("run/rows/pointing"), seconds=3600)      # a younger one may still have a writer
    """
    for draft in folder.glob(f".{name}.*.part"):
        if time.time() - draft.stat().st_mtime >= seconds:
            draft.unlink(missing_ok=True)


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.part")


# ------------------------------------------------------------------------------------------------------------- hashes


def text_hash(text: str, letters: int = 16) -> str:
    """The first letters of a text's SHA-256, as a short name for what the text describes.

    >>> text_hash("agf", 6)
    '13755d'
    """
    return hashlib.sha256(text.encode()).hexdigest()[:letters]


def draw_key(seed: int, name: str) -> bytes:
    """A number drawn for a name: sorting by it shuffles, and only the seed and the names decide the order.

    >>> sorted(["a", "b", "c", "d"], key=lambda name: draw_key(0, name))
    ['d', 'a', 'c', 'b']

    A name keeps its number whoever else is there: more names leave the order of the others as it was.
    """
    return hashlib.sha256(f"{seed}:{name}".encode()).digest()
