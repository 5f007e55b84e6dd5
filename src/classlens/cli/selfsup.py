"""The commands `classlens selfsup ...`: read options, call `classlens.selfsup`, print. Nothing is computed here."""

from __future__ import annotations

import json as jsonlib
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from classlens.cli.bar import Bar
from classlens.cli.early import check_method, check_methods, check_out, check_pictures
from classlens.cli.explain import folders_for
from classlens.cli.flags import add_command
from classlens.cli.options import (
    AsJson,
    Device,
    ModelName,
    RatherThan,
    Seed,
    Threads,
    Weights,
    complain,
    load_model,
    rivals_of,
    set_threads,
)
from classlens.cli.plain import App
from classlens.cli.selfsup_train import probe, train
from classlens.errors import ImageError

if TYPE_CHECKING:
    from classlens.selfsup import Contrast
    from classlens.selfsup.evaluation import Outcome

selfsup = App(help="Explain networks that were trained without labels.")


class Mode(StrEnum):
    """The input of the head."""

    difference = "difference"
    sum = "sum"
    none = "none"


class Metric(StrEnum):
    """The distance metric."""

    euclidean = "euclidean"
    cosine = "cosine"


class Reading(StrEnum):
    """The reading of Algorithm 2."""

    literal = "literal"
    image = "image"
    logits = "logits"


class Explained(StrEnum):
    """The class to explain."""

    contrast = "contrast"
    predicted = "predicted"


# Options that several commands share.
Head = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="The module that reads the latent, or `none` for a backbone whose output is its latent.  "
        "[default: the last linear layer]",
        show_default=False,
    ),
]
Split = Annotated[str, typer.Option(help="VOC: the list of images.")]
Distance = Annotated[Metric, typer.Option("--metric", help="Distance metric for the nearest neighbour.")]
Read = Annotated[
    Reading,
    typer.Option(
        "--reading",
        help="`literal`: the head reads L_I - L_N. `image`: the same, but the evidence starts from L_I. `logits`: the "
        "logits are subtracted.",
    ),
]
BankFolder = Annotated[
    Path,
    typer.Option("--bank", metavar="BANK|DIR", help="A bank made by `classlens selfsup bank`, or a folder of images."),
]


@selfsup.callback()
def _selfsup() -> None:
    """Explain networks that were trained without labels: what distinguishes an image from its nearest neighbour."""


