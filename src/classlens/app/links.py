"""A view of the page as text: for its address, so that a link reproduces it, and for a reload.

>>> write("sample", "cat", Wish("lite0", "one", 285, 282, "agf", FIRST_METHODS))
'sample=cat&class=285'

Only what differs from a fresh page is written. A link may hold anything: `read` refuses what the page does not have.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode

from classlens.app.actions import VIEWS, Wish
from classlens.app.offers import LONGEST_TEXT, MOST_TEXTS, Given, Rivals
from classlens.app.studio import DEFAULT_METHOD, FIRST_METHODS, MOST_METHODS, NOTHING
from classlens.core.method_text import AUTO
from classlens.core.targets import RIVALS
from classlens.errors import ClasslensError
from classlens.methods import METHODS


class LinkError(ClasslensError):
    """A link that this page cannot follow."""


@dataclass(frozen=True)
class Link:
    """The picture and the settings that a link names; None where it leaves the choice to the page."""

    sample: str | None = None
    picture: str | None = None  # the fingerprint of a visitor's picture
    model: str | None = None
    index: int | None = None
    view: str = next(iter(VIEWS))
    rival: int | None = None
    rather_than: Rivals = None
    method: str = DEFAULT_METHOD
    methods: tuple[str, ...] = FIRST_METHODS
    given: Given = NOTHING
    folder: str | None = None


def write(kind: str, picture: str, wish: Wish, model: str = "") -> str:
    """The text of a view of a "sample" or of a visitor's "picture"; `model` names the network if there are several.

    >>> write("sample", "cat", Wish("lite0", "two", 285, 967, "gradcam", FIRST_METHODS))
    'sample=cat&class=285&view=two&with=967&method=gradcam'
    """
    fresh = Link()
    told = {
        kind: picture,
        "model": model,
        "class": str(wish.index),
        "view": wish.view if wish.view != fresh.view else "",
        "with": str(wish.rival) if wish.view == "two" else "",
        "than": "" if wish.rivals is None else str(wish.rivals),
        "method": wish.method if wish.method != fresh.method else "",
        "methods": ",".join(wish.methods) if wish.view == "methods" and wish.methods != fresh.methods else "",
        "pictures": wish.folder if wish.view == "concepts" else "",
        "at": ",".join(map(str, wish.given.place or ())),
        "texts": "\n".join(wish.given.texts) if wish.given.texts != NOTHING.texts else "",
    }
    return urlencode({key: value for key, value in told.items() if value})


def read(
    text: str, models: Collection[str], samples: Collection[str], views: Collection[str] = tuple(VIEWS),
    folders: Collection[str] = (),
) -> Link:  # fmt: skip
    """What a text names; an error says what this page does not have.

    >>> read("sample=cat&class=285", models=["lite0"], samples=["cat"]).index
    285
    """
    told = dict(parse_qsl(text))
    methods = tuple(told["methods"].split(",")) if "methods" in told else FIRST_METHODS
    link = Link(
        sample=_one_of(told.get("sample"), samples, "sample"),
        picture=told.get("picture"),
        model=_one_of(told.get("model"), models, "network"),
        index=_number(told.get("class")),
        view=_one_of(told.get("view"), views, "view") or Link.view,
        rival=_number(told.get("with")),
        rather_than=RIVALS if told.get("than") == RIVALS else _number(told.get("than")),
        method=_one_of(told.get("method"), [*METHODS, AUTO], "method") or DEFAULT_METHOD,
        methods=tuple(name for name in methods[:MOST_METHODS] if _one_of(name, METHODS, "method")),
        folder=_one_of(told.get("pictures"), folders, "folder"),
        given=Given(_texts(told.get("texts")), _place(told.get("at"))),
    )
    if link.index is None and (link.rival, link.rather_than) != (None, None):
        raise LinkError("this link names a rival but no class; copy it again")
    return link


def _one_of(value: str | None, known: Collection[str], kind: str) -> str | None:
    if value is not None and value not in known:
        raise LinkError(f"this link names the {kind} {value[:60]!r}, which this page does not have")
    return value


def _number(text: str | None) -> int | None:
    if text is not None and not (text.isascii() and text.isdigit() and len(text) < 10):
        raise LinkError(f"this link names the class {text[:60]!r}, which is not a number; copy it again")
    return None if text is None else int(text)


def _place(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    found = [_number(part) for part in text.split(",")]
    if len(found) != 2 or found[0] is None or found[1] is None:
        raise LinkError(f"this link names the pixel {text[:60]!r}, which is not x,y; copy it again")
    return found[0], found[1]


def _texts(text: str | None) -> tuple[str, ...]:
    if text is None:
        return NOTHING.texts
    found = tuple(dict.fromkeys(line.strip() for line in text.split("\n")))
    if not all(0 < len(line) <= LONGEST_TEXT for line in found) or len(found) > MOST_TEXTS:
        raise LinkError(f"this link names texts that the page cannot take (1 to {MOST_TEXTS}, none empty or too long)")
    return found
