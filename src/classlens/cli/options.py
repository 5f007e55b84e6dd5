"""Options that several commands have."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class Layout(StrEnum):
    """How labelled data lie on disk."""

    voc = "voc"
    csv = "csv"
    folders = "folders"


Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps; auto takes the fastest.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of the computation.")]
Seed = Annotated[int, typer.Option(min=0, help="Decides everything that is drawn at random.")]
