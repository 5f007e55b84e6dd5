"""The command `classlens evaluate`: reads options, calls `classlens.evaluate`, prints. Nothing is computed here."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from classlens.cli.bar import Bar
from classlens.cli.options import Device

if TYPE_CHECKING:
    from classlens.evaluate import Report


class Test(StrEnum):
    """What to measure."""

    perturbation = "perturbation"
    segmentation = "segmentation"
    pointing = "pointing"
    sanity = "sanity"
    all = "all"


def evaluate(
    test: Annotated[Test, typer.Argument(metavar="TEST", help="perturbation, segmentation, pointing, sanity or all.")],
    data: Annotated[
        list[str],
        typer.Option(
            metavar="DIR",
            help="A data set; can be repeated. Its layout is recognised: a folder for each class (wnid), VOC, Oxford "
            "pets, images/ + masks/, gtsegs_ijcv.mat; or say it: `pets:DIR`.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="RUN", help="The folder of the run; the same command goes on there.")],
    methods: Annotated[str, typer.Option(help="Names with commas; `classlens methods` lists them.")] = "agf,gradcam",
    model: Annotated[str, typer.Option(help="The network; `classlens models` lists names.")] = "efficientnet-lite0",
    weights: Annotated[str, typer.Option(help="`default`, `none` (random ones), or a file.")] = "default",
    device: Device = "auto",
    explain: Annotated[
        str, typer.Option(help="Perturbation: explain the `predicted` or the `target` class.")
    ] = "predicted",
    fill: Annotated[str, typer.Option(help="Perturbation: removed pixels are black, blur, mean (commas).")] = "black",
    threshold: Annotated[
        float, typer.Option(help="Segmentation with a multi-label network: probability from which a class counts.")
    ] = 0.5,
    shapes: Annotated[str, typer.Option(help="Pointing: grids, columns x rows (commas).")] = "2x1,2x2,3x3",
    cells: Annotated[
        str, typer.Option(help="Pointing: `fit` the grid into one input, or `full` cells of that size.")
    ] = "fit",
    confidence: Annotated[float, typer.Option(help="Pointing: least probability of a picture's class.")] = 0.5,
    max_grids: Annotated[int, typer.Option(min=1, help="Pointing: grids of each shape at most.")] = 500,
    sanity_images: Annotated[int, typer.Option(min=1, help="Sanity: pictures at most.")] = 50,
    frame: Annotated[
        str, typer.Option(help="`model`: its own crop; `whole`: the picture squashed, as in the paper.")
    ] = "model",
    split: Annotated[str, typer.Option(help="VOC: which list of pictures.")] = "val",
    limit: Annotated[
        int | None, typer.Option(min=1, help="Pictures of each data set at most: a stable choice.")
    ] = None,
    half: Annotated[
        str | None,
        typer.Option(metavar="A|B", help="Half of the pictures, by their names' hash: choose on A, report on B."),
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="METHOD", help="Also each other method less this one, on the same pictures.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides which pictures, and all that is drawn at random.")] = 0,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Pictures at once.  [default: 4 on CPU, 32 on GPU]")
    ] = None,
    memory_limit: Annotated[
        float | None,
        typer.Option(min=0.01, metavar="GB", help="Perturbation: memory of one forward of perturbed pictures."),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of a worker.")] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="ADDRESS|local", help="Run on Ray: an address, or `local`.")
    ] = None,
) -> None:
    """Measure how good the maps are, and write tables, curves and a report.

        classlens evaluate all --data imagenet/val --data oxford-pets --methods agf,gradcam --out runs/first

        classlens evaluate perturbation --data imagenet/val --explain target --limit 500 --out runs/target

    Stopped, even killed, the same command goes on where it was. Writes RUN/table.md, table.csv, curves.png,
    report.html, the rows (Parquet) and a manifest.
    """
    from classlens.evaluate import TESTS, Settings, run
    from classlens.methods import split_names
    from classlens.models.loading import pick_device

    everything = test is Test.all
    settings = Settings(
        tests=TESTS if everything else (test.value,),
        everything=everything,
        data=tuple(data),
        methods=tuple(split_names(methods)),
        model=model,
        weights=None if weights == "none" else weights,
        device=pick_device(device),
        explain=explain,
        fills=tuple(split_names(fill)),
        threshold=threshold,
        shapes=tuple(split_names(shapes)),
        cells=cells,
        confidence=confidence,
        max_grids=max_grids,
        sanity_images=sanity_images,
        frame=frame,
        split=split,
        limit=limit,
        half=half,
        against=against,
        seed=seed,
        batch_size=batch_size,
        memory_limit=memory_limit,
        threads=threads,
    )
    with Bar() as bar:
        report = run(settings, out, cluster, bar, ["classlens", *sys.argv[1:]])
    _print(report)


def _print(report: Report) -> None:
    from classlens.evaluate.tables import terminal

    console = Console()
    if not console.is_terminal:
        console = Console(width=140)  # a file has room
    for table in report.tables:
        console.print(terminal(table))
        console.print()
    for note in report.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    for file in report.files:
        console.print(f"-> {file}", markup=False, highlight=False)
