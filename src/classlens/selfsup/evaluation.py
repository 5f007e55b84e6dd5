"""Whether maps are better with the neighbour: the two tables of the paper on self-supervised networks, and a third.

    >>> run(Settings("perturbation", data="data/val", bank="bank", modes=("difference", "none")), "runs/ssl").table

*Segmentation*: does the map lie on the object? *Perturbation*: does the network still predict its own class when the
pixels that matter least are gone? *Planted*: with a disc of another picture in the image, and the image as it was for
its neighbour, does the map lie on the disc, the one thing that differs? Scores, rows, intervals and tables are those of
`classlens.evaluate`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from classlens.data.layouts import Dataset, Item, data_hash, open_dataset
from classlens.data.masks import Mask
from classlens.errors import ClasslensError, DataError, ImageError, MethodError
from classlens.evaluate import metrics, perturbation, segmentation, tables
from classlens.evaluate.network import Network, images_per_forward
from classlens.evaluate.records import Row, Store, finished, same_pictures, where
from classlens.evaluate.run import versions
from classlens.evaluate.settings import Config
from classlens.evaluate.stats import Estimate, estimate, ratio
from classlens.evaluate.worker import framed_mask
from classlens.methods import check_options, resolve
from classlens.models import LoadedModel, load
from classlens.progress import Progress, silent
from classlens.selfsup.bank import METRICS, Bank, encoder_of
from classlens.selfsup.bank_files import BankError
from classlens.selfsup.contrast import MODES, PREDICTED, READINGS, Contrast, explain, open_bank
from classlens.selfsup.planted import place, plant
from classlens.selfsup.split import NO_HEAD, Encoder

PLANTED = "planted"
TESTS = ("perturbation", "segmentation", PLANTED)
EXPLAINED = ("contrast", PREDICTED)


@dataclass(frozen=True)
class Settings:
    """One command.

    >>> Settings("segmentation", data="data/pets", bank="bank", methods=("agf", "rap"), limit=100)
    """

    test: str
    data: str
    bank: str | None = None  # planted: needs none
    model: str = "efficientnet-lite0"
    weights: str | None = "default"
    device: str = "cpu"
    methods: tuple[str, ...] = ("agf", "rap")
    modes: tuple[str, ...] = MODES
    metric: str = "euclidean"
    reading: str = "literal"
    explain: str = "contrast"  # the likeliest class of the contrast; "predicted": of the image itself
    head: str | None = None
    split: str = "val"
    fill: str = "black"
    limit: int | None = None
    seed: int = 0
    batch_size: int = 4

    def __post_init__(self) -> None:
        for what, given, known in (
            ("test", (self.test,), TESTS),
            ("mode", self.modes, MODES),
            ("reading", (self.reading,), tuple(READINGS)),
            ("explain", (self.explain,), EXPLAINED),
            ("metric", (self.metric,), METRICS),
            ("fill", (self.fill,), perturbation.FILLS),
        ):
            unknown = [word for word in given if word not in known]
            if unknown:
                raise ClasslensError(f"{what} {unknown[0]!r} is not known; there are {', '.join(known)}")
        if (self.test == PLANTED) != (self.bank is None):
            raise BankError(
                "planted needs no bank: its neighbours are the pictures as they were"
                if self.bank
                else f"{self.test} needs a bank of neighbours; make one with `classlens selfsup bank`"
            )
        if not self.methods or not self.modes:
            raise MethodError("give at least one method and one mode")
        for text in self.methods:
            check_options(*resolve(text))

    @property
    def columns(self) -> dict[str, tuple[str, str]]:
        """What the rows of the table are called -> (method, mode)."""
        return {f"{method}, {mode}": (method, mode) for method in self.methods for mode in self.modes}

    def config(self, bank: str) -> Config:
        """What the rows depend on, beside the model, the method and the mode."""
        contrast = (("contrast", self.reading), ("metric", self.metric), ("bank", bank), ("head", self.head))
        if self.test != "perturbation":  # planted discs are masks like others
            own = (("reading", "object"), ("explain", self.explain))
            truth = ((PLANTED, True),) if self.test == PLANTED else ()
            return Config("segmentation", (*own, *truth, ("seed", self.seed), *contrast))
        removed = (("fill", self.fill), ("explain", self.explain), ("fractions", perturbation.FRACTIONS))
        return Config(self.test, (*removed, ("seed", self.seed), *contrast))


@dataclass(frozen=True)
class Outcome:
    """The table, what to know about it, and where it was written."""

    table: tables.Table
    paired: str  # Markdown: each mode less "none", picture by picture
    notes: tuple[str, ...]
    files: tuple[Path, ...]


@dataclass(frozen=True)
class _Setup:
    settings: Settings
    loaded: LoadedModel
    network: Network
    encoder: Encoder
    dataset: Dataset
    bank: Bank | None
    config: Config

    @property
    def planted(self) -> bool:
        return self.settings.test == PLANTED

    def key(self, column: str, test: str, image: str) -> Row:
        key = {"model": self.network.id, "method": column, "test": test, "data": self.dataset.name, "image": image}
        return key | {"config": self.config.hash}


@dataclass(frozen=True, eq=False)
class _Seen:
    """A picture as the network takes it, and what goes with it."""

    name: str
    image: Tensor  # (3,H,W)
    mask: Mask | None = None
    plain: Tensor | None = None  # as it was before something was planted into it


def run(
    settings: Settings,
    out: str | os.PathLike[str],
    progress: Progress = silent,
    command: Sequence[str] = (),
) -> Outcome:
    """Do what is not yet done, and write table.md and table.csv about all of it."""
    loaded = load(settings.model, settings.weights, settings.device)
    dataset = open_dataset(settings.data, settings.split)
    if settings.test == "segmentation" and not dataset.has_masks:
        raise DataError(f"segmentation needs masks, and {dataset.name} ({dataset.layout}) has none")
    if settings.head == NO_HEAD and settings.test == "perturbation":
        raise MethodError("a network without a head predicts no class, so its perturbation test has no score")
    if settings.test == PLANTED and len(dataset.items) < 2:
        raise DataError(f"{dataset.name} has one picture; planting takes a disc out of another")
    encoder = encoder_of(loaded, settings.head)
    bank = None if settings.bank is None else open_bank(settings.bank, loaded, encoder)
    config = settings.config(_bank_hash(bank) if bank else "")
    setup = _Setup(settings, loaded, Network(loaded), encoder, dataset, bank, config)
    items = dataset.select(settings.limit, settings.seed)
    store = Store(out)
    _measure(setup, items, store, progress)
    store.compact()
    about = {"command": list(command), "versions": versions(), "settings": asdict(settings), "config": config.to_json()}
    pictures = {"pictures": len(items), "hash": data_hash(dataset, items)}
    store.write_text(
        "manifest.json", json.dumps(about | {"model": setup.network.id, "data": pictures}, indent=2) + "\n"
    )
    return _report(setup, items, store)


def _bank_hash(bank: Bank) -> str:
    return hashlib.sha256(bank.rows["hash"].tobytes()).hexdigest()[:12]


# -------------------------------------------------------------------------------------------------------- measuring


def _measure(setup: _Setup, items: Sequence[Item], store: Store, progress: Progress) -> None:
    size, columns = setup.settings.batch_size, setup.settings.columns
    done = _done(setup, store)
    total = len(items) * len(columns)
    for start in range(0, len(items), size):
        batch = items[start : start + size]
        todo = {column: {item.name for item in batch} - done.get(column, set()) for column in columns}
        progress(setup.settings.test, start * len(columns), total)
        if any(todo.values()):
            for rows in _batch(setup, batch, todo):
                store.append(rows)
    progress(setup.settings.test, total, total)


def _done(setup: _Setup, store: Store) -> dict[str, set[str]]:
    """column of the table -> pictures that need no more work."""
    found: dict[str, set[str]] = {}
    for test in (setup.config.test, "skipped"):
        for (model, data, method, config), names in finished(store.read(test)).items():
            if (model, data, config) == (setup.network.id, setup.dataset.name, setup.config.hash):
                found.setdefault(method, set()).update(names)
    return found


def _batch(setup: _Setup, items: Sequence[Item], todo: dict[str, set[str]]) -> Any:
    """Rows of a batch, a method and a mode at a time; a picture that cannot be used says why."""
    read: list[_Seen] = []
    for item in items:
        try:
            read.append(_read(setup, item))
        except ImageError as error:
            why = setup.dataset.why(error)
            yield [_skipped(setup, column, item.name, why) for column, names in todo.items() if item.name in names]
    for column, names in todo.items():
        wanted = [seen for seen in read if seen.name in names]
        for part in [[seen] for seen in wanted] if setup.planted else [wanted]:  # planted: each has a bank of its own
            if part:
                yield _rows(setup, column, part)


def _rows(setup: _Setup, column: str, read: Sequence[_Seen]) -> list[Row]:
    try:
        contrast = _explain(setup, column, read)
    except ClasslensError as error:
        if isinstance(error, BankError) and not setup.planted:
            raise
        if len(read) == 1:
            return [_skipped(setup, column, read[0].name, str(error))]
        return [row for seen in read for row in _rows(setup, column, [seen])]  # one must not cost the others theirs
    score = _perturbed if setup.config.test == "perturbation" else _segmented
    values = score(setup, contrast, read)
    return [
        setup.key(column, setup.config.test, seen.name) | value for seen, value in zip(read, values, strict=True)
    ]  # fmt: skip


def _explain(setup: _Setup, column: str, read: Sequence[_Seen]) -> Contrast:
    s = setup.settings
    method, mode = s.columns[column]
    targets = PREDICTED if s.explain == PREDICTED and s.head != NO_HEAD else None
    plain = read[0].plain
    bank = setup.bank if plain is None else plain[None]
    assert bank is not None
    return explain(
        setup.loaded, torch.stack([seen.image for seen in read]), bank, method, mode,
        targets=targets, metric=s.metric, reading=s.reading, head=s.head, both=False,
    )  # fmt: skip


def _segmented(setup: _Setup, contrast: Contrast, read: Sequence[_Seen]) -> list[Row]:
    values = []
    for row, seen in enumerate(read):
        assert seen.mask is not None
        scores = segmentation.foreground_scores(contrast.maps[row, 0].cpu().numpy(), seen.mask, contrast.signed)
        values.append({"explained": int(contrast.targets[row, 0])} | asdict(scores))
    return values


def _perturbed(setup: _Setup, contrast: Contrast, read: Sequence[_Seen]) -> list[Row]:
    """Whatever class is explained, what counts is whether the network keeps the class that it predicts itself."""
    network, s = setup.network, setup.settings
    images = network.placed(torch.stack([seen.image for seen in read]))
    tape = network.record(images)
    predicted, clean = tape.logits.argmax(1).cpu(), tape.logits.detach().double().softmax(1).cpu()
    fill = perturbation.replacement(images, s.fill, network.preprocess)
    at_once = images_per_forward(tape, None, s.device)
    curves = perturbation.measure(
        lambda x: network.forward(x).cpu(), images, contrast.maps[:, 0], fill, predicted, at_once, s.seed
    )
    return [
        {
            "label": None,
            "predicted": int(predicted[row]),
            "explained": int(contrast.targets[row, 0]),
            "clean_probability": float(clean[row, predicted[row]]),
        }
        | {
            f"{direction}_{what}": steps[d, :, row].tolist()
            for d, direction in enumerate(perturbation.DIRECTIONS)
            for what, steps in (("predicted", curves.predicted), ("probability", curves.probability))
        }
        for row in range(len(images))
    ]


def _read(setup: _Setup, item: Item) -> _Seen:
    dataset, preprocess = setup.dataset, setup.network.preprocess
    picture = dataset.picture(item)
    image = preprocess(picture)
    if setup.settings.test == "perturbation":
        return _Seen(item.name, image)
    if not setup.planted:
        return _Seen(item.name, image, framed_mask(dataset, item, picture, preprocess))
    random = place(setup.settings.seed, item.name)
    others = [other for other in dataset.items if other.name != item.name]
    other = preprocess(dataset.picture(others[random.integers(len(others))]))
    planted, mask = plant(image, other, random)
    return _Seen(item.name, planted, mask, plain=image)


def _skipped(setup: _Setup, column: str, image: str, why: str) -> Row:
    return setup.key(column, "skipped", image) | {"reason": " ".join(why.split())[:300]}


# -------------------------------------------------------------------------------------------------------- reporting


_PLANTED_REMARK = (
    "A disc of another picture is planted into each; its neighbour is the picture as it was. The map against the disc, "
    "in per cent; a map that knows nothing has an AP of about 12.6 on square pictures, the disc's share."
)


def _report(setup: _Setup, items: Sequence[Item], store: Store) -> Outcome:
    s, names = setup.settings, [item.name for item in items]
    same = {"model": setup.network.id, "data": setup.dataset.name, "config": setup.config.hash, "image": names}
    rows = where(store.read(setup.config.test), **same)
    by_column = {column: where(rows, method=column) for column in s.columns}
    table = tables.build(setup.dataset.name, setup.config, by_column, s.seed)
    if setup.planted:
        table = replace(table, title="What was planted", remark=_PLANTED_REMARK)
    skipped = where(store.read("skipped"), **same).to_pylist()
    notes = tuple(dict.fromkeys(f"{row['image']}, {row['method']}: {row['reason']}" for row in skipped))
    paired = _paired(setup, by_column)
    name, _, fingerprint = setup.network.id.partition("@")
    of_bank = f"neighbours by {s.metric} distance among {len(setup.bank)} pictures" if setup.bank else "planted discs"
    about = (
        f"Model {name} ({fingerprint}), {of_bank}, reading {s.reading}, seed {s.seed}. In brackets: 95 % bootstrap "
        "intervals."
    )
    blocks = [about, tables.markdown([table]).rstrip(), paired]
    if notes:
        blocks.append("\n".join(["### Skipped", "", *(f"- {note}" for note in notes)]))
    files = (
        store.write_text("table.md", "\n\n".join(block for block in blocks if block) + "\n"),
        store.write_text("table.csv", tables.csv_text([table], setup.network.id)),
    )
    return Outcome(table, paired, notes, files)


def _paired(setup: _Setup, by_column: dict[str, pa.Table]) -> str:
    """Each mode less the same method without the neighbour, on the same pictures: a much finer comparison."""
    columns = setup.settings.columns
    lines = []
    for column, (method, mode) in columns.items():
        plain = f"{method}, none"
        if mode == "none" or plain not in columns:
            continue
        cells = [
            tables.cell(_difference(metric, by_column[column], by_column[plain], setup.settings.seed))
            for metric in metrics.metrics(setup.config)
            if _per_picture(metric, by_column[plain])
        ]
        lines.append(f"| {method}: {mode} less none | {' | '.join(cells)} |")
    if not lines:
        return ""
    heads = [metric.name for metric in metrics.metrics(setup.config) if _per_picture(metric, by_column[plain])]
    return "\n".join(
        [
            "### Picture by picture", "", "The mean of the differences on the same pictures.", "",
            f"| | {' | '.join(heads)} |", f"|{'---|' * (len(heads) + 1)}", *lines,
        ]
    )  # fmt: skip


def _per_picture(metric: metrics.Metric, rows: pa.Table) -> bool:
    """Whether a metric is a mean over pictures (or can be read so), and there is any value of it."""
    return metric.combine is ratio and len(rows) > 0 and bool(metric.columns(rows)[:, 1].any())


def _difference(metric: metrics.Metric, rows: pa.Table, plain: pa.Table, seed: int) -> Estimate:
    ours, theirs = (metric.columns(table) for table in same_pictures(rows, plain))
    there = (ours[:, 1] > 0) & (theirs[:, 1] > 0)
    values = ours[there, 0] / ours[there, 1] - theirs[there, 0] / theirs[there, 1]
    return metric.scaled(estimate(np.stack([values, np.ones(len(values))], 1), ratio, seed=seed))
