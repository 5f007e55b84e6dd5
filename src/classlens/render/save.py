"""Writes figures and results to files.

>>> save(explanation, "out")
[PosixPath('out/0-285-egyptian-cat.png'), ..., PosixPath('out/report.json')]
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image

from classlens.files import write_bytes, write_json
from classlens.render.colours import RGB
from classlens.render.figures import figure
from classlens.render.slices import side_by_side
from classlens.render.words import describe

if TYPE_CHECKING:
    from classlens.explanation import Explanation
    from classlens.trust import Trust

_NOTEBOOK_DPI, _NOTEBOOK_WIDTH = 84, 1000  # resolution and maximum width of a figure in a notebook


def save(explanation: Explanation, folder: str | os.PathLike[str], trust: Sequence[Trust] = ()) -> list[Path]:
    """Write overlays and a figure (PNG), the raw maps (npz) and, last, report.json to a folder; returns the paths.

    >>> save(explanation, "out")
    [PosixPath('out/0-285-egyptian-cat.png'), ..., PosixPath('out/report.json')]

    Trust cards are drawn as `trust-0-285-egyptian-cat.png`, and are part of report.json.
    Every file is written atomically: if report.json exists, all files are complete.
    """
    target = Path(folder)
    paths = []
    for row, k in np.ndindex(*explanation.targets.shape):
        path = target / f"{stem(explanation, row, k)}.png"
        paths.append(write_png(path, side_by_side(explanation, row, k)))
    paths.append(write_png(target / "figure.png", figure(explanation)))
    for card in trust:
        paths.append(write_png(target / f"trust-{stem(explanation, card.row, card.k)}.png", card.figure()))
    paths.append(write_bytes(target / "maps.npz", _arrays(explanation)))
    cards = {"trust": [card.to_json() for card in trust]} if trust else {}
    paths.append(write_json(target / "report.json", _report(explanation) | cards))
    return paths


def write_png(path: Path, picture: RGB | Figure) -> Path:
    """Write an image or a figure as a PNG file, atomically; the same image gives the same bytes.

    >>> write_png(Path("out/figure.png"), figure(explanation))
    """
    return write_bytes(path, png(picture))


def png(picture: RGB | Figure) -> bytes:
    """The bytes that `write_png` writes."""
    buffer = io.BytesIO()
    if isinstance(picture, Figure):
        picture.savefig(buffer, format="png", metadata={"Software": None})
    else:
        Image.fromarray(picture).save(buffer, format="png")
    return buffer.getvalue()


def notebook_png(fig: Figure) -> tuple[bytes, dict[str, int]]:
    """A figure for a notebook: a high-resolution PNG, and its display width."""
    return png(fig), {"width": min(round(_NOTEBOOK_DPI * fig.get_size_inches()[0]), _NOTEBOOK_WIDTH)}


def stem(explanation: Explanation, row: int, k: int) -> str:
    """The name of the files of one map, without its ending: "0-285-egyptian-cat"."""
    return f"{row}-{int(explanation.targets[row, k])}-{_slug(explanation.name(row, k))}"


def _slug(label: str) -> str:
    """A class's name as a part of a file name: "Egyptian cat" -> "egyptian-cat"."""
    return re.sub(r"\W+", "-", label.lower()).strip("-")[:60] or "class"


def _arrays(explanation: Explanation) -> bytes:
    rows, classes = explanation.targets.shape
    names = [[explanation.name(row, k) for k in range(classes)] for row in range(rows)]
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
