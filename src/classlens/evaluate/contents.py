"""What a picture holds: a row is kept under it, so a picture that changed has no row and is computed.

    >>> contents = Contents(Path("RUN/contents.json"))
    >>> contents.of(subject, item)
    '5f0c1a...'

It is a hash of all that a row depends on beside network and settings: the bytes of picture and mask, how the mask is
read, and the label. Bytes are read once: RUN/contents.json remembers the hash of a file with its size, times and inode,
and as soon as one of these differs the file is read again. The file is a cache; without it all files are read again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any, BinaryIO

from classlens import files
from classlens.data.images import open_regular
from classlens.data.layouts import Item
from classlens.errors import ImageError
from classlens.evaluate.registry import Subject, Unit

_LETTERS = 24
_BLOCK = 2**20  # bytes read at once
_SETTLED = 2_000_000_000  # ns; a younger file may change once more without its time changing


class Contents:
    """The contents of pictures, and what is remembered of their files."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._known = {} if file is None else _remembered(file)
        self._seen: dict[Path, str] = {}

    def of(self, subject: Subject, item: Item) -> str:
        """What a picture holds; "" if it cannot be read, which equals nothing."""
        root = subject.dataset.root
        picture, mask = (self._part(root, part) for part in (item.image, item.mask))
        if not picture:
            return ""
        about: list[Any] = [item.label, sorted(item.classes), subject.label(item)]
        if item.mask is not None:
            about += [mask, subject.dataset.layout, subject.dataset.classes, subject.outputs]
        return files.text_hash(json.dumps([picture, *about]), _LETTERS)

    def save(self) -> None:
        """Remember the files for the next run."""
        if self._file is not None:
            files.write_json(self._file, self._known, indent=None)

    def _part(self, root: Path, part: Path | int | None) -> str:
        if isinstance(part, int):  # of one file with all pictures
            whole = self._bytes(root)
            return whole and f"{whole}:{part}"
        return "" if part is None else self._bytes(part)

    def _bytes(self, path: Path) -> str:
        if path not in self._seen:
            try:
                self._seen[path] = self._hash(path)
            except (ImageError, OSError):
                self._seen[path] = ""
        return self._seen[path]

    def _hash(self, path: Path) -> str:
        key = hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:_LETTERS]
        with open_regular(path, str(path)) as file:
            found = os.fstat(file.fileno())
            state = [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
            known = self._known.pop(key, None)
            digest = known[-1] if known is not None and known[:-1] == state else ""
            if not digest:
                digest = _digest(file)
        if max(found.st_mtime_ns, found.st_ctime_ns) < time.time_ns() - _SETTLED:
            self._known[key] = [*state, digest]
        return digest


def _digest(file: BinaryIO) -> str:
    found = hashlib.sha256()
    while block := file.read(_BLOCK):
        found.update(block)
    return found.hexdigest()[:_LETTERS]


def content_of(unit: Unit, contents: dict[str, str]) -> str:
    """What a unit holds: its picture's content, or one of all its pictures, with the classes that are asked for.

    >>> content_of(Unit("grid", (cat, dog), ("cat.jpg", "dog.jpg"), (281, 207)), contents)
    '81d3...'
    """
    parts = [contents.get(item.name, "") for item in unit.items]
    if not all(parts):
        return ""
    if len(parts) == 1 and not unit.classes:
        return parts[0]
    return files.text_hash(json.dumps([parts, unit.classes]), _LETTERS)


def _remembered(file: Path) -> dict[str, list[Any]]:
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    entries = known.items() if isinstance(known, dict) else ()
    return {key: entry for key, entry in entries if isinstance(entry, list) and len(entry) == 5}
