"""Rows that were there before: which of them still hold, and what is said of the others.

A row is kept under the content of its picture. So a picture that changed has no row of its new content: it is computed,
and `changed` names it. Rows of classlens before it kept contents have none. `adopt` gives them their pictures' content
where nothing speaks against it: the run's manifest names the data set once, the names and sizes of its files are those
of that run, and the picture's file is older than the run. Others are computed again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from classlens.data.layouts import Item, data_hash
from classlens.evaluate.manifest import Entry
from classlens.evaluate.plan import Part, Plan, contents_of, is_late, wanted
from classlens.evaluate.registry import Config
from classlens.evaluate.store import Row, Store, finished, where

_NAMED = 5  # pictures that a note names


@dataclass(frozen=True)
class Adopted:
    """Pictures whose rows had no content: with those that were adopted, and those that were not."""

    kept: frozenset[str] = frozenset()
    refused: frozenset[str] = frozenset()

    def __or__(self, other: Adopted) -> Adopted:
        return Adopted(self.kept | other.kept, self.refused | other.refused)

    def notes(self) -> list[str]:
        found = []
        if self.kept:
            found.append(
                f"the rows of {_listed(self.kept)} are of a classlens that did not keep what pictures hold; their "
                "names, sizes and times have not changed, so the rows are used. Give a new --out to compute them again."
            )
        if self.refused:
            found.append(
                f"the rows of {_listed(self.refused)} are of a classlens that did not keep what pictures hold, and the "
                "data may have changed since: they are computed again."
            )
        return found


def changed(plan: Plan, store: Store) -> list[str]:
    """A note for each data set of which pictures have rows, but none of what they hold now."""
    found = []
    for part in plan.parts:
        names: set[str] = set()
        for config, held in _asked(part, plan, store, late=False):
            mine = where(store.read(config.kind), model=plan.model, data=part.dataset.name, config=config.hash)
            for pictures in finished(mine).values():
                before = {name for name, content in pictures if content}
                names |= {name for name in before & held.keys() if held[name] and (name, held[name]) not in pictures}
        if names:
            found.append(
                f"{part.dataset.name}: {_listed(names)} changed since an earlier run here (the file, its mask or its "
                "label), or belonged to another data set of that name: computed again."
            )
    return found


def adopt(plan: Plan, store: Store, earlier: Sequence[Entry], late: bool) -> Adopted:
    """Give rows without a content that of their pictures, where they can be trusted."""
    found = Adopted()
    for part in plan.parts:
        for config, held in _asked(part, plan, store, late):
            for kind in (config.kind, "skipped"):
                found |= _adopt(part, plan, store, earlier, kind, config, held)
    return found


def _asked(part: Part, plan: Plan, store: Store, late: bool) -> Iterator[tuple[Config, dict[str, str]]]:
    """Each kind of row of a data set, with the contents of its pictures."""
    if plan.prediction is not None and not late:
        yield plan.prediction, contents_of(part.pictures)
    for config in part.configs:
        if is_late(config) == late:
            yield config, wanted(part, config, plan, store)


def _adopt(
    part: Part, plan: Plan, store: Store, earlier: Sequence[Entry], kind: str, config: Config, held: dict[str, str]
) -> Adopted:
    table = where(store.read(kind), model=plan.model, data=part.dataset.name, config=config.hash)
    there = {
        (row["method"], row["image"], row["content"])
        for row in table.select(["method", "image", "content"]).to_pylist()
    }
    old: list[Row] = [
        row
        for row in where(table, content="").to_pylist()
        if held.get(row["image"]) and (row["method"], row["image"], held[row["image"]]) not in there
    ]
    if not old:
        return Adopted()
    trusted = _trusted(part, plan.model, earlier)
    kept = [row | {"content": held[row["image"]]} for row in old if row["image"] in trusted]
    store.append(kept)
    names = {row["image"] for row in kept}
    return Adopted(frozenset(names), frozenset({row["image"] for row in old} - names))


def _trusted(part: Part, model: str, earlier: Sequence[Entry]) -> set[str]:
    """Pictures that are as the runs found them that wrote rows without contents."""
    runs = [
        run
        for run in earlier
        if "id" not in run and run["model"].get("id") == model and part.dataset.name in _names(run)
    ]
    if not runs or any(_names(run).count(part.dataset.name) > 1 for run in runs) or not _same_files(part, runs[-1]):
        return set()
    begun = min(datetime.fromisoformat(run["begun"]).timestamp() for run in runs)
    return {item.name for item in part.items if _time(part, item) < begun}


def _names(run: Entry) -> list[str]:
    return [str(data.get("name")) for data in run["data"]]


def _same_files(part: Part, run: Entry) -> bool:
    """Whether the pictures that a run chose have the same names and sizes now."""
    (data,) = (data for data in run["data"] if data.get("name") == part.dataset.name)
    choice = run["settings"]
    items = part.dataset.select(choice.get("limit"), choice.get("seed", 0), choice.get("half"))
    return bool(data.get("hash") == data_hash(part.dataset, items))


def _time(part: Part, item: Item) -> float:
    """When a picture or its mask was last changed."""
    paths = [part.dataset.root if isinstance(p, int) else p for p in (item.image, item.mask) if p is not None]
    return max(_changed(path) for path in paths)


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return float("inf")


def _listed(names: Sequence[str] | set[str] | frozenset[str]) -> str:
    """`3 pictures (a.png, b.png, c.png)`, of many the first."""
    shown = sorted(names)[:_NAMED]
    more = ", ..." if len(names) > len(shown) else ""
    return f"{len(names)} picture{'s' if len(names) > 1 else ''} ({', '.join(shown)}{more})"
