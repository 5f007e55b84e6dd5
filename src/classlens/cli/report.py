"""The command `classlens report`: reads options, calls `classlens.report`, prints. Nothing is computed here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from classlens.cli.bar import Bar
from classlens.cli.early import check_method, check_new, check_out
from classlens.cli.options import Device, ModelName, Weights, load_for

if TYPE_CHECKING:
    from classlens.report import Report


def report(
    data: Annotated[
        str,
        typer.Option(
            "--data",
            "-d",
            metavar="DIR",
            help="A folder of images, a folder for each class, VOC, Oxford pets, images/ + masks/. "
            "The layout is detected. To set it, write `pets:DIR`.",
        ),
    ],
    model: ModelName = "efficientnet-lite0",
    out: Annotated[Path, typer.Option("--out", "-o", metavar="HTML", help="The page.")] = Path("report.html"),
    weights: Weights = "default",
    method: Annotated[
        str,
        typer.Option(
            "--method",
            "-M",
            metavar="NAME",
            help="The method; `classlens methods` lists them. `auto`: the "
            "one that `classlens choose` stored for the network.",
        ),
    ] = "agf",
    limit: Annotated[int, typer.Option(min=1, help="Use at most N images (a deterministic subset).")] = 200,
    seed: Annotated[int, typer.Option(help="Seed for the choice of images and all random numbers.")] = 0,
    top: Annotated[int, typer.Option(min=1, help="At most this many entries per section (up to 25).")] = 12,
    bundle: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR|ZIP",
            help="Also write an audit bundle, a folder or a zip file: the page, all rows (Parquet), settings, hashes "
            "and limitations. `classlens verify` checks it later.",
        ),
    ] = None,
    concepts: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Also show what classes are made of (see `classlens concepts`): 1,000 to 3,000 more forward passes "
            "per class with at least 6 images. DIR keeps what was computed, so that a stopped report resumes.",
        ),
    ] = None,
    device: Device = "auto",
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Images per batch.  [default: 4 on CPU, 32 on GPU]")
    ] = None,
) -> None:
    """Report on a model: where it finds its classes, which evidence looks odd, and which classes it confuses.

        classlens report --data photos/ --out report.html
        classlens report --data oxford-pets/ --model torchvision:resnet50 --limit 500
        classlens report --data photos/ --bundle audit.zip
        classlens report --data photos/ --concepts index/

    Writes one self-contained page. Masks and labels are used if the data set has them.
    """
    check_method(method, auto=True)
    check_out(out, folder=False)
    if concepts is not None:
        check_out(concepts, option="--concepts")
    if bundle is not None:
        check_new(bundle)
    from classlens.report import batch_size_of
    from classlens.report import report as make

    loaded, method = load_for(model, weights, device, method)
    at_once = batch_size or batch_size_of(loaded)
    with Bar() as bar:
        made = make(
            loaded, data, out, method=method, limit=limit, seed=seed, top=top, batch_size=at_once, concepts=concepts,
            progress=bar, command=["classlens", *sys.argv[1:]],
        )  # fmt: skip
    _print(made)
    if bundle is not None:
        from classlens.trust.bundle import write

        settings = {"method": method, "limit": limit, "seed": seed, "batch_size": at_once}
        given = {"given": {"model": model, "weights": weights, "data": data}, "command": ["classlens", *sys.argv[1:]]}
        typer.echo(f"-> {write(made, loaded, data, bundle, settings=settings | given)}")


def _print(made: Report) -> None:
    console = Console(soft_wrap=True)
    for finding in made.findings:
        console.print(f"- {finding.text}", markup=False, highlight=False)
    for note in made.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    console.print(f"-> {made.path}", markup=False, highlight=False)
