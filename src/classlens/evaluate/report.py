"""What a run found, for people: table.md, table.csv, curves.png and a self-contained report.html."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import pyarrow as pa

from classlens.evaluate import curves, gallery, tables
from classlens.evaluate.panels import Panel
from classlens.evaluate.plan import Part, Plan, units_of
from classlens.evaluate.registry import TESTS, Config
from classlens.evaluate.settings import Settings
from classlens.evaluate.store import Store, where
from classlens.evaluate.tables import Table
from classlens.evaluate.worker import Worker
from classlens.render.html import data_uri

Rows = dict[str, pa.Table]  # by method
_TIME = "What a method takes beside the recorded forward pass that all methods share."
_LISTED = 20  # skipped pictures named in table.md; the report names all


@dataclass(frozen=True)
class Report:
    """The tables of a run, remarks about them, and where everything was written."""

    model: str
    tables: tuple[Table, ...]
    notes: tuple[str, ...]
    files: tuple[Path, ...]


def write(store: Store, plan: Plan, settings: Settings, worker: Worker) -> Report:
    """Read the rows that the command asked for, and write all files."""
    model = plan.model
    results = collect(store, plan)
    built = [tables.build(part.dataset.name, config, rows, settings.seed) for part, config, rows in results]
    skipped = _skipped(store, plan, model)
    notes = (*plan.notes, *_failures(skipped, settings), *_too_few(results))
    panels = [panel for table, (_, _, rows) in zip(built, results, strict=True) for panel in _panels(table, rows)]
    built = _with_differences(built, results, settings)
    drawing = _png(curves.draw(panels, settings.methods))
    timing = _timing(store, model, settings.methods)
    text = _markdown(model, settings, built, notes, skipped, timing)
    files = [
        store.write_text("table.md", text),
        store.write_text("table.csv", tables.csv_text(built, model)),
        store.write_bytes("curves.png", drawing),
    ]
    shown = [drawn for d in gallery.disputes(results) if (drawn := gallery.show(d, worker, plan, settings.seed, store))]
    ops = gallery.slowest_ops(worker, plan.parts[0], settings, store) if plan.parts else {}
    page = _page(model, settings, built, notes, skipped, timing, drawing, shown, ops, store)
    files.append(store.write_text("report.html", page))
    return Report(model, tuple(built), notes, tuple(files))


def _with_differences(
    built: Sequence[Table], results: Sequence[tuple[Part, Config, Rows]], settings: Settings
) -> list[Table]:
    """The tables that have a column, each followed by its differences to the method that was asked for."""
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
    """For each test on each data set: the rows of each method, of the pictures that the command asked for."""
    found = []
    read = {kind: store.read(kind) for kind in {config.kind for part in plan.parts for config in part.configs}}
    for part in plan.parts:
        for config in part.configs:
            names = [name for unit in units_of(part, config, plan, store) for name in unit.rows]
            same = {"model": plan.model, "data": part.dataset.name, "config": config.hash, "image": names}
            chosen = where(read[config.kind], **same)
            found.append((part, config, {method: where(chosen, method=method) for method in plan.methods}))
    return found


# ------------------------------------------------------------------------------------------------- what to say


def _skipped(store: Store, plan: Plan, model: str) -> list[dict[str, Any]]:
    """Pictures, or pictures with a method, that gave no row; each with its reason, once."""
    names = {(part.dataset.name, item.name) for part in plan.parts for item in part.items}
    rows = where(store.read("skipped"), model=model).select(["data", "image", "method", "reason"]).to_pylist()
    unique = {(row["data"], row["image"], row["method"], row["reason"]): row for row in rows}
    return [row for row in unique.values() if (row["data"], row["image"]) in names]


def _failures(skipped: Sequence[dict[str, Any]], settings: Settings) -> list[str]:
    found = []
    for method in settings.methods:
        mine = [row for row in skipped if row["method"] == method]
        if mine:
            reason, _ = Counter(row["reason"] for row in mine).most_common(1)[0]
            pictures = len({(row["data"], row["image"]) for row in mine})
            found.append(f"{method} gave no map for {pictures} pictures: {reason}")
    return found


def _too_few(results: Sequence[tuple[Part, Config, Rows]]) -> list[str]:
    """What tests say that found nothing to work on."""
    found = []
    for part, config, rows in results:
        nothing = TESTS[config.test].nothing
        if nothing is not None and not any(len(table) for table in rows.values()):
            found.append(nothing(config, part.dataset.name))
    return found


def _timing(store: Store, model: str, methods: Sequence[str]) -> dict[str, float]:
    """Seconds that a method takes for one picture, from all runs in this folder."""
    seconds: Counter[str] = Counter()
    images: Counter[str] = Counter()
    for entry in store.timings():
        if entry["model"] == model and entry["kind"] == "pictures":
            seconds[entry["method"]] += entry["seconds"].get("method", 0.0)
            images[entry["method"]] += entry["images"]
    return {method: seconds[method] / images[method] for method in methods if images[method]}


def _about(model: str, settings: Settings) -> str:
    name, _, fingerprint = model.partition("@")
    amount = f"{settings.limit} pictures of each data set at most" if settings.limit else "all pictures"
    if settings.half:
        amount += f", half {settings.half}"
    return f"Model {name} ({fingerprint}), {amount}, seed {settings.seed}. In brackets: 95 % bootstrap intervals."


def _skipped_text(row: Mapping[str, Any]) -> str:
    return f"{row['data']}: {row['image']}" + (f", {row['method']}" if row["method"] else "") + f" ({row['reason']})"


# ---------------------------------------------------------------------------------------------------- Markdown


def _markdown(
    model: str, settings: Settings, built: Sequence[Table], notes: Sequence[str], skipped: Sequence[dict[str, Any]],
    timing: Mapping[str, float],
) -> str:  # fmt: skip
    blocks = [_about(model, settings), tables.markdown(built).rstrip()]
    if timing:
        rows = [f"| {method} | {seconds:.2f} |" for method, seconds in timing.items()]
        blocks.append("\n".join(["### Time", "", _TIME, "", "| method | seconds a picture |", "|---|---|", *rows]))
    if notes:
        blocks.append("\n".join(["### Notes", "", *(f"- {note}" for note in notes)]))
    if skipped:
        lines = [f"- {_skipped_text(row)}" for row in skipped[:_LISTED]]
        more = [f"- and {len(skipped) - _LISTED} more, in report.html"] if len(skipped) > _LISTED else []
        blocks.append("\n".join([f"### Skipped ({len(skipped)})", "", *lines, *more]))
    return "\n\n".join(blocks) + "\n"


# -------------------------------------------------------------------------------------------------------- HTML


def _page(
    model: str, settings: Settings, built: Sequence[Table], notes: Sequence[str], skipped: Sequence[dict[str, Any]],
    timing: Mapping[str, float], drawing: bytes, shown: Sequence[gallery.Shown],
    ops: Mapping[str, Sequence[tuple[str, float]]], store: Store,
) -> str:  # fmt: skip
    """One file with everything in it: it can be mailed."""
    sections = [
        f"<h1>classlens evaluate: {escape(model.partition('@')[0])}</h1><p>{escape(_about(model, settings))}</p>",
        _list("Notes", notes),
        "<h2>Tables</h2>",
        *(tables.html(table) for table in built),
        f"<h2>Curves</h2><img class=curves alt='curves' src='{data_uri(drawing)}'>",
        _gallery(shown),
        _costs(timing, ops),
        _list(f"Skipped ({len(skipped)})", [_skipped_text(row) for row in skipped]),
        _details("Manifest", (store.root / "manifest.json")),
    ]
    head = "<meta charset=utf-8><meta name=viewport content='width=device-width'><title>classlens evaluate</title>"
    return f"<!doctype html><html lang=en><head>{head}{_STYLE}</head><body>{''.join(sections)}</body></html>\n"


def _gallery(shown: Sequence[gallery.Shown]) -> str:
    if not shown:
        return ""
    blocks = []
    for dispute in shown:
        figures = [_figure(dispute.picture, "picture")]
        figures += [_figure(jpeg, f"{method} {score:.2f}") for method, (score, jpeg) in dispute.maps.items()]
        blocks.append(f"<h4>{escape(dispute.caption)}</h4><div class=row>{''.join(figures)}</div>")
    judges = dict.fromkeys(dispute.judge for dispute in shown)
    remark = (
        "Red speaks for the explained class, blue against it. Under each map its score on this picture, from 0 to 1: "
        f"{', or '.join(judges)}."
    )
    return f"<h2>Where the methods disagree most</h2><p>{remark}</p>{''.join(blocks)}"


def _costs(timing: Mapping[str, float], ops: Mapping[str, Sequence[tuple[str, float]]]) -> str:
    if not timing and not ops:
        return ""
    rows = []
    for method in {**timing, **ops}:
        seconds = f"{timing[method]:.2f}" if method in timing else "–"
        slowest = ", ".join(f"{escape(name)} {100 * share:.0f} %" for name, share in ops.get(method, ()))
        rows.append(f"<tr><th>{escape(method)}</th><td>{seconds}</td><td class=left>{slowest}</td></tr>")
    heads = "<th>method</th><th>seconds a picture</th><th class=left>slowest operations</th>"
    return (
        f"<h2>Time and slowest operations</h2><p>{_TIME} Operations: measured on one picture.</p>"
        f"<div class=wide><table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _list(heading: str, lines: Sequence[str]) -> str:
    return (
        f"<h2>{escape(heading)}</h2><ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>" if lines else ""
    )


def _details(heading: str, file: Path) -> str:
    content = json.dumps(json.loads(file.read_text(encoding="utf-8"))["runs"][-1], indent=2) if file.exists() else ""
    return f"<details><summary>{escape(heading)}</summary><pre>{escape(content)}</pre></details>"


def _figure(jpeg: bytes, caption: str) -> str:
    text = escape(caption, quote=True)
    return f"<figure><img alt='{text}' src='{data_uri(jpeg, 'jpeg')}'><figcaption>{text}</figcaption></figure>"


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


_STYLE = """<style>
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1180px; margin: 2rem auto; padding: 0 1rem; color: #1d1d1f; }
h1 { font-size: 1.6rem } h2 { font-size: 1.25rem; margin-top: 2.2rem; border-bottom: 1px solid #ddd }
h3 { font-size: 1.05rem; margin-bottom: .2rem } h4 { font-weight: 500; margin: 1.2rem 0 .3rem; font-size: .95rem }
p { color: #444; margin-top: .2rem } .wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .8rem; text-align: right; border-bottom: 1px solid #e5e5e5; white-space: nowrap }
tbody th, thead th:first-child, .left { text-align: left !important }
tbody th { font-weight: 500 } td small { color: #777 } td.best { background: #fdf3d3; font-weight: 600 }
.curves { width: 100%; max-width: 1150px }
.row { display: grid; grid-template-columns: repeat(auto-fill, 112px); gap: .5rem .3rem }
figure { margin: 0; font-size: .75rem; line-height: 1.2 }
figure img { width: 112px; display: block; border-radius: 3px }
pre { background: #f6f6f6; padding: 1rem; overflow-x: auto; font-size: .8rem }
</style>"""
