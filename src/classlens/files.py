"""Atomic file writes, and hashes that identify things.

    >>> write_text(Path("out/table.md"), "| method | score |")
    >>> with replacing(Path("out/weights.safetensors")) as draft:
    ...     save_file(tensors, draft)

Everything is written to a draft in the same folder, flushed to disk, and then renamed in one step. A reader, a second
process or the next run never sees a partial file. An error or Ctrl-C removes the draft; a kill leaves it behind.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

# ------------------------------------------------------------------------------------------------------ atomic writes


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The path of a draft, which replaces the file when the block ends without an error.

    >>> with replacing(Path("rows.parquet")) as draft:
    ...     pq.write_table(table, draft)

    The folder is created if it does not exist.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = _draft(path)
    try:
        yield draft
        with draft.open("rb+") as file:  # without fsync, a power failure may leave an empty file
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def creating(folder: Path) -> Iterator[Path]:
    """The path of a draft folder, which is renamed to `folder` when the block ends without an error.

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
    """Write a file atomically; returns its path."""
    with replacing(path) as draft:
        draft.write_bytes(content)
    return path


def write_text(path: Path, text: str) -> Path:
    """Write a text file atomically (UTF-8, line endings as given)."""
    return write_bytes(path, text.encode())


def write_json(path: Path, value: Any, indent: int | None = 2) -> Path:
    """Write a JSON document atomically.

    >>> write_json(Path("out/card.json"), {"labels": ["cat", "dog"]})
    """
    return write_text(path, json.dumps(value, indent=indent) + "\n")


def remove_drafts(folder: Path, name: str = "*", seconds: float = 0.0) -> None:
    """Delete the drafts of killed runs: those of `name` that are at least this many seconds old.

    >>> remove_drafts(Path("run/rows/pointing"), seconds=3600)      # a newer draft may still be in use
    """
    for draft in folder.glob(f".{name}.*.part"):
        with suppress(FileNotFoundError):  # its writer has just finished
            if time.time() - draft.stat().st_mtime >= seconds:
                draft.unlink()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Only one process at a time is inside of this for a folder; a killed one lets the next in.

    >>> with locked(Path("run")):
    ...     write_json(Path("run/manifest.json"), [*json.loads(Path("run/manifest.json").read_text()), entry])

    Where the system or the disk knows no locks, nobody waits.
    """
    with (folder / ".lock").open("ab") as file:
        with suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.part")


# ------------------------------------------------------------------------------------------------------------- hashes


def text_hash(text: str, letters: int = 16) -> str:
    """The first letters of the SHA-256 of a text, as a short identifier.

    >>> text_hash("agf", 6)
    '13755d'
    """
    return hashlib.sha256(text.encode()).hexdigest()[:letters]


def draw_key(seed: int, name: str) -> bytes:
    """A pseudo-random sort key for a name: sorting by it shuffles, and the order depends only on seed and names.

    >>> sorted(["a", "b", "c", "d"], key=lambda name: draw_key(0, name))
    ['d', 'a', 'c', 'b']

    The key of a name does not depend on the other names: adding names does not change the order of the others.
    """
    return hashlib.sha256(f"{seed}:{name}".encode()).digest()
