"""The commands that list: `classlens models`, `methods`, `ops`, `coverage`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from classlens.cli.declared import declared
from classlens.cli.options import Weights, load_model


def models() -> None:
    """List the included networks, and the other kinds of names that --model accepts."""
    from classlens.models import KINDS, MODELS

    table = Table("name", "description, and what to install", "input", box=None, pad_edge=False)
    for name, info in (MODELS | KINDS).items():
        about = escape(info.description) + (f"\n[dim]{escape(info.install)}[/]" if info.install else "")
        table.add_row(escape(name), about, f"{info.size}×{info.size}" if info.size else "")
    Console().print(table)


def methods() -> None:
    """List the explanation methods and their properties."""
    table = Table("name", "description", "class-specific", "signed", "conserves", box=None, pad_edge=False)
    for entry in declared():
        about = f"{escape(entry['summary'])}\n[dim]{escape(entry['paper'])}[/]"
        marks = ("yes" if entry[mark] else "–" for mark in ("class_specific", "signed", "conserves"))
        table.add_row(escape(entry["name"]), about, *marks)
    Console().print(table)


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
    library: Annotated[str, typer.Option(help="`torchvision` (all classifiers) or `timm` (one of every family).")],
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="The folder for rows and table.md; rerun the same command to resume.")
    ],
    only: Annotated[str, typer.Option(help="Only networks whose name contains this text.")] = "",
    timeout: Annotated[float, typer.Option(min=1, help="Time limit per network, in seconds.")] = 180,
    memory: Annotated[float, typer.Option(min=1, metavar="GB", help="Memory limit per network.")] = 12,
) -> None:
    """Test every classifier of a library: recorded, finite, conserved, batch = single, model unchanged.

    classlens coverage --library torchvision --out coverage
    """
    from classlens.evaluate.coverage import cover, table
    from classlens.files import write_text

    rows = []
    for done, total, row in cover(library, out, timeout, memory, only):
        rows.append(row)
        typer.echo(f"{done}/{total} {row.name}: {'good' if row.good else row.reason or 'not good'}", err=True)
    write_text(out / "table.md", table(rows))
    typer.echo(f"{sum(row.good for row in rows)} of {len(rows)} networks are good -> {out / 'table.md'}")
