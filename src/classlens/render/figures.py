"""Evidence maps as pictures: red speaks for the class, blue against it, and zero is always the middle.

    >>> overlay(explanation.pictures[0], explanation.maps[0, 0])     # (H,W,3) uint8
    >>> figure(explanation).savefig("figure.png")
    >>> where(explanation.maps[0, 0])
    'top half 92 %, strongest in top-left (41 %); 8 % of all evidence is against'

Pictures are scaled, data are not: each map is drawn relative to its own size, so two pictures compare places,
not amounts. Overlays lie on the photograph's greys: a colour in them can only mean evidence.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import re
import textwrap
import uuid
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.colors import Colormap, LinearSegmentedColormap, ListedColormap
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from classlens.errors import MethodError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from classlens.explanation import Explanation
    from classlens.methods import LayerTrace

Evidence: TypeAlias = Tensor | NDArray[np.floating[Any]]  # (H,W)
RGB: TypeAlias = NDArray[np.uint8]  # (H,W,3)

_DIVERGING = LinearSegmentedColormap.from_list(
    "evidence",
    ["#0a2f86", "#1f6fe0", "#86bbf7", "#ffffff", "#ff9580", "#e4202c", "#8a0413"],
    N=257,  # odd, so that zero has a colour of its own: white
)
_SEQUENTIAL = colormaps["inferno"]
_CLASS_COLOURS = ListedColormap(  # of label maps: apart from each other for most eyes, and none is grey
    ["#e4202c", "#1f6fe0", "#2ca02c", "#ff9f1c", "#9b5de5", "#00bbd4", "#f15bb5", "#8c564b", "#c2b800", "#0b6e4f"]
)
# The part of the colours that overlays use. Pale ends would veil the photograph without saying anything, and dark
# ones would be lost in its shadows: there, strength is how dense a vivid colour is.
_ALL, _VIVID = (0.0, 1.0), (0.45, 0.8)
# Share of the places that a scale takes in. A handful of outliers must not make everything else look like zero.
_PERCENTILE = 99.5

_GREY = "#666666"
_DPI = 150
_NOTEBOOK_DPI, _NOTEBOOK_WIDTH = 84, 1000  # of a figure on the screen, where drawn dots are finer; and the most
_MAX_PIXELS = 60_000  # of a figure's edge; matplotlib cannot draw beyond 2**16
_PANEL, _GAP, _MARGIN, _HEADING, _FOOT = 3.0, 0.14, 0.2, 0.34, 0.5  # inches
_ABREAST = 7  # methods beside each other in a comparison
_MAX_NAME = 27  # characters that fit above a panel beside the probability

_ROWS, _COLUMNS = ("top", "centre", "bottom"), ("left", "centre", "right")
_CELLS = [[row if row == column else f"{row}-{column}" for column in _COLUMNS] for row in _ROWS]

# The terms of the paper's decomposition figure, in its order, with what each one knows.
_TERMS = {
    "C": ("C", "input and weights"),
    "A": ("A", "weights alone"),
    "F_x": ("F(x)", "factorised input"),
    "F_dx": ("F(∇x)", "factorised gradient"),
    "M": ("M", "input × gradient"),
    "Phi": ("Φ", "relevance passed on"),
}


# ------------------------------------------------------------------------------------------------- single maps


def heatmap(evidence: Evidence, signed: bool = True) -> RGB:
    """A map in colours: blue to white to red, or black to yellow for a method without signs.

    >>> heatmap(np.array([[-1.0, 0.0, 1.0]]))[0, 1].tolist()
    [255, 255, 255]
    """
    return _to_bytes(_colours(scaled(evidence, signed), signed, _ALL))


def overlay(picture: Tensor, evidence: Evidence, signed: bool = True, opacity: float = 0.8) -> RGB:
    """A map over the greys of a picture (3,H,W) in [0,1]; the stronger the evidence, the denser its colour.

    >>> overlay(e.pictures[0], e.maps[0, 0], e.signed)      # where there is no evidence: the grey photograph
    """
    level = scaled(evidence, signed)
    alpha = opacity * np.abs(level)[..., None]
    grey = _grey(picture)[..., None]
    return _to_bytes((1 - alpha) * grey + alpha * _colours(level, signed, _VIVID))


def where(evidence: Evidence, signed: bool = True) -> str:
    """Where the evidence for the class lies, in a few words.

    >>> where(np.array([[3.0, 0.0, 0.0], [0.0, 0.0, -1.0], [0.0, 0.0, 0.0]]))
    'top half 100 %, mostly top-left (100 %); 25 % of all evidence is against'
    """
    cells, against = shares(evidence)
    if not cells:
        return "no evidence for the class" + ("; all of it is against" if against else "")
    cell = max(cells, key=cells.__getitem__)
    text = f"{'mostly' if cells[cell] >= 0.5 else 'strongest in'} {cell} ({_percent(cells[cell])})"
    half, part = _strongest_half(evidence)
    if part >= 0.65:
        text = f"{half} half {_percent(part)}, {text}"
    elif cells[cell] < 0.2:
        text = f"spread out, {text}"
    return f"{text}; {_percent(against)} of all evidence is against" if signed else text


def shares(evidence: Evidence) -> tuple[dict[str, float], float]:
    """How the evidence for the class is spread over a 3x3 grid, and how much of all evidence is against it.

    >>> shares(np.array([[3.0, 0.0, 0.0], [0.0, 0.0, -1.0], [0.0, 0.0, 0.0]]))[1]
    0.25

    Without any evidence for the class the grid is empty.
    """
    values = _checked(evidence)
    positive = np.maximum(values, 0)
    total, size = positive.sum(), np.abs(values).sum()
    against = float(1 - total / size) if size else 0.0
    if not total:
        return {}, against
    rows, columns = (np.arange(n) * 3 // n for n in values.shape)
    grid = np.zeros((3, 3))
    np.add.at(grid, (rows[:, None], columns[None, :]), positive / total)
    return {_CELLS[i][j]: float(grid[i, j]) for i in range(3) for j in range(3)}, against


def _strongest_half(evidence: Evidence) -> tuple[str, float]:
    """The half of the picture that holds most of the positive evidence, and how much of it."""
    positive = np.maximum(_checked(evidence), 0)
    height, width = positive.shape
    # Weights 1 ... 1 0 ... 0; the middle line of an odd number belongs to both halves by 0.5.
    upper = np.clip(height / 2 - np.arange(height), 0, 1) @ positive.sum(1) / positive.sum()
    left = np.clip(width / 2 - np.arange(width), 0, 1) @ positive.sum(0) / positive.sum()
    halves = {"top": upper, "bottom": 1 - upper, "left": left, "right": 1 - left}
    name = max(halves, key=halves.__getitem__)
    return name, float(halves[name])


def _checked(evidence: Evidence) -> NDArray[np.float64]:
    values = evidence.detach().cpu().double().numpy() if isinstance(evidence, Tensor) else np.asarray(evidence, float)
    if not np.isfinite(values).all():
        raise MethodError("the map holds NaN or infinite values and cannot be drawn; try float32 or another method")
    return values


def scaled(evidence: Evidence, signed: bool) -> NDArray[np.float64]:
    """The map in [-1,1], zero kept, the same scale on both sides; without signs in [0,1] from its smallest value."""
    values = _checked(evidence)
    if not signed:
        values = values - values.min()
    size = np.abs(values)
    # A map that is zero almost everywhere has a percentile of zero: then its largest value is the scale.
    scale = np.percentile(size, _PERCENTILE) or size.max() or 1.0
    return np.clip(values / scale, -1.0 if signed else 0.0, 1.0)


def _colours(level: NDArray[np.float64], signed: bool, part: tuple[float, float]) -> NDArray[np.float64]:
    """Colours of a scaled map, taken from a part of each side of the colour map."""
    colours: Colormap = _DIVERGING if signed else _SEQUENTIAL
    start, end = part
    depth = start + (end - start) * np.abs(level)
    rgba: NDArray[np.float64] = colours(0.5 + 0.5 * np.sign(level) * depth if signed else depth)
    return rgba[..., :3]


def _grey(picture: Tensor) -> NDArray[np.float64]:
    """The luminance (ITU-R BT.601) of a picture (3,H,W) in [0,1]."""
    weights = torch.tensor([0.299, 0.587, 0.114], dtype=torch.float64)
    luminance: NDArray[np.float64] = torch.einsum("c,chw->hw", weights, picture.detach().cpu().double()).numpy()
    return luminance


def _to_bytes(colours: NDArray[np.float64]) -> RGB:
    return (np.clip(colours, 0, 1) * 255).round().astype(np.uint8)


def _percent(share: float) -> str:
    """71 %; what is not nothing is never written as 0."""
    return "<1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"


# ----------------------------------------------------------------------------------------------------- figures


def figure(explanation: Explanation) -> Figure:
    """One row for each image: the picture, then an overlay for each class with its name and probability.

    >>> figure(explain(model, "photo.jpg", targets=["tabby", "espresso"])).savefig("two-classes.png")
    """
    rows, classes, height, width = explanation.maps.shape
    signed = explanation.signed
    fig, axes = _panels(rows, 1 + classes, height / width)
    for row in range(rows):
        picture = explanation.pictures[row]
        _draw(axes[row][0], _to_bytes(picture.detach().cpu().double().permute(1, 2, 0).numpy()))
        _head(axes[row][0], "picture")
        for k in range(classes):
            _draw(axes[row][1 + k], overlay(picture, explanation.maps[row, k], signed))
            _head(axes[row][1 + k], _name(explanation, row, k), probability_text(explanation.probability(row, k)))
    ends = ("against" if signed else "none", "for")
    _foot(fig, (explanation.method, explanation.model), _legend(signed), ends)
    return fig


def _legend(signed: bool) -> RGB:
    """The colours of an overlay from least to most, on light grey paper."""
    paper = torch.full((3, 1, 256), 0.85)
    return overlay(paper, np.linspace(-1.0 if signed else 0.0, 1.0, 256)[None, :], signed)


def comparison(explanations: Mapping[str, Explanation], failures: Mapping[str, str] | None = None) -> Figure:
    """One row for each class, one column for each method: `comparison({"agf": e1, "gradcam": e2})`.

    Signed methods have zero in the middle of their colours, unsigned ones begin with it. A method that failed has an
    empty column that says why.
    """
    failures = failures or {}
    if not explanations:
        raise MethodError("no method could explain this picture: " + "; ".join(failures.values()))
    first = next(iter(explanations.values()))
    _, classes, height, width = first.maps.shape
    methods = [*explanations, *failures]
    blocks = [methods[i : i + _ABREAST] for i in range(0, len(methods), _ABREAST)]
    fig, axes = _panels(classes * len(blocks), 1 + len(blocks[0]), height / width, panel=2.0)
    for row, (block, k) in enumerate(itertools.product(blocks, range(classes))):
        _draw(axes[row][0], _to_bytes(first.pictures[0].detach().cpu().double().permute(1, 2, 0).numpy()))
        _head(axes[row][0], _name(first, 0, k), probability_text(first.probability(0, k)), size=8.5)
        for panel, method in itertools.zip_longest(axes[row][1:], block):
            if method in explanations:
                e = explanations[method]
                _draw(panel, overlay(e.pictures[0], e.maps[0, k], e.signed))
                _head(panel, method, f"{e.report.seconds:.1f} s", size=8.5)
            else:  # it failed, or the last block is shorter
                panel.set_axis_off()
                _head(panel, method or "", size=8.5)
                text = "\n".join(textwrap.wrap(failures.get(method or "", ""), 32))
                panel.text(0.5, 0.5, text, ha="center", va="center", fontsize=7, color=_GREY, parse_math=False)
    _foot(fig, (first.model,), _legend(True), ends=("against", "for"))
    return fig


def segmentation(explanation: Explanation, labels: NDArray[np.int64], row: int = 0) -> Figure:
    """The picture, its label map (H,W) in a colour for each explained class, and a legend.

    >>> segmentation(e, label_map(e.maps[0].numpy(), e.signed))     # 1 is the first explained class, 0 none of them
    """
    picture, classes = explanation.pictures[row], explanation.targets.shape[1]
    colours = np.array([[0.0, 0.0, 0.0], *(_CLASS_COLOURS(k % _CLASS_COLOURS.N)[:3] for k in range(classes))])
    alpha = 0.65 * (labels > 0)[..., None]
    height, width = labels.shape
    fig, ((photo, painted, legend),) = _panels(1, 3, height / width)
    _draw(photo, _to_bytes(picture.detach().cpu().double().permute(1, 2, 0).numpy()))
    _head(photo, "picture")
    _draw(painted, _to_bytes((1 - alpha) * _grey(picture)[..., None] + alpha * colours[labels]), "nearest")
    _head(painted, "strongest evidence")
    legend.set_axis_off()
    legend.set(xlim=(0, 1), ylim=(0, 1))
    step = min(0.11, 0.96 / (classes + 1))
    for k in range(classes + 1):
        y = 0.97 - k * step
        name = "none of them" if k == classes else _name(explanation, row, k)
        chance = "" if k == classes else probability_text(explanation.probability(row, k))
        colour = (0.8, 0.8, 0.8) if k == classes else colours[k + 1]
        share = float((labels == (0 if k == classes else k + 1)).mean())
        legend.plot(0.04, y, marker="s", markersize=11, color=colour)
        legend.text(0.11, y, name, va="center_baseline", fontsize=10, fontweight="bold", parse_math=False)
        text = f"{chance},  {_percent(share)} of the picture" if chance else f"{_percent(share)} of the picture"
        legend.text(1.0, y, text, va="center_baseline", ha="right", fontsize=9, color=_GREY)
    words = "  ·  ".join(word for word in (explanation.method, explanation.model) if word)
    start, inches = photo.get_position().x0, fig.get_size_inches()[1]
    fig.text(start, 0.235 / inches, words, va="center_baseline", fontsize=9, color=_GREY, parse_math=False)
    return fig


def decomposition(explanation: Explanation, row: int = 0, k: int = 0, layers: int | Sequence[str] = 5) -> Figure:
    """What each term of AGF contributes: a column for each term, a row for each layer, deep ones first.

    >>> decomposition(explain(model, images, trace=True), layers=["features.28", "features.10"])

    `layers` names them, or is how many to pick evenly from those that have all terms. Maps are summed over channels.
    """
    chosen = _pick_layers(explanation.trace, layers)
    height, width = chosen[0].terms["C"].shape[-2:]
    fig, axes = _panels(len(chosen), len(_TERMS), height / width, panel=2.0, left=0.55)
    for i, layer in enumerate(chosen):
        for j, (name, (symbol, meaning)) in enumerate(_TERMS.items()):
            # Deep layers are a few places wide, and shown as such.
            _draw(axes[i][j], heatmap(layer.terms[name][k, row].sum(0)), interpolation="nearest")
            if i == 0:
                _head(axes[i][j], symbol, meaning)
        size = "×".join(map(str, layer.terms["C"].shape[-2:]))
        axes[i][0].set_ylabel(f"{layer.name}\n{size}", fontsize=8, color=_GREY, parse_math=False)
    bar = heatmap(np.linspace(-1.0, 1.0, 256)[None, :])
    about = (_name(explanation, row, k), explanation.method, explanation.model)
    _foot(fig, about, bar, ends=("against", "for"))
    return fig


def probability_text(probability: float | None) -> str:
    """14.2 %, and for very unlikely classes <0.1 %; nothing for what is no class and so has none (None or NaN)."""
    if probability is None or math.isnan(probability):
        return ""
    return "<0.1 %" if probability < 0.0005 else f"{100 * probability:.1f} %"


def _name(explanation: Explanation, row: int, k: int) -> str:
    return explanation.label(int(explanation.targets[row, k]))


def _pick_layers(trace: Sequence[LayerTrace], layers: int | Sequence[str]) -> list[LayerTrace]:
    """The layers to decompose, of those that have every term as a feature map (K,B,channels,h,w)."""
    drawable = {t.name: t for t in trace if all(n in t.terms and t.terms[n].dim() == 5 for n in _TERMS)}
    if not drawable:
        raise MethodError(
            "there is no layer to decompose; explain with trace=True and an AGF method with all its terms"
        )
    if isinstance(layers, int):
        steps = np.linspace(0, len(drawable) - 1, min(max(layers, 1), len(drawable))).round().astype(int)
        return [list(drawable.values())[i] for i in steps]
    unknown = [name for name in layers if name not in drawable]
    if unknown or not layers:
        raise MethodError(f"no layer to decompose is called {(*unknown, '')[0]!r}; there are {', '.join(drawable)}")
    return [drawable[name] for name in layers]


def _panels(
    rows: int, columns: int, aspect: float, panel: float = _PANEL, left: float = _MARGIN
) -> tuple[Figure, list[list[Axes]]]:
    """An empty figure with a grid of panels, each `panel` inches wide, and room for headings and a foot."""
    step = panel * aspect + _HEADING
    width = left + columns * (panel + _GAP) - _GAP + _MARGIN
    height = rows * step + _MARGIN / 2 + _FOOT
    fig = Figure(figsize=(width, height), dpi=min(_DPI, _MAX_PIXELS / max(width, height)), facecolor="white")

    def place(row: int, column: int) -> Axes:
        x, y = left + column * (panel + _GAP), _FOOT + (rows - 1 - row) * step
        return fig.add_axes((x / width, y / height, panel / width, panel * aspect / height))

    return fig, [[place(row, column) for column in range(columns)] for row in range(rows)]


def _draw(axes: Axes, pixels: RGB, interpolation: str = "bicubic") -> None:
    axes.imshow(pixels, interpolation=interpolation, aspect="auto")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)


def _head(axes: Axes, left: str, right: str = "", size: float = 10.5) -> None:
    name = left if len(left) <= _MAX_NAME else left[: _MAX_NAME - 1].rstrip() + "…"
    # A class may be called "$100 bill": names are no formulas.
    axes.set_title(name, loc="left", fontsize=size, fontweight="bold", pad=5, parse_math=False)
    axes.set_title(right, loc="right", fontsize=size - 1, color=_GREY, pad=5)


def _foot(fig: Figure, about: Sequence[str], bar: RGB, ends: tuple[str, str]) -> None:
    """What was run, and a small bar that says what the colours mean."""
    width, height = fig.get_size_inches()
    length, thickness, middle = 1.5, 0.13, 0.235  # inches
    x = width - _MARGIN - 0.3 - length
    axes = fig.add_axes((x / width, (middle - thickness / 2) / height, length / width, thickness / height))
    axes.imshow(bar, aspect="auto")
    axes.set_axis_off()
    for text, edge, side in ((ends[0], x - 0.07, "right"), (ends[1], x + length + 0.07, "left")):
        fig.text(edge / width, middle / height, text, ha=side, va="center_baseline", fontsize=9, color=_GREY)
    words = "  ·  ".join(word for word in about if word)
    start = fig.axes[0].get_position().x0
    fig.text(start, middle / height, words, va="center_baseline", fontsize=9, color=_GREY, parse_math=False)


# ------------------------------------------------------------------------------------------------------- files


def save(explanation: Explanation, folder: str | os.PathLike[str]) -> list[Path]:
    """Overlays and a figure (PNG), the raw maps (npz) and, last, report.json into a folder; gives the paths.

    >>> save(explanation, "out")
    [PosixPath('out/0-285-egyptian-cat.png'), ..., PosixPath('out/report.json')]

    Every file is written whole or not at all: once report.json is there, all of them are.
    """
    target = Path(folder)
    paths = []
    for row, k in np.ndindex(*explanation.targets.shape):
        index = int(explanation.targets[row, k])
        path = target / f"{row}-{index}-{_slug(explanation.label(index))}.png"
        pixels = overlay(explanation.pictures[row], explanation.maps[row, k], explanation.signed)
        paths.append(write_png(path, pixels))
    paths.append(write_png(target / "figure.png", figure(explanation)))
    paths.append(_write(target / "maps.npz", _arrays(explanation)))
    paths.append(_write(target / "report.json", json.dumps(_report(explanation), indent=2).encode()))
    return paths


def write_png(path: Path, picture: RGB | Figure) -> Path:
    """A picture or a figure as a PNG file, whole or not at all; the same picture gives the same bytes.

    >>> write_png(Path("out/figure.png"), figure(explanation))
    """
    return _write(path, png(picture))


def png(picture: RGB | Figure) -> bytes:
    """What `write_png` writes."""
    buffer = io.BytesIO()
    if isinstance(picture, Figure):
        picture.savefig(buffer, format="png", metadata={"Software": None})
    else:
        Image.fromarray(picture).save(buffer, format="png")
    return buffer.getvalue()


def notebook_png(fig: Figure) -> tuple[bytes, dict[str, int]]:
    """A figure as notebooks take it: a PNG of many dots, and how wide to show it."""
    return png(fig), {"width": min(round(_NOTEBOOK_DPI * fig.get_size_inches()[0]), _NOTEBOOK_WIDTH)}


def write_text(path: Path, text: str) -> Path:
    """A text file, whole or not at all."""
    return _write(path, text.encode())


def _write(path: Path, content: bytes) -> Path:
    """Through a file beside it that takes its place when complete, so nobody ever reads half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


