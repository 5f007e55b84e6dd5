"""The settings of one evaluation command."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from classlens.errors import MethodError
from classlens.evaluate.registry import NEEDS, OF_EXPLAINER, TESTS, SettingsError, Test, Values, flag_of
from classlens.evaluate.scene import OpensExplainer, OpensPlain
from classlens.methods import check_options, resolve

PLAIN = OpensPlain()


@dataclass(frozen=True)
class Settings:
    """One command: everything that a worker needs to know, wherever it runs.

    >>> Settings(tests=("pointing",), data=("data/imagenet/val",), methods=("agf", "gradcam"), limit=200)

    The options of the tests are in `options`; `options_of_tests(max_grids=100)` creates them.
    """

    tests: tuple[str, ...]
    data: tuple[str, ...]
    methods: tuple[str, ...]
    everything: bool = False  # the test `all`: each test runs on the data sets that are meant for it
    options: tuple[Any, ...] = ()  # of the tests; missing ones have their defaults
    explainer: OpensExplainer = PLAIN
    model: str = "efficientnet-lite0"
    weights: str | None = "default"
    device: str = "cpu"
    frame: str = "model"  # the model's own crop; "whole": the whole image, squeezed, as in the paper
    split: str = "val"
    limit: int | None = None
    half: str | None = None  # "A" or "B": only images of this half
    against: str | None = None  # a method for paired differences (method − against) on the same images
    seed: int = 0
    batch_size: int | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        _one_of("test", self.tests, tuple(TESTS))
        _one_of("--frame", (self.frame,), ("model", "whole"))
        if not self.methods:
            raise MethodError("no method was given; `classlens methods` lists them")
        for text in self.methods:
            check_options(*resolve(text))
        _one_of("--half", (self.half,) if self.half else (), ("A", "B"))
        _one_of("--against", (self.against,) if self.against else (), self.methods)
        if self.limit is not None and self.limit < 1:
            raise SettingsError(f"--limit {self.limit} leaves nothing; give a positive integer")
        _check_data(self.tests, self.data)
        for name in self.tests:
            _check_offers(TESTS[name], self.explainer.offers)
            _check_choices(self.options_of(name))

    def options_of(self, test: str) -> Any:
        """The options of a test, as given or by default."""
        kind = TESTS[test].options
        return next((given for given in self.options if isinstance(given, kind)), None) or kind()

    @property
    def images_at_once(self) -> int:
        """Images per batch. On a CPU larger batches are slower: their tensors no longer fit into reused memory."""
        return self.batch_size or (4 if self.device == "cpu" else 32)

    def to_json(self) -> Values:
        """The settings for the manifest, including the options of the tests."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("options", "explainer")}
        for test in self.tests:
            own |= {f.name: getattr(self.options_of(test), f.name) for f in fields(TESTS[test].options)}
        return own


def options_of_tests(**values: Any) -> tuple[Any, ...]:
    """Options by name, for any of the tests.

    >>> options_of_tests(fill=("black", "blur"), max_grids=100)
    (Options(explain='predicted', fill=('black', 'blur'), memory_limit=None), Options(shapes=...))
    """
    made: list[Any] = []
    known: set[str] = set()
    for kind in dict.fromkeys(test.options for test in TESTS.values()):
        mine = {f.name: values[f.name] for f in fields(kind) if f.name in values}
        known |= mine.keys()
        made += [kind(**mine)] if mine else []
    for name in values:
        if name not in known:
            raise SettingsError(f"no test has an option {name!r}; `classlens evaluate --help` lists them")
    return tuple(made)


def _check_offers(test: Test, offers: frozenset[str]) -> None:
    for need in sorted(test.needs & OF_EXPLAINER - offers):
        raise SettingsError(f"{test.name} needs {NEEDS[need]}")


def _check_data(tests: tuple[str, ...], data: tuple[str, ...]) -> None:
    drawn = [name for name in tests if TESTS[name].own]
    if data and drawn == list(tests):
        raise SettingsError(f"{drawn[0]} draws its own pictures; leave out --data")
    if not data and len(drawn) < len(tests):
        raise SettingsError(f"{next(name for name in tests if name not in drawn)} needs pictures: give --data DIR")


def _check_choices(options: Any) -> None:
    for f in fields(options):
        value, choices = getattr(options, f.name), flag_of(f).choices
        if choices:
            _one_of(f"--{f.name.replace('_', '-')}", value if isinstance(value, tuple) else (value,), choices)


def _one_of(name: str, values: tuple[str, ...], known: tuple[str, ...]) -> None:
    for value in values:
        if value not in known:
            raise SettingsError(f"unknown {name} {value!r}; choose from {', '.join(known)}")
