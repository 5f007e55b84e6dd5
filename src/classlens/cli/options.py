"""Options that several commands share, and how they are interpreted."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from classlens.core.targets import Targets
    from classlens.models import LoadedModel


class Layout(StrEnum):
    """The layout of labelled data on disk."""

    voc = "voc"
    csv = "csv"
    folders = "folders"


ModelName = Annotated[
    str, typer.Option("--model", "-m", metavar="NAME", help="The network; `classlens models` lists the kinds of names.")
]
Weights = Annotated[
    str,
    typer.Option(metavar="FILE|none", help="`default` (the published weights), `none` (random weights), or a file."),
]
Classes = Annotated[
    list[str] | None, typer.Option("--class", "-c", metavar="NAME|INDEX", help="A class to explain; can be repeated.")
]
RatherThan = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME|INDEX|rivals",
        help="Show evidence for the class rather than for this one; can be repeated; `rivals` means all other classes.",
    ),
]
Device = Annotated[str, typer.Option(metavar="NAME", help="cpu, cuda, cuda:1, mps; auto picks the fastest.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed for all random numbers.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


def load_model(model: str, weights: str, device: str) -> LoadedModel:
    """Load the model that --model, --weights and --device specify."""
    import classlens
    from classlens.models.loading import pick_device

    return classlens.load(model, None if weights == "none" else weights, pick_device(device))


def load_for(model: str, weights: str, device: str, method: str) -> tuple[LoadedModel, str]:
    """The model, and the method for it: `auto` is the one that was chosen for it."""
    from classlens.models.choice import named

    loaded = load_model(model, weights, device)
    return loaded, named(method, loaded)


def targets_of(classes: list[str] | None, top: int | None, default: int) -> Targets:
    """The targets of --class or --top; otherwise the `default` most likely classes."""
    if classes and top:
        raise typer.BadParameter("give --class or --top, not both")
    import classlens

    return [classes] if classes else classlens.top(top or default)


def rivals_of(given: list[str] | None) -> list[str] | str | None:
    """The rivals of --rather-than: a single one, or `rivals`, as a string; several as a list."""
    return given[0] if given and len(given) == 1 else given


def set_threads(threads: int | None) -> None:
    """Apply --threads."""
    if threads:
        import torch

        torch.set_num_threads(threads)


def complain(text: str) -> None:
    """Print an error as one line on stderr."""
    typer.echo(f"error: {' '.join(text.split())}", err=True)
