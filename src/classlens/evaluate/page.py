"""report.html: one file with everything in it, that can be mailed. Its words and looks are in templates/."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from classlens.evaluate.gallery import Shown
from classlens.evaluate.stats import Estimate
from classlens.evaluate.tables import Table, cell, counts, headings
from classlens.render.html import pages

TIME = "What a method takes beside the recorded forward pass that all methods share."


@dataclass(frozen=True)
class Page:
    """All that the page shows."""

    model: str
    about: str
    notes: Sequence[str]
    tables: Sequence[Table]
    curves: bytes  # PNG
    shown: Sequence[Shown]
    timing: Mapping[str, float]  # method -> seconds a picture
    ops: Mapping[str, Sequence[tuple[str, float]]]  # method -> operations and their share of the time
    skipped: Sequence[str]
    manifest: str

    def html(self) -> str:
        """The whole file."""
        text = pages("evaluate").get_template("report.html").render(
            vars(self), tables=[_table(table) for table in self.tables], gallery=[_row(shown) for shown in self.shown],
            remark=_remark(self.shown), time=TIME, costs=_costs(self.timing, self.ops),
        )  # fmt: skip
        return text + "\n"


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
    """A caption, and the picture and each method's map of it."""
    maps = [(f"{method} {score:.2f}", jpeg) for method, (score, jpeg) in dispute.maps.items()]
    return dispute.caption, [("picture", dispute.picture), *maps]


def _remark(shown: Sequence[Shown]) -> str:
    judges = dict.fromkeys(dispute.judge for dispute in shown)
    return (
        "Red speaks for the explained class, blue against it. Under each map its score on this picture, from 0 to 1: "
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
