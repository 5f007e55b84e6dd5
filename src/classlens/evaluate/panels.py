"""The data of a test's plots: `Panel`s, made from its table and rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from classlens.evaluate.stats import Estimate

if TYPE_CHECKING:
    from classlens.evaluate.tables import Table


@dataclass(frozen=True)
class Panel:
    """One set of axes: a line over x for each method, or a value with its interval for each metric and method."""

    title: str
    ylabel: str
    xlabel: str = ""
    x: tuple[float, ...] = ()
    ticks: tuple[str, ...] = ()  # labels of the x values, if they are not the numbers
    lines: Mapping[str, NDArray[np.float64]] | None = None  # method -> (len(x),)
    groups: tuple[str, ...] = ()
    points: Mapping[str, Sequence[Estimate]] | None = None  # method -> one for each group
    chance: float | None = None


def comparison(table: Table, only: str = "", ylabel: str = "%", chance: float | None = None) -> Panel:
    """The metrics of a table side by side (those whose name begins with `only`)."""
    chosen = [i for i, metric in enumerate(table.metrics) if metric.name.startswith(only)]
    return Panel(
        f"{only.capitalize() or table.title}: {table.data}",
        ylabel,
        groups=tuple(table.metrics[i].name.removeprefix(f"{only}, ") for i in chosen),
        points={method: [found[i] for i in chosen] for method, found in table.rows.items()},
        chance=chance,
    )
