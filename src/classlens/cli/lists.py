"""The commands that list: `classlens models`, `methods`, `ops`, `coverage`."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from classlens.cli.declared import declared
from classlens.cli.early import check_out
from classlens.cli.options import AsJson, Weights, load_model

_TABLE_WIDTH = 110  # columns; below that, a table would break its texts into single words


def models(json: AsJson = False) -> None:
    """List the included networks, and the other kinds of names that --model accepts."""
    from classlens.models import KINDS, MODELS

    entries: list[dict[str, Any]] = [
        {"name": name, "included": name in MODELS} | asdict(info) for name, info in (MODELS | KINDS).items()
    ]  # fmt: skip
    if json:
        typer.echo(jsonlib.dumps(entries, indent=2))
        return
    sizes = (f"{entry['size']}×{entry['size']}" if entry["size"] else "" for entry in entries)
    _print_entries(
        ("name", "description, and what to install", "input"),
        [(e["name"], e["description"], e["install"] or "", size) for e, size in zip(entries, sizes, strict=True)],
    )


def methods(json: AsJson = False) -> None:
    """List the explanation methods and their properties.

    class-specific: each class has its own map.
    signed: negative values are evidence against the class.
    conserves: the map sums to the score that is explained.
    """
    entries = declared()
    if json:
        typer.echo(jsonlib.dumps(entries, indent=2))
        return
    marks = ("class_specific", "signed", "conserves")
    _print_entries(
        ("name", "description", *(mark.replace("_", "-") for mark in marks)),
        [(e["name"], e["summary"], e["paper"], *("yes" if e[mark] else "–" for mark in marks)) for e in entries],
    )


def _print_entries(heads: Sequence[str], entries: Sequence[Sequence[str]]) -> None:
    """Entries (name, description, remark, properties ...) as a table, or below each other in a narrow terminal."""
    console = Console(highlight=False)
    if console.width < _TABLE_WIDTH:
        for entry in entries:
            console.print(*_below_each_other(heads, entry), sep="\n")
        return
    table = Table(*heads, box=None, pad_edge=False)
    for name, about, remark, *properties in entries:
        table.add_row(escape(name), escape(about) + (f"\n[dim]{escape(remark)}[/]" if remark else ""), *properties)
    console.print(table)


def _below_each_other(heads: Sequence[str], entry: Sequence[str]) -> Iterator[Any]:
    name, about, remark, *properties = entry
    named = ", ".join(f"{head}: {mark}" for head, mark in zip(heads[2:], properties, strict=True) if mark)
    yield Text(name, "bold")
    for line, style in ((about, ""), (named, ""), (remark, "dim")):
        if line:
            yield Padding(Text(line, style), (0, 0, 0, 2))


def ops(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The network; `classlens models` lists names.")],
    weights: Weights = "default",
) -> None:
    """List the operations of a network, how often each occurs, and the rule for each.

    classlens ops efficientnet-lite0
    classlens ops torchvision:convnext_tiny --weights none
    """
    from classlens.core.rules import RULES
    from classlens.explanation import operations

    table = Table("operation", "count", "rule", "description", box=None, pad_edge=False)
    for op, times in operations(load_model(model, weights, "cpu")).items():
        rule = RULES.get(op)
        about = (rule.__doc__ or "").strip().splitlines()[0] if rule else "[red]none: relevance methods refuse it[/]"
        table.add_row(op, str(times), getattr(rule, "__name__", "–"), escape(about) if rule else about)
    Console().print(table)


def coverage(
    library: Annotated[
        str, typer.Option(help="`torchvision`, `transformers` (all classifiers) or `timm` (one of every family).")
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", metavar="DIR", help="The folder for rows and table.md; rerun the same command to resume."
        ),
    ],
    only: Annotated[str, typer.Option(help="Only networks whose name contains this text.")] = "",
    timeout: Annotated[float, typer.Option(min=1, help="Time limit per network, in seconds.")] = 180,
    memory: Annotated[float, typer.Option(min=1, metavar="GB", help="Memory limit per network.")] = 12,
) -> None:
    """Test every classifier of a library: recorded, finite, conserved, batch = single, model unchanged.

    classlens coverage --library torchvision --out coverage
    """
    check_out(out)
    from classlens.evaluate.coverage import cover, table
    from classlens.files import write_text

    rows = []
    for done, total, row in cover(library, out, timeout, memory, only):
        rows.append(row)
        typer.echo(f"{done}/{total} {row.name}: {'good' if row.good else row.reason or 'not good'}", err=True)
    write_text(out / "table.md", table(rows))
    typer.echo(f"{sum(row.good for row in rows)} of {len(rows)} networks are good -> {out / 'table.md'}")
