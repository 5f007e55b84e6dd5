"""The actions of the page's buttons: a picture in, panels out. Uses no gradio, no HTML and no files.

>>> *_, found = panels(studio, picture, Wish("lite0", "one", 967, 285, "agf", ()))

A panel is one map with its names; the page draws it, `sheet` makes a PNG of panels and `arrays` an NPZ.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from classlens import render
from classlens.app.offers import Given, Rivals
from classlens.app.studio import DEFAULT_METHOD, NOTHING, Picture, Studio
from classlens.core.targets import Asked, Outline
from classlens.data.images import to_tensor
from classlens.errors import ClasslensError, MethodError, TargetError
from classlens.methods import METHODS
from classlens.render.trust import fading

FADED = "uncertain places faded"
# The views of a picture, and the titles of their tabs.
VIEWS = {
    "one": "One class",
    "two": "Two classes",
    "methods": "Several methods",
    "layers": "Layer by layer",
    "trust": "Trust",
    "concepts": "Concepts",
}  # the last one only if the server was started with pictures


@dataclass(frozen=True, eq=False)
class Panel:
    """One map with its captions."""

    title: str
    note: str
    evidence: Tensor  # (H,W), raw
    signed: bool = True
    index: int = -1  # of the class; -1 for a difference
    name: str = ""  # of the class
    method: str = ""
    seconds: float = 0.0
    ends: tuple[str, str] = ("against it", "for it")  # the meaning of blue and red
    rivals: str = ""  # "rather than Egyptian cat (14.9 %)", if the class has rivals
    place: str = ""  # "at pixel (40, 60)", if one was clicked
    outlines: tuple[Outline, ...] = ()  # the box or the region that it is about
    arrived: str = ""  # how much relevance is in the map
    scale: render.Scale | None = None  # of the colours, if another map gives it

    @property
    def is_difference(self) -> bool:
        """Whether it is the difference of two maps."""
        return self.index < 0


@dataclass(frozen=True)
class Blank:
    """A placeholder for a map that is being computed, or the reason why there is none."""

    title: str
    reason: str = ""


@dataclass(frozen=True)
class Wish:
    """What a visitor wants to see."""

    model: str
    view: str  # a key of VIEWS
    index: int  # of the class
    rival: int  # the class it is compared with
    method: str
    methods: tuple[str, ...]
    rather_than: Rivals = None  # None: evidence for the class by itself
    given: Given = NOTHING
    folder: str = ""  # the pictures in which concepts are found

    @property
    def rivals(self) -> Rivals:
        """The rivals for its view: two classes are compared by the evidence for each, never by a contrast."""
        return None if self.view in ("two", "concepts") else self.rather_than


# -------------------------------------------------------------------------------------------------------- panels


def panels(studio: Studio, picture: Picture, wish: Wish) -> Iterator[list[Panel | Blank]]:
    """Yield the panels of a view each time one more is ready; the others are blank.

    >>> *_, last = panels(studio, picture, Wish("lite0", "two", 967, 285, "agf", ()))
    >>> [panel.title for panel in last]
    ['espresso', 'Egyptian cat', 'difference']
    """
    if wish.view == "two":
        yield _two_classes(studio, picture, wish)
    elif wish.view == "methods":
        yield from _several_methods(studio, picture, wish)
    elif wish.view == "trust":
        yield from _tested(studio, picture, wish)
    elif wish.view == "concepts":
        studio.concepts(picture, wish.model, wish.index, wish.folder, wish.given)
        yield []
    else:
        method = agf_method(wish.method) if wish.view == "layers" else wish.method
        yield [_panel(studio, picture, wish, wish.index, method)]


def _two_classes(studio: Studio, picture: Picture, wish: Wish) -> list[Panel | Blank]:
    """The evidence for each of two classes, and where the maps differ."""
    if wish.index == wish.rival:
        several = studio.offer(picture, wish.model, wish.given).words.several
        raise TargetError(f"both {several} are the same; pick another one to compare with")
    one, two = (_panel(studio, picture, wish, index, wish.method) for index in (wish.index, wish.rival))
    apart = difference(one.evidence, two.evidence)
    words, ends = "both maps scaled to the same total", (two.title, one.title)
    return [one, two, Panel("difference", words, apart, method=wish.method, ends=ends)]


def _several_methods(studio: Studio, picture: Picture, wish: Wish) -> Iterator[list[Panel | Blank]]:
    """One class by several methods; a method that fails gives its reason."""
    if not wish.methods:
        raise MethodError("no method is selected; pick some from the list")
    shown: list[Panel | Blank] = [Blank(method) for method in wish.methods]
    for i, method in enumerate(wish.methods):
        yield shown
        try:
            found = _panel(studio, picture, wish, wish.index, method)
        except ClasslensError as error:
            shown[i] = Blank(method, str(error))
        else:
            shown[i] = replace(found, title=method, note=f"{found.seconds:.1f} s")
    yield shown


def _tested(studio: Studio, picture: Picture, wish: Wish) -> Iterator[list[Panel | Blank]]:
    """The map, and once it is tested, the same map with uncertain places faded; a blank instead of these until then."""
    plain = _panel(studio, picture, wish, wish.index, wish.method)
    yield [plain, Blank(FADED)]
    try:
        trust = studio.trust(picture, wish.model, wish.index, wish.method, wish.rivals, wish.given)
    except ClasslensError as error:
        yield [plain, Blank(FADED, str(error))]
        return
    evidence, scale = fading(trust)
    faded = replace(plain, title=FADED, note="", evidence=evidence, scale=scale)
    yield [plain, faded] if trust.measures.places else [plain]


def difference(one: Tensor, two: Tensor) -> Tensor:
    """The difference of two maps, each divided by the sum of its magnitudes, so that positions can be compared.

    >>> difference(torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 8.0]]))
    tensor([[ 1., -1.]], dtype=torch.float64)
    """
    one, two = (m.double() / m.double().abs().sum().clamp(min=1e-300) for m in (one, two))
    return one - two


def agf_method(method: str) -> str:
    """The method to decompose: the selected one if it has the terms of AGF, otherwise `agf`."""
    same = METHODS[method].family == METHODS[DEFAULT_METHOD].family if method in METHODS else False
    return method if same else DEFAULT_METHOD


def _panel(studio: Studio, picture: Picture, wish: Wish, index: int, method: str) -> Panel:
    offer = studio.offer(picture, wish.model, wish.given)
    e = studio.explain(picture, wish.model, index, method, wish.rivals, wish.given)
    asked, place = e.target(), wish.given.place
    than = (
        f"rather than {offer.names[wish.rivals]}" if isinstance(asked, Asked) and isinstance(wish.rivals, int) else ""
    )
    against = "against it" if wish.rivals is None else "for its rivals"
    return Panel(
        title=offer.names[index],
        note=offer.note(index),
        evidence=e.maps[0, 0],
        signed=e.signed,
        index=index,
        name=e.name(),
        method=e.method,
        seconds=e.report.seconds,
        ends=(against, "for it") if e.signed else ("nothing", "for it (a method without “against”)"),
        rivals=than or render.rival_text(e, 0, 0),
        arrived=render.arrival_text(e),
        place=f"at pixel ({place[0]}, {place[1]})" if place and offer.kind == "pixel" else "",
        outlines=asked.found.outlines if isinstance(asked, Asked) else (),
    )


# --------------------------------------------------------------------------------------------------- as pictures


def layer(evidence: Tensor, signed: bool, scale: render.Scale | None = None) -> Image.Image:
    """Only the colours of `render.overlay`; the weaker the evidence, the more transparent (RGBA).

    Over the grey picture with an opacity of p they give `overlay(..., opacity=p)`, so a browser can blend them while a
    slider moves. They are computed from overlays on black and on white: on black the result is alpha * colour, on white
    it is 1 - alpha more.
    """
    height, width = evidence.shape
    black, white = (
        render.overlay(torch.full((3, height, width), paper), evidence, signed, 1.0, scale).astype(float) / 255
        for paper in (0.0, 1.0)
    )
    alpha = np.clip(1 - (white - black).mean(2, keepdims=True), 0, 1)
    colour = np.clip(black / np.maximum(alpha, 1 / 255), 0, 1)
    return Image.fromarray((np.concatenate([colour, alpha], 2) * 255).round().astype(np.uint8), "RGBA")


def lines(panel: Panel) -> Image.Image:
    """The outlines of a panel's question, on nothing (RGBA), in the size of the network's input."""
    drawn = render.strokes(panel.outlines, tuple(panel.evidence.shape))
    return Image.fromarray(drawn[..., None] * np.array([*render.OUTLINE, 255], np.uint8), "RGBA")


def blend(view: Image.Image, evidence: Tensor, signed: bool, opacity: float) -> render.RGB:
    """A map over the high-resolution picture, at its size."""
    large = torch.nn.functional.interpolate(
        evidence[None, None].double().cpu(), size=(view.height, view.width), mode="bilinear", align_corners=False
    )
    return render.overlay(to_tensor(view), large[0, 0], signed, opacity)


def sheet(view: Image.Image, panels: Sequence[Panel | Blank], about: str, opacity: float) -> bytes:
    """The picture and its panels with their names, as a PNG for slides."""
    tiles = [("picture", np.asarray(view))]
    drawn = [panel for panel in panels if isinstance(panel, Panel)]
    for panel in drawn:
        note = f"red: {panel.ends[1]}, blue: {panel.ends[0]}" if panel.is_difference else panel.note
        more = panel.rivals or panel.place
        title = f"{panel.title} {more}" if more else f"{panel.title}  ({note})"
        drawing = Image.fromarray(blend(view, panel.evidence, panel.signed, opacity))
        if panel.outlines:
            over = lines(panel).resize(drawing.size, Image.Resampling.NEAREST)
            drawing.paste(over, mask=over.getchannel("A"))
        tiles.append((title, np.asarray(drawing)))
    kinds = dict.fromkeys(
        f"red: {panel.ends[1]}, blue: {panel.ends[0]}" if panel.signed else "yellow: for it"
        for panel in drawn
        if not panel.is_difference
    )
    columns = min(4, len(tiles))
    rows = -(-len(tiles) // columns)
    size = (3.2 * columns, (3.2 * view.height / view.width + 0.35) * rows + 0.3)
    figure = Figure(figsize=size, dpi=200, layout="constrained")
    places = figure.subplots(rows, columns, squeeze=False).flatten()
    for place in places:
        place.set_axis_off()
    for place, (title, pixels) in zip(places, tiles, strict=False):  # the last row may be incomplete
        place.imshow(pixels, aspect="auto")
        place.set_title(title if len(title) < 44 else title[:43] + "…", fontsize=9, loc="left", parse_math=False)
    figure.supxlabel("  ·  ".join((about, *kinds)), fontsize=8, color="#666666", x=0.01, ha="left", parse_math=False)
    return render.png(figure)


def arrays(picture: Picture, model: str, panels: Sequence[Panel | Blank]) -> bytes:
    """The raw maps with their metadata, as an NPZ; differences can be computed from them."""
    kept = [panel for panel in panels if isinstance(panel, Panel) and not panel.is_difference]
    if not kept:
        raise MethodError("there is no map to save; pick another method")
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        maps=np.stack([panel.evidence.float().cpu().numpy() for panel in kept]),  # (N,H,W)
        classes=np.array([panel.index for panel in kept]),
        names=np.array([panel.name for panel in kept]),
        methods=np.array([panel.method for panel in kept]),
        signed=np.array([panel.signed for panel in kept]),
        model=np.array(model),
        input=picture.inputs[model].cpu().numpy()[0],  # (3,H,W), the network input
    )
    return buffer.getvalue()
