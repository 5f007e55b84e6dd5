"""The work of a run, cut into pieces that any worker can do, always in the same way.

A shard is a batch of pictures (or grids) with what is still missing for them. Its pictures depend on the data, the
limit, the seed and the batch size alone, never on what is already done: a batch computed again gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from classlens.data.layouts import Item
from classlens.evaluate.pointing import Grid, cells
from classlens.evaluate.settings import Config

Todo = dict[tuple[str, Config], frozenset[str]]  # (method, test) -> names that lack a row
Done = Mapping[tuple[str, str], set[str]]  # (method, config hash) -> names that have one

T = TypeVar("T")
PREDICTION = ""  # the "method" of rows that say what the network predicts


@dataclass(frozen=True)
class ImageShard:
    """A batch of pictures of one data set."""

    data: int
    items: tuple[Item, ...]
    tests: tuple[Config, ...]  # all that concern them, done or not: they decide which classes are explained
    todo: Todo

    @property
    def units(self) -> int:
        return sum(len(names) for names in self.todo.values())


@dataclass(frozen=True)
class GridShard:
    """A batch of grids of one shape, made from one data set."""

    data: int
    grids: tuple[Grid, ...]
    items: tuple[Item, ...]  # of the grids' cells, in their order
    test: Config
    todo: Todo

    @property
    def units(self) -> int:
        return sum(len(names) for names in self.todo.values())


Shard = ImageShard | GridShard


def image_shards(
    data: int,
    items: Sequence[Item],
    tests: Sequence[tuple[Config, int | None]],
    methods: Sequence[str],
    prediction: Config,
    done: Done,
    size: int,
) -> list[ImageShard]:
    """Batches of pictures; each test comes with how many pictures it wants at most (the first ones)."""
    positions = {item.name: position for position, item in enumerate(items)}
    shards = []
    for batch in _batches(items, size):
        wanted: dict[Config, list[str]] = {
            config: [item.name for item in batch if most is None or positions[item.name] < most]
            for config, most in tests
        }
        concerning = tuple(config for config, names in wanted.items() if names)
        asked = [(PREDICTION, prediction, [item.name for item in batch])]
        asked += [(method, config, wanted[config]) for method in methods for config in concerning]
        todo = _missing(asked, done)
        if todo:
            shards.append(ImageShard(data, batch, concerning, todo))
    return shards


def grid_shards(
    data: int,
    grids: Sequence[Grid],
    items: Mapping[str, Item],
    test: Config,
    methods: Sequence[str],
    done: Done,
    size: int,
) -> list[GridShard]:
    """Batches of grids, fewer at once the more cells (and so classes) each has."""
    rows, columns = cells(test["shape"])
    shards = []
    for batch in _batches(grids, max(1, size // (rows * columns))):
        names = [cell.image for grid in batch for cell in grid]
        todo = _missing([(method, test, names) for method in methods], done)
        if todo:
            shards.append(GridShard(data, batch, tuple(items[name] for name in names), test, todo))
    return shards


def _missing(asked: Iterable[tuple[str, Config, list[str]]], done: Done) -> Todo:
    broken = done.get((PREDICTION, ""), set())  # pictures that cannot be read lack nothing
    missing = {
        (method, config): frozenset(names) - done.get((method, config.hash), set()) - broken
        for method, config, names in asked
    }
    return {key: names for key, names in missing.items() if names}


def _batches(things: Sequence[T], size: int) -> Iterable[tuple[T, ...]]:
    return (tuple(things[start : start + size]) for start in range(0, len(things), size))
