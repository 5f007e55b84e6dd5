"""TESTS: every evaluation by name. A test is one object, and all that the runner, command and report know of it.

    pictures -> units      what is worked on: a picture, a grid of them, a picture with something planted
    unit -> Seen           the image that goes into the network, with its mask
    Scene -> classes       which classes of it are explained
    Explained -> rows      the maps of a method for all of them, scored: one row of `columns` each
    rows -> metrics        the columns of a table; `title`, `remark` and `panels` show them

`register(Test(...))` at the end of a module of `classlens.evaluate.tests` is enough. What most tests have in common is
the default: a unit is a picture, the predicted class is explained, the fields of `options` are the settings.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor

from classlens.data.labels import class_outputs, label_index
from classlens.data.layouts import Dataset, Item
from classlens.data.masks import Mask
from classlens.errors import ClasslensError
from classlens.evaluate.panels import Panel, comparison
from classlens.files import text_hash

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    from classlens.evaluate.metrics import Metric
    from classlens.evaluate.scene import Explained, Scene
    from classlens.evaluate.tables import Table
    from classlens.models.network import Network

NEEDS = {
    "masks": "a data set with masks",
    "labels": "labels that the model knows",
    "predictions": "the predictions of all pictures, from which its units are made",
    "head": "a network that predicts a class",
    "classes": "maps of any class, also of an altered network",
    "neighbour": "maps that set a picture against its neighbour (classlens selfsup evaluate)",
}
"""What a test may need: the first two of the data, `predictions` of the runner, the others of the explainer."""
OF_EXPLAINER = frozenset({"head", "classes", "neighbour"})

Values = dict[str, Any]
Classes = Tensor | list[list[int]]  # one class for each image (B,), or a list of them of any length for each


class SettingsError(ClasslensError):
    """Choices that do not go together."""


# ----------------------------------------------------------------------------------------------------------- options


@dataclass(frozen=True)
class Flag:
    """What a field of a test's options says of itself: to the command, and about the rows."""

    help: str
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    least: float | None = None
    each: str = ""  # of a field with several values: each is a table of its own, and this is the setting's name there
    decides: bool = True  # False: how much is done, or how; the rows do not depend on it
    needs: str = ""  # the flag makes sense with explainers that offer this
    adds: tuple[tuple[str, str], ...] = ()  # (value, need): what the test needs when this is chosen


def option(default: Any, help: str, **more: Any) -> Any:  # noqa: A002 - as typer has it
    """A field of a test's options; `more` are those of `Flag`.

    >>> fill: tuple[str, ...] = option(("black",), "what removed pixels become", choices=FILLS, each="fill")
    """
    return field(default=default, metadata={"flag": Flag(help, **more)})


def flag_of(of: Field[Any]) -> Flag:
    """What a field says of itself."""
    found: Flag = of.metadata["flag"]
    return found


@dataclass(frozen=True)
class NoOptions:
    """For a test without any."""


# -------------------------------------------------------------------------------------------------------- what is run


def config_hash(config: Values) -> str:
    """A short name for a test's settings.

    >>> config_hash({"fill": "black"}) == config_hash({"fill": "black"})
    True
    """
    return text_hash(json.dumps(config, sort_keys=True), 12)


@dataclass(frozen=True)
class Config:
    """A test with the settings that its rows depend on: one table. `config["fill"]` is a setting."""

    test: str
    values: tuple[tuple[str, Any], ...] = ()
    options: Any = field(default=None, compare=False, repr=False)  # all of the test's, also those that decide nothing

    def __getitem__(self, name: str) -> Any:
        return dict(self.values)[name]

    @property
    def kind(self) -> str:
        """What its rows are called."""
        return TESTS[self.test].kind if self.test in TESTS else self.test

    @property
    def needs(self) -> frozenset[str]:
        return TESTS[self.test].needed(self.options)

    @cached_property
    def hash(self) -> str:
        return config_hash(self.to_json())

    def to_json(self) -> Values:
        return {"test": self.kind} | dict(self.values)


@dataclass(frozen=True)
class Unit:
    """What is worked on at once: most often one picture."""

    name: str
    items: tuple[Item, ...]  # what has to be read for it
    rows: tuple[str, ...]  # the pictures that its rows are about
    classes: tuple[int, ...] = ()  # to be explained, where planning decides that
    content: str = ""  # what its pictures hold, once that is known: rows are kept under it


@dataclass(frozen=True, eq=False)
class Seen:
    """A unit as the network sees it."""

    image: Tensor  # (3,H,W)
    mask: Mask | None = None
    label: int | None = None
    plain: Tensor | None = None  # the neighbour it is set against, where the test decides that


Read = Callable[[Item], Seen]  # may raise ImageError


@dataclass(frozen=True)
class Prediction:
    """What the network says of a picture."""

    label: int | None
    predicted: int
    confidence: float


@dataclass(frozen=True)
class Subject:
    """Whom a test is about: a network and a data set, and what the explainer offers."""

    network: Network
    dataset: Dataset
    offers: frozenset[str]

    def label(self, item: Item) -> int | None:
        """The output of the network that a picture's label means."""
        if "classes" not in self.offers:
            return None
        return label_index(item.label, self.network.labels, self.network.classes)

    @cached_property
    def outputs(self) -> tuple[int, ...] | None:
        """For each class of the masks its output, if the network knows them all; else None."""
        if "classes" not in self.offers:
            return None
        return class_outputs(self.dataset.classes, self.network.labels, self.network.classes)


