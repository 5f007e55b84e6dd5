"""What is to be measured: the choices of one command, and the settings of each test with their fingerprint."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from classlens.errors import ClasslensError, MethodError
from classlens.evaluate import perturbation, pointing, sanity
from classlens.evaluate.records import config_hash
from classlens.methods import check_options, resolve

TESTS = ("perturbation", "segmentation", "pointing", "sanity")


class SettingsError(ClasslensError):
    """Choices that do not go together."""


@dataclass(frozen=True)
class Settings:
    """One command. Everything a worker needs to know, wherever it runs.

    >>> Settings(tests=("pointing",), data=("data/imagenet/val",), methods=("agf", "gradcam"), limit=200)
    """

    tests: tuple[str, ...]
    data: tuple[str, ...]
    methods: tuple[str, ...]
    everything: bool = False  # the test `all`: each data set serves the tests it was made for
    model: str = "efficientnet-lite0"
    weights: str | None = "default"
    device: str = "cpu"
    explain: str = "predicted"  # or "target": the labelled class
    fills: tuple[str, ...] = ("black",)
    threshold: float = 0.5  # of a multi-label classifier's probabilities
    shapes: tuple[str, ...] = pointing.SHAPES
    cells: str = "fit"  # a grid as large as one input; "full": each cell as large as one
    confidence: float = 0.5
    max_grids: int = 500  # of each shape
    sanity_images: int = 50
    frame: str = "model"  # the model's own crop; "whole": the whole picture squashed, as the paper does
    split: str = "val"
    limit: int | None = None
    half: str | None = None  # "A" or "B": only pictures of this half
    against: str | None = None  # a method: the others less this one, on the same pictures
    seed: int = 0
    batch_size: int | None = None
    memory_limit: float | None = None  # GB for the perturbed images of one forward
    threads: int | None = None

    def __post_init__(self) -> None:
        _one_of("test", self.tests, TESTS)
        _one_of("--explain", (self.explain,), ("predicted", "target"))
        _one_of("--fill", self.fills, perturbation.FILLS)
        _one_of("--cells", (self.cells,), ("fit", "full"))
        _one_of("--frame", (self.frame,), ("model", "whole"))
        for shape in self.shapes:
            if not re.fullmatch(r"[1-9]x[1-9]", shape) or shape == "1x1":
                raise SettingsError(f"a grid is written columns x rows, as 2x1 or 3x3, not {shape!r}")
        if not self.methods:
            raise MethodError("no method was given; `classlens methods` lists them")
        for text in self.methods:
            check_options(*resolve(text))
        _one_of("--half", (self.half,) if self.half else (), ("A", "B"))
        _one_of("--against", (self.against,) if self.against else (), self.methods)
        if self.limit is not None and self.limit < 1:
            raise SettingsError(f"--limit {self.limit} leaves nothing; give a whole number from 1")

    @property
    def images_at_once(self) -> int:
        """Images of a batch. On a CPU larger batches are slower: their tensors no longer fit into reused memory."""
        return self.batch_size or (4 if self.device == "cpu" else 32)


@dataclass(frozen=True)
class Config:
    """A test with the settings that its rows depend on."""

    test: str
    values: tuple[tuple[str, Any], ...] = field(default=())

    def __getitem__(self, name: str) -> Any:
        return dict(self.values)[name]

    @cached_property
    def hash(self) -> str:
        return config_hash(self.to_json())

    def to_json(self) -> dict[str, Any]:
        return {"test": self.test} | dict(self.values)


def configs(settings: Settings, test: str, multi_label: bool = False) -> tuple[Config, ...]:
    """The variants of a test that a command asks for: each fill, each shape of grid."""
    common = (("frame", settings.frame), ("seed", settings.seed))
    if test == "perturbation":
        return tuple(
            Config(
                test, (("fill", fill), ("explain", settings.explain), ("fractions", perturbation.FRACTIONS), *common)
            )
            for fill in settings.fills
        )
    if test == "segmentation":
        reading: tuple[tuple[str, Any], ...] = (("reading", "object"),)
        if multi_label:
            reading = (("reading", "multi-label"), ("threshold", settings.threshold))
        return (Config(test, (*reading, *common)),)
    if test == "pointing":
        return tuple(
            Config(test, (("shape", shape), ("cells", settings.cells), ("confidence", settings.confidence), *common))
            for shape in settings.shapes
        )
    if test == "sanity":
        return (Config(test, (("stages", sanity.STAGES), *common)),)
    return (Config(test, (("frame", settings.frame),)),)


def _one_of(name: str, values: tuple[str, ...], known: tuple[str, ...]) -> None:
    for value in values:
        if value not in known:
            raise SettingsError(f"{name} {value!r} is not known; there are {', '.join(known)}")
