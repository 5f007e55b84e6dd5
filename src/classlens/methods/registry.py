"""METHODS: every explanation method by name, with what a user wants to know about it.

>>> chosen, options = resolve("agf-release(without=A)")
>>> chosen.name, options
('agf-release', {'without': 'A'})
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from classlens.core.capture import Picker, Tape, Value
from classlens.core.rules.propagate import Sweep
from classlens.core.targets import OfClass, Target, directions, picked, scores
from classlens.errors import MethodError


@dataclass(frozen=True, eq=False)
class Case:
    """What is to be explained: B images, K classes each, and the recorded forward pass."""

    model: nn.Module
    images: Tensor  # (B,C,H,W), as the network takes them
    tape: Tape
    targets: Tensor  # (B,K) class indices; negative ones stand for `scalars`
    output: Picker = None
    trace: bool = False
    scalars: tuple[Target, ...] = ()  # those that are no class; only for methods that take them
    multilabel: bool = False  # each class has a probability of its own, so classes do not compete
    once: bool = False  # the tape serves this one method, which may use it up

    def scores(self, logits: Tensor, of_class: OfClass = picked) -> Tensor:
        """(B,K): what is explained, at these logits (B,classes) of the images or of other inputs in their place."""
        return scores(logits, self.targets, self.scalars, of_class)

    def directions(self, logits: Tensor | None = None) -> Tensor:
        """(K,B,classes): the gradient of what is explained, at the network's logits or at others.

        For a class that is 1 at the class. Its product with the logits is where LRP starts.
        """
        return directions(self.tape.logits if logits is None else logits, self.targets, self.scalars)

    def one_hot(self) -> Tensor:
        """(K,B,classes): the same for methods that set a class against the others, and so take classes alone."""
        return directions(self.tape.logits, self.targets)


@dataclass(frozen=True)
class LayerTrace:
    """The terms of one layer: `terms["C"]`, `["A"]`, ... each (K,B,channels,h,w), and `["Phi"]`, what left it."""

    name: str
    op: str
    terms: dict[str, Tensor]


@dataclass(frozen=True)
class Balance:
    """What became of the relevance put in at the top; each (B,K), float64."""

    started: Tensor
    arrived: Tensor  # sum over the image
    absorbed: Tensor  # what stayed in biases, or rules took out on purpose
    size: Tensor  # sum of magnitudes, at the top or over the image: the scale on which an error counts

    def error(self) -> Tensor:
        """|arrived + absorbed - started| / size: 0 where all relevance arrived or is accounted for."""
        return (self.arrived + self.absorbed - self.started).abs() / self.size.clamp(min=1e-300)


def balance(sweep: Sweep, start: Mapping[Value, Tensor]) -> Balance:
    """The balance of a sweep that began with `start`."""
    started = torch.stack([total(relevance) for relevance in start.values()]).sum(0)
    put_in = torch.stack([total(relevance.abs()) for relevance in start.values()]).sum(0)
    size = torch.maximum(put_in, total(sweep.relevance.abs()))
    return Balance(started.T, total(sweep.relevance).T, sweep.absorbed.T, size.T)


def total(relevance: Tensor) -> Tensor:
    """(K, B) sums of relevance (K, B, ...), in float64."""
    return relevance.flatten(2).sum(2, dtype=torch.float64).cpu()


@dataclass(frozen=True)
class Result:
    """What a method gives back."""

    maps: Tensor  # (B,K,H,W)
    balance: Balance | None = None  # None: the method does not propagate relevance
    notes: tuple[str, ...] = ()
    trace: tuple[LayerTrace, ...] = ()
    colours: Tensor | None = None  # (B,K,C,H,W): each colour's share of the maps, where a method tells them apart


def of_colours(shares: Tensor, balance: Balance | None = None) -> Result:
    """The result whose maps are the sum over the colours of shares (K,B,C,H,W)."""
    return Result(shares.sum(2).transpose(0, 1), balance, colours=shares.transpose(0, 1))


@dataclass(frozen=True)
class Method:
    """One entry of the registry."""

    name: str
    run: Callable[..., Result]
    family: str
    summary: str  # one line
    class_specific: bool  # different classes give different maps
    signed: bool  # negative values mean evidence against the class
    conserves: bool  # on ReLU-like networks the map sums to what was put in, up to what the report says
    paper: str
    options: tuple[str, ...] = field(default=())
    scalars: bool = False  # also explains other numbers made of the logits: a callable's, a contrast
    layers: bool = True  # looks inside the network; else image and logits are enough
    contrastive: bool = False  # sets the class against others by construction, whatever is asked

    @property
    def locates(self) -> bool:
        """Whether its maps of two classes may be compared: each shows the evidence for its class by itself."""
        return self.class_specific and not self.contrastive


METHODS: dict[str, Method] = {}


def method(
    name: str, *, family: str, summary: str, class_specific: bool, signed: bool, conserves: bool, paper: str,
    scalars: bool = False, layers: bool = True, contrastive: bool = False,
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:  # fmt: skip
    """Put a function (Case, **options) -> Result into the registry.

    With `scalars` it must ask the Case for `scores` and `directions` alone, and use no class index. With `layers=False`
    it must use nothing of the tape but image, logits and gradients at the image: the nodes may be missing.
    """

    def add(run: Callable[..., Result]) -> Callable[..., Result]:
        options = tuple(inspect.signature(run).parameters)[1:]
        METHODS[name] = Method(
            name, run, family, summary, class_specific, signed, conserves, paper, options, scalars, layers, contrastive
        )
        return run

    return add


def resolve(text: str) -> tuple[Method, dict[str, Any]]:
    """A method by name, with options in brackets if there are any."""
    match = re.fullmatch(r"\s*([\w-]+)\s*(?:\((.*)\))?\s*", text)
    if not match:
        raise MethodError(f"cannot read the method {text!r}; write a name such as agf, or agf(without=A)")
    name, inside = match.groups()
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(METHODS)}"
        raise MethodError(f"there is no method {name!r}; {hint}")
    return METHODS[name], _options(inside, text) if inside else {}


def _options(inside: str, text: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for part in re.split(r",(?![^\[(]*[\])])", inside):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not key.isidentifier() or not value:
            raise MethodError(f"cannot read {part.strip()!r} in {text!r}; options are written name=value")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value  # a bare word is a string
    return options


def check_options(chosen: Method, options: dict[str, Any]) -> None:
    """Refuse options that a method does not have."""
    for key in options:
        if key not in chosen.options:
            has = f"it has {', '.join(chosen.options)}" if chosen.options else "it has none"
            raise MethodError(f"{chosen.name} has no option {key!r}; {has}")


def is_release(variant: str) -> bool:
    """Whether the released code's variant is asked for."""
    if variant not in ("default", "release"):
        raise MethodError(f"variant={variant!r} is not known; there are default and release")
    return variant == "release"


def method_names(methods: str | Sequence[str]) -> list[str]:
    """`all`, or names with commas, or a list; each is checked.

    >>> method_names("agf, agf-release(without=A)")
    ['agf', 'agf-release(without=A)']
    """
    if methods == "all":
        return list(METHODS)
    names = split_names(methods) if isinstance(methods, str) else list(dict.fromkeys(methods))
    if not names:
        raise MethodError("no method was given; write names with commas, or all")
    for name in names:
        resolve(name)
    return names


def split_names(text: str) -> list[str]:
    """At commas that are not inside brackets.

    >>> split_names("agf, agf(a=1,b=2)")
    ['agf', 'agf(a=1,b=2)']
    """
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return list(dict.fromkeys(part.strip() for part in parts if part.strip()))
