"""What the page's buttons do: a picture in, panels out. No gradio, no HTML, no file is read or written here.

>>> studio = Studio({"lite0": load("efficientnet-lite0")})
>>> picture = studio.open(demo.picture())
>>> studio.likeliest(picture, "lite0", 2)
[(967, 0.18), (285, 0.15)]
>>> *_, found = panels(studio, picture, Wish("lite0", "one", 967, 285, "agf", ()))

A panel is one map with its names; the page draws it, `sheet` makes a PNG of panels and `arrays` an NPZ.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from classlens import demo, render
from classlens.data.images import open_image, to_tensor
from classlens.errors import ClasslensError, ImageError, MethodError, TargetError
from classlens.explanation import Explanation, explain
from classlens.methods import METHODS
from classlens.models import LoadedModel, Preprocess

MAX_UPLOAD = 20 * 2**20  # bytes of a picture file
DEFAULT_METHOD = "agf"
_SHARP = 672  # pixels of a picture's edge on the page
_QUICK = 3.0  # seconds: what takes longer is not computed ahead
_KEPT = 256 * 2**20  # bytes of maps kept for the next click

# What a picture can be looked at by, and the words on the tab.
VIEWS = {"one": "One class", "two": "Two classes", "methods": "Several methods", "layers": "Layer by layer"}

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture as every network of the page takes it. The file itself is not kept."""

    digest: str
    inputs: dict[str, Tensor]  # model -> (1,3,H,W)
    views: dict[str, Image.Image]  # model -> the same part of the picture, sharper, for the eye


@dataclass(frozen=True, eq=False)
class Panel:
    """One map and what to write above it."""

    title: str
    note: str
    evidence: Tensor  # (H,W), raw
    signed: bool = True
    index: int = -1  # of the class; -1 for a difference
    name: str = ""  # of the class
    method: str = ""
    seconds: float = 0.0
    ends: tuple[str, str] = ("against it", "for it")  # what blue and red say

    @property
    def is_difference(self) -> bool:
        """Whether it is no class's map but two classes' compared."""
        return self.index < 0


@dataclass(frozen=True)
class Blank:
    """The place of a map that is still to come, or why there is none."""

    title: str
    reason: str = ""


@dataclass(frozen=True)
class Wish:
    """What a visitor wants to see of a picture."""

    model: str
    view: str  # a key of VIEWS
    index: int  # of the class
    rival: int  # the class it is compared with
    method: str
    methods: tuple[str, ...]


class OutOfDate(Exception):
    """A drawing that nobody waits for any more."""


class Upload(io.BytesIO):
    """A picture file's content, under a name that error texts can use."""

    name = "this file"


