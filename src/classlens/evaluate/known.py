"""Networks whose weights are written down, pictures for them, and what each pixel contributes to each class, exactly.

>>> logits = build("plain")(draw(0).image[None])                # (1,7), one for each of CLASSES
>>> truth = draw(0).truth                                       # (7,64,64): the contributions of all pixels

A picture shows small objects on black: shapes of nine pixels in one of seven colours, and a white tag of four. Every
network of `BUILDS` computes the same function of it:

    colour     the number of red objects
    shape      the number of green pluses; other green shapes are ignored
    both       1 if a yellow and a cyan object are there, 0 if one is missing: relu(yellow + cyan - 1)
    any        1 if a blue object is there, and no more if two are: 1 - relu(1 - blue)
    against    red objects less magenta ones
    cancel     the number of yellow objects; blue ones are read twice, with weights 1 and -1, so that they do not count
    shortcut   the number of green objects, plus four for the white tag

The contribution of a pixel is its Shapley value when pixels are painted black. Here it needs no sampling: pixels that
the function cannot tell apart share their contribution equally, those that never change the logit get 0, and all of
them add up to the difference that the picture makes. `tests/evaluate/test_known.py` derives it from permutations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from classlens.models import LoadedModel, Preprocess

CLASSES = ("colour", "shape", "both", "any", "against", "cancel", "shortcut")
COLOURS = {
    "red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1), "yellow": (1, 1, 0), "cyan": (0, 1, 1),
    "magenta": (1, 0, 1), "white": (1, 1, 1),
}  # fmt: skip
SHAPES = {
    "plus": ("..#..", "..#..", "#####", "..#..", "..#.."),
    "square": (".....", ".###.", ".###.", ".###.", "....."),
    "ell": ("#....", "#....", "#....", "#....", "#####"),
    "tag": (".....", ".##..", ".##..", ".....", "....."),
}
PIXELS = 9  # of every shape but the tag
TAG = 4
SIDE, CELL, BOX = 64, 8, 5  # pixels of a picture, of the cells in which its objects lie, of a shape's box


# ------------------------------------------------------------------------------------------------------- the pictures


@dataclass(frozen=True)
class Thing:
    """An object of a picture."""

    colour: str
    shape: str
    top: int
    left: int

    @cached_property
    def mask(self) -> Tensor:
        """(64,64): its pixels."""
        found = torch.zeros(SIDE, SIDE, dtype=torch.bool)
        found[self.top : self.top + BOX, self.left : self.left + BOX] = template(self.shape)
        return found

    def amount(self, name: str) -> float:
        """What it contributes to the logit of a class."""
        plus = self.colour == "green" and self.shape == "plus"
        amounts = {
            "colour": {"red": 1.0},
            "shape": {"green": float(plus)},
            "both": {"yellow": 0.5, "cyan": 0.5},
            "any": {"blue": 0.5},
            "against": {"red": 1.0, "magenta": -1.0},
            "cancel": {"yellow": 1.0},
            "shortcut": {"green": 1.0, "white": float(TAG)},
        }
        return amounts[name].get(self.colour, 0.0)


@dataclass(frozen=True)
class Picture:
    """Objects on black."""

    things: tuple[Thing, ...]

    @cached_property
    def image(self) -> Tensor:
        """(3,64,64) in [0,1]."""
        image = torch.zeros(3, SIDE, SIDE)
        for thing in self.things:
            image[:, thing.mask] = torch.tensor(COLOURS[thing.colour], dtype=torch.float32)[:, None]
        return image

    def amounts(self, name: str) -> Tensor:
        """What each of its objects contributes to the logit of a class."""
        return torch.tensor([thing.amount(name) for thing in self.things], dtype=torch.float64)

    @cached_property
    def truth(self) -> Tensor:
        """(classes,64,64): what each pixel contributes."""
        found = torch.zeros(len(CLASSES), SIDE, SIDE, dtype=torch.float64)
        for k, name in enumerate(CLASSES):
            for thing, amount in zip(self.things, self.amounts(name), strict=True):
                found[k, thing.mask] = amount / thing.mask.sum()
        return found


def template(shape: str) -> Tensor:
    """(5,5): the pixels of a shape."""
    return torch.tensor([[mark == "#" for mark in row] for row in SHAPES[shape]])


def draw(seed: int) -> Picture:
    """A picture in which every class has evidence, and objects that it has to ignore."""
    random = np.random.default_rng(seed)
    any_shape = [name for name in SHAPES if name != "tag"]
    kinds = [("white", "tag"), *(("green", "plus"),) * int(random.integers(1, 3))]
    kinds += [("green", str(random.choice(["square", "ell"])))] * int(random.integers(1, 3))
    counts = {"red": int(random.integers(2, 4)), "blue": 2, "yellow": 1, "cyan": 1, "magenta": 1}
    kinds += [(colour, str(random.choice(any_shape))) for colour, count in counts.items() for _ in range(count)]
    cells = random.permutation((SIDE // CELL) ** 2)[: len(kinds)]
    moves = random.integers(1, 3, (len(kinds), 2))
    places = [
        (CELL * int(c // CELL) + int(y), CELL * int(c % CELL) + int(x)) for c, (y, x) in zip(cells, moves, strict=True)
    ]
    return Picture(tuple(Thing(*kind, *place) for kind, place in zip(kinds, places, strict=True)))


# ------------------------------------------------------------------------------------------------------- the networks


class Plain(nn.Module):
    """Colours, then shapes, then the mean over the picture, then a head of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.colours, self.shapes, self.head = colours(), shapes(), head()

    def features(self, x: Tensor) -> Tensor:
        """(B,9,h,w): seven colours, pluses, blue once more."""
        return torch.relu(self.shapes(torch.relu(self.colours(x))))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.features(x).mean((2, 3)))
        return found