@selfsup.command(no_args_is_help=True)
def bank(
    images: Annotated[
        str, typer.Argument(metavar="IMAGES", help="A folder of images, or a data set that `evaluate` knows.")
    ],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="BANK", help="The folder of the bank; rerun the same command to resume."),
    ],
    model: ModelName = "efficientnet-lite0",
    weights: Weights = "default",
    head: Head = None,
    split: Split = "val",
    limit: Annotated[int | None, typer.Option(min=1, help="Use at most N images (a deterministic subset).")] = None,
    seed: Seed = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per batch.")] = 8,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Compute the latents of many images once, for nearest-neighbour search.

        classlens selfsup bank pictures/ --out bank
        classlens selfsup bank pictures/ --model selfsup:scan --weights scan_imagenet_50.pth.tar --out bank

    Rerun the same command to resume, even after a kill.
    """
    check_out(out)
    set_threads(threads)
    from classlens.selfsup import build_bank

    loaded = load_model(model, weights, device)
    with Bar() as bar:
        made = build_bank(
            loaded, images, out, head=head, split_name=split, limit=limit, seed=seed, batch_size=batch_size,
            progress=bar,
        )  # fmt: skip
    broken = len(made.rows) - len(made)
    remark = f" ({broken} images could not be read)" if broken else ""
    typer.echo(f"{len(made)} latents of {made.latents.shape[1]} numbers, read by {made.head}{remark}")
    typer.echo(f"-> {out}")


@selfsup.command(no_args_is_help=True)
def explain(
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE", help="Picture files.", show_default=False)],
    bank: BankFolder,
    model: ModelName = "efficientnet-lite0",
    weights: Weights = "default",
    method: Annotated[str, typer.Option("--method", "-M", help="The method; `classlens methods` lists them.")] = "agf",
    mode: Annotated[
        Mode, typer.Option(help="The head reads the difference from the neighbour, the sum, or only the image.")
    ] = Mode.difference,
    classes: Annotated[
        list[str] | None,
        typer.Option(
            "--class", metavar="NAME|INDEX",
            help="A class to explain; `predicted`: the class predicted for the image; `cosine` (without a head): the "
            "similarity to the neighbour.  [default: the most likely class of the contrast]", show_default=False,
        ),
    ] = None,
    rather_than: RatherThan = None,
    metric: Distance = Metric.euclidean,
    reading: Read = Reading.literal,
    head: Head = None,
    device: Device = "auto",
    threads: Threads = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Output folder; each image gets a subfolder.")
    ] = Path("out"),
    json: AsJson = False,
) -> None:  # fmt: skip
    """Show what distinguishes an image from its nearest neighbour.

        classlens selfsup explain photo.jpg --bank bank
        classlens selfsup explain photo.jpg --bank pictures/ --mode sum --method rap

    Writes OUT/photo/neighbours.png (image, neighbour, map without and with the neighbour), overlays, maps.npz and
    report.json.
    """
    check_pictures(images)
    check_method(method)
    check_out(out)
    set_threads(threads)
    from classlens import selfsup as library
    from classlens.progress import reporting
    from classlens.selfsup.bank import encoder_of
    from classlens.selfsup.contrast import open_bank

    loaded = load_model(model, weights, device)
    targets: Any = classes[0] if classes and len(classes) == 1 else [classes] if classes else None
    options: dict[str, Any] = {"targets": targets, "rather_than": rivals_of(rather_than)}
    options |= {"metric": metric.value, "reading": reading.value, "head": head}
    done: list[dict[str, Any]] = []
    failed: list[dict[str, str]] = []
    with Bar() as bar, reporting(bar):
        opened = open_bank(bank, loaded, encoder_of(loaded, head))
        for number, (image, folder) in enumerate(zip(images, folders_for(images, out), strict=True)):
            bar("images", number, len(images))
            try:
                found = library.explain(loaded, image, opened, method, mode.value, **options)
            except ImageError as error:
                failed.append({"path": str(image), "error": str(error)})
                continue
            done.append(_document(found, image, found.save(folder)))
        bar("images", len(images), len(images))
    for wrong in failed:
        complain(wrong["error"])
    if json:
        from importlib.metadata import version

        about = {"classlens": version("classlens"), "model": model, "method": method, "mode": mode.value}
        typer.echo(jsonlib.dumps(about | {"images": done, "failed": failed}, indent=2))
    else:
        _show(done)
    if failed:
        raise typer.Exit(2)


def _show(done: list[dict[str, Any]]) -> None:
    for entry in done:
        typer.echo(f"{entry['path']}: {entry['class']}; without its neighbour {entry['class_without'] or '–'}")
        typer.echo(f"  neighbour {entry['neighbour']}, distance {entry['distance']:.4g}")
        typer.echo(f"  -> {entry['files'][0]}")


def evaluate(
    test: str,
    data: Annotated[str, typer.Option("--data", "-d", metavar="DIR", help="A data set, as for `classlens evaluate`.")],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="RUN", help="The folder of the run; rerun the same command to resume."),
    ],
    bank: Annotated[
        Path | None,
        typer.Option(
            metavar="BANK|DIR",
            help="A bank made by `classlens selfsup bank`, or a folder of images; `planted` needs none.",
        ),
    ] = None,
    model: ModelName = "efficientnet-lite0",
    weights: Weights = "default",
    methods: Annotated[
        str, typer.Option("--methods", "-M", help="Method names, separated by commas; `classlens methods` lists them.")
    ] = "agf,rap",
    modes: Annotated[str, typer.Option(help="Modes, separated by commas.")] = "difference,sum,none",
    explain: Annotated[
        Explained,
        typer.Option(
            help="`contrast`: the most likely class of the contrast. `predicted`: the class predicted for the image."
        ),
    ] = Explained.contrast,
    metric: Distance = Metric.euclidean,
    reading: Read = Reading.literal,
    head: Head = None,
    split: Split = "val",
    limit: Annotated[int | None, typer.Option(min=1, help="Use at most N images (a deterministic subset).")] = None,
    seed: Seed = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per batch.")] = 4,
    device: Device = "auto",
    threads: Threads = None,
    **options: Any,
) -> None:
    """Measure whether the neighbour improves maps: the paper's two tables, and a test with a known difference.

        classlens selfsup evaluate perturbation --data pictures/ --bank bank --out runs/ssl
        classlens selfsup evaluate segmentation --data oxford-pets --bank bank --methods agf,rap,gradcam --out runs/seg
        classlens selfsup evaluate planted --data pictures/ --reading literal --out runs/planted

    `planted` pastes a disc from another image into each image; the neighbour is the original image. Rerun the same
    command to resume, even after a kill. Writes RUN/table.md, table.csv, rows and a manifest.
    """
    check_methods(methods)
    check_out(out)
    set_threads(threads)
    from classlens.evaluate import options_of_tests
    from classlens.methods import split_names
    from classlens.models.loading import pick_device
    from classlens.selfsup.evaluation import Settings, run

    settings = Settings(
        test=str(test),
        data=data,
        bank=None if bank is None else str(bank),
        model=model,
        weights=None if weights == "none" else weights,
        device=pick_device(device),
        methods=tuple(split_names(methods)),
        modes=tuple(split_names(modes)),
        metric=metric.value,
        reading=reading.value,
        explain=explain.value,
        head=head,
        options=options_of_tests(**options),
        split=split,
        limit=limit,
        seed=seed,
        batch_size=batch_size,
    )
    with Bar() as bar:
        outcome = run(settings, out, bar, ["classlens", *sys.argv[1:]])
    _print(outcome)


add_command(selfsup, evaluate, "selfsup evaluate")
selfsup.command(no_args_is_help=True)(train)
selfsup.command(no_args_is_help=True)(probe)


def _print(outcome: Outcome) -> None:
    from classlens.evaluate.tables import terminal

    console = Console()
    if not console.is_terminal:
        console = Console(width=140)  # a file has room
    for table in outcome.tables:
        console.print(terminal(table))
    for text in (outcome.paired, *(f"note: {note}" for note in outcome.notes)):
        console.print(text, markup=False, highlight=False)
    for file in outcome.files:
        console.print(f"-> {file}", markup=False, highlight=False)


def _document(found: Contrast, image: Path, written: list[Path]) -> dict[str, Any]:
    plain = found.without
    return {
        "path": str(image),
        "class": found.name(),
        "class_without": None if plain is None else plain.name(),
        "neighbour": found.neighbours[0],
        "distance": float(found.distances[0]),
        "report": found.report.to_json(),
        "files": [str(path) for path in written],
    }
