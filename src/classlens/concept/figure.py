"""The figure of concepts: a row for each, with its share of the evidence, its map and its reference pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from classlens.concept.references import SHOWN
from classlens.render.colours import RGB, legend, overlay, pixels_of
from classlens.render.panels import QUIET, caption, draw, foot
from classlens.render.words import percent, probability_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from classlens.concept.found import Concept, Concepts

_FOR, _AGAINST = "#e4202c", "#1f6fe0"  # as in maps
_PHOTO, _TILE, _GAP, _WORDS = 2.55, 1.12, 0.07, 1.75  # inches
_MARGIN, _HEAD, _FOOT, _BETWEEN = 0.25, 0.95, 0.6, 0.16
_FOR_CLASS, _AGAINST_CLASS = 6, 2  # concepts of a class that are drawn


@dataclass(frozen=True)
class _Page:
    """A figure measured in inches from its upper left corner."""

    fig: Figure
    width: float
    height: float

    def panel(self, x: float, y: float, width: float, height: float) -> Axes:
        return self.fig.add_axes(
            (x / self.width, 1 - (y + height) / self.height, width / self.width, height / self.height)
        )

    def say(self, x: float, y: float, text: str, size: float = 9, bold: bool = False, colour: str = QUIET) -> None:
        weight = "bold" if bold else "normal"
        self.fig.text(
            x / self.width, 1 - y / self.height, text, fontsize=size, fontweight=weight, color=colour, va="baseline",
            parse_math=False,
        )  # fmt: skip


def figure(found: Concepts) -> Figure:
    """With a picture: the picture and the map of the class on the left, then a row for each concept.

    >>> figure(concepts(model, "photo.jpg", "Persian cat", data="photos")).savefig("concepts.png")
    """
    support, against = ([one for one in found.concepts if one.sign == sign] for sign in (1, -1))
    against = against[:_AGAINST_CLASS]
    rows = [*support[:_FOR_CLASS], *against]
    left = _MARGIN + (_PHOTO + 0.3 if found.picture is not None else 0.0)
    tiles = SHOWN + (found.picture is not None)
    width = left + _WORDS + tiles * (_TILE + _GAP) + (0.12 if found.picture is not None else 0) + _MARGIN
    body = len(rows) * (_TILE + _GAP) + (_BETWEEN if 0 < len(against) < len(rows) else 0)
    photos = 2 * (_PHOTO + 0.3) if found.picture is not None else 0
    height = _HEAD + max(body, photos) + _FOOT
    page = _Page(Figure(figsize=(width, height), dpi=150, facecolor="white"), width, height)
    _title(page, found)
    if found.picture is not None:
        _photo(page, found)
    _headings(page, found, left)
    y = _HEAD
    for number, one in enumerate(rows):
        if number and one.sign != rows[number - 1].sign:
            y += _BETWEEN
        _row(page, found, one, left, y)
        y += _TILE + _GAP
    rest = f"{percent(max(found.rest, 0.0))} of the evidence is in none of them"
    if not against:
        rest += ", hardly any is against the class"
    about = rest, found.method, found.model, f"layer {found.layer}, {found.grid[0]} x {found.grid[1]}"
    if found.picture is None:  # no map, so no colours to read
        caption(page.fig, _carried(found), about)
    else:
        foot(page.fig, _carried(found), about, legend(True), ("against", "for"))
    return page.fig


def _title(page: _Page, found: Concepts) -> None:
    asked = (
        f"What the network found for “{found.label}”"
        if found.picture is not None
        else f"What “{found.label}” is made of"
    )
    page.say(_MARGIN, 0.3, asked, size=13, bold=True, colour="black")
    here = "where it is in this picture, and in " if found.picture is not None else "in "
    what = "Each row is a concept: something that the evidence has in common over many pictures."
    page.say(_MARGIN, 0.53, f"{what} It is shown {here}the pictures where it is strongest.")


def _photo(page: _Page, found: Concepts) -> None:
    assert found.picture is not None
    assert found.map is not None
    drawn = (
        ("picture", "", pixels_of(found.picture)),
        (f"evidence for {found.label}", probability_text(found.probability), overlay(found.picture, found.map)),
    )
    y = _HEAD
    for name, remark, pixels in drawn:
        page.say(_MARGIN, y - 0.07, name if len(name) < 30 else name[:29] + "…", bold=True, colour="black")
        panel = page.panel(_MARGIN, y, _PHOTO, _PHOTO)
        draw(panel, pixels)
        if remark:
            panel.set_title(remark, loc="right", fontsize=8.5, color=QUIET, pad=4)
        y += _PHOTO + 0.3


def _headings(page: _Page, found: Concepts, left: float) -> None:
    x, y = left + _WORDS, _HEAD - 0.07
    page.say(left, y, "concept", bold=True, colour="black")
    if found.picture is not None:
        page.say(x, y, "where it is", bold=True, colour="black")
        x += _TILE + _GAP + 0.12
    others = " in other pictures" if found.picture is not None else ""
    page.say(x, y, f"where it gives most evidence{others}", bold=True, colour="black")


def _row(page: _Page, found: Concepts, one: Concept, left: float, y: float) -> None:
    colour = _FOR if one.sign > 0 else _AGAINST
    page.say(left, y + 0.3, one.name, size=10, bold=True, colour="black")
    page.say(left, y + 0.51, f"{percent(abs(one.share))} of the evidence,", size=8.5)
    page.say(left, y + 0.67, f"{'for' if one.sign > 0 else 'against'} {_short(found.label)}", size=8.5, colour=colour)
    most = max(abs(other.share) for other in found.concepts)
    bar = page.panel(left, y + 0.78, (_WORDS - 0.35) * abs(one.share) / most, 0.09)
    bar.set_facecolor(colour)
    bar.set_xticks([])
    bar.set_yticks([])
    bar.spines[:].set_visible(False)
    x = left + _WORDS
    if found.picture is not None and one.map is not None:
        _tile(page, x, y, overlay(found.picture, one.map))
        x += _TILE + _GAP + 0.12
    for reference in one.references:
        _tile(page, x, y, reference.crop)
        x += _TILE + _GAP


def _tile(page: _Page, x: float, y: float, pixels: RGB) -> None:
    draw(page.panel(x, y, _TILE, _TILE), pixels)


def _short(label: str) -> str:
    return label if len(label) <= 22 else label[:21].rstrip() + "…"


def _carried(found: Concepts) -> str:
    return (
        f"found in {found.pictures} pictures; such concepts carry {percent(found.carried)} of the class's score"
        f"{found.beside}"
    )
