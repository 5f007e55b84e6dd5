"""The command `classlens concepts`: reads options, calls `classlens.concepts`, prints. Nothing is computed here."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from classlens.cli.bar import Bar
from classlens.cli.early import check_call, check_classes, check_method, check_out
from classlens.cli.options import AsJson, Device, ModelName, Seed, Weights, load_model

if TYPE_CHECKING:
    from classlens.concept import Concepts


def concepts(
    data: Annotated[
        str,
        typer.Option(
            metavar="DIR",
            help="A folder of images in which the class occurs, or a data set in any layout that `evaluate` knows.",
        ),
    ],
    target: Annotated[str, typer.Option("--class", "-c", metavar="NAME|INDEX", help="The class to explain.")],
    image: Annotated[
        Path | None,
        typer.Argument(metavar="[IMAGE]", help="An image file. Without one: the class as a whole.", show_default=False),
    ] = None,
    model: ModelName = "efficientnet-lite0",
    weights: Weights = "default",
    method: Annotated[
        str,
        typer.Option("--method", "-M", metavar="NAME", help="A method whose rules are linear in the relevance."),
    ] = "lrp-epsilon-plus-flat",
    layer: Annotated[
        str | None, typer.Option(metavar="NAME", help="The layer of the concepts.  [default: chosen]")
    ] = None,
    count: Annotated[
        int | None, typer.Option(min=1, help="The number of concepts for the class.  [default: chosen]")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Find the concepts in at most N images of the class.")] = 32,
    seed: Seed = 0,
    device: Device = "auto",
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Where results and index go.")] = Path(
        "out/concepts"
    ),
    json: AsJson = False,
) -> None:
    """Show what a network found, not only where: the concepts that the evidence for a class consists of.

        classlens concepts photo.jpg --class "Persian cat" --data photos/
        classlens concepts --class "Persian cat" --data photos/

    A concept is a direction in the features of a layer. It is shown with its share of the evidence, where it is in the
    image, and the images of the folder in which it gives most evidence. This costs one forward pass for each image of
    the folder (with labels: of the class), and 1,000 to 3,000 more; most of them run only a part of the network. What
    was computed is kept in DIR/index, so a stopped run resumes, and a second image of the class costs at most a
    hundred forward passes and eight sweeps.
    """
    if image is None:
        check_method(method)
        check_classes(model, [target])
        check_out(out)
    else:
        check_call([image], method, model, [target], out, folder=True)
    import classlens

    loaded = load_model(model, weights, device)
    with Bar() as bar:
        found = classlens.concepts(
            loaded, image, target, data, method=method, layer=layer, count=count, limit=limit, seed=seed,
            index=out / "index", progress=bar,
        )  # fmt: skip
    files = found.save(out)
    if json:
        typer.echo(jsonlib.dumps(found.to_json() | {"files": [str(path) for path in files]}, indent=2))
    else:
        _show(found, files)


def _show(found: Concepts, files: list[Path]) -> None:
    table = Table("concept", "share of the evidence", "most in", box=None, pad_edge=False)
    for one in found.concepts:
        table.add_row(one.name, f"{100 * one.share:+.1f} %", escape(", ".join(r.name for r in one.references[:3])))
    console = Console(soft_wrap=True)
    console.print(table)
    for line in (
        f"layer {found.layer}, found in {found.pictures} images of {found.label}; the concepts carry "
        f"{100 * found.carried:.0f} % of the class's score{found.beside}, and are {100 * found.stability:.0f} % alike "
        "in two halves of the images",
        f"cost: {found.forwards} forward passes, {found.sweeps} sweeps",
        *(f"note: {note}" for note in found.notes),
        *(f"-> {path}" for path in files),
    ):
        console.print(line, markup=False, highlight=False)
