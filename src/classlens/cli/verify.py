"""The command `classlens verify`: reads options, checks an audit bundle, prints. Nothing is computed here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from classlens.cli.bar import Bar
from classlens.cli.options import Device, load_model


def verify(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="The folder or zip file that --bundle wrote.")],
    data: Annotated[
        str | None, typer.Option("--data", "-d", metavar="DIR", help="The data, if they are no longer where they were.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="NAME", help="The network, if its name has changed.")
    ] = None,
    weights: Annotated[str | None, typer.Option(metavar="FILE|none", help="Its weights, if they have moved.")] = None,
    sample: Annotated[int, typer.Option(min=1, metavar="N", help="Compute N rows again.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Seed for the choice of rows.")] = 0,
    device: Device = "auto",
) -> None:
    """Check an audit bundle: its files, the weights, the pictures, and a sample of its numbers, computed again.

        classlens report --data photos/ --bundle audit.zip
        classlens verify audit.zip
        classlens verify audit.zip --data copy-of-photos/ --sample 50

    A file that has changed by one byte is refused by its name.
    """
    from classlens.trust.bundle import read_settings
    from classlens.trust.verify import verify as check

    given = read_settings(bundle)["given"]
    loaded = load_model(model or given["model"], weights or given["weights"], device)
    with Bar() as bar:
        found = check(bundle, loaded, data or given["data"], sample=sample, seed=seed, progress=bar)
    typer.echo(str(found))