# ------------------------------------------------------------------------------------------------------------ a test


def variants_of_fields(options: Any, subject: Subject) -> list[Values]:
    """The settings of each table: the fields of the options, those with `each` one value at a time."""
    flags = {f.name: flag_of(f) for f in fields(options)}
    several = [name for name, flag in flags.items() if flag.each]
    one = {name: getattr(options, name) for name, flag in flags.items() if flag.decides and not flag.each}
    return [
        {flags[name].each: value for name, value in zip(several, chosen, strict=True)} | one
        for chosen in itertools.product(*(getattr(options, name) for name in several))
    ]


def every_picture(
    subject: Subject, items: Sequence[Item], config: Config, predictions: Mapping[str, Prediction]
) -> list[Unit]:
    """Each picture is a unit, with one row."""
    return [Unit(item.name, (item,), (item.name,)) for item in items]


def predicted_class(scene: Scene, config: Config) -> Mapping[str, Classes]:
    """The likeliest class of each image."""
    return {"predicted": scene.predicted}


def metrics_side_by_side(table: Table, rows: Mapping[str, pa.Table]) -> list[Panel]:
    """One panel with the table's metrics."""
    return [comparison(table)]


@dataclass(frozen=True)
class Test:
    """An evaluation. What follows `remark` has a default that suits most."""

    __test__ = False  # not one of pytest's

    name: str
    question: str  # what it asks of a map, in one line
    columns: Mapping[str, str]  # of its rows: int32, int64, float64, string, or list<...> of one of these
    metrics: Callable[[Config], tuple[Metric, ...]]
    title: Callable[[Config], str]
    remark: Callable[[Config], str]  # how to read the table

    score: Callable[[Scene, Config, Explained], list[Values]] | None = None
    """One method's maps of a scene -> the values of a row for each of `scene.rows`. Or, instead,"""
    score_together: Callable[[Scene, Config, Mapping[str, Explained]], Iterator[tuple[str, list[Values]]]] | None = None
    """all methods' at once, where they share what is expensive; gives (method, values) one by one."""

    options: type[Any] = NoOptions
    needs: frozenset[str] = frozenset()
    variants: Callable[[Any, Subject], list[Values]] = variants_of_fields
    constants: Mapping[str, Any] = field(default_factory=dict)  # settings that cannot be chosen, but decide
    units: Callable[[Subject, Sequence[Item], Config, Mapping[str, Prediction]], list[Unit]] = every_picture
    compose: Callable[[Subject, Unit, Config, Read], Seen] | None = None
    """Makes the image of a unit. None: it is the picture."""
    alone: bool = False
    """Has batches of its own. Tests on pictures share forward pass and maps, which depend on all classes asked for."""
    classes: Callable[[Scene, Config], Mapping[str, Classes]] = predicted_class
    """By name: the same name is the same class for all tests. `Explained.of(name)` gives its maps."""
    notes: Callable[[Subject, Sequence[Item], Config], list[str]] = lambda subject, items, config: []
    """Remarks for the reader; may raise a ClasslensError."""
    nothing: Callable[[Config, str], str] | None = None  # (config, data set) -> what to do when there is no row
    panels: Callable[[Table, Mapping[str, pa.Table]], list[Panel]] = metrics_side_by_side
    group: str | None = None  # the column that says which rows belong together, and are drawn together
    picture_score: Callable[[pa.Table], NDArray[Any]] | None = None
    """One number in [0,1] for each row, to find pictures on which methods disagree; the rows need `explained`, a class
    or a list of classes, whose maps are drawn."""
    picture_score_name: str = ""
    rows_as: str = ""  # the test whose kind of rows these are
    place: int = 100  # in lists and tables

    @property
    def kind(self) -> str:
        """What its rows are called."""
        return self.rows_as or self.name

    @property
    def shares(self) -> bool:
        """Whether one batch of pictures serves it and other tests."""
        return self.compose is None and not self.alone

    def needed(self, options: Any) -> frozenset[str]:
        """All that it needs with these options."""
        more = {need for f in fields(options or NoOptions()) for value, need in flag_of(f).adds
                if getattr(options, f.name) == value}  # fmt: skip
        return self.needs | more

    def serves(self, offers: frozenset[str]) -> bool:
        """Whether an explainer offers what the test needs of it."""
        return self.needs & OF_EXPLAINER <= offers


TESTS: dict[str, Test] = {}


def register(test: Test) -> Test:
    """Put a test into TESTS, at its place."""
    if (test.score is None) == (test.score_together is None):
        raise TypeError(f"{test.name}: give score or score_together")
    unknown = test.needs - NEEDS.keys()
    if unknown:
        raise TypeError(f"{test.name} needs {', '.join(unknown)}; known are {', '.join(NEEDS)}")
    for f in fields(test.options):
        if "flag" not in f.metadata or f.default is MISSING:
            raise TypeError(f"{test.name}: declare {f.name} with option(default, help)")
    everything = {**TESTS, test.name: test}
    TESTS.clear()
    TESTS.update(sorted(everything.items(), key=lambda entry: (entry[1].place, entry[0])))
    return test
