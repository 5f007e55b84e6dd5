"""A batch in front of the network, and the maps that an explainer makes of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from classlens.core.capture import Tape
from classlens.core.targets import Targets
from classlens.evaluate.registry import TESTS, Config, Seen, Subject, Unit
from classlens.evaluate.stopwatch import Stopwatch
from classlens.explanation import run
from classlens.methods import resolve
from classlens.models.network import Network


@dataclass(frozen=True)
class Asked:
    """The classes of a scene that are explained."""

    targets: Tensor  # (B,K)
    columns: Mapping[str, int]  # name -> its place in K
    lists: Mapping[str, Sequence[Mapping[int, int]]]  # name -> for each image: class -> its place in K


@dataclass(frozen=True)
class Explained:
    """What an explainer made of a scene."""

    method: str  # as in the rows
    maps: Tensor  # (B,K,H,W) on the CPU
    targets: Tensor  # (B,K): the classes they are of
    columns: Mapping[str, int]
    signed: bool

    def of(self, name: str) -> Tensor:
        """(B,H,W): the maps of a class by its name, `predicted`."""
        return self.maps[:, self.columns[name]]

    def explained(self, name: str) -> list[int]:
        """For each image, which class that is."""
        found: list[int] = self.targets[:, self.columns[name]].tolist()
        return found


@dataclass(frozen=True, eq=False)
class Scene:
    """Units that can be read, as a batch. What a test scores stands here; the forward pass is recorded when asked for.

    Which classes are explained depends on the tests that were asked for and never on what is already done, so that
    maps computed again after an interruption are the same to the last bit.
    """

    subject: Subject
    tests: tuple[Config, ...]
    units: tuple[Unit, ...]
    seen: tuple[Seen, ...]
    watch: Stopwatch

    @property
    def network(self) -> Network:
        return self.subject.network

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(unit.name for unit in self.units)

    @property
    def rows(self) -> list[tuple[int, str]]:
        """(position of its unit, picture) of every row that a test gives for this scene."""
        return [(position, name) for position, unit in enumerate(self.units) for name in unit.rows]

    @cached_property
    def images(self) -> Tensor:
        """(B,3,H,W)."""
        return torch.stack([seen.image for seen in self.seen])

    @cached_property
    def tape(self) -> Tape:
        with self.watch("clean forward"):
            return self.network.record(self.images)

    @cached_property
    def predicted(self) -> Tensor:
        """(B,): the likeliest class of each."""
        return self.tape.logits.argmax(1).cpu()

    def forward(self, images: Tensor) -> Tensor:
        """Logits of other images, such as perturbed ones."""
        with self.watch("further forward"):
            return self.network.forward(images).cpu()

    @cached_property
    def asked(self) -> Asked:
        """The classes that any test wants: single ones first, then lists, padded with the likeliest class."""
        single: dict[str, Tensor] = {}
        lists: dict[str, list[list[int]]] = {}
        for config in sorted(self.tests, key=lambda config: list(TESTS).index(config.test)):
            for name, classes in TESTS[config.test].classes(self, config).items():
                if isinstance(classes, Tensor):
                    single.setdefault(name, classes)
                else:
                    lists.setdefault(name, classes)
        columns = list(single.values())
        places: dict[str, list[dict[int, int]]] = {}
        for name, rows in lists.items():
            start, width = len(columns), max(map(len, rows))
            places[name] = [{index: start + k for k, index in enumerate(row)} for row in rows]
            padded = [row + (width - len(row)) * [int(self.predicted[i])] for i, row in enumerate(rows)]
            columns += torch.tensor(padded, dtype=torch.int64).view(len(rows), width).unbind(1)
        return Asked(torch.stack(columns, 1), {name: k for k, name in enumerate(single)}, places)


class Explainer(Protocol):
    """Makes maps of scenes: `explain` with any method, or a contrast with neighbours."""

    @property
    def methods(self) -> tuple[str, ...]:
        """The names that its maps have in the rows."""

    @property
    def offers(self) -> frozenset[str]:
        """What tests may need of it: some of `registry.OF_EXPLAINER`."""

    @property
    def values(self) -> Mapping[str, Any]:
        """Settings of its own that rows depend on."""

    @property
    def fatal(self) -> tuple[type[Exception], ...]:
        """Errors that end a run; others are told of the picture that they concern."""

    def explain(self, scene: Scene, method: str, seed: int, rows: slice = slice(None)) -> Explained:
        """Maps of a scene, or of some of its images."""


class OpensExplainer(Protocol):
    """What settings hold of an explainer: it can be sent to another machine, and opened there."""

    @property
    def offers(self) -> frozenset[str]: ...

    def __call__(self, network: Network, methods: tuple[str, ...], frame: str, seed: int) -> Explainer: ...


@dataclass(frozen=True)
class Plain:
    """Maps by `explain`, of any class, from the one recorded forward pass of a scene."""

    network: Network
    methods: tuple[str, ...]
    values: Mapping[str, Any]
    offers: frozenset[str] = frozenset({"classes", "head"})
    fatal: tuple[type[Exception], ...] = ()

    def explain(self, scene: Scene, method: str, seed: int, rows: slice = slice(None)) -> Explained:
        asked = scene.asked
        tape = scene.tape if rows == slice(None) else scene.network.record(scene.images[rows])
        maps = maps_of(scene.network, tape, asked.targets[rows], method, seed)
        return Explained(method, maps, asked.targets[rows], asked.columns, resolve(method)[0].signed)


@dataclass(frozen=True)
class OpensPlain:
    """Opens `Plain`."""

    offers: frozenset[str] = Plain.offers

    def __call__(self, network: Network, methods: tuple[str, ...], frame: str, seed: int) -> Plain:
        return Plain(network, methods, {"frame": frame, "seed": seed})


def maps_of(
    network: Network, tape: Tape, targets: Targets, method: str, seed: int, module: nn.Module | None = None
) -> Tensor:
    """What `explain` gives, (B,K,H,W) on the CPU, from a recorded forward of the network or of an altered copy.

    The seed serves methods that draw, unless theirs is written: `random(seed=1)`.
    """
    chosen, written = resolve(method)
    options: dict[str, Any] = {"seed": seed} if "seed" in chosen.options and "seed" not in written else {}
    images = tape.image.tensor.detach()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        multilabel = network.loaded.multilabel
        _, result = run(
            module or network.module, images, targets, method, multilabel=multilabel, recorded=tape, **options
        )
        return result.maps.detach().cpu()


def number(*parts: object) -> int:
    """A number below 2**63 that belongs to these words: for seeds and stable choices."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


def seed_of(seed: int, method: str) -> int:
    """What decides everything that a method draws: the same for all images, so that a row depends on no other."""
    return number(seed, method)
