"""The parts of the page as HTML: sample pictures, class bars, panels, legends. The templates are in pieces.html.

>>> bars([(967, "espresso", 0.18, "18.0 %")], chosen=967)
Markup('<div class="bars"><button class="bar chosen" aria-pressed="true" data-index="967" ...')

Pictures are embedded as data: URLs, so the page needs no file from the server.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup
from PIL import Image

from classlens import render
from classlens.app.actions import Blank, Panel, layer, lines
from classlens.concept import Concepts
from classlens.core.targets import Box
from classlens.render import colours
from classlens.render.html import data_uri, pages
from classlens.render.words import percent
from classlens.trust import Trust
from classlens.trust.verdict import VERDICTS

_JPEG = {"format": "JPEG", "quality": 88}
_PNG = {"format": "PNG", "compress_level": 3}  # a click waits for it
_KINDS = dict(zip(VERDICTS, ("good", "unsure", "bad"), strict=True))  # classes of the style sheet
_PASSED = {"good": "passed", "unsure": "doubtful", "bad": "failed"}


def piece(name: str, /, **values: Any) -> Markup:
    """Render a macro of templates/pieces.html: `piece("notice", line="This file is broken")`."""
    macro = getattr(pages("app").get_template("pieces.html").module, name)
    return Markup(macro(**values))


def icon() -> Markup:
    """The icon of the page, for its head."""
    logo = pages("app").get_template("logo.svg").render()
    return piece("icon", address=data_uri(logo.encode(), "svg+xml"))


def sample_row(pictures: Mapping[str, bytes]) -> Markup:
    """Small pictures to click."""
    return piece("samples", pictures=[(name, _thumbnail(content)) for name, content in pictures.items()])


def concepts(model: str, found: Concepts) -> Markup:
    """The figure of concepts, and a table of their shares."""
    shares = [(one.name, percent(abs(one.share)), "for" if one.sign > 0 else "against") for one in found.concepts]
    address = data_uri(render.png(found.figure()))
    return piece("concepts", model=model, found=found, shares=shares, carried=percent(found.carried), address=address)


def bars(choices: Iterable[tuple[int, str, float, str]], chosen: int, label: str = "") -> Markup:
    """A clickable bar for each choice (index, name, share, share in words), with the selected one marked."""
    rows = [(index, name, f"{100 * min(max(share, 0), 1):.2f}", words) for index, name, share, words in choices]
    return piece("bars", choices=rows, chosen=chosen, label=label)


@dataclass(frozen=True)
class Aims:
    """What can be clicked in a picture: boxes, or every pixel."""

    boxes: tuple[tuple[int, str, Box], ...] = ()  # position, name, place in pixels of the network's input
    chosen: int = -1
    pixels: bool = False
    size: tuple[int, int] = (1, 1)  # (H,W) of the network's input

    def frames(self) -> list[dict[str, Any]]:
        """The boxes as shares of the picture, the largest first, so that small ones lie on top."""
        height, width = self.size
        rows = []
        for index, name, box in self.boxes:
            left, right = (min(max(x / width, 0), 1) for x in (box.left, box.right))
            top, bottom = (min(max(y / height, 0), 1) for y in (box.top, box.bottom))
            share = {"left": left, "top": top, "width": right - left, "height": bottom - top}
            rows.append({"index": index, "name": name} | {side: f"{100 * value:.2f}" for side, value in share.items()})
        return sorted(rows, key=lambda row: -float(row["width"]) * float(row["height"]))


def stage(
    lead: str, view: Image.Image, panels: Sequence[Panel | Blank], picture: bool = False, facts: Sequence[str] = (),
    aims: Aims | None = None,
) -> Markup:  # fmt: skip
    """A heading (text, or a lead from this module), facts, the panels over the grey picture, and a legend."""
    drawn = [panel for panel in panels if isinstance(panel, Panel) and panel.outlines]
    return piece(
        "stage", lead=lead, facts=facts, legends=legend(panels), width=view.width, height=view.height,
        view=address(view, _JPEG) if picture else "", grey=address(view.convert("L"), _JPEG),
        panels=[_panel(panel) for panel in panels], aims=aims or Aims(),
        lines=address(lines(drawn[0]), _PNG) if picture and drawn and aims and aims.pixels else "",
    )  # fmt: skip


def waiting(view: Image.Image, aims: Aims, found: bool = True) -> Markup:
    """A new picture, whose map is being computed; the picture alone if nothing is found in it."""
    return stage("", view, [Blank("")] if found else [], picture=True, aims=aims)


def found(model: str, panels: Iterable[Panel | Blank]) -> Markup:
    """The heading above a map: the model and the class."""
    shown = [(p.title, _after(p.rivals or p.place)) for p in panels if isinstance(p, Panel)]
    return piece("lead_one", model=model, found=shown)


def facts(panels: Iterable[Panel | Blank]) -> list[str]:
    """The lines about a map: where the evidence lies, and how much of the relevance is in it."""
    maps = [panel for panel in panels if isinstance(panel, Panel)]
    lines = [(render.where(p.evidence, p.signed, bool(p.rivals)), p.arrived) for p in maps]
    return [line[:1].upper() + line[1:] for pair in lines for line in pair if line]


def lead(view: str, name: str, rival: str, panels: Iterable[Panel | Blank]) -> Markup:
    """The heading of the other views."""
    more = (panel.rivals or panel.place for panel in panels if isinstance(panel, Panel))
    than = next((words for words in more if words), "")
    return piece("lead", view=view, name=name, rival=rival, than=_after(than))


def _after(words: str) -> str:
    return f" {words}" if words else ""


def figure(lead: str, png: bytes) -> Markup:
    """A heading, two sentences that explain it, and the figure of the layers."""
    return piece("figure", lead=lead, address=data_uri(png))


def legend(panels: Sequence[Panel | Blank]) -> Markup:
    """The legends of these panels; each kind once."""
    maps = [panel for panel in panels if isinstance(panel, Panel) and not panel.is_difference]
    kinds = dict.fromkeys((panel.signed, panel.ends) for panel in maps)
    return piece("legends", found=[_legend(signed, *ends) for signed, ends in kinds])


def trust(lead: str, view: Image.Image, panels: Sequence[Panel | Blank], card: Trust | None) -> Markup:
    """The verdict on a map, the map and its uncertain places, and the result of each test; only the maps before."""
    shown = stage(lead, view, panels)
    if card is None:
        return shown
    results = [(_KINDS[one.verdict], one.text) for one in card.reasons]
    return shown + piece("tests", results=results, where=card.where, passed=_PASSED)


def lead_trust(name: str, panels: Sequence[Panel | Blank], card: Trust | None) -> Markup:
    """The heading of a tested map: the verdict, and the reasons that decided."""
    failed = any(isinstance(panel, Blank) and panel.reason for panel in panels)
    kind = ("failed" if failed else "") if card is None else _KINDS[card.verdict]
    because = "" if card is None or kind == "good" else card.because
    than = next((_after(panel.rivals) for panel in panels if isinstance(panel, Panel)), "")
    return piece("lead_trust", name=name, than=than, kind=kind, because=because[:1].upper() + because[1:])


def notice(text: str) -> Markup:
    """One line with an error; empty for no text."""
    line = " ".join(text.split())
    return piece("notice", line=line[:1].upper() + line[1:])


def address(image: Image.Image, how: Mapping[str, object]) -> str:
    """A picture as a data: address."""
    buffer = io.BytesIO()
    image.save(buffer, **how)  # type: ignore[arg-type]
    return data_uri(buffer.getvalue(), str(how["format"]).lower())


def _thumbnail(content: bytes) -> str:
    small = Image.open(io.BytesIO(content)).convert("RGB")
    small.thumbnail((112, 112))
    return address(small, _JPEG)


def _panel(panel: Panel | Blank) -> dict[str, str]:
    """The values of a panel for the template."""
    if isinstance(panel, Blank):
        return {"title": panel.title, "note": "", "key": "", "colours": "", "reason": panel.reason, "lines": ""}
    evidence = address(layer(panel.evidence, panel.signed, panel.scale), _PNG)
    key = _legend(True, *panel.ends) if panel.is_difference else ""
    drawn = address(lines(panel), _PNG) if panel.outlines else ""
    return {
        "title": panel.title, "note": panel.note, "key": key, "colours": evidence, "reason": "", "lines": drawn,
    }  # fmt: skip


def _legend(signed: bool, low: str, high: str) -> Markup:
    bar = address(Image.fromarray(colours.legend(signed, opacity=1.0)), _PNG)
    return piece("legend", signed=signed, low=low, high=high, bar=bar)
