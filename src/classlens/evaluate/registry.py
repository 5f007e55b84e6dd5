"""TESTS: every evaluation by name. A test is one object; the runner, the command and the report know nothing else.

    images -> units        units of work: an image, a grid of images, an image with something planted
    unit -> Seen           the input of the network, with its mask
    Scene -> classes       the classes to explain
    Explained -> rows      the scores of one method's maps: one row of `columns` each
    rows -> metrics        the columns of a table; `title`, `remark` and `panels` present them

`register(Test(...))` at the end of a module of `classlens.evaluate.tests` is enough. The defaults suit most tests: a
unit is an image, the predicted class is explained, the fields of `options` are the settings.
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
    "labels": "labels that are classes of the model",
    "predictions": "the predictions for all images, from which its units are made",
    "head": "a network that predicts a class",
    "classes": "maps of any class, also of an altered network",
    "neighbour": "maps that contrast an image with its neighbour (classlens selfsup evaluate)",
}
"""What a test may need: the first two from the data, `predictions` from the runner, the others from the explainer."""
OF_EXPLAINER = frozenset({"head", "classes", "neighbour"})

Values = dict[str, Any]
Classes = Tensor | list[list[int]]  # one class for each image (B,), or a list of them of any length for each


class SettingsError(ClasslensError):
    """Settings that cannot be combined."""


# ----------------------------------------------------------------------------------------------------------- options


@dataclass(frozen=True)
class Flag:
    """The metadata of a field of a test's options: for the command, and for the rows."""

    help: str
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    least: float | None = None
    each: str = ""  # for a field with several values: each value gets its own table, with this setting name
    decides: bool = True  # False: the rows do not depend on it
    needs: str = ""  # the flag applies only to explainers that offer this
    adds: tuple[tuple[str, str], ...] = ()  # (value, need): what the test needs for this value


def option(default: Any, help: str, **more: Any) -> Any:  # noqa: A002 - as typer has it
    """A field of a test's options; `more` are those of `Flag`.

    >>> fill: tuple[str, ...] = option(("black",), "what removed pixels become", choices=FILLS, each="fill")
    """
    return field(default=default, metadata={"flag": Flag(help, **more)})


def flag_of(of: Field[Any]) -> Flag:
    """The metadata of a field."""
    found: Flag = of.metadata["flag"]
    return found


@dataclass(frozen=True)
class NoOptions:
    """For a test without options."""


# -------------------------------------------------------------------------------------------------------- what is run


def config_hash(config: Values) -> str:
    """A short identifier of a test's settings.

    >>> config_hash({"fill": "black"}) == config_hash({"fill": "black"})
    True
    """
    return text_hash(json.dumps(config, sort_keys=True), 12)


@dataclass(frozen=True)
class Config:
    """A test with the settings that its rows depend on: one table. `config["fill"]` is a setting."""

    test: str
    values: tuple[tuple[str, Any], ...] = ()
    options: Any = field(
        default=None, compare=False, repr=False
    )  # all options of the test, including those that do not affect rows

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
    """A unit of work: usually one image."""

    name: str
    items: tuple[Item, ...]  # the images to read
    rows: tuple[str, ...]  # the names of its rows
    classes: tuple[int, ...] = ()  # the classes to explain, if planning decides them
    content: str = ""  # a hash of its images, once known; rows are stored with it


@dataclass(frozen=True, eq=False)
class Seen:
    """A unit as the network sees it."""

    image: Tensor  # (3,H,W)
    mask: Mask | None = None
    label: int | None = None
    plain: Tensor | None = None  # the neighbour, if the test decides it


Read = Callable[[Item], Seen]  # may raise ImageError


@dataclass(frozen=True)
class Prediction:
    """The network's prediction for an image."""

    label: int | None
    predicted: int
    confidence: float


@dataclass(frozen=True)
class Subject:
    """The subject of a test: a network and a data set, and what the explainer offers."""

    network: Network
    dataset: Dataset
    offers: frozenset[str]

    def label(self, item: Item) -> int | None:
        """The output of the network for the label of an image."""
        if "classes" not in self.offers:
            return None
        return label_index(item.label, self.network.labels, self.network.classes)

    @cached_property
    def outputs(self) -> tuple[int, ...] | None:
        """The output for each class of the masks, if the network has them all; otherwise None."""
        if "classes" not in self.offers:
            return None
        return class_outputs(self.dataset.classes, self.network.labels, self.network.classes)


