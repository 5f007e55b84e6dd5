"""The choices of a network as the page shows them: bars, clickable boxes and pixels, and lists of rivals."""

from __future__ import annotations

from collections.abc import Sequence

from classlens.app import markup
from classlens.app.actions import Wish
from classlens.app.markup import Aims
from classlens.app.offers import Given, Offer
from classlens.app.studio import NOTHING, Picture, Studio
from classlens.core.targets import RIVALS

ROWS = 8  # bars
ITSELF = "itself"  # the question for the evidence for the class by itself


def bars_of(studio: Studio, picture: Picture, model: str, chosen: int, given: Given) -> str:
    """The likeliest choices as bars, and the chosen one."""
    offer = studio.offer(picture, model, given)
    offer.check(chosen)
    rows = _in_sight(offer, chosen)
    named = [(i, offer.names[i], offer.share(i), offer.note(i)) for i in rows]
    return markup.bars(named, chosen, offer.words.heading)


def aims_of(studio: Studio, picture: Picture, model: str, chosen: int, given: Given) -> Aims:
    """What can be clicked in the picture: the boxes of a detector, or pixels."""
    offer = studio.offer(picture, model, given)
    boxes = tuple((i, offer.names[i], offer.boxes[i]) for i in _in_sight(offer, chosen)) if offer.boxes else ()
    height, width = picture.inputs[model].shape[-2:]
    return Aims(boxes, chosen, offer.kind == "pixel", (height, width))


def _in_sight(offer: Offer, chosen: int) -> list[int]:
    """The positions of the likeliest choices and of the chosen one; texts stay in the order of the visitor."""
    shown = list(range(len(offer.names))) if offer.kind == "text" else [i for i, _ in offer.likeliest(ROWS)]
    return [*shown, chosen] if chosen not in shown else shown


def numbered(offer: Offer) -> list[tuple[str, int]]:
    """The choices as text and as values; the positions of classes are those of the network."""
    return [(f"{name}  ·  {i}" if offer.kind in ("class", "pixel") else name, i) for i, name in enumerate(offer.names)]


def questions(
    names: Sequence[tuple[str, int]], likely: Sequence[int], one: str = "class", every: bool = True
) -> list[tuple[str, int | str]]:
    """The possible questions about the selected class, as text and as values; likely rivals come first."""
    rivals = [names[i] for i in likely] + [found for found in names if found[1] not in likely]
    first: list[tuple[str, int | str]] = [(f"the {one}", ITSELF)]
    first += [(f"the {one} rather than its rivals", RIVALS)] if every else []
    return [*first, *((f"rather than {name}", index) for name, index in rivals)]


def wished(
    model: str, view: str, index: int, rival: int | None, question: int | str, method: str, methods: list[str],
    given: Given = NOTHING, folder: str | None = None,
) -> Wish:  # fmt: skip
    """What a visitor wants to see, from the settings of the page."""
    compared, than = index if rival is None else rival, None if question == ITSELF else question
    return Wish(model, view, index, compared, method, tuple(methods), than, given, folder or "")