class Studio:
    """The networks of a page, fixed at its start, and what was lately computed with them.

    Explanations are kept for the next click, up to a number of bytes; the likeliest classes of a picture are
    computed ahead while its user still looks at the first one.
    """

    def __init__(self, models: Mapping[str, LoadedModel]) -> None:
        self.models = dict(models)
        self._kept: OrderedDict[tuple[str, ...], tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()
        self._ahead = ThreadPoolExecutor(1, "ahead")
        self._turn = 0
        self._closed = False

    def open(self, content: bytes) -> Picture:
        """A picture file's content, decoded within the limits of `classlens.data.images`."""
        if len(content) > MAX_UPLOAD:
            raise too_large()
        image = open_image(Upload(content))
        inputs = {name: model.preprocess(image)[None] for name, model in self.models.items()}
        views = {name: _sharp(model.preprocess, image) for name, model in self.models.items()}
        return Picture(hashlib.sha256(content).hexdigest(), inputs, views)

    def labels(self, picture: Picture, model: str) -> list[str]:
        """What the classes of a network are called."""
        names = self.models[model].labels
        return list(names) if names else [f"class {i}" for i in range(self._logits(picture, model).shape[1])]

    def likeliest(self, picture: Picture, model: str, count: int) -> list[tuple[int, float]]:
        """The classes with the largest probabilities, and these: [(967, 0.18), (285, 0.15), ...]."""
        shares = self._shares(picture, model)
        found = shares.topk(min(count, len(shares)))
        return list(zip(found.indices.tolist(), found.values.tolist(), strict=True))

    def probability(self, picture: Picture, model: str, index: int) -> float:
        """The probability of a class: softmax, or sigmoid of a network with several classes in a picture."""
        return float(self._shares(picture, model)[index])

    def explain(self, picture: Picture, model: str, index: int, method: str = DEFAULT_METHOD) -> Explanation:
        """The explanation of one class; at once if it was asked for lately."""
        if method not in METHODS:  # a request may hold anything
            raise MethodError("there is no such method; pick one of the list")
        classes = self._logits(picture, model).shape[1]
        if not 0 <= index < classes:
            raise TargetError(f"there is no class {index}; {model} has {classes}")
        key = (picture.digest, model, method, str(index))
        make = partial(explain, self.models[model], picture.inputs[model], index, method)
        return self._keep(key, make, lambda e: e.maps.nbytes + e.pictures.nbytes)

    def is_quick(self, picture: Picture, model: str, index: int, method: str) -> bool:
        """Whether another class would be explained while a visitor still looks at this one."""
        return self.explain(picture, model, index, method).report.seconds < _QUICK

    def prefetch(self, picture: Picture, model: str, count: int, method: str = DEFAULT_METHOD) -> None:
        """Compute the likeliest classes in the background; what an earlier call left undone is dropped."""
        self._turn += 1
        self._ahead.submit(self._compute_ahead, self._turn, picture, model, count, method)

    def _compute_ahead(self, turn: int, picture: Picture, model: str, count: int, method: str) -> None:
        for index, _ in self.likeliest(picture, model, count):
            if turn != self._turn or self._closed:
                return
            self.explain(picture, model, index, method)

    def decomposition(self, picture: Picture, model: str, index: int, method: str) -> bytes:
        """The terms of AGF, layer by layer, as a PNG (`classlens explain --trace` draws the same)."""

        def draw() -> bytes:
            traced = explain(self.models[model], picture.inputs[model], index, method, trace=True)
            return _png(render.decomposition(traced))

        return self._keep((picture.digest, model, method, str(index), "decomposition"), draw, len)

    def close(self) -> None:
        """Let go of what is still to be computed."""
        self._closed = True
        self._ahead.shutdown(cancel_futures=True)

    def check_open(self) -> None:
        """Raises `OutOfDate` once the page is closed: a slow method must not hold up the end."""
        if self._closed:
            raise OutOfDate

    def _shares(self, picture: Picture, model: str) -> Tensor:
        logits = self._logits(picture, model)[0].double()
        return logits.sigmoid() if self.models[model].multilabel else logits.softmax(0)

    def _logits(self, picture: Picture, model: str) -> Tensor:
        def forward() -> Tensor:
            # The cheapest method: one checked forward pass, and no gradient.
            return explain(self.models[model], picture.inputs[model], method="centre").logits.detach()

        return self._keep((picture.digest, model), forward, lambda logits: logits.nbytes)

    def _keep(self, key: tuple[str, ...], make: Callable[[], T], measure: Callable[[T], int]) -> T:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                kept: T = self._kept[key][0]
                return kept
        made = make()
        with self._lock:
            self._kept[key] = (made, measure(made))
            while len(self._kept) > 1 and sum(size for _, size in self._kept.values()) > _KEPT:
                self._kept.popitem(last=False)
        return made


# ------------------------------------------------------------------------------------------------------ pictures


def samples() -> dict[str, bytes]:
    """Pictures to begin with: the demo picture and two parts of it.

    >>> list(samples())
    ['cat and espresso', 'cat', 'espresso']
    """
    whole = Image.open(io.BytesIO(demo.picture()))
    parts = {"cat": (0, 0, 300, 270), "espresso": (112, 196, 428, 512)}
    return {"cat and espresso": demo.picture()} | {name: _png(whole.crop(box)) for name, box in parts.items()}


def pick_sample(pictures: Mapping[str, bytes], index: object) -> bytes:
    """One of the samples by its place; a request may hold anything."""
    if not isinstance(index, int) or not 0 <= index < len(pictures):
        raise ImageError("there is no such sample; pick one of the row")
    return list(pictures.values())[index]


def too_large() -> ImageError:
    """What to say of a file that is larger than the page takes."""
    return ImageError(f"this file is larger than {MAX_UPLOAD // 2**20} MB: scale the picture down first")


def decode(text: object) -> bytes:
    """The picture file that a browser sent as base64."""
    if not isinstance(text, str) or not text:
        raise ImageError("no picture arrived: choose one again")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ImageError("the picture did not arrive whole: send it again") from None


def _sharp(preprocess: Preprocess, image: Image.Image) -> Image.Image:
    """What a network sees of a picture, as sharp as the picture allows: people read more than 224 pixels."""
    seen = preprocess.frame(image)
    if preprocess.resize is not None:
        size = (preprocess.resize,) if isinstance(preprocess.resize, int) else preprocess.resize
        finer = min(_SHARP / max(seen.size), min(image.size) / max(size))
        if finer > 1:
            scaled = replace(preprocess, resize=_times(preprocess.resize, finer), crop=_times(preprocess.crop, finer))
            seen = scaled.frame(image)
    seen.thumbnail((_SHARP, _SHARP))
    return seen


def _times(size: int | tuple[int, int] | None, factor: float) -> int | tuple[int, int] | None:
    if size is None or isinstance(size, int):
        return size and round(size * factor)
    return round(size[0] * factor), round(size[1] * factor)


# -------------------------------------------------------------------------------------------------------- panels


def panels(studio: Studio, picture: Picture, wish: Wish) -> Iterator[list[Panel | Blank]]:
    """The panels of a view, anew each time that there is one more; those still to come are blank.

    >>> *_, last = panels(studio, picture, Wish("lite0", "two", 967, 285, "agf", ()))
    >>> [panel.title for panel in last]
    ['espresso', 'Egyptian cat', 'difference']
    """
    if wish.view == "two":
        yield _two_classes(studio, picture, wish)
    elif wish.view == "methods":
        yield from _several_methods(studio, picture, wish)
    else:
        method = agf_method(wish.method) if wish.view == "layers" else wish.method
        yield [_panel(studio, picture, wish.model, wish.index, method)]


def _two_classes(studio: Studio, picture: Picture, wish: Wish) -> list[Panel | Blank]:
    """Where two classes are found, and what speaks for the one rather than the other."""
    if wish.index == wish.rival:
        raise TargetError("both classes are the same; pick another one to compare with")
    one, two = (_panel(studio, picture, wish.model, index, wish.method) for index in (wish.index, wish.rival))
    apart = difference(one.evidence, two.evidence)
    words, ends = "both maps scaled to the same total", (two.title, one.title)
    return [one, two, Panel("difference", words, apart, method=wish.method, ends=ends)]


def _several_methods(studio: Studio, picture: Picture, wish: Wish) -> Iterator[list[Panel | Blank]]:
    """What different methods say about one class; a method that cannot serve the model says why."""
    if not wish.methods:
        raise MethodError("no method is chosen; pick some of the list")
    shown: list[Panel | Blank] = [Blank(method) for method in wish.methods]
    for i, method in enumerate(wish.methods):
        yield shown
        try:
            found = _panel(studio, picture, wish.model, wish.index, method)
        except ClasslensError as error:
            shown[i] = Blank(method, str(error))
        else:
            shown[i] = replace(found, title=method, note=f"{found.seconds:.1f} s")
    yield shown


def difference(one: Tensor, two: Tensor) -> Tensor:
    """One map less another, each divided by the sum of its magnitudes: their amounts differ, places compare.

    >>> difference(torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 8.0]]))
    tensor([[ 1., -1.]], dtype=torch.float64)
    """
    one, two = (m.double() / m.double().abs().sum().clamp(min=1e-300) for m in (one, two))
    return one - two


def agf_method(method: str) -> str:
    """The method to decompose: the chosen one if it has the terms of AGF, else `agf`."""
    same = METHODS[method].family == METHODS[DEFAULT_METHOD].family if method in METHODS else False
    return method if same else DEFAULT_METHOD


def _panel(studio: Studio, picture: Picture, model: str, index: int, method: str) -> Panel:
    e = studio.explain(picture, model, index, method)
    words = render.probability_text(studio.probability(picture, model, index))
    ends = ("against it", "for it") if e.signed else ("nothing", "for it (a method without “against”)")
    return Panel(e.label(index), words, e.maps[0, 0], e.signed, index, e.label(index), method, e.report.seconds, ends)


# --------------------------------------------------------------------------------------------------- as pictures


def layer(evidence: Tensor, signed: bool) -> Image.Image:
    """The colours of `render.overlay` alone, as transparent as they are weak (RGBA).

    Laid over the grey picture with an opacity of p they give `overlay(..., opacity=p)`, so a browser can blend them
    anew while a slider moves. They are read back from what an overlay makes of black and of white:
    on black it gives alpha * colour, on white 1 - alpha more.
    """
    height, width = evidence.shape
    black, white = (
        render.overlay(torch.full((3, height, width), paper), evidence, signed, opacity=1.0).astype(float) / 255
        for paper in (0.0, 1.0)
    )
    alpha = np.clip(1 - (white - black).mean(2, keepdims=True), 0, 1)
    colour = np.clip(black / np.maximum(alpha, 1 / 255), 0, 1)
    return Image.fromarray((np.concatenate([colour, alpha], 2) * 255).round().astype(np.uint8), "RGBA")


def blend(view: Image.Image, evidence: Tensor, signed: bool, opacity: float) -> render.RGB:
    """A map over the sharp picture, as large as this."""
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
        tiles.append((f"{panel.title}  ({note})", blend(view, panel.evidence, panel.signed, opacity)))
    kinds = dict.fromkeys("red: for, blue: against" if panel.signed else "yellow: for" for panel in drawn)
    columns = min(4, len(tiles))
    rows = -(-len(tiles) // columns)
    size = (3.2 * columns, (3.2 * view.height / view.width + 0.35) * rows + 0.3)
    figure = Figure(figsize=size, layout="constrained")
    places = figure.subplots(rows, columns, squeeze=False).flatten()
    for place in places:
        place.set_axis_off()
    for place, (title, pixels) in zip(places, tiles, strict=False):  # the last row may have room left
        place.imshow(pixels, aspect="auto")
        place.set_title(title if len(title) < 44 else title[:43] + "…", fontsize=9, loc="left", parse_math=False)
    figure.supxlabel("  ·  ".join((about, *kinds)), fontsize=8, color="#666666", x=0.01, ha="left", parse_math=False)
    return _png(figure, dpi=200)


def arrays(picture: Picture, model: str, panels: Sequence[Panel | Blank]) -> bytes:
    """The raw maps and what they are of, as an NPZ; a difference can be made from them."""
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
        input=picture.inputs[model].cpu().numpy()[0],  # (3,H,W), what the network got
    )
    return buffer.getvalue()


def _png(picture: Figure | Image.Image, dpi: int = 150) -> bytes:
    buffer = io.BytesIO()
    if isinstance(picture, Figure):
        picture.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    else:
        picture.save(buffer, format="png")
    return buffer.getvalue()
