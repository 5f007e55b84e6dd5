"""Plans a run: which test runs on which data set, and which rows are missing.

A shard is a batch of units with their missing rows; any worker can execute it. Its units depend only on the data, the
limit, the seed and the batch size, never on what is already done, so a recomputed batch gives the same bits.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from classlens.data.layouts import LAYOUTS, Dataset, Item
from classlens.errors import DataError
from classlens.evaluate.contents import Contents, content_of
from classlens.evaluate.registry import TESTS, Config, Prediction, Subject, Unit, every_picture
from classlens.evaluate.store import Row, Store, current, finished, schemas, where

if TYPE_CHECKING:
    from classlens.evaluate.settings import Settings
    from classlens.evaluate.worker import Worker

Todo = dict[tuple[str, Config], frozenset[str]]  # (method, test) -> images that lack a row
Done = Mapping[tuple[str, str], set[tuple[str, str]]]  # (method, config hash) -> images that have one, by content

T = TypeVar("T")
PREDICTION = ""  # the "method" of rows with the network's predictions


@dataclass(frozen=True)
class Shard:
    """A batch of units of one data set."""

    data: int
    units: tuple[Unit, ...]
    tests: tuple[Config, ...]  # all tests on these units, done or not: they determine the explained classes
    todo: Todo
    prediction: Config | None = None  # if the units are images whose predictions are stored

    @property
    def rows(self) -> int:
        """The number of missing rows."""
        return sum(len(names) for names in self.todo.values())

    @cached_property
    def contents(self) -> dict[str, str]:
        """The images of its rows, with their content."""
        return contents_of(self.units)

    def without(self, broken: Container[str]) -> Shard:
        """The same shard without work for the broken units."""
        gone = {name for unit in self.units if unit.name in broken for name in unit.rows}
        left = {key: names - gone for key, names in self.todo.items()}
        return replace(self, todo={key: names for key, names in left.items() if names})


@dataclass(frozen=True)
class Part:
    """A data set with its selected images and its tests."""

    index: int
    subject: Subject
    items: tuple[Item, ...]
    configs: tuple[Config, ...]
    contents: dict[str, str] = field(default_factory=dict)  # of each picture, by its name

    @property
    def dataset(self) -> Dataset:
        return self.subject.dataset

    def known(self, units: Iterable[Unit]) -> list[Unit]:
        """Units that say what they hold."""
        return [replace(unit, content=content_of(unit, self.contents)) for unit in units]

    @property
    def pictures(self) -> list[Unit]:
        """Each picture as a unit."""
        return self.known(every_picture(self.subject, self.items, Config(""), {}))


@dataclass(frozen=True)
class Plan:
    """All parts of a run, and remarks for the reader of its tables."""

    model: str  # its id in the rows
    methods: tuple[str, ...]  # their names in the rows
    parts: tuple[Part, ...]
    notes: tuple[str, ...]
    prediction: Config | None  # what the rows of predictions depend on; None: none are stored
    broken: tuple[Row, ...] = ()  # images that could not be read this time; every run tries them again


# ------------------------------------------------------------------------------------------------- who serves whom


def make_plan(settings: Settings, worker: Worker, contents: Contents | None = None) -> Plan:
    """Run each requested test on every data set; in `all` only on those that are meant for it."""
    parts, notes = [], []
    refused: dict[str, str] = {}
    contents = contents or Contents()
    labels_anywhere = any(subject.dataset.has_labels for subject in worker.subjects)
    for index, subject in enumerate(worker.subjects):
        dataset = subject.dataset
        tests = [t for t in settings.tests if not settings.everything or _suits(t, dataset, labels_anywhere)]
        if not tests:
            notes.append(f"{dataset.name} suits none of the tests and was not used.")
            continue
        items = dataset.select(settings.limit, settings.seed, settings.half)
        configs = []
        for test in tests:
            try:
                configs += _configs(settings, test, subject, worker)
            except DataError as error:  # a test that was named but cannot run on this network is refused
                if not settings.everything:
                    raise
                refused[test] = str(error)
        configs.sort(key=is_late)  # in order of execution
        notes += _notes(subject, items, configs)
        held = {item.name: contents.of(subject, item) for item in items}
        parts.append(Part(index, subject, items, tuple(configs), held))
    served = {config.test for part in parts for config in part.configs}
    notes += [
        f"{test} was skipped: {refused.get(test, 'no given data set suits it')}."
        for test in settings.tests
        if test not in served
    ]
    keeps = "classes" in worker.explainer.offers
    prediction = Config("prediction", (("frame", settings.frame),)) if keeps else None
    return Plan(worker.network.id, worker.explainer.methods, tuple(parts), tuple(notes), prediction)


def _configs(settings: Settings, test: str, subject: Subject, worker: Worker) -> list[Config]:
    """The tables of a test in a command."""
    options, chosen = settings.options_of(test), TESTS[test]
    return [
        Config(test, tuple({**values, **chosen.constants, **worker.explainer.values}.items()), options)
        for values in chosen.variants(options, subject)
    ]


def _notes(subject: Subject, items: Sequence[Item], configs: Sequence[Config]) -> list[str]:
    found = []
    for config in configs:
        if "masks" in config.needs and not subject.dataset.has_masks:
            layouts = ", ".join(name for name, layout in LAYOUTS.items() if layout.decode)
            raise DataError(
                f"{config.test} needs masks, and {subject.dataset.name} ({subject.dataset.layout}) has none; layouts "
                f"with: {layouts}"
            )
        found += TESTS[config.test].notes(subject, items, config)
    return list(dict.fromkeys(found))


def _suits(test: str, dataset: Dataset, labels_anywhere: bool) -> bool:
    """In `all`, tests that need masks use data sets with masks; the others use labelled images if there are any."""
    if TESTS[test].own:
        return False
    if "masks" in TESTS[test].needs:
        return dataset.has_masks
    return dataset.has_labels or not labels_anywhere


def is_late(config: Config) -> bool:
    """Whether a test has to wait until all images are classified."""
    return "predictions" in config.needs


# ---------------------------------------------------------------------------------------------- what is still missing


def units_of(part: Part, config: Config, plan: Plan, store: Store) -> list[Unit]:
    """The units of a test on a data set."""
    said = _predictions(part, plan, store) if is_late(config) else {}
    return part.known(TESTS[config.test].units(part.subject, part.items, config, said))


def wanted(part: Part, config: Config, plan: Plan, store: Store) -> dict[str, str]:
    """The rows that a test asks for: for each picture the content that they have to be computed from."""
    return contents_of(units_of(part, config, plan, store))


def contents_of(units: Iterable[Unit]) -> dict[str, str]:
    """The pictures that the rows of units are about -> their content."""
    return {name: unit.content for unit in units for name in unit.rows}


def work(plan: Plan, store: Store, size: int, late: bool) -> list[Shard]:
    """Shards with missing rows: first of tests that can start at once, then (`late`) of those that have to wait."""
    done = _done(store, plan.model)
    found: list[Shard] = []
    for part in plan.parts:
        mine = done.get(part.dataset.name, {})
        units = {config: units_of(part, config, plan, store) for config in part.configs if is_late(config) == late}
        shared = {config: chosen for config, chosen in units.items() if TESTS[config.test].shares}
        found += _on_pictures(part, shared, plan.methods, None if late else plan.prediction, mine, size)
        for config in units.keys() - shared.keys():
            found += _composed(part, config, units[config], plan.methods, mine, size)
    return found


def _on_pictures(
    part: Part, units: Mapping[Config, list[Unit]], methods: Sequence[str], prediction: Config | None, done: Done,
    size: int,
) -> list[Shard]:  # fmt: skip
    """Batches of images, each for all tests that use any of them: they share its forward pass and maps."""
    names = {config: {unit.name for unit in chosen} for config, chosen in units.items()}
    shards = []
    for batch in _batches(part.pictures, size):
        mine = {c: contents_of(unit for unit in batch if unit.name in chosen) for c, chosen in names.items()}
        concerning = tuple(config for config, pictures in mine.items() if pictures)
        asked = [(PREDICTION, prediction, contents_of(batch))] if prediction is not None else []
        asked += [(method, config, mine[config]) for method in methods for config in concerning]
        todo = _missing(asked, done)
        if todo:
            shards.append(Shard(part.index, batch, concerning, todo, prediction))
    return shards


def _composed(
    part: Part, config: Config, units: Sequence[Unit], methods: Sequence[str], done: Done, size: int
) -> list[Shard]:
    """Batches of units with composed inputs; the more images (and so classes) a unit has, the smaller the batches."""
    most = max((len(unit.items) for unit in units), default=1) or 1  # a unit may be drawn, without any image
    shards = []
    for batch in _batches(units, max(1, size // most)):
        todo = _missing([(method, config, contents_of(batch)) for method in methods], done)
        if todo:
            shards.append(Shard(part.index, batch, (config,), todo))
    return shards


def _missing(asked: Iterable[tuple[str, Config, dict[str, str]]], done: Done) -> Todo:
    """The missing rows. An unreadable image never has one: every run tries it again."""
    missing = {
        (method, config): frozenset(
            name
            for name, held in pictures.items()
            if not held or (name, held) not in done.get((method, config.hash), ())
        )
        for method, config, pictures in asked
    }
    return {key: names for key, names in missing.items() if names}


def _done(store: Store, model: str) -> dict[str, Done]:
    """data -> (method, config) -> names that need no more work: they have a row, or a reason why not."""
    found: dict[str, dict[tuple[str, str], set[tuple[str, str]]]] = {}
    for kind in schemas():
        for (owner, data, method, config), names in finished(store.read(kind)).items():
            if owner == model:
                found.setdefault(data, {}).setdefault((method, config), set()).update(names)
    return dict(found)


def _predictions(part: Part, plan: Plan, store: Store) -> dict[str, Prediction]:
    """The predictions for all classified images."""
    if plan.prediction is None:
        return {}
    rows = where(store.read("prediction"), model=plan.model, data=part.dataset.name, config=plan.prediction.hash)
    rows = current(rows, part.contents)
    columns = [rows[name].to_pylist() for name in ("image", "label", "predicted", "confidence")]
    return {image: Prediction(*said) for image, *said in zip(*columns, strict=True)}


def _batches(things: Sequence[T], size: int) -> Iterable[tuple[T, ...]]:
    return (tuple(things[start : start + size]) for start in range(0, len(things), size))