# ------------------------------------------------------------------------------------------------------------ a test


def variants_of_fields(options: Any, subject: Subject) -> list[Values]:
    """The settings of each table: the fields of the options; fields with `each` give one table per value."""
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
    """Each image is a unit, with one row."""
    return [Unit(item.name, (item,), (item.name,)) for item in items]


def predicted_class(scene: Scene, config: Config) -> Mapping[str, Classes]:
    """The most likely class of each image."""
    return {"predicted": scene.predicted}


def metrics_side_by_side(table: Table, rows: Mapping[str, pa.Table]) -> list[Panel]:
    """One panel with the table's metrics."""
    return [comparison(table)]


@dataclass(frozen=True)
class Test:
    """An evaluation. The fields after `remark` have defaults that suit most tests."""

    __test__ = False  # not a pytest test

    name: str
    question: str  # the question about a map, in one line
    columns: Mapping[str, str]  # of its rows: int32, int64, float64, string, or list<...> of one of these
    metrics: Callable[[Config], tuple[Metric, ...]]
    title: Callable[[Config], str]
    remark: Callable[[Config], str]  # how to read the table

    score: Callable[[Scene, Config, Explained], list[Values]] | None = None
    """One method's maps of a scene -> the values of a row for each of `scene.rows`. Alternatively,"""
    score_together: Callable[[Scene, Config, Mapping[str, Explained]], Iterator[tuple[str, list[Values]]]] | None = None
    """score all methods together if they share expensive work; yields (method, values) one by one."""

    options: type[Any] = NoOptions
    needs: frozenset[str] = frozenset()
    variants: Callable[[Any, Subject], list[Values]] = variants_of_fields
    constants: Mapping[str, Any] = field(default_factory=dict)  # fixed settings that affect rows
    units: Callable[[Subject, Sequence[Item], Config, Mapping[str, Prediction]], list[Unit]] = every_picture
    compose: Callable[[Subject, Unit, Config, Read], Seen] | None = None
    """Composes the input of a unit. None: it is the image."""
    network: Callable[[Subject, Config], Network] | None = None
    """The network to explain, if it is not the model itself: one that is built from it, or one set by hand."""
    own: str = ""
    """The name of the model of a test that brings its own network and draws its own pictures: no --model, no --data."""
    alone: bool = False
    """Whether it needs separate batches. Tests on images share the forward pass and the maps of all classes."""
    classes: Callable[[Scene, Config], Mapping[str, Classes]] = predicted_class
    """Classes by name: the same name means the same class for all tests. `Explained.of(name)` returns its maps."""
    notes: Callable[[Subject, Sequence[Item], Config], list[str]] = lambda subject, items, config: []
    """Remarks for the reader; may raise a ClasslensError."""
    nothing: Callable[[Config, str], str] | None = None  # (config, data set) -> advice if there are no rows
    panels: Callable[[Table, Mapping[str, pa.Table]], list[Panel]] = metrics_side_by_side
    group: str | None = None  # the column that groups rows, which are resampled together
    picture_score: Callable[[pa.Table], NDArray[Any]] | None = None
    """One number in [0,1] for each row, to find images on which methods disagree; the rows need `explained`, a class
    or a list of classes, whose maps are drawn."""
    picture_score_name: str = ""
    chooses: str = ""
    """Its name in `classlens choose`, which ranks methods by `picture_score`; none: it has no part in that."""
    proof: tuple[str, ...] = ()
    """The metrics that the quick proof `classlens evaluate truth` shows; none: it is not part of it."""
    rows_as: str = ""  # another test with the same kind of rows
    place: int = 100  # in lists and tables

    @property
    def kind(self) -> str:
        """What its rows are called."""
        return self.rows_as or self.name

    @property
    def shares(self) -> bool:
        """Whether it shares batches of images with other tests."""
        return self.compose is None and self.network is None and not self.alone

    def needed(self, options: Any) -> frozenset[str]:
        """Everything that it needs with these options."""
        more = {need for f in fields(options or NoOptions()) for value, need in flag_of(f).adds
                if getattr(options, f.name) == value}  # fmt: skip
        return self.needs | more

    def serves(self, offers: frozenset[str]) -> bool:
        """Whether an explainer offers what the test needs from it."""
        return self.needs & OF_EXPLAINER <= offers


TESTS: dict[str, Test] = {}


def register(test: Test) -> Test:
    """Add a test to TESTS, at its position."""
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
