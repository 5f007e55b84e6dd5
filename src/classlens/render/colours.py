"""Maps in colours: red speaks for the class, blue against it, and zero is always the middle.

    >>> overlay(explanation.pictures[0], explanation.maps[0, 0])     # (H,W,3) uint8

Pictures are scaled, data are not: each map is drawn relative to its own size, so two pictures compare places,
not amounts. Overlays lie on the photograph's greys: a colour in them can only mean evidence.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.colors import Colormap, LinearSegmentedColormap, ListedColormap
from numpy.typing import NDArray
from torch import Tensor

from classlens.errors import MethodError

Evidence: TypeAlias = Tensor | NDArray[np.floating[Any]]  # (H,W)
RGB: TypeAlias = NDArray[np.uint8]  # (H,W,3)

_DIVERGING = LinearSegmentedColormap.from_list(
    "evidence",
    ["#0a2f86", "#1f6fe0", "#86bbf7", "#ffffff", "#ff9580", "#e4202c", "#8a0413"],
    N=257,  # odd, so that zero has a colour of its own: white
)
_SEQUENTIAL = colormaps["inferno"]
CLASS_COLOURS = ListedColormap(  # of label maps: apart from each other for most eyes, and none is grey
    ["#e4202c", "#1f6fe0", "#2ca02c", "#ff9f1c", "#9b5de5", "#00bbd4", "#f15bb5", "#8c564b", "#c2b800", "#0b6e4f"]
)
# The part of the colours that overlays use. Pale ends would veil the photograph without saying anything, and dark
# ones would be lost in its shadows: there, strength is how dense a vivid colour is.
_ALL, _VIVID = (0.0, 1.0), (0.45, 0.8)
# Share of the places that a scale takes in. A handful of outliers must not make everything else look like zero.
_PERCENTILE = 99.5


def heatmap(evidence: Evidence, signed: bool = True) -> RGB:
    """A map in colours: blue to white to red, or black to yellow for a method without signs.

    >>> heatmap(np.array([[-1.0, 0.0, 1.0]]))[0, 1].tolist()
    [255, 255, 255]
    """
    return to_bytes(_colours(scaled(evidence, signed), signed, _ALL))


def overlay(picture: Tensor, evidence: Evidence, signed: bool = True, opacity: float = 0.8) -> RGB:
    """A map over the greys of a picture (3,H,W) in [0,1]; the stronger the evidence, the denser its colour.

    >>> overlay(e.pictures[0], e.maps[0, 0], e.signed)      # where there is no evidence: the grey photograph
    """
    level = scaled(evidence, signed)
    alpha = opacity * np.abs(level)[..., None]
    return to_bytes((1 - alpha) * grey(picture)[..., None] + alpha * _colours(level, signed, _VIVID))


def legend(signed: bool, opacity: float = 0.8) -> RGB:
    """The colours of an overlay from least to most, on light grey paper: (1,256,3)."""
    paper = torch.full((3, 1, 256), 0.85)
    return overlay(paper, np.linspace(-1.0 if signed else 0.0, 1.0, 256)[None, :], signed, opacity)


def scaled(evidence: Evidence, signed: bool) -> NDArray[np.float64]:
    """The map in [-1,1], zero kept, the same scale on both sides; without signs in [0,1] from its smallest value."""
    values = checked(evidence)
    if not signed:
        values = values - values.min()
    size = np.abs(values)
    # A map that is zero almost everywhere has a percentile of zero: then its largest value is the scale.
    scale = np.percentile(size, _PERCENTILE) or size.max() or 1.0
    return np.clip(values / scale, -1.0 if signed else 0.0, 1.0)


def checked(evidence: Evidence) -> NDArray[np.float64]:
    """The map as float64; one that is not finite cannot be drawn."""
    values = evidence.detach().cpu().double().numpy() if isinstance(evidence, Tensor) else np.asarray(evidence, float)
    if not np.isfinite(values).all():
        raise MethodError("the map holds NaN or infinite values and cannot be drawn; try float32 or another method")
    return values


def _colours(level: NDArray[np.float64], signed: bool, part: tuple[float, float]) -> NDArray[np.float64]:
    """Colours of a scaled map, taken from a part of each side of the colour map."""
    colours: Colormap = _DIVERGING if signed else _SEQUENTIAL
    start, end = part
    depth = start + (end - start) * np.abs(level)
    rgba: NDArray[np.float64] = colours(0.5 + 0.5 * np.sign(level) * depth if signed else depth)
    return rgba[..., :3]


def grey(picture: Tensor) -> NDArray[np.float64]:
    """The luminance (ITU-R BT.601) of a picture (3,H,W) in [0,1]."""
    weights = torch.tensor([0.299, 0.587, 0.114], dtype=torch.float64)
    luminance: NDArray[np.float64] = torch.einsum("c,chw->hw", weights, picture.detach().cpu().double()).numpy()
    return luminance


def pixels_of(picture: Tensor) -> RGB:
    """A picture (3,H,W) in [0,1] as bytes (H,W,3)."""
    return to_bytes(picture.detach().cpu().double().permute(1, 2, 0).numpy())


def to_bytes(colours: NDArray[np.float64]) -> RGB:
    """Colours in [0,1] as bytes, rounded."""
    return (np.clip(colours, 0, 1) * 255).round().astype(np.uint8)
