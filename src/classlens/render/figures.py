"""Figures: an explanation, several methods side by side, a label map, the terms of AGF.

>>> figure(explanation).savefig("figure.png")
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from classlens.errors import MethodError
from classlens.render.colours import CLASS_COLOURS, Scale, grey, heatmap, legend, pixels_of, shared_scale, to_bytes
from classlens.render.outlines import overlay_of
from classlens.render.panels import QUIET, caption, draw, foot, head, panels
from classlens.render.slices import flat, strips, strongest
from classlens.render.words import class_name, percent, probability_text, question_text, rival_text

if TYPE_CHECKING:
    from classlens.explanation import Explanation
    from classlens.methods import LayerTrace

_ABREAST = 7  # methods beside each other in a comparison

# The terms of the paper's decomposition figure, in its order, with what each one depends on.
_TERMS = {
    "C": ("C", "input and weights"),
    "A": ("A", "weights alone"),
    "F_x": ("F(x)", "factorised input"),
    "F_dx": ("F(∇x)", "factorised gradient"),
    "M": ("M", "input × gradient"),
    "Phi": ("Φ", "relevance passed on"),
}


def figure(explanation: Explanation, scale: str | float = "own") -> Figure:
    """One row for each image: the image, then an overlay for each class with its name and probability.

    >>> figure(explain(model, "photo.jpg", targets=["tabby", "espresso"])).savefig("two-classes.png")

    Each map has its own scale: colours compare positions, not amounts. `scale="shared"` draws all maps of the figure on
    one scale, and a number on that scale, so that figures can be compared too; the colour bar then has numbers.
    """
    if explanation.maps.dim() == 5:
        if scale != "own":
            raise MethodError(f"a figure of volumes has no scale={scale!r}: each strip has its own")
        return _of_volumes(explanation)
    fixed = _fixed(explanation, scale)
    rows, classes, height, width = explanation.maps.shape
    signed = explanation.signed
    rivals = [[_lines(rival_text(explanation, row, k), 46) for k in range(classes)] for row in range(rows)]
    fig, axes = panels(rows, 1 + classes, height / width, lines=max(len(text) for row in rivals for text in row))
    for row in range(rows):
        picture = explanation.pictures[row]
        draw(axes[row][0], pixels_of(picture))
        head(axes[row][0], "picture")
        for k in range(classes):
            draw(axes[row][1 + k], overlay_of(explanation, row, k, fixed))
            chance = probability_text(explanation.probability(row, k))
            head(axes[row][1 + k], class_name(explanation, row, k), chance, below=rivals[row][k])
    about = (explanation.method, explanation.model, _warning(explanation))
    foot(fig, question_text(explanation), about, legend(signed), _ends(explanation, fixed))
    return fig


def _fixed(explanation: Explanation, scale: str | float) -> Scale | None:
    """The values of no colour and of full colour, or None if each map has its own scale."""
    if scale == "own":
        return None
    if scale == "shared":
        return shared_scale(explanation.maps, explanation.signed)
    if isinstance(scale, int | float) and not isinstance(scale, bool) and 0 < scale < float("inf"):
        return 0.0, float(scale)
    raise MethodError(f'scale is "own", "shared" or a positive number, not {scale!r}')


def _of_volumes(explanation: Explanation) -> Figure:
    """For each image a strip of slices or frames, then one for each class."""
    rows, classes = explanation.targets.shape

    def heading(row: int, k: int) -> tuple[str, str]:
        words = explanation.name(row, k), rival_text(explanation, row, k)
        return " ".join(filter(None, words)), probability_text(explanation.probability(row, k))

    fig = strips(explanation, [[heading(row, k) for k in range(classes)] for row in range(rows)])
    about = (explanation.method, explanation.model)
    foot(fig, question_text(explanation), about, legend(explanation.signed), _ends(explanation))
    return fig


def _lines(text: str, width: int) -> list[str]:
    """Wrap text to lines of a width; brackets start a new line if the text does not fit on one."""
    parts = [text] if len(text) <= width else text.replace(" (", "\n(").splitlines()
    return [line for part in parts for line in textwrap.wrap(part, width)]


def _warning(explanation: Explanation) -> str:
    return "unreliable: see the notes" if explanation.report.warnings else ""


def _ends(explanation: Explanation, scale: Scale | None = None) -> tuple[str, str]:
    """The labels of the two ends of the colour bar; with numbers if the scale is fixed."""
    low, high = ("for rivals", "for it") if explanation.likeliest_rival(0, 0) else ("against", "for")
    if not explanation.signed:
        low, high = "none", "for"
    if scale is None:
        return low, high
    return f"{low} {-scale[1] if explanation.signed else scale[0]:.2g}", f"{scale[1]:.2g} {high}"


def comparison(explanations: Mapping[str, Explanation], failures: Mapping[str, str] | None = None) -> Figure:
    """One row for each class, one column for each method: `comparison({"agf": e1, "gradcam": e2})`.

    For signed methods, zero is the middle of the colours; for unsigned methods, it is the lower end. The column of a
    failed method holds only the reason.
    """
    failures = failures or {}
    if not explanations:
        raise MethodError("no method could explain this image: " + "; ".join(failures.values()))
    first = next(iter(explanations.values()))
    _, classes, *_, height, width = first.maps.shape
    methods = [*explanations, *failures]
    blocks = [methods[i : i + _ABREAST] for i in range(0, len(methods), _ABREAST)]
    slices = [strongest(one) if one.dim() == 3 else None for one in first.maps[0]]  # of a volume, for every method
    rivals = [
        [*_lines(rival_text(first, 0, k), 36), *([] if at is None else [f"slice {at + 1} of {first.maps.shape[2]}"])]
        for k, at in enumerate(slices)
    ]
    lines = max(map(len, rivals))
    fig, axes = panels(classes * len(blocks), 1 + len(blocks[0]), height / width, panel=2.0, lines=lines)
    for row, (block, k) in enumerate(itertools.product(blocks, range(classes))):
        draw(axes[row][0], flat(first, 0, k, slices[k])[0])
        chance = probability_text(first.probability(0, k))
        head(axes[row][0], class_name(first, 0, k), chance, size=8.5, below=rivals[k])
        for panel, method in itertools.zip_longest(axes[row][1:], block):
            if method in explanations:
                e = explanations[method]
                draw(panel, flat(e, 0, k, slices[k])[1])
                head(panel, method, _warning(e) or f"{e.report.seconds:.1f} s", size=8.5)
            else:  # it failed, or the last block is shorter
                panel.set_axis_off()
                head(panel, method or "", size=8.5)
                text = "\n".join(textwrap.wrap(failures.get(method or "", ""), 32))
                panel.text(0.5, 0.5, text, ha="center", va="center", fontsize=7, color=QUIET, parse_math=False)
    foot(fig, question_text(first), (first.model,), legend(True), _ends(first))
    return fig


def segmentation(explanation: Explanation, labels: NDArray[np.int64], row: int = 0) -> Figure:
    """The image, its label map (H,W) with a colour for each explained class, and a legend.

    >>> segmentation(e, label_map(e.maps[0].numpy(), e.signed))     # 1 is the first explained class, 0 none of them
    """
    picture, classes = explanation.pictures[row], explanation.targets.shape[1]
    colours = np.array([[0.0, 0.0, 0.0], *(CLASS_COLOURS(k % CLASS_COLOURS.N)[:3] for k in range(classes))])
    alpha = 0.65 * (labels > 0)[..., None]
    height, width = labels.shape
    fig, ((photo, painted, key),) = panels(1, 3, height / width)
    draw(photo, pixels_of(picture))
    head(photo, "picture")
    draw(painted, to_bytes((1 - alpha) * grey(picture)[..., None] + alpha * colours[labels]), "nearest")
    head(painted, "strongest evidence")
    key.set_axis_off()
    key.set(xlim=(0, 1), ylim=(0, 1))
    step = min(0.11, 0.96 / (classes + 1))
    for k in range(classes + 1):
        y = 0.97 - k * step
        name = "none of them" if k == classes else explanation.name(row, k)
        chance = "" if k == classes else probability_text(explanation.probability(row, k))
        colour = (0.8, 0.8, 0.8) if k == classes else colours[k + 1]
        share = float((labels == (0 if k == classes else k + 1)).mean())
        key.plot(0.04, y, marker="s", markersize=11, color=colour)
        key.text(0.11, y, name, va="center_baseline", fontsize=10, fontweight="bold", parse_math=False)
        text = f"{chance},  {percent(share)} of the picture" if chance else f"{percent(share)} of the picture"
        key.text(1.0, y, text, va="center_baseline", ha="right", fontsize=9, color=QUIET)
    caption(fig, question_text(explanation), (explanation.method, explanation.model))
    return fig


def decomposition(explanation: Explanation, row: int = 0, k: int = 0, layers: int | Sequence[str] = 5) -> Figure:
    """The contribution of each term of AGF: a column for each term, a row for each layer, the deepest first.

    >>> decomposition(explain(model, images, trace=True), layers=["features.28", "features.10"])

    `layers` names the layers, or is the number of evenly spaced layers that have all terms. Maps are summed over
    channels, and over the depth of a volume.
    """
    chosen, terms = _pick_layers(explanation.trace, layers), _terms(explanation.trace)
    height, width = chosen[0].terms["C"].shape[-2:]
    fig, axes = panels(len(chosen), len(terms), height / width, panel=2.0, left=0.55)
    for i, layer in enumerate(chosen):
        for j, (name, (symbol, meaning)) in enumerate(terms.items()):
            # Deep layers are a few pixels wide, and shown without interpolation.
            shown = layer.terms[name][k, row].flatten(0, -3).sum(0)
            draw(axes[i][j], heatmap(shown), interpolation="nearest")
            if i == 0:
                head(axes[i][j], symbol, meaning)
        size = "×".join(map(str, layer.terms["C"].shape[3:]))
        axes[i][0].set_ylabel(f"{layer_words(layer.name)}\n{size}", fontsize=8, color=QUIET, parse_math=False)
    bar = heatmap(np.linspace(-1.0, 1.0, 256)[None, :])
    foot(fig, explanation.question(row, k), (explanation.method, explanation.model), bar, _ends(explanation))
    return fig


def layer_words(name: str) -> str:
    """The name of a layer as it is read.

    >>> layer_words("_blocks.13._expand_conv")
    'blocks 13, expand conv'
    """
    words = ""
    for part in (part.replace("_", " ").strip() for part in name.split(".")):
        words += (" " if part.isdigit() else ", ") + part if words else part
    return words


def _terms(trace: Sequence[LayerTrace]) -> dict[str, tuple[str, str]]:
    """The terms to draw; `agf` has no A, the published rules do."""
    return {name: text for name, text in _TERMS.items() if name != "A" or any(name in t.terms for t in trace)}


def _pick_layers(trace: Sequence[LayerTrace], layers: int | Sequence[str]) -> list[LayerTrace]:
    """The layers to decompose, among those that have every term as a feature map (K,B,channels,h,w)."""
    terms = _terms(trace)
    drawable = {t.name: t for t in trace if all(n in t.terms and t.terms[n].dim() >= 5 for n in terms)}
    if not drawable:
        raise MethodError(
            "no layer has all terms of AGF here; choose agf-release or agf-paper (in Python with trace=True)"
        )
    if isinstance(layers, int):
        steps = np.linspace(0, len(drawable) - 1, min(max(layers, 1), len(drawable))).round().astype(int)
        return [list(drawable.values())[i] for i in steps]
    unknown = [name for name in layers if name not in drawable]
    if unknown or not layers:
        raise MethodError(f"no layer to decompose is called {(*unknown, '')[0]!r}; choose from {', '.join(drawable)}")
    return [drawable[name] for name in layers]
