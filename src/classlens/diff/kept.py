"""What a stopped diff has found so far: a file of JSON lines beside the page, one for each picture.

>>> kept = Kept(Path("diff.html"), both)
>>> found = collect(both, items, 4, silent, kept)      # takes what an earlier run found, and keeps what is new
>>> kept.remove()                                      # once the page is written

A picture's line counts only if networks, method, data and the picture itself are still what they were. The numbers
come back exactly, so a resumed diff writes the same page.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from classlens import files
from classlens.data.layouts import Item
from classlens.diff.collect import Both, Found, Row, Side
from classlens.errors import ImageError
from classlens.evaluate.manifest import versions
from classlens.trust.bundle import file_hashes


@dataclass(frozen=True)
class Kept:
    """The file beside a page; its first line says what the others were computed by."""

    page: Path
    both: Both

    @property
    def path(self) -> Path:
        """`diff.html.rows`, beside `diff.html`."""
        return self.page.with_name(f"{self.page.name}.rows")

    def read(self, items: Sequence[Item]) -> dict[str, Found]:
        """What an earlier run of the same diff found in these pictures; without one, the file begins anew."""
        first, *lines = _lines(self.path) or [None]
        if first != self._settings():
            files.write_text(self.path, json.dumps(self._settings()))
            return {}
        known = {line["item"]: line for line in lines}
        same = [item for item in items if item.name in known and known[item.name]["content"] == self._content(item)]
        return {item.name: _found(known[item.name], item) for item in same}

    def add(self, found: Iterable[tuple[Item, Found]]) -> None:
        """Keep what was found in some pictures, before the next are begun."""
        texts = [json.dumps(self._line(item, one)) for item, one in found if self._content(item)]
        with self.path.open("ab") as file:
            file.write("".join(f"\n{text}" for text in texts).encode())  # a line cut short before ends here
            file.flush()
            os.fsync(file.fileno())

    def remove(self) -> None:
        """The page is written: nothing is left to resume."""
        self.path.unlink(missing_ok=True)

    def _settings(self) -> dict[str, str]:
        dataset = self.both.a.dataset
        about = [
            *(side.network.id for side in self.both.sides), *(side.model.labels for side in self.both.sides),
            self.both.a.method, self.both.a.seed, self.both.asked, os.path.abspath(dataset.root), dataset.layout,
            versions()["classlens"],
        ]  # fmt: skip
        return {"diff": files.text_hash(json.dumps(about))}

    def _content(self, item: Item) -> str:
        """A hash of picture and mask; empty if they cannot be read."""
        try:
            return files.text_hash(json.dumps(file_hashes(self.both.a.dataset, item)))
        except (OSError, ImageError):
            return ""

    def _line(self, item: Item, found: Found) -> dict[str, Any]:
        rows = [{**vars(row), "item": None, "a": asdict(row.a), "b": asdict(row.b)} for row in found.rows]
        found_here: dict[str, Any] = _plain({**vars(found), "rows": rows})
        return {"item": item.name, "content": self._content(item), **found_here}


def _plain(value: Any) -> Any:
    """Arrays as lists, at any depth."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _found(line: Mapping[str, Any], item: Item) -> Found:
    """What a line says, as it was before it was written."""
    rows = tuple(
        Row(**{
            **row, "item": item, "classes": tuple(row["classes"]), "predicted": tuple(row["predicted"]),
            "right": row["right"] and tuple(row["right"]), "a": Side(**row["a"]), "b": Side(**row["b"]),
            "grids": tuple(np.array(grid) for grid in row["grids"]),
            "object": None if row["object"] is None else np.array(row["object"]),
        })
        for row in line["rows"]
    )  # fmt: skip
    return Found(rows, line["skipped"], line["without_mask"], tuple(line["unshared"]))


def _lines(path: Path) -> list[Any]:
    """The lines of the file; the one that was being written when the process died is no line."""
    found = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except (ValueError, RecursionError):
            continue
    return found
