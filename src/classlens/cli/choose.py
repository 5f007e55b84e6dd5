"""The command `classlens choose`: reads options, calls `classlens.choice`, prints. Nothing is computed here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from classlens.cli.bar import Bar
from classlens.cli.early import check_methods, check_out
from classlens.cli.options import Device, ModelName, Seed, Weights, load_model
from classlens.cli.results import print_results


def choose(
    data: Annotated[
        str,
        typer.Option(
            "--data",
            "-d",
            metavar="DIR",
            help="Pictures of the network's classes: a folder of images, a folder for each class, VOC, Oxford pets, "
            "images/ + masks/. Masks are used if there are any.",
        ),
    ],
    model: ModelName = "efficientnet-lite0",
    weights: Weights = "default",
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods",
            "-M",
            metavar="NAMES",
            help="The methods to try, separated by commas; agf, the default, always takes part.  [default: those of "
            "several families that cost at most a dozen forward passes]",
            show_default=False,
        ),
    ] = None,
    tests: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="The tests that decide, separated by commas: masks, deletion, grids, stability.  [default: masks "
            "or, without masks, deletion; grids; stability]",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option(min=10, help="Use at most N images of each half (a deterministic subset).")
    ] = 40,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="RUN", help="The folder of the scores; rerun the same command to resume."),
    ] = Path("choose"),
    seed: Seed = 0,
    device: Device = "auto",
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Images per batch.  [default: 4 on CPU, 32 on GPU]")
    ] = None,
) -> None:
    """Choose the method for your network on half of your pictures, and prove it on the other half.

        classlens choose --model pets/card.json --data photos/
        classlens explain photo.jpg --model pets/card.json --method auto
        classlens choose --model torchvision:resnet50 --data photos/ --methods agf,gradcam,rise --limit 100

    Half A ranks the methods by masks (without masks: deletion), pointing in grids of the pictures, and stability. The
    best one replaces agf, the default, only if half B confirms it. `--method auto` uses the choice, which is stored in
    the card, or for a network without a card in NAME.choice.json in the current folder. RUN gets choice.html,
    choice.json and the scores.
    """
    if methods is not None:
        check_methods(methods)
    check_out(out)
    from classlens.choice import measure
    from classlens.core.method_text import split_names
    from classlens.models.choice import home_of

    check_out(home_of(model), folder=False, option="the choice for")
    loaded, deciding = load_model(model, weights, device), None if tests is None else split_names(tests)
    with Bar() as bar:
        made = measure(
            loaded, data, out, methods=methods, tests=deciding, limit=limit, seed=seed, batch_size=batch_size,
            progress=bar, command=["classlens", *sys.argv[1:]],
        )  # fmt: skip
    print_results(made.tables, made.notes, (*made.files, made.choice.save(loaded)), made.choice.text)
