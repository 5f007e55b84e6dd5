"""Measures whether the neighbour improves maps: the paper's two tables on self-supervised networks, and a third.

    >>> run(Settings("perturbation", data="data/val", bank="bank", modes=("difference", "none")), "runs/ssl").tables

The tests are those of `classlens.evaluate.TESTS` that suit such maps; runner, rows and intervals are the same too. This
module has the explainer, `Contrasts`, and the comparison with maps without a neighbour.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from classlens.errors import ClasslensError, MethodError
from classlens.evaluate import TESTS, runner, tables
from classlens.evaluate import Settings as Shared
from classlens.evaluate.metrics import Metric
from classlens.evaluate.plan import Plan
from classlens.evaluate.registry import OF_EXPLAINER
from classlens.evaluate.report import collect, skipped_rows
from classlens.evaluate.scene import Explained, Scene
from classlens.evaluate.stats import Estimate, estimate, ratio
from classlens.evaluate.store import Store, same_pictures
from classlens.evaluate.worker import Worker
from classlens.models import LoadedModel
from classlens.models.network import Network
from classlens.progress import Progress, silent
from classlens.selfsup.bank import METRICS, Bank, encoder_of
from classlens.selfsup.bank_files import BankError
from classlens.selfsup.contrast import MODES, PREDICTED, READINGS, Contrast, explain, open_bank
from classlens.selfsup.split import NO_HEAD

if TYPE_CHECKING:
    import pyarrow as pa

EXPLAINED = ("contrast", PREDICTED)
OFFERS = frozenset({"head", "neighbour"})


@dataclass(frozen=True)
class OpensContrasts:
    """How neighbours are found and used: the settings of `Contrasts`."""

    bank: str | None = None  # None: the test decides the neighbour
    modes: tuple[str, ...] = MODES
    metric: str = "euclidean"
    reading: str = "literal"
    explain: str = "contrast"  # the most likely class of the contrast; "predicted": of the image itself
    head: str | None = None

    @property
    def offers(self) -> frozenset[str]:
        return OFFERS - {"head"} if self.head == NO_HEAD else OFFERS

    def columns(self, methods: Sequence[str]) -> dict[str, tuple[str, str]]:
        """The names of the rows of a table -> (method, mode)."""
        return {f"{method}, {mode}": (method, mode) for method in methods for mode in self.modes}

    def __call__(self, network: Network, methods: tuple[str, ...], frame: str, seed: int) -> Contrasts:
        encoder = encoder_of(network.loaded, self.head)
        bank = None if self.bank is None else open_bank(self.bank, network.loaded, encoder)
        return Contrasts(self, network.loaded, bank, self.columns(methods), seed)


@dataclass(frozen=True)
class Contrasts:
    """Maps of what distinguishes an image from its neighbour: an explainer for `classlens.evaluate`."""

    how: OpensContrasts
    loaded: LoadedModel
    bank: Bank | None
    columns: Mapping[str, tuple[str, str]]
    seed: int
    fatal: tuple[type[Exception], ...] = (BankError,)

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(self.columns)

    @property
    def offers(self) -> frozenset[str]:
        return self.how.offers

    @property
    def values(self) -> Mapping[str, Any]:
        digest = "" if self.bank is None else hashlib.sha256(self.bank.rows["hash"].tobytes()).hexdigest()[:12]
        how = {"explain": self.how.explain, "contrast": self.how.reading, "metric": self.how.metric}
        return how | {"bank": digest, "head": self.how.head, "seed": self.seed}

    def explain(self, scene: Scene, method: str, seed: int, rows: slice = slice(None)) -> Explained:
        positions = range(len(scene.seen))[rows]
        if self.bank is not None:
            found = [self._contrast(scene, method, positions)]
        else:  # each image has its own neighbour
            found = [self._contrast(scene, method, [position]) for position in positions]
        maps, targets = (
            torch.cat(parts).detach().cpu() for parts in ([e.maps for e in found], [e.targets for e in found])
        )
        return Explained(method, maps, targets, {"predicted": 0}, found[0].signed)

    def _contrast(self, scene: Scene, column: str, positions: Sequence[int]) -> Contrast:
        method, mode = self.columns[column]
        targets = PREDICTED if self.how.explain == PREDICTED and self.how.head != NO_HEAD else None
        images = torch.stack([scene.seen[position].image for position in positions])
        plain = scene.seen[positions[0]].plain
        how = self.how
        options: dict[str, Any] = {"metric": how.metric, "reading": how.reading, "head": how.head, "both": False}
        if self.bank is not None:
            return explain(self.loaded, images, self.bank, method, mode, targets=targets, **options)
        assert plain is not None
        try:
            return explain(self.loaded, images, plain[None], method, mode, targets=targets, **options)
        except BankError as error:  # affects only this image
            raise ClasslensError(str(error)) from error


@dataclass(frozen=True)
class Settings:
    """One command.

    >>> Settings("segmentation", data="data/pets", bank="bank", methods=("agf", "rap"), limit=100)
    """

    test: str
    data: str
    bank: str | None = None  # None for a test that creates its neighbours
    model: str = "efficientnet-lite0"
    weights: str | None = "default"
    device: str = "cpu"
    methods: tuple[str, ...] = ("agf", "rap")
    modes: tuple[str, ...] = MODES
    metric: str = "euclidean"
    reading: str = "literal"
    explain: str = "contrast"  # the most likely class of the contrast; "predicted": of the image itself
    head: str | None = None
    options: tuple[Any, ...] = ()  # of the test, as `classlens.evaluate.options_of_tests` makes them
    split: str = "val"
    limit: int | None = None
    seed: int = 0
    batch_size: int = 4

    def __post_init__(self) -> None:
        for what, given, known in (
            ("test", (self.test,), tuple(name for name, test in TESTS.items() if test.serves(OFFERS))),
            ("mode", self.modes, MODES),
            ("reading", (self.reading,), tuple(READINGS)),
            ("explain", (self.explain,), EXPLAINED),
            ("metric", (self.metric,), METRICS),
        ):
            unknown = [word for word in given if word not in known]
            if unknown:
                raise ClasslensError(f"unknown {what} {unknown[0]!r}; choose from {', '.join(known)}")
        needs = TESTS[self.test].needs & OF_EXPLAINER
        if ("neighbour" in needs) != (self.bank is None):
            raise BankError(
                f"{self.test} needs no bank: its neighbours are the original images"
                if self.bank
                else f"{self.test} needs a bank of neighbours; make one with `classlens selfsup bank`"
            )
        if self.head == NO_HEAD and "head" in needs:
            raise MethodError(f"a network without a head predicts no class, so its {self.test} test has no score")
        if not self.methods or not self.modes:
            raise MethodError("give at least one method and one mode")
        self.shared()  # checks the other settings

    def shared(self) -> Shared:
        """The settings for the common runner."""
        how = OpensContrasts(self.bank, self.modes, self.metric, self.reading, self.explain, self.head)
        return Shared(
            tests=(self.test,), data=(self.data,), methods=self.methods, options=self.options, explainer=how,
            model=self.model, weights=self.weights, device=self.device, split=self.split, limit=self.limit,
            seed=self.seed, batch_size=self.batch_size,
        )  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """The tables, the notes about them, and the paths of the files."""

    tables: tuple[tables.Table, ...]
    paired: str  # Markdown: paired differences (mode − none) on the same images
    notes: tuple[str, ...]
    files: tuple[Path, ...]


def run(
    settings: Settings,
    out: str | os.PathLike[str],
    progress: Progress = silent,
    command: Sequence[str] = (),
) -> Outcome:
    """Compute the missing rows, and write table.md and table.csv for all rows."""
    return runner.run_and(_report, settings.shared(), out, progress=progress, command=command)


# -------------------------------------------------------------------------------------------------------- reporting


def _report(store: Store, plan: Plan, settings: Shared, worker: Worker) -> Outcome:
    how = settings.explainer
    assert isinstance(how, OpensContrasts)
    built, compared = [], []
    for part, config, rows in collect(store, plan):
        table = tables.build(part.dataset.name, config, rows, settings.seed)
        built.append(table)
        compared.append(_paired(how.columns(settings.methods), TESTS[config.test].metrics(config), rows, settings.seed))
    notes = _skipped(store, plan)
    paired = "\n\n".join(text for text in compared if text)
    blocks = [_about(worker, settings), tables.markdown(built).rstrip(), paired]
    if notes:
        blocks.append("\n".join(["### Skipped", "", *(f"- {tables.plain(note)}" for note in notes)]))
    files = (
        store.write_text("table.md", "\n\n".join(block for block in blocks if block) + "\n"),
        store.write_text("table.csv", tables.csv_text(built, plan.model)),
    )
    return Outcome(tuple(built), paired, notes, files)


def _about(worker: Worker, settings: Shared) -> str:
    contrasts = worker.explainer
    assert isinstance(contrasts, Contrasts)
    name, _, fingerprint = worker.network.id.partition("@")
    bank, how = contrasts.bank, contrasts.how
    of_bank = "planted discs" if bank is None else f"neighbours by {how.metric} distance among {len(bank)} images"
    return (
        f"Model {name} ({fingerprint}), {of_bank}, reading {how.reading}, seed {settings.seed}. In brackets: 95 % "
        "bootstrap intervals."
    )


def _skipped(store: Store, plan: Plan) -> tuple[str, ...]:
    rows = skipped_rows(store, plan)
    return tuple(", ".join(filter(None, (row["image"], row["method"]))) + f": {row['reason']}" for row in rows)


def _paired(
    columns: Mapping[str, tuple[str, str]], metrics: Sequence[Metric], rows: Mapping[str, pa.Table], seed: int
) -> str:
    """Paired differences (mode − none) for each method on the same images: much more precise than two intervals."""
    lines, heads = [], [""]
    for column, (method, mode) in columns.items():
        plain = f"{method}, none"
        if mode == "none" or plain not in columns:
            continue
        shown = [metric for metric in metrics if _per_picture(metric, rows[plain])]
        cells = [tables.cell(_difference(metric, rows[column], rows[plain], seed)) for metric in shown]
        lines.append(f"| {method}: {mode} − none | {' | '.join(cells)} |")
        heads = [metric.name for metric in shown]
    if not lines:
        return ""
    return "\n".join(
        [
            "### Paired differences", "", "The mean of the differences on the same images.", "",
            f"| | {' | '.join(heads)} |", f"|{'---|' * (len(heads) + 1)}", *lines,
        ]
    )  # fmt: skip


def _per_picture(metric: Metric, rows: pa.Table) -> bool:
    """Whether a metric is a mean over pictures (or can be read so), and there is any value of it."""
    return metric.combine is ratio and len(rows) > 0 and bool(metric.columns(rows)[:, 1].any())


def _difference(metric: Metric, rows: pa.Table, plain: pa.Table, seed: int) -> Estimate:
    ours, theirs = (metric.columns(table) for table in same_pictures(rows, plain))
    there = (ours[:, 1] > 0) & (theirs[:, 1] > 0)
    values = ours[there, 0] / ours[there, 1] - theirs[there, 0] / theirs[there, 1]
    return metric.scaled(estimate(np.stack([values, np.ones(len(values))], 1), ratio, seed=seed))
