"""Writes the results of a run: table.md, table.csv, curves.png and a self-contained report.html."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from classlens.evaluate import curves, gallery, tables
from classlens.evaluate.page import TIME, Page
from classlens.evaluate.panels import Panel
from classlens.evaluate.plan import Part, Plan, wanted
from classlens.evaluate.registry import TESTS, Config
from classlens.evaluate.settings import Settings
from classlens.evaluate.store import Store, current, where
from classlens.evaluate.tables import Table
from classlens.evaluate.worker import Worker
from classlens.render import png

if TYPE_CHECKING:
    import pyarrow as pa

Rows: TypeAlias = "dict[str, pa.Table]"  # by method
_LISTED = 20  # skipped images named in table.md; the report names all


@dataclass(frozen=True)
class Report:
    """The tables of a run, remarks about them, and the paths of the files."""

    model: str
    tables: tuple[Table, ...]
    notes: tuple[str, ...]
    files: tuple[Path, ...]


def write(store: Store, plan: Plan, settings: Settings, worker: Worker) -> Report:
    """Read the rows of the command, and write all files."""
    model = plan.model
    results = collect(store, plan)
    built = [tables.build(part.dataset.name, config, rows, settings.seed) for part, config, rows in results]
    skipped = skipped_rows(store, plan)
    notes = (*plan.notes, *_unread(plan), *_failures(skipped, settings), *_too_few(results))
    panels = [panel for table, (_, _, rows) in zip(built, results, strict=True) for panel in _panels(table, rows)]
    built = _with_differences(built, results, settings)
    drawing = png(curves.draw(panels, settings.methods))
    timing = _timing(store, model, settings.methods)
    text = _markdown(model, settings, built, notes, skipped, timing)
    files = [
        store.write_text("table.md", text),
        store.write_text("table.csv", tables.csv_text(built, model)),
        store.write_bytes("curves.png", drawing),
    ]
    shown = [drawn for d in gallery.disputes(results) if (drawn := gallery.show(d, worker, plan, settings.seed, store))]
    ops = gallery.slowest_ops(worker, plan.parts[0], settings, store) if plan.parts else {}
    page = Page(
        model.partition("@")[0], _about(model, settings), notes, built, drawing, shown, timing, ops,
        [_skipped_text(row) for row in skipped], _last_run(store),
    )  # fmt: skip
    files.append(store.write_text("report.html", page.html()))
    return Report(model, tuple(built), notes, tuple(files))


def _with_differences(
    built: Sequence[Table], results: Sequence[tuple[Part, Config, Rows]], settings: Settings
) -> list[Table]:
    """The tables with at least one column, each followed by its paired differences from the `against` method."""
    found = []
    for table, (_, _, rows) in zip(built, results, strict=True):
        if table.metrics:
            found.append(table)
            if settings.against and len(rows[settings.against]):
                found.append(tables.paired(table, rows, settings.against, settings.seed))
    return found


def _panels(table: Table, rows: Rows) -> list[Panel]:
    there = {method: found for method, found in rows.items() if len(found)}
    return TESTS[table.config.test].panels(table, there) if there and table.metrics else []


def collect(store: Store, plan: Plan) -> list[tuple[Part, Config, Rows]]:
    """For each test on each data set: the rows of each method, for the images of the command."""
    found = []
    read = {kind: store.read(kind) for kind in {config.kind for part in plan.parts for config in part.configs}}
    for part in plan.parts:
        for config in part.configs:
            mine = where(read[config.kind], model=plan.model, data=part.dataset.name, config=config.hash)
            chosen = current(mine, wanted(part, config, plan, store))
            found.append((part, config, {method: where(chosen, method=method) for method in plan.methods}))
    return found


# ------------------------------------------------------------------------------------------------- what to say


def skipped_rows(store: Store, plan: Plan) -> list[dict[str, Any]]:
    """Images, or images with a method, without a row; each with its reason, once."""
    rows = list(plan.broken)
    table = where(store.read("skipped"), model=plan.model, method=plan.methods)
    for part in plan.parts:
        for config in part.configs:
            mine = where(table, data=part.dataset.name, config=config.hash)
            rows += current(mine, wanted(part, config, plan, store)).to_pylist()
    return list({(row["data"], row["image"], row["method"], row["reason"]): row for row in rows}.values())


def _unread(plan: Plan) -> list[str]:
    count = len({(row["data"], row["image"]) for row in plan.broken})
    return [f"{count} image{'s' if count > 1 else ''} could not be used; table.md names them."] if count else []


def _failures(skipped: Sequence[dict[str, Any]], settings: Settings) -> list[str]:
    found = []
    for method in settings.methods:
        mine = [row for row in skipped if row["method"] == method]
        if mine:
            reason, _ = Counter(row["reason"] for row in mine).most_common(1)[0]
            pictures = len({(row["data"], row["image"]) for row in mine})
            found.append(f"{method} gave no map for {pictures} images: {reason}")
    return found


def _too_few(results: Sequence[tuple[Part, Config, Rows]]) -> list[str]:
    """The messages of tests without any rows."""
    found = []
    for part, config, rows in results:
        nothing = TESTS[config.test].nothing
        if nothing is not None and not any(len(table) for table in rows.values()):
            found.append(nothing(config, part.dataset.name))
    return found


def _timing(store: Store, model: str, methods: Sequence[str]) -> dict[str, float]:
    """Seconds per image of each method, from all runs in this folder."""
    seconds: Counter[str] = Counter()
    images: Counter[str] = Counter()
    for entry in store.timings():
        if entry["model"] == model and entry["kind"] == "pictures":
            seconds[entry["method"]] += entry["seconds"].get("method", 0.0)
            images[entry["method"]] += entry["images"]
    return {method: seconds[method] / images[method] for method in methods if images[method]}


def _about(model: str, settings: Settings) -> str:
    name, _, fingerprint = model.partition("@")
    amount = f"at most {settings.limit} images of each data set" if settings.limit else "all images"
    if settings.half:
        amount += f", half {settings.half}"
    return f"Model {name} ({fingerprint}), {amount}, seed {settings.seed}. In brackets: 95 % bootstrap intervals."


def _last_run(store: Store) -> str:
    """The manifest's entry for the last command; another process may have started one meanwhile."""
    file = store.root / "manifest.json"
    return json.dumps(json.loads(file.read_text(encoding="utf-8"))["runs"][-1], indent=2) if file.exists() else ""


