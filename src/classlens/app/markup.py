"""The page's pieces as HTML: sample pictures, class bars, panels, legends. Text in, text out.

>>> bars([(967, "espresso", 0.18)], chosen=967)
'<div class="bars"><button class="bar chosen" data-index="967" ...'

Pictures are in the text itself (data: addresses), so the page needs no file from the server.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from PIL import Image

from classlens import render
from classlens.app.actions import Blank, Panel, layer
from classlens.render import colours

_JPEG = {"format": "JPEG", "quality": 88}
_PNG = {"format": "PNG", "compress_level": 3}  # a click waits for it


def sample_row(pictures: Mapping[str, bytes]) -> str:
    """Small pictures to click."""
    buttons = []
    for i, (name, content) in enumerate(pictures.items()):
        small = Image.open(io.BytesIO(content)).convert("RGB")
        small.thumbnail((112, 112))
        text = escape(name)
        buttons.append(
            f'<button class="sample" data-sample="{i}" title="{text}"><img src="{address(small, _JPEG)}" alt="{text}">'
            "</button>"
        )
    return "".join(buttons)


def bars(classes: Iterable[tuple[int, str, float]], chosen: int) -> str:
    """A row to click for each class (index, name, probability), the chosen one marked."""
    rows = []
    for index, name, probability in classes:
        mark = ' chosen" aria-pressed="true' if index == chosen else ""
        rows.append(
            f'<button class="bar{mark}" data-index="{index}" title="class {index}">'
            f'<span class="fill" style="width:{100 * probability:.2f}%"></span>'
            f'<span class="name">{escape(name)}</span>'
            f'<span class="share">{escape(render.probability_text(probability))}</span></button>'
        )
    return f'<div class="bars">{"".join(rows)}</div>'


def stage(lead: str, view: Image.Image, panels: Sequence[Panel | Blank], picture: bool = False) -> str:
    """A heading (HTML), the panels over the grey picture, and what their colours mean."""
    grey = address(view.convert("L"), _JPEG)
    first = [_frame("picture", "what the network sees", f'<img src="{address(view, _JPEG)}" alt="the picture">')]
    shown = [*(first if picture else []), *(_map_frame(panel, grey) for panel in panels)]
    return (
        f'<h2 class="lead">{lead}</h2>{legend(panels)}'
        f'<div class="panels of-{len(shown)}" style="--ratio:{view.width}/{view.height}">{"".join(shown)}</div>'
    )


def found(model: str, panels: Iterable[Panel | Blank]) -> str:
    """The heading above a map: whose evidence for what, and where it lies."""
    return "".join(
        f"Where {escape(model)} finds <b>{escape(panel.title)}</b>"
        f"<small>{escape(render.where(panel.evidence, panel.signed))}</small>"
        for panel in panels
        if isinstance(panel, Panel)
    )


def figure(lead: str, png: bytes) -> str:
    """A heading and a drawn figure."""
    data = base64.b64encode(png).decode()
    return f'<h2 class="lead">{lead}</h2><img class="drawn" src="data:image/png;base64,{data}" alt="">'


def legend(panels: Sequence[Panel | Blank]) -> str:
    """What the colours of these panels say; each kind once."""
    maps = [panel for panel in panels if isinstance(panel, Panel) and not panel.is_difference]
    kinds = dict.fromkeys((panel.signed, panel.ends) for panel in maps)
    return f'<div class="legends">{"".join(_legend(signed, *ends) for signed, ends in kinds)}</div>'


def notice(text: str) -> str:
    """One line about what went wrong; nothing for no text."""
    line = " ".join(text.split())
    return f'<div class="notice" role="alert">{escape(line[:1].upper() + line[1:])}</div>' if line else ""


def address(image: Image.Image, how: Mapping[str, object]) -> str:
    """A picture as a data: address."""
    buffer = io.BytesIO()
    image.save(buffer, **how)  # type: ignore[arg-type]
    return f"data:image/{str(how['format']).lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _map_frame(panel: Panel | Blank, grey: str) -> str:
    if isinstance(panel, Blank):
        inside = f'<div class="failed">{escape(panel.reason)}</div>' if panel.reason else '<div class="waiting">…</div>'
        return _frame(panel.title, "", inside)
    evidence = address(layer(panel.evidence, panel.signed), _PNG)
    text = escape(f"evidence: {panel.title}")
    images = f'<img src="{grey}" alt=""><img class="evidence" src="{evidence}" alt="{text}">'
    return _frame(panel.title, panel.note, images, _legend(True, *panel.ends) if panel.is_difference else "")


def _frame(title: str, note: str, inside: str, below: str = "") -> str:
    head = f"<figcaption><b>{escape(title)}</b><span>{escape(note)}</span></figcaption>"
    return f'<figure class="panel">{head}<div class="frame">{inside}</div>{below}</figure>'


def _legend(signed: bool, low: str, high: str) -> str:
    bar = address(Image.fromarray(colours.legend(signed, opacity=1.0)), _PNG)
    left, right = ("blue: ", "red: ") if signed else ("grey: ", "yellow: ")
    return (
        f'<div class="legend{" signed" if signed else ""}"><span class="low">{left}{escape(low)}</span>'
        f'<img src="{bar}" alt=""><span class="high">{right}{escape(high)}</span></div>'
    )
