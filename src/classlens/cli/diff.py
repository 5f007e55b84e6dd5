"""The command `classlens diff`: reads options, calls `classlens.diff`, prints. Nothing is computed here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from classlens.cli.bar import Bar
from classlens.cli.early import check_classes, check_method, check_out
from classlens.cli.options import Classes, Device, Seed, load_model

if TYPE_CHECKING:
    from classlens.diff import Diff

FAILED = 3  # the exit code if a condition of --fail-if holds


def diff(
    model_a: Annotated[
        str, typer.Argument(metavar="MODEL_A", help="The first network, such as the checkpoint before training.")
    ],
    model_b: Annotated[
        str, typer.Argument(metavar="MODEL_B", help="The second network, such as the checkpoint after training.")
    ],
    data: Annotated[
        str,
        typer.Option(
            "--data",
            "-d",
            metavar="DIR",
            help="Pictures: a folder of images, a folder for each class, VOC, Oxford pets, images/ + masks/.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="HTML", help="The page.")] = Path("diff.html"),
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONDITION",
            help="Exit with 3 if this holds, such as `appeared>0` or `border.low>0.05`; can be repeated. NAME is the "
            "mean, NAME.low and NAME.high are the ends of its 95 % interval. A wrong name lists all measures.",
        ),
    ] = None,
    classes: Classes = None,
    weights_a: Annotated[str, typer.Option(metavar="FILE|none", help="The weights of MODEL_A.")] = "default",
    weights_b: Annotated[str, typer.Option(metavar="FILE|none", help="The weights of MODEL_B.")] = "default",
    method: Annotated[
        str, typer.Option("--method", "-M", metavar="NAME", help="The method; `classlens methods` lists them.")
    ] = "agf",
    limit: Annotated[int, typer.Option(min=1, help="Use at most N images (a deterministic subset).")] = 200,
    seed: Seed = 0,
    top: Annotated[int, typer.Option(min=1, help="At most this many entries per section (up to 25).")] = 12,
    device: Device = "auto",
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Images per batch.  [default: 4 on CPU, 32 on GPU]")
    ] = None,
) -> None:
    """Compare two networks on the same pictures: where evidence moved, and whether a shortcut appeared or went.

        classlens diff before/card.json after/card.json --data photos/ --out diff.html
        classlens diff torchvision:resnet50 my_package:network --data photos/ --limit 500
        classlens diff old/ new/ --data photos/ --fail-if "appeared>0" --fail-if "border.low>0.05"

    Writes one self-contained page. Preprocessing and classes may differ: what both networks see is compared, and
    classes match by name. The measures of --fail-if: moved, correlation, border, off_object, spread, against,
    probability, predictions, accuracy, appeared, gone. After a stop, the same command goes on where it was.
    """
    check_method(method)
    check_out(out, folder=False)
    for name in (model_a, model_b):
        check_classes(name, classes or ())
    from classlens.diff import diff as make
    from classlens.diff.measures import condition

    for text in fail_if or ():
        condition(text)  # before the networks are loaded
    first, second = load_model(model_a, weights_a, device), load_model(model_b, weights_b, device)
    with Bar() as bar:
        made = make(
            first, second, data, out, classes=classes or (), fail_if=fail_if or (), method=method, limit=limit,
            seed=seed, top=top, batch_size=batch_size, progress=bar, command=["classlens", *sys.argv[1:]],
        )  # fmt: skip
    _print(made)
    if made.failed:
        raise typer.Exit(FAILED)


def _print(made: Diff) -> None:
    console = Console(soft_wrap=True)
    lines = [f"- {finding.title}: {finding.text}" for finding in made.findings]
    lines += [f"note: {note}" for note in made.notes]
    lines += [f"--fail-if {text} holds" for text in made.failed]
    for line in (*lines, f"-> {made.path}"):
        console.print(line, markup=False, highlight=False)
