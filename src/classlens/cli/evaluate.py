"""The command `classlens evaluate`: reads options, calls `classlens.evaluate`, prints. Nothing is computed here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from classlens.cli.bar import Bar
from classlens.cli.early import check_methods, check_out
from classlens.cli.flags import add_command
from classlens.cli.options import Device, ModelName, Weights
from classlens.cli.plain import App
from classlens.cli.results import print_results

USUAL = "agf,gradcam"
PROOF = "agf,gradcam,lrp,random"  # a proof needs a control


def evaluate(
    test: str,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="RUN", help="The folder of the run; rerun the same command to resume."),
    ],
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            "-d",
            metavar="DIR",
            help="A data set; can be repeated. The layout is detected: a folder for each class (wnid), VOC, Oxford "
            "pets, images/ + masks/, gtsegs_ijcv.mat. To set it, write `pets:DIR`.",
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods",
            "-M",
            metavar="NAMES",
            help="Method names, separated by commas; `classlens methods` lists them.  [default: agf,gradcam; "
            "truth also lrp,random]",
        ),
    ] = None,
    model: ModelName = "efficientnet-lite0",
    weights: Weights = "default",
    device: Device = "auto",
    frame: Annotated[
        str, typer.Option(help="`model`: the model's own crop; `whole`: the whole image, squeezed, as in the paper.")
    ] = "model",
    split: Annotated[str, typer.Option(help="VOC: the list of images.")] = "val",
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use at most N images of each data set (a deterministic subset).")
    ] = None,
    half: Annotated[
        str | None,
        typer.Option(
            metavar="A|B", help="Use half of the images, by the hash of their names: choose on A, report on B."
        ),
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="METHOD", help="Also show paired differences (method − METHOD).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed for the choice of images and all random numbers.")] = 0,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Images per batch.  [default: 4 on CPU, 32 on GPU]")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads per worker.")] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="ADDRESS|local", help="Run on Ray: an address, or `local`.")
    ] = None,
    **options: Any,
) -> None:
    """Measure how good the maps are, and write tables, curves and a report.

        classlens evaluate all -d imagenet/val -d oxford-pets -o runs/first
        classlens evaluate perturbation -d imagenet/val --limit 500 -o runs/500

    Rerun the same command to resume, even after a kill. Writes RUN/table.md, table.csv, curves.png,
    report.html, the rows (Parquet) and a manifest.
    """
    if methods is None:
        methods = PROOF if test == "truth" else USUAL
    check_methods(methods)
    check_out(out)
    from classlens.core.method_text import split_names
    from classlens.evaluate import TESTS, Settings, options_of_tests, run
    from classlens.evaluate.settings import PLAIN
    from classlens.evaluate.truth import prove, shipped_pictures
    from classlens.models.loading import pick_device

    group = {"all": lambda t: t.serves(PLAIN.offers) and not t.own, "truth": lambda t: t.proof and not t.own}.get(test)
    tests = tuple(name for name, t in TESTS.items() if group(t)) if group else (str(test),)
    if test == "truth" and not data:  # windows of one picture: not all of them show a class
        data, options = [shipped_pictures(out)], options | {"confidence": 0.0}
    settings = Settings(
        tests=tests,
        everything=group is not None,
        data=tuple(data or ()),
        methods=tuple(split_names(methods)),
        options=options_of_tests(**options),
        model=TESTS[tests[0]].own or model,
        weights=None if weights == "none" else weights,
        device=pick_device(device),
        frame=frame,
        split=split,
        limit=limit,
        half=half,
        against=against,
        seed=seed,
        batch_size=batch_size,
        threads=threads,
    )
    with Bar() as bar:
        report = (prove if test == "truth" else run)(settings, out, cluster, bar, ["classlens", *sys.argv[1:]])
    print_results(report.tables, report.notes, report.files)


def add_evaluate(app: App) -> None:
    """Add the command to an app; its other flags are those of the tests."""
    add_command(app, evaluate, "evaluate", groups=True)