class Residual(Plain):
    """The same with normalisation, and with a skip connection that carries half of each colour."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = normalisation(len(COLOURS)), normalisation(len(COLOURS) + 2)
        self.skip = nn.Conv2d(len(COLOURS), len(COLOURS) + 2, 1, bias=False)
        with torch.no_grad():
            self.skip.weight.zero_()
            for k in range(len(COLOURS)):
                self.skip.weight[k, k] = 0.5
                self.shapes.weight[k] *= 0.5

    def features(self, x: Tensor) -> Tensor:
        found = torch.relu(self.first(self.colours(x)))
        return torch.relu(self.second(self.shapes(found)) + self.skip(found))


class Deep(Plain):
    """The same with features eight times smaller than the picture, which go through two more layers."""

    def __init__(self) -> None:
        super().__init__()
        width = len(COLOURS) + 2
        self.pool = nn.AvgPool2d(CELL)
        layers = nn.Conv2d(width, width, 1, bias=False), nn.Conv2d(width, width, 1, bias=False)
        for layer in layers:
            nn.init.dirac_(layer.weight)  # each passes on what it gets
        self.after = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU())

    def features(self, x: Tensor) -> Tensor:
        found: Tensor = self.after(self.pool(super().features(x)))
        return found


BUILDS: dict[str, Callable[[], nn.Module]] = {"plain": Plain, "residual": Residual, "deep": Deep}


def build(name: str) -> nn.Module:
    """A network of `BUILDS`, ready to be explained."""
    return BUILDS[name]().eval()


def loaded(name: str = "plain") -> LoadedModel:
    """The same with its labels; `load("classlens.evaluate.known:loaded")` gives the plain one."""
    return LoadedModel(
        f"set by hand: {name}", build(name), Preprocess(SIDE, SIDE, mean=(0, 0, 0), std=(1, 1, 1)), CLASSES
    )


# ------------------------------------------------------------------------------------------------------- the weights


@torch.no_grad()
def colours() -> nn.Conv2d:
    """A channel for each colour: 1 where a pixel has it, at most 0 elsewhere. Magenta: red + blue - green - 1."""
    layer = nn.Conv2d(3, len(COLOURS), 1)
    wanted = torch.tensor(list(COLOURS.values()), dtype=torch.float32)
    layer.weight.copy_(2 * wanted[:, :, None, None] - 1)
    layer.bias = nn.Parameter(1 - wanted.sum(1))
    return layer


@torch.no_grad()
def shapes() -> nn.Conv2d:
    """Passes the colours on, and adds a channel that is 1 at the centre of a green plus, and blue once more."""
    names = list(COLOURS)
    layer = nn.Conv2d(len(names), len(names) + 2, BOX, padding=BOX // 2)
    layer.bias = nn.Parameter(torch.zeros(len(names) + 2))
    nn.init.dirac_(layer.weight)
    layer.weight[len(names), names.index("green")] = 2.0 * template("plus")
    layer.bias[len(names)] = 1 - 2 * PIXELS
    layer.weight[len(names) + 1, names.index("blue"), BOX // 2, BOX // 2] = 1
    return layer


@torch.no_grad()
def head() -> nn.Sequential:
    """From the mean of the features to the classes; the hidden units count objects."""
    names = [*COLOURS, "plus", "again"]
    hidden = [*names, "pair", "lack"]
    first, second = nn.Linear(len(names), len(hidden)), nn.Linear(len(hidden), len(CLASSES))
    for layer in (first, second):
        layer.weight.zero_()
        layer.bias.zero_()
    unit = torch.eye(len(names)) * SIDE**2 / PIXELS  # the mean over the picture -> the number of objects
    for name in names:
        first.weight[hidden.index(name)] = unit[names.index(name)] * (PIXELS if name in ("plus", "white") else 1)
    first.weight[hidden.index("pair")] = unit[names.index("yellow")] + unit[names.index("cyan")]
    first.bias[hidden.index("pair")] = -1
    first.weight[hidden.index("lack")] = -unit[names.index("blue")]
    first.bias[hidden.index("lack")] = 1
    counts = {
        "colour": {"red": 1}, "shape": {"plus": 1}, "both": {"pair": 1}, "any": {"lack": -1},
        "against": {"red": 1, "magenta": -1}, "cancel": {"yellow": 1, "blue": 1, "again": -1},
        "shortcut": {"green": 1, "white": 1},
    }  # fmt: skip
    for k, name in enumerate(CLASSES):
        for unit_name, weight in counts[name].items():
            second.weight[k, hidden.index(unit_name)] = weight
    second.bias[CLASSES.index("any")] = 1
    return nn.Sequential(first, nn.ReLU(), second)


def normalisation(channels: int) -> nn.BatchNorm2d:
    """A normalisation that changes nothing: (x - 0.3) / 2 * 2 + 0.3."""
    layer = nn.BatchNorm2d(channels, eps=0.0)
    for tensor, value in ((layer.running_mean, 0.3), (layer.running_var, 4.0), (layer.weight, 2.0), (layer.bias, 0.3)):
        nn.init.constant_(tensor, value)  # type: ignore[arg-type]
    return layer