def _slug(label: str) -> str:
    """A class's name as a part of a file name: "Egyptian cat" -> "egyptian-cat"."""
    return re.sub(r"\W+", "-", label.lower()).strip("-")[:60] or "class"


def _arrays(explanation: Explanation) -> bytes:
    names = [[explanation.label(index) for index in row] for row in explanation.targets.tolist()]
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        maps=explanation.maps.float().cpu().numpy(),
        targets=explanation.targets.cpu().numpy(),
        logits=explanation.logits.detach().float().cpu().numpy(),
        names=np.array(names),
    )
    return buffer.getvalue()


def _report(explanation: Explanation) -> dict[str, Any]:
    return {
        "versions": {"classlens": version("classlens"), "torch": torch.__version__},
        "model": explanation.model,
        "method": explanation.method,
        "images": [{"classes": describe(explanation, row)} for row in range(len(explanation.targets))],
        "report": explanation.report.to_json(),
    }


def describe(explanation: Explanation, row: int = 0) -> list[dict[str, Any]]:
    """What there is to say about each explained class of an image, ready for JSON.

    >>> [(c["name"], c["where"]) for c in describe(explanation)]
    [('Egyptian cat', 'top half 100 %, strongest in top-centre (39 %); 43 % of all evidence is against')]
    """
    return [_describe_class(explanation, row, k) for k in range(explanation.targets.shape[1])]


def summary(explanation: Explanation, row: int = 0) -> str:
    """The same for people: a line for each class.

    >>> print(summary(explanation))
      Egyptian cat (285)  14.9 %  top half 100 %, strongest in top-centre (39 %); 43 % of all evidence is against
    """
    classes = describe(explanation, row)
    names = [f"{c['name']} ({c['index']})" for c in classes]
    width = max(map(len, names))
    return "\n".join(
        f"  {name:{width}}  {probability_text(c['probability']):>6}  {c['where']}"
        for name, c in zip(names, classes, strict=True)
    )


def _describe_class(explanation: Explanation, row: int, k: int) -> dict[str, Any]:
    evidence, probability = explanation.maps[row, k], explanation.probability(row, k)
    cells, against = shares(evidence)
    return {
        "name": _name(explanation, row, k),
        "index": int(explanation.targets[row, k]),
        "probability": None if math.isnan(probability) else probability,
        "where": where(evidence, explanation.signed),
        "cells": cells,
        "against": against,
    }
