"""report.html: one self-contained file. Its text and style are in templates/."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from classlens.evaluate.gallery import Shown
from classlens.evaluate.stats import Estimate
from classlens.evaluate.tables import Table, cell, counts, headings
from classlens.render.html import pages

TIME = "Time of each method, excluding the recorded forward pass that all methods share."


@dataclass(frozen=True)
class Page:
    """The content of the page."""

    model: str
    about: str
    notes: Sequence[str]
    tables: Sequence[Table]
    curves: bytes  # PNG
    shown: Sequence[Shown]
    timing: Mapping[str, float]  # method -> seconds per image
    ops: Mapping[str, Sequence[tuple[str, float]]]  # method -> operations and their share of the time
    skipped: Sequence[str]
    manifest: str

    def html(self) -> str:
        """The whole file."""
        text = pages("evaluate").get_template("report.html").render(
            vars(self), tables=laid_out(self.tables), gallery=gallery(self.shown),
            remark=_remark(self.shown), time=TIME, costs=_costs(self.timing, self.ops),
        )  # fmt: skip
        return text + "\n"


def laid_out(tables: Sequence[Table]) -> list[dict[str, Any]]:
    """Tables as the macro `scores` of scores.html takes them."""
    return [_table(table) for table in tables]


def gallery(shown: Sequence[Shown]) -> list[tuple[str, list[tuple[str, bytes]]]]:
    """Drawn pictures as the macro `disputed` takes them."""
    return [_row(one) for one in shown]


def _table(table: Table) -> dict[str, Any]:
    rows = [
        (method, [(*_interval(value), method in table.best(i)) for i, value in enumerate(found)], counts(table, method))
        for method, found in table.rows.items()
    ]
    return {"title": f"{table.title}: {table.data}", "remark": table.remark, "heads": headings(table), "rows": rows}


def _interval(found: Estimate) -> tuple[str, str]:
    """A number, and the interval behind it: `51.2` and `[48.0, 54.1]`."""
    value, bracket, interval = cell(found).partition(" [")
    return value, f"[{interval}" if bracket else ""


def _row(dispute: Shown) -> tuple[str, list[tuple[str, bytes]]]:
    """A caption, the image, and the map of each method."""
    maps = [(f"{method} {score:.2f}", jpeg) for method, (score, jpeg) in dispute.maps.items()]
    return dispute.caption, [("picture", dispute.picture), *maps]


def _remark(shown: Sequence[Shown]) -> str:
    judges = dict.fromkeys(dispute.judge for dispute in shown)
    return (
        "Red is evidence for the explained class, blue is evidence against it. The number under each map is its score "
        "on this image, from 0 to 1: "
        f"{', or '.join(judges)}."
    )


def _costs(timing: Mapping[str, float], ops: Mapping[str, Sequence[tuple[str, float]]]) -> list[tuple[str, str, str]]:
    """For each method: its seconds, and its slowest operations."""
    return [
        (
            method,
            f"{timing[method]:.2f}" if method in timing else "–",
            ", ".join(f"{name} {100 * share:.0f} %" for name, share in ops.get(method, ())),
        )
        for method in {**timing, **ops}
    ]
