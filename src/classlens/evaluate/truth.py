"""Truth: the tests whose right answer is known, in one table; a few minutes on a small machine.

>>> report = prove(settings, "runs/truth")           # Settings of the tests with a `proof`
>>> report.tables[0].rows["agf"]

Tests that bring their own network run in a folder of their own; all others run on the model. Each one is an ordinary
run, with its tables, its curves and its report, and can be resumed.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from classlens import files
from classlens.data.images import open_image
from classlens.evaluate import tables
from classlens.evaluate.metrics import Metric, mean
from classlens.evaluate.registry import TESTS, Config
from classlens.evaluate.report import Report
from classlens.evaluate.runner import run
from classlens.evaluate.settings import Settings
from classlens.evaluate.tables import Table
from classlens.progress import Progress, silent

LIMIT = 16  # images, if no --limit is given
_PICTURE = Path(__file__).parent.parent / "assets" / "demo.jpg"
_WINDOW, _STEPS = 0.5, 4  # of the picture that ships with the package: windows of half its sides, 4x4 of them


def prove(
    settings: Settings,
    out: str | os.PathLike[str],
    cluster: str | None = None,
    progress: Progress = silent,
    command: Sequence[str] = (),
) -> Report:
    """Run the tests, and put the metrics of their proofs side by side."""
    settings = replace(settings, limit=settings.limit or LIMIT, against=None)
    reports = []
    for name, test in TESTS.items():
        if test.proof and test.own:
            own = replace(settings, tests=(name,), everything=False, data=(), model=test.own, weights="default")
            reports.append(run(own, Path(out) / name, cluster, progress, command))
    reports.append(run(settings, Path(out) / "model", cluster, progress, command))
    table = side_by_side([table for report in reports for table in report.tables], settings.methods)
    text = Path(out) / "truth.md"
    files.write_text(text, tables.markdown([table]))
    notes = dict.fromkeys(note for report in reports for note in report.notes)
    return Report(reports[-1].model, (table,), tuple(notes), (text, *(file for r in reports for file in r.files)))


def side_by_side(found: Sequence[Table], methods: Sequence[str]) -> Table:
    """One table of many: a row for each metric that the tests' proofs name, a column for each method."""
    chosen = [
        (table, i) for table in found for i, metric in enumerate(table.metrics)
        if metric.name in TESTS[table.config.test].proof
    ]  # fmt: skip
    rows = {
        f"{table.title}: {tables.headings(table)[i + 1]}": tuple(table.rows[method][i] for method in methods)
        for table, i in chosen
    }
    # The estimates are those of the tests: a column only names its method.
    columns = tuple(Metric(method, 0, lambda rows: mean(np.zeros(len(rows)))) for method in methods)
    remark = (
        "A row for each test whose right answer is known. ↑: higher is better. RUN/*/table.md has all columns. "
        "Asked for the class: a method that contrasts it with its rivals answers another question, and is judged by "
        "the logit. A method that ignores the picture repeats itself too."
    )
    return Table("Truth", remark, "all tests", Config("truth"), columns, rows, "test")


def shipped_pictures(out: str | os.PathLike[str]) -> str:
    """A folder with windows of the picture that ships with the package, for those who have no data at hand."""
    folder = Path(out) / "pictures"
    picture = open_image(_PICTURE)
    width, height = (round(_WINDOW * side) for side in picture.size)
    for row in range(_STEPS):
        for column in range(_STEPS):
            left, top = (k * (side - size) // (_STEPS - 1) for k, side, size in
                         ((column, picture.width, width), (row, picture.height, height)))  # fmt: skip
            file = folder / f"window-{row}-{column}.png"
            if not file.exists():
                content = io.BytesIO()
                picture.crop((left, top, left + width, top + height)).save(content, "PNG")
                files.write_bytes(file, content.getvalue())
    return str(folder)
