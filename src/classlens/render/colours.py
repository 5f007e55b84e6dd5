"""Colours of maps: red is evidence for the class, blue is evidence against it, and zero is always the middle.

    >>> overlay(explanation.pictures[0], explanation.maps[0, 0])     # (H,W,3) uint8

Only pictures are scaled, never data: each map is drawn on its own scale, so colours compare positions, not amounts. To
compare amounts, draw several maps on one scale: `scale=shared_scale(maps, signed)`.
Overlays use a grey version of the image: a colour in them always means evidence.
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
Scale: TypeAlias = tuple[float, float]  # the values of no colour and of full colour

_DIVERGING = LinearSegmentedColormap.from_list(
    "evidence",
    ["#0a2f86", "#1f6fe0", "#86bbf7", "#ffffff", "#ff9580", "#e4202c", "#8a0413"],
    N=257,  # odd, so that zero is exactly white
)
_SEQUENTIAL = colormaps["inferno"]
CLASS_COLOURS = ListedColormap(  # of label maps: distinguishable for most eyes, and none is grey
    ["#e4202c", "#1f6fe0", "#2ca02c", "#ff9f1c", "#9b5de5", "#00bbd4", "#f15bb5", "#8c564b", "#c2b800", "#0b6e4f"]
)
# The range of colours that overlays use. Pale colours would veil the image, and dark ones would be lost in its shadows:
# in overlays, opacity shows the strength.
_ALL, _VIVID = (0.0, 1.0), (0.45, 0.8)
# Share of the pixels within the scale. A few outliers must not make everything else look like zero.
_PERCENTILE = 99.5


def heatmap(evidence: Evidence, signed: bool = True) -> RGB:
    """A map in colours: blue to white to red, or black to yellow for an unsigned method.

    >>> heatmap(np.array([[-1.0, 0.0, 1.0]]))[0, 1].tolist()
    [255, 255, 255]
    """
    return to_bytes(_colours(scaled(evidence, signed), signed, _ALL))


def overlay(
    picture: Tensor, evidence: Evidence, signed: bool = True, opacity: float = 0.8, scale: Scale | None = None
) -> RGB:
    """A map over a grey version of an image (3,H,W) in [0,1]; the stronger the evidence, the more opaque the colour.

    >>> overlay(e.pictures[0], e.maps[0, 0], e.signed)      # without evidence: the grey image

    The slices of a volume (3,D,H,W) share one scale. `scale` draws several maps on the same one (`shared_scale`).
    """
    level = scaled(evidence, signed, scale)
    alpha = opacity * np.abs(level)[..., None]
    return to_bytes((1 - alpha) * grey(picture)[..., None] + alpha * _colours(level, signed, _VIVID))


def legend(signed: bool, opacity: float = 0.8) -> RGB:
    """The colours of an overlay from least to most, on light grey: (1,256,3)."""
    paper = torch.full((3, 1, 256), 0.85)
    return overlay(paper, np.linspace(-1.0 if signed else 0.0, 1.0, 256)[None, :], signed, opacity)


def scaled(evidence: Evidence, signed: bool, scale: Scale | None = None) -> NDArray[np.float64]:
    """The map scaled to [-1,1], symmetric around zero; an unsigned map to [0,1] from its minimum."""
    values = checked(evidence)
    low, high = scale or shared_scale(values, signed)
    return np.clip((values - low) / (high - low), -1.0 if signed else 0.0, 1.0)


def shared_scale(maps: Evidence, signed: bool) -> Scale:
    """One scale for all these maps: the values that get no colour and full colour.

    >>> shared_scale(np.array([[[-4.0, 1.0]], [[0.5, 2.0]]]), signed=True)
    (0.0, 4.0)
    """
    values = checked(maps)
    low = 0.0 if signed else float(values.min())
    size = np.abs(values - low)
    # If a map is zero almost everywhere, its percentile is zero: then the maximum is the scale.
    return low, low + float(np.percentile(size, _PERCENTILE) or size.max() or 1.0)


def checked(evidence: Evidence) -> NDArray[np.float64]:
    """The map as float64; raises an error if it is not finite."""
    values = evidence.detach().cpu().double().numpy() if isinstance(evidence, Tensor) else np.asarray(evidence, float)
    if not np.isfinite(values).all():
        raise MethodError("the map holds NaN or infinite values and cannot be drawn; try float32 or another method")
    return values


def _colours(level: NDArray[np.float64], signed: bool, part: tuple[float, float]) -> NDArray[np.float64]:
    """Colours of a scaled map, from a part of each side of the colour map."""
    colours: Colormap = _DIVERGING if signed else _SEQUENTIAL
    start, end = part
    depth = start + (end - start) * np.abs(level)
    rgba: NDArray[np.float64] = colours(0.5 + 0.5 * np.sign(level) * depth if signed else depth)
    return rgba[..., :3]


def grey(picture: Tensor) -> NDArray[np.float64]:
    """The luminance (ITU-R BT.601) of a picture (3,H,W) in [0,1], or of the slices (3,D,H,W) of a volume."""
    weights = torch.tensor([0.299, 0.587, 0.114], dtype=torch.float64)
    luminance: NDArray[np.float64] = torch.einsum("c,c...->...", weights, picture.detach().cpu().double()).numpy()
    return luminance


def pixels_of(picture: Tensor) -> RGB:
    """A picture (3,H,W) in [0,1] as bytes (H,W,3); of a volume, each slice."""
    return to_bytes(picture.detach().cpu().double().movedim(0, -1).numpy())


def to_bytes(colours: NDArray[np.float64]) -> RGB:
    """Colours in [0,1] as bytes, rounded."""
    return (np.clip(colours, 0, 1) * 255).round().astype(np.uint8)
