"""The command `classlens masks`: reads options, calls `classlens.masks`, prints. Nothing is computed here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from classlens.cli.bar import Bar
from classlens.cli.early import check_method, check_out
from classlens.cli.options import Device, ModelName, Seed, Weights, load_model

if TYPE_CHECKING:
    from classlens.masks import Made


def masks(
    data: Annotated[
        str,
        typer.Option(
            "--data", "-d", metavar="DIR",
            help="The pictures: a folder of images, a folder for each class, VOC, Oxford pets, images/ + masks/. Drawn "
            "masks, if there are any, are used to choose the threshold on half A and to measure mIoU on half B.",
        ),
    ],
    classes: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="The classes of the masks, separated by commas; `object`: whatever the network finds likeliest.  "
            "[default: those of drawn masks]",
            show_default=False,
        ),
    ] = None,
    model: ModelName = "efficientnet-lite0",
    weights: Weights = "default",
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="The folder; rerun the same command to resume.")
    ] = Path("pseudo"),
    method: Annotated[
        str, typer.Option("--method", "-M", metavar="NAME", help="The method of the maps, or `auto`.")
    ] = "agf",
    against: Annotated[
        str | None, typer.Option(metavar="METHOD", help="Also measure seeds of this method, such as gradcam.")
    ] = None,
    labels: Annotated[
        str | None,
        typer.Option(
            metavar="data|model",
            help="Who says which classes a picture shows: its labels, or the network.  [default: data, if they do]",
            show_default=False,
        ),
    ] = None,
    scales: Annotated[
        str, typer.Option(metavar="N,N", help="Add the maps of the picture at these scales, such as 0.5,1,1.5,2.")
    ] = "1",
    flip: Annotated[bool, typer.Option(help="Add the maps of the mirrored picture.")] = True,
    threshold: Annotated[
        float | None,
        typer.Option(
            help="The score of background, between 0 and 1.  [default: chosen with drawn masks, else 0.05 for signed "
            "methods and 0.35 for others]",
            show_default=False,
        ),
    ] = None,
    refine: Annotated[
        str | None,
        typer.Option(
            metavar="none|walk",
            help="`walk`: a random walk follows the edges of the picture.  [default: chosen with drawn "
            "masks, else none]",
            show_default=False,
        ),
    ] = None,
    split: Annotated[str, typer.Option(help="VOC: the list of images.")] = "val",
    limit: Annotated[int | None, typer.Option(min=1, help="Use at most N images (a deterministic subset).")] = None,
    seed: Seed = 0,
    device: Device = "auto",
) -> None:  # fmt: skip
    """Make pseudo-labels from maps: masks for training a segmentation network without drawing any.

        classlens masks --data photos/ --classes "tabby,golden retriever" --out pseudo
        classlens masks --data VOCdevkit/VOC2012 --split train --model runs/voc --against gradcam --out pseudo
        classlens train segmentation --data pseudo --out runs/segmenter

    Writes DIR in the layout of VOC (JPEGImages, SegmentationClass, ImageSets, labels.txt), COCO's labels.json, and
    masks.json with settings and measurements.
    """
    check_method(method, auto=True)
    if against is not None:
        check_method(against)
    check_out(out)
    from classlens.masks import make_masks
    from classlens.masks.options import checked_labels, numbers

    shown_by, sizes = checked_labels(labels), numbers(scales)
    names = None if classes is None else [name.strip() for name in classes.split(",") if name.strip()]
    loaded = load_model(model, weights, device)
    with Bar() as bar:
        made = make_masks(
            loaded, data, out, classes=names, shown_by=shown_by, method=method, against=against, scales=sizes,
            flip=flip, threshold=threshold, refine=refine, split=split, limit=limit, seed=seed, progress=bar,
        )  # fmt: skip
    _print(made)


def _print(made: Made) -> None:
    from classlens.evaluate.tables import cell

    console = Console()
    if made.measured:
        table = Table(title="mIoU on half B, in per cent; settings chosen on half A", title_justify="left")
        for heading in ("method", "setting", "mIoU", "n"):
            table.add_column(heading)
        for method, found in made.measured.items():
            for refine, setting in found.settings.items():
                chosen = " (chosen)" if setting == found.best else ""
                estimate = found.on_b[refine]
                table.add_row(method, f"{setting}{chosen}", cell(estimate), str(estimate.n))
        console.print(table)
    lines = [f"less {other}, each at its best: {cell(found)}" for other, found in made.differences.items()]
    lines += [f"note: {note}" for note in made.notes]
    lines += [f"skipped: {name}: {why}" for name, why in made.skipped.items()]
    count = len(made.pictures)
    lines.append(f"{count} masks of {len(made.classes)} classes ({made.setting}) -> {made.folder}")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
