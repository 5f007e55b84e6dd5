"""Tables of results: built from rows, and written for a terminal, as Markdown, as CSV, as HTML."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table as RichTable
from rich.text import Text

from classlens.evaluate.metrics import Metric
from classlens.evaluate.registry import TESTS, Config
from classlens.evaluate.stats import Estimate

if TYPE_CHECKING:
    import pyarrow as pa

_ARROWS = {1: " ↑", -1: " ↓", 0: ""}
_WORDS = {1: "more", -1: "less", 0: ""}


@dataclass(frozen=True)
class Table:
    """One test on one data set: a row for each method, a column for each metric."""

    title: str
    remark: str  # how to read it
    data: str
    config: Config
    metrics: tuple[Metric, ...]
    rows: dict[str, tuple[Estimate, ...]]  # method -> an estimate for each metric
    heading: str = "method"  # of the names of the rows

    def best(self, column: int) -> set[str]:
        """The methods that lead in a column (several if they tie, none if the metric has no direction)."""
        sign = self.metrics[column].better
        if not sign:
            return set()
        values = {method: sign * found[column].value for method, found in self.rows.items()}
        known = [value for value in values.values() if not math.isnan(value)]
        return {method for method, value in values.items() if known and value == max(known)}


def build(data: str, config: Config, rows: Mapping[str, pa.Table], seed: int) -> Table:
    """The table of a test from its rows by method. Columns without any value are left out."""
    test = TESTS[config.test]
    columns = test.metrics(config)
    found = {
        method: [metric.estimate(table, seed, test.group) if len(table) else _NOTHING for metric in columns]
        for method, table in rows.items()
    }
    shown = [i for i in range(len(columns)) if any(found[method][i].n for method in found)]
    estimates = {method: tuple(values[i] for i in shown) for method, values in found.items()}
    return Table(test.title(config), test.remark(config), data, config, tuple(columns[i] for i in shown), estimates)


def paired(table: Table, rows: Mapping[str, pa.Table], against: str, seed: int) -> Table:
    """The paired differences (method − `against`) on the images that both have."""
    group = TESTS[table.config.test].group
    differences = {
        method: tuple(metric.difference(mine, rows[against], seed, group) for metric in table.metrics)
        for method, mine in rows.items()
        if method != against and len(mine)
    }
    remark = f"Paired difference (method − {against}) on the same images. It is significant if the interval excludes 0."
    return replace(table, title=f"{table.title}, method − {against}", remark=remark, rows=differences)


# ------------------------------------------------------------------------------------------------------- texts


def cell(found: Estimate) -> str:
    """'51.2 [48.0, 54.1]'."""
    if math.isnan(found.value):
        return "–"
    digits = 1 if max(abs(found.value), abs(found.high) if not math.isnan(found.high) else 0.0) > 2 else 2
    if math.isnan(found.low):
        return f"{found.value:.{digits}f}"
    return f"{found.value:.{digits}f} [{found.low:.{digits}f}, {found.high:.{digits}f}]"


def headings(table: Table) -> list[str]:
    """The headings: an arrow shows whether higher or lower is better."""
    return [table.heading, *(f"{metric.name}{_ARROWS[metric.better]}" for metric in table.metrics), "n"]


def counts(table: Table, method: str) -> str:
    """The number of images behind a row."""
    return str(max((found.n for found in table.rows[method]), default=0))


def plain(text: str) -> str:
    r"""A name as Markdown shows it letter by letter: neither HTML nor the end of a table's cell.

    >>> plain("<b>a|b</b>")
    '&lt;b&gt;a\\\\|b&lt;/b&gt;'
    """
    return " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("|", "\\|")


def markdown(tables: Sequence[Table]) -> str:
    """The tables with their remarks; the leader of each column is bold."""
    blocks = []
    for table in tables:
        heads = headings(table)
        lines = [f"### {table.title}: {plain(table.data)}", "", table.remark, ""]
        lines += [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
        for method, found in table.rows.items():
            values = [f"**{cell(value)}**" if method in table.best(i) else cell(value) for i, value in enumerate(found)]
            lines.append(f"| {' | '.join([plain(method), *values, counts(table, method)])} |")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def csv_text(tables: Sequence[Table], model: str) -> str:
    """One line for each number, easy to parse."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["model", "data", "test", "settings", "method", "metric", "better", "value", "low", "high", "n"])
    for table in tables:
        for method, estimates in table.rows.items():
            for metric, found in zip(table.metrics, estimates, strict=True):
                numbers = ["" if math.isnan(x) else f"{x:.6g}" for x in (found.value, found.low, found.high)]
                better = _WORDS[metric.better]
                writer.writerow(
                    [model, table.data, table.config.kind, table.title, method, metric.name, better, *numbers, found.n]
                )
    return buffer.getvalue()


def terminal(table: Table) -> RichTable:
    """For `rich.print`; the leader of each column is bold."""
    drawn = RichTable(title=f"{table.title}: {table.data}", title_justify="left", caption=table.remark)
    drawn.caption_justify = "left"
    for i, heading in enumerate(headings(table)):
        drawn.add_column(heading, justify="left" if i == 0 else "right", no_wrap=i == 0)
    for method, found in table.rows.items():
        values = [Text(cell(value), "bold" if method in table.best(i) else "") for i, value in enumerate(found)]
        drawn.add_row(Text(method), *values, counts(table, method))
    return drawn


_NOTHING = Estimate(np.nan, np.nan, np.nan, 0)