def _skipped_text(row: Mapping[str, Any]) -> str:
    return f"{row['data']}: {row['image']}" + (f", {row['method']}" if row["method"] else "") + f" ({row['reason']})"


# ---------------------------------------------------------------------------------------------------- Markdown


def _markdown(
    model: str, settings: Settings, built: Sequence[Table], notes: Sequence[str], skipped: Sequence[dict[str, Any]],
    timing: Mapping[str, float],
) -> str:  # fmt: skip
    blocks = [tables.plain(_about(model, settings)), tables.markdown(built).rstrip()]
    if timing:
        rows = [f"| {tables.plain(method)} | {seconds:.2f} |" for method, seconds in timing.items()]
        blocks.append("\n".join(["### Time", "", TIME, "", "| method | seconds per image |", "|---|---|", *rows]))
    if notes:
        blocks.append("\n".join(["### Notes", "", *(f"- {tables.plain(note)}" for note in notes)]))
    if skipped:
        lines = [f"- {tables.plain(_skipped_text(row))}" for row in skipped[:_LISTED]]
        more = [f"- and {len(skipped) - _LISTED} more, in report.html"] if len(skipped) > _LISTED else []
        blocks.append("\n".join([f"### Skipped ({len(skipped)})", "", *lines, *more]))
    return "\n\n".join(blocks) + "\n"
