"""Which data set serves which test, and what is still to be done.

A shard is a batch of units with what is still missing for them: any worker can do it. Its units depend on the data, the
limit, the seed and the batch size alone, never on what is already done: a batch computed again gives the same bits.
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

Todo = dict[tuple[str, Config], frozenset[str]]  # (method, test) -> pictures that lack a row
Done = Mapping[tuple[str, str], set[tuple[str, str]]]  # (method, config hash) -> pictures that have one, by content

T = TypeVar("T")
PREDICTION = ""  # the "method" of rows that say what the network predicts


@dataclass(frozen=True)
class Shard:
    """A batch of units of one data set."""

    data: int
    units: tuple[Unit, ...]
    tests: tuple[Config, ...]  # all that concern them, done or not: they decide which classes are explained
    todo: Todo
    prediction: Config | None = None  # where the units are pictures whose predictions are kept

    @property
    def rows(self) -> int:
        """How many are missing."""
        return sum(len(names) for names in self.todo.values())

    @cached_property
    def contents(self) -> dict[str, str]:
        """The pictures that its rows are about, with their content."""
        return contents_of(self.units)

    def without(self, broken: Container[str]) -> Shard:
        """The same with nothing to be done for some of its units."""
        gone = {name for unit in self.units if unit.name in broken for name in unit.rows}
        left = {key: names - gone for key, names in self.todo.items()}
        return replace(self, todo={key: names for key, names in left.items() if names})


@dataclass(frozen=True)
class Part:
    """A data set with the pictures chosen from it and the tests it serves."""

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
    methods: tuple[str, ...]  # as the rows call them
    parts: tuple[Part, ...]
    notes: tuple[str, ...]
    prediction: Config | None  # what the rows of predictions depend on; None: none are kept
    broken: tuple[Row, ...] = ()  # pictures that could not be read this time; every run tries them again


# ------------------------------------------------------------------------------------------------- who serves whom


def make_plan(settings: Settings, worker: Worker, contents: Contents | None = None) -> Plan:
    """Every data set serves the tests asked for; in `all` only those it was made for."""
    parts, notes = [], []
    refused: dict[str, str] = {}
    contents = contents or Contents()
    labels_anywhere = any(subject.dataset.has_labels for subject in worker.subjects)
    for index, subject in enumerate(worker.subjects):
        dataset = subject.dataset
        tests = [t for t in settings.tests if not settings.everything or _suits(t, dataset, labels_anywhere)]
        if not tests:
            notes.append(f"{dataset.name} serves none of the tests and was not used.")
            continue
        items = dataset.select(settings.limit, settings.seed, settings.half)
        configs = []
        for test in tests:
            try:
                configs += _configs(settings, test, subject, worker)
            except DataError as error:  # asked for by its name, a test that cannot serve this network is refused
                if not settings.everything:
                    raise
                refused[test] = str(error)
        configs.sort(key=is_late)  # as they are done
        notes += _notes(subject, items, configs)
        held = {item.name: contents.of(subject, item) for item in items}
        parts.append(Part(index, subject, items, tuple(configs), held))
    served = {config.test for part in parts for config in part.configs}
    notes += [
        f"{test} was left out: {refused.get(test, 'no data set given serves it')}."
        for test in settings.tests
        if test not in served
    ]
    keeps = "classes" in worker.explainer.offers
    prediction = Config("prediction", (("frame", settings.frame),)) if keeps else None
    return Plan(worker.network.id, worker.explainer.methods, tuple(parts), tuple(notes), prediction)


def _configs(settings: Settings, test: str, subject: Subject, worker: Worker) -> list[Config]:
    """The tables of a test that a command asks for."""
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
    """In `all`, masks are for tests that need them, and labelled pictures, where there are any, for the rest."""
    if "masks" in TESTS[test].needs:
        return dataset.has_masks
    return dataset.has_labels or not labels_anywhere


def is_late(config: Config) -> bool:
    """Whether a test has to wait until all pictures are classified."""
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
    """Shards with what is missing: first of all tests that can begin at once, then (`late`) of those that wait."""
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
    """Batches of pictures, each for all tests that want any of them: they share its forward pass and maps."""
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
    """Batches of units with images of their own, fewer at once the more pictures (and so classes) each has."""
    most = max((len(unit.items) for unit in units), default=1)
    shards = []
    for batch in _batches(units, max(1, size // most)):
        todo = _missing([(method, config, contents_of(batch)) for method in methods], done)
        if todo:
            shards.append(Shard(part.index, batch, (config,), todo))
    return shards


def _missing(asked: Iterable[tuple[str, Config, dict[str, str]]], done: Done) -> Todo:
    """What has no row. A picture that cannot be read never has one: every run tries it again."""
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
    """data -> (method, config) -> names that need no more work: they have a row, or a reason for having none."""
    found: dict[str, dict[tuple[str, str], set[tuple[str, str]]]] = {}
    for kind in schemas():
        for (owner, data, method, config), names in finished(store.read(kind)).items():
            if owner == model:
                found.setdefault(data, {}).setdefault((method, config), set()).update(names)
    return dict(found)


def _predictions(part: Part, plan: Plan, store: Store) -> dict[str, Prediction]:
    """What the network says of every picture that it has classified."""
    if plan.prediction is None:
        return {}
    rows = where(store.read("prediction"), model=plan.model, data=part.dataset.name, config=plan.prediction.hash)
    rows = current(rows, part.contents)
    columns = [rows[name].to_pylist() for name in ("image", "label", "predicted", "confidence")]
    return {image: Prediction(*said) for image, *said in zip(*columns, strict=True)}


def _batches(things: Sequence[T], size: int) -> Iterable[tuple[T, ...]]:
    return (tuple(things[start : start + size]) for start in range(0, len(things), size))
