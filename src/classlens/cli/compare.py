"""The command `classlens compare`: reads options, calls the library, prints."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from classlens.cli.bar import Bar
from classlens.cli.early import check_call
from classlens.cli.options import (
    AsJson,
    Classes,
    Device,
    ModelName,
    RatherThan,
    Weights,
    load_model,
    rivals_of,
    targets_of,
)
from classlens.errors import ClasslensError

if TYPE_CHECKING:
    from classlens.comparison import Comparison
    from classlens.progress import Progress


def compare(
    image: Annotated[Path, typer.Argument(metavar="IMAGE", help="An image file.", show_default=False)],
    methods: Annotated[
        str,
        typer.Option(
            "--methods",
            "-M",
            metavar="NAMES",
            help="Method names, separated by commas, or `all`; `classlens methods` lists them.",
        ),
    ] = "agf,agf-release,gradcam,fullgrad,lrp,clrp,integrated-gradients",
    classes: Classes = None,
    top: Annotated[
        int | None,
        typer.Option("--top", "-k", min=1, metavar="K", help="Explain the K most likely classes.  [default: 2]"),
    ] = None,
    rather_than: RatherThan = None,
    model: ModelName = "efficientnet-lite0",
    weights: Weights = "default",
    device: Device = "auto",
    out: Annotated[Path, typer.Option("--out", "-o", metavar="PNG", help="The figure.")] = Path("out/comparison.png"),
    json: AsJson = False,
) -> None:
    """Compare several methods side by side: rows are classes, columns are methods.

        classlens compare photo.jpg --class tabby --class espresso
        classlens compare photo.jpg --class tabby --class espresso --methods all
        classlens compare photo.jpg --class tabby --rather-than rivals

    The table shows how similar each method's maps of the classes are (their correlation): near 1, the method shows the
    same map for every class.
    """
    check_call([image], methods, model, [*(classes or ()), *(rather_than or ())], out, folder=False)
    from classlens import render
    from classlens.comparison import Comparison, comparing
    from classlens.methods import method_names
    from classlens.progress import reporting

    names = method_names(methods)
    targets = targets_of(classes, top, default=2)
    loaded = load_model(model, weights, device)
    found = Comparison({}, {})
    steps = comparing(loaded, image, targets, names, rivals_of(rather_than))
    with Bar() as bar:
        for number, name in enumerate(names):
            bar(name, number, len(names))
            with reporting(_within(bar, number, len(names))):
                _, outcome = next(steps)
            if isinstance(outcome, ClasslensError):
                found.failures[name] = str(outcome)
            else:
                found.explanations[name] = outcome
    render.write_png(out, found.figure())
    if json:
        typer.echo(jsonlib.dumps(_comparison_document(found, image, out), indent=2))
    else:
        _show_comparison(found, out)


def _within(bar: Progress, number: int, total: int) -> Progress:
    """The steps of a long method, shown next to its name: `rise 12/63`."""
    return lambda label, done, steps: bar(f"{label} {done}/{steps}", number, total)


def _comparison_document(found: Comparison, image: Path, out: Path) -> dict[str, Any]:
    from classlens import render

    methods = {
        name: {"seconds": e.report.seconds, "likeness": found.likeness(name), "classes": render.describe(e)}
        for name, e in found.explanations.items()
    }
    return {"path": str(image), "methods": methods, "failed": found.failures, "files": [str(out)]}


def _show_comparison(found: Comparison, out: Path) -> None:
    from classlens import render
    from classlens.comparison import ALIKE

    table = Table("method", "s", "similarity", "class", "evidence for it", box=None, pad_edge=False)
    table.columns[0].no_wrap = True
    for name, e in found.explanations.items():
        alike = found.likeness(name)
        verdict = "" if alike is None else f"{alike:.2f}" + (" (same map)" if alike > ALIKE else "")
        for k, about in enumerate(render.describe(e)):
            lead = (escape(name), f"{e.report.seconds:.1f}", verdict) if k == 0 else ("", "", "")
            asked = " ".join(word for word in (about["name"], render.rival_text(e, 0, k)) if word)
            table.add_row(*lead, escape(asked), about["where"])
    for name, reason in found.failures.items():
        table.add_row(escape(name), "–", "", "", f"[dim]{escape(reason)}[/]")
    Console().print(table)
    typer.echo(f"-> {out}")
