"""What is shown of a choice: tables, and one self-contained page. Its text and style are in templates/."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from classlens import files
from classlens.choice.contest import Contest, about, title
from classlens.choice.halves import Half
from classlens.choice.rank import Duel
from classlens.evaluate.metrics import Metric, mean
from classlens.evaluate.page import gallery, laid_out
from classlens.evaluate.registry import Config
from classlens.evaluate.stats import Estimate
from classlens.evaluate.tables import Table
from classlens.models.network import short_name
from classlens.render.html import pages

if TYPE_CHECKING:
    from classlens.choice.run import Chosen

_RANK = Metric("mean rank", -1, lambda rows: mean(np.zeros(len(rows))), scale=1)  # only names its column


def tables(data: str, ranks: Mapping[str, float], a: Half, b: Half, duels: Sequence[Duel]) -> tuple[Table, ...]:
    """Half A with the mean ranks, half B, and the paired differences on half B."""
    config, remark = Config("choose"), "In per cent, with 95 % intervals. " + " ".join(_remarks(a))
    first = {
        method: (*(found.estimate(method) for found in a.scores.values()), Estimate(rank, np.nan, np.nan, 0))
        for method, rank in ranks.items()
    }
    second = {m: tuple(found.estimate(m) for found in b.scores.values()) for m in ranks if m in b.methods}
    third = {f"{duel.method} − {duel.against}": tuple(duel.differences.values()) for duel in duels}
    columns_a, columns_b = (tuple(found.metric for found in half.scores.values()) for half in (a, b))
    plain = tuple(replace(column, better=0) for column in columns_b)  # a difference is not better than another one
    return (
        Table("Half A: all methods, ranked", remark, data, config, (*columns_a, _RANK), first),
        Table("Half B: the best two and the default", "Pictures that had no part in the ranking.", data, config,
              columns_b, second),
        Table("Half B: paired differences", "On the same pictures. A difference counts if its interval excludes 0.",
              data, config, plain, third, "difference"),
    )  # fmt: skip


def _remarks(half: Half) -> list[str]:
    return [f"{title(test)[0].upper()}{title(test)[1:]}: {about(test)}." for test in half.scores]


def write(made: Chosen, data: str, tried: Contest, out: Path) -> tuple[Path, ...]:
    """choice.html and choice.json."""
    choice = made.choice
    text = pages("choice", "evaluate").get_template("choice.html").render(
        model=short_name(choice.model.partition("@")[0]), data=data, choice=choice, tables=laid_out(made.tables),
        notes=made.notes, gallery=gallery(made.b.shown), shape=tried.shape,
        counts=[len(half.pictures) for half in (made.a, made.b)],
        facts={
            "model": choice.model, "SHA-256 of the weights": choice.weights, "seed": choice.proof["seed"],
            "versions": ", ".join(f"{name} {number}" for name, number in choice.proof["versions"].items()),
        },
    )  # fmt: skip
    page = files.write_text(out / "choice.html", text + "\n")
    return page, files.write_json(out / "choice.json", choice.to_json())
