"""The grid of panels of every figure: headings above, the method and the colour legend below.

>>> fig, ((photo, evidence),) = panels(rows=1, columns=2, aspect=1.0)
>>> draw(photo, pixels_of(picture))
>>> head(photo, "picture")
>>> foot(fig, "evidence for the class", ("agf", "resnet50"), legend(signed=True), ("against", "for"))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from classlens.render.colours import RGB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

QUIET = "#666666"  # of text other than headings
_DPI = 150
_MAX_PIXELS = 60_000  # of a figure's edge; matplotlib cannot draw beyond 2**16
_PANEL, _GAP, _MARGIN, _HEADING, _FOOT = 3.0, 0.14, 0.2, 0.34, 0.5  # inches
_MAX_NAME = 27  # characters that fit above a panel next to the probability
_LINE, _POINTS = 12, 72  # points of a line below a heading, and of an inch


def panels(
    rows: int, columns: int, aspect: float, panel: float = _PANEL, left: float = _MARGIN, lines: int = 0
) -> tuple[Figure, list[list[Axes]]]:
    """An empty figure with a grid of panels, each `panel` inches wide, and room for headings and a foot.

    `lines` is the number of lines below the headings.
    """
    step = panel * aspect + _HEADING + lines * _LINE / _POINTS
    width = left + columns * (panel + _GAP) - _GAP + _MARGIN
    height = rows * step + _MARGIN / 2 + _FOOT
    fig = Figure(figsize=(width, height), dpi=min(_DPI, _MAX_PIXELS / max(width, height)), facecolor="white")

    def place(row: int, column: int) -> Axes:
        x, y = left + column * (panel + _GAP), _FOOT + (rows - 1 - row) * step
        return fig.add_axes((x / width, y / height, panel / width, panel * aspect / height))

    return fig, [[place(row, column) for column in range(columns)] for row in range(rows)]


def draw(axes: Axes, pixels: RGB, interpolation: str = "bicubic") -> None:
    """Fill a panel with an image, without axes."""
    axes.imshow(pixels, interpolation=interpolation, aspect="auto")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)


def head(axes: Axes, left: str, right: str = "", size: float = 10.5, below: Sequence[str] = ()) -> None:
    """A name above a panel, bold on the left, and a remark on the right: `head(panel, "tabby", "14.2 %")`.

    `below` are small lines between them and the panel.
    """
    pad = 5 + _LINE * len(below)
    name = left if len(left) <= _MAX_NAME else left[: _MAX_NAME - 1].rstrip() + "…"
    # A class may be called "$100 bill": names are not formulas.
    axes.set_title(name, loc="left", fontsize=size, fontweight="bold", pad=pad, parse_math=False)
    axes.set_title(right, loc="right", fontsize=size - 1, color=QUIET, pad=pad)
    for i, line in enumerate(reversed(below)):
        axes.annotate(
            line, (0, 1), (0, 5 + _LINE * i), xycoords="axes fraction", textcoords="offset points",
            fontsize=size - 1.5, color=QUIET, parse_math=False,
        )  # fmt: skip


def foot(fig: Figure, question: str, about: Sequence[str], bar: RGB, ends: tuple[str, str]) -> None:
    """The question, the method, and a small colour bar."""
    width, height = fig.get_size_inches()
    length, thickness, middle = 1.5, 0.13, 0.235  # inches
    x = width - _MARGIN - max(0.3, 0.07 * len(ends[1])) - length  # a fixed scale has a number there
    axes = fig.add_axes((x / width, (middle - thickness / 2) / height, length / width, thickness / height))
    axes.imshow(bar, aspect="auto")
    axes.set_axis_off()
    for text, edge, side in ((ends[0], x - 0.07, "right"), (ends[1], x + length + 0.07, "left")):
        fig.text(edge / width, middle / height, text, ha=side, va="center_baseline", fontsize=9, color=QUIET)
    caption(fig, question, about)


def caption(fig: Figure, question: str, about: Sequence[str]) -> None:
    """Two lines in the lower left corner: `caption(fig, "evidence for the class", ("agf", "resnet50"))`."""
    start, height = fig.axes[0].get_position().x0, fig.get_size_inches()[1]
    for line, y in ((question, 0.315), ("  ·  ".join(word for word in about if word), 0.145)):  # inches
        fig.text(start, y / height, line, va="center_baseline", fontsize=9, color=QUIET, parse_math=False)
