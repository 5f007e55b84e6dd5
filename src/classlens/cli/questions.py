"""Questions of `classlens explain` to networks that are not classifiers: --text, --box, --region, --like, --neuron."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from classlens.errors import TargetError

if TYPE_CHECKING:
    from classlens.core.targets import Question

Texts = Annotated[
    list[str] | None,
    typer.Option("--text", metavar="TEXT", help="A text, for models with a text tower; can be repeated."),
]
Boxes = Annotated[
    list[int] | None,
    typer.Option("--box", min=0, metavar="N", help="The N-th box of a detector, from 0 by score; can be repeated."),
]
Regions = Annotated[
    list[str] | None,
    typer.Option(
        "--region",
        metavar="CLASS[@PLACE]",
        help="A class of a segmentation network: where it is found, at a pixel (`person@40,60`), or in a box "
        "(`person@10,20,80,90`, left, top, right, bottom); can be repeated.",
    ),
]
Likes = Annotated[
    list[str] | None, typer.Option("--like", metavar="IMAGE", help="Similarity of the embedding to another image's.")
]
Neurons = Annotated[
    list[str] | None,
    typer.Option("--neuron", metavar="LAYER:CHANNEL", help="A channel of a layer, `layer3:7`; can be repeated."),
]


def questions_of(
    texts: list[str] | None, boxes: list[int] | None, regions: list[str] | None, likes: list[str] | None,
    neurons: list[str] | None,
) -> list[Question]:  # fmt: skip
    """The questions of these options, in their order."""
    import classlens

    return [
        *map(classlens.text, texts or ()), *map(classlens.detection, boxes or ()), *map(region_of, regions or ()),
        *map(classlens.like, likes or ()), *map(_neuron_of, neurons or ()),
    ]  # fmt: skip


def refuse_several(multilabel: bool, questions: bool, classes: bool) -> None:
    """Refuse more than one way of saying what to explain."""
    if multilabel + questions + classes > 1:
        raise TargetError(
            "give --multilabel, or questions such as --region, or classes (--class, --top, --rather-than), not several"
        )


def region_of(given: str) -> Question:
    """The region that a user wrote.

    >>> region_of("person@40,60")
    Region(category='person', box=None, pixel=(40, 60))
    """
    import classlens

    category, at, place = given.rpartition("@")
    if not at:
        return classlens.region(given)
    try:
        numbers = [int(number) for number in place.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (2, 4) or not category:
        raise TargetError(
            f"cannot read --region {given!r}; write person, person@40,60 (a pixel) or person@10,20,80,90 (a box)"
        )
    where: dict[str, Any] = {"pixel": numbers} if len(numbers) == 2 else {"box": numbers}
    return classlens.region(category, **where)


def _neuron_of(given: str) -> Question:
    import classlens

    layer, colon, channel = given.rpartition(":")
    if not colon or not layer or not channel.isdigit():
        raise TargetError(f"cannot read --neuron {given!r}; write a layer and a channel, such as layer3:7")
    return classlens.neuron(layer, int(channel))
