"""METHODS: every explanation method by name, with its properties.

>>> chosen, options = resolve("agf-release(without=A)")
>>> chosen.name, options
('agf-release', {'without': 'A'})
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from classlens.core.capture import Picker, Tape, Value
from classlens.core.method_text import parse, refuse_unknown, split_names
from classlens.core.rules.propagate import Sweep
from classlens.core.targets import OfClass, Target, directions, picked, scores
from classlens.errors import MethodError


@dataclass(frozen=True, eq=False)
class Case:
    """What to explain: B images, K targets each, and the recorded forward pass."""

    model: nn.Module
    images: Tensor  # (B,C,H,W), the network's input
    tape: Tape
    targets: Tensor  # (B,K) class indices; negative ones stand for `scalars`
    output: Picker = None
    trace: bool = False
    scalars: tuple[Target, ...] = ()  # targets that are not classes; only for methods that accept them
    multilabel: bool = False  # each class has an independent probability, so classes do not compete
    once: bool = False  # no other method uses the tape, so its buffers may be freed

    def scores(self, logits: Tensor, of_class: OfClass = picked) -> Tensor:
        """(B,K): the explained scores at these logits (B,classes), of the images or of other inputs."""
        return scores(logits, self.targets, self.scalars, of_class)

    def directions(self, logits: Tensor | None = None) -> Tensor:
        """(K,B,classes): the gradient of the explained scores, at the network's logits or at others.

        For a class it is 1 at the class. Its product with the logits is the starting relevance of LRP.
        """
        return directions(self.tape.logits if logits is None else logits, self.targets, self.scalars)

    def one_hot(self) -> Tensor:
        """(K,B,classes): the same for methods that contrast a class with the others, and so accept only classes."""
        return directions(self.tape.logits, self.targets)


@dataclass(frozen=True)
class LayerTrace:
    """The terms of one layer: `terms["C"]`, `["A"]`, ... each (K,B,channels,h,w), and its result `["Phi"]`."""

    name: str
    op: str
    terms: dict[str, Tensor]


UNRELIABLE = "the map is unreliable"  # how a note ends that figures repeat as a warning
POOR = 0.05  # the share of relevance that may be unaccounted for without such a note


@dataclass(frozen=True)
class Balance:
    """Where the starting relevance went; each (B,K), float64."""

    started: Tensor
    arrived: Tensor  # sum over the image
    absorbed: Tensor  # relevance that stayed in biases, or that rules absorbed on purpose
    size: Tensor  # sum of magnitudes, at the top or over the image: the scale of the error

    def error(self) -> Tensor:
        """|arrived + absorbed - started| / size: 0 if all relevance arrived or is accounted for."""
        return (self.arrived + self.absorbed - self.started).abs() / self.size.clamp(min=1e-300)

    def notes(self) -> tuple[str, ...]:
        """A note if much relevance is unaccounted for: the map does not add up to what it explains."""
        worst = self.error().max().item()
        return (f"{worst:.0%} of the relevance is unaccounted for; {UNRELIABLE}",) if worst > POOR else ()


def balance(sweep: Sweep, start: Mapping[Value, Tensor]) -> Balance:
    """The balance of a sweep that started from `start`."""
    started = torch.stack([total(relevance) for relevance in start.values()]).sum(0)
    put_in = torch.stack([total(relevance.abs()) for relevance in start.values()]).sum(0)
    size = torch.maximum(put_in, total(sweep.relevance.abs()))
    return Balance(started.T, total(sweep.relevance).T, sweep.absorbed.T, size.T)


def total(relevance: Tensor) -> Tensor:
    """(K, B) sums of relevance (K, B, ...), in float64."""
    return relevance.flatten(2).sum(2, dtype=torch.float64).cpu()


@dataclass(frozen=True)
class Result:
    """The return value of a method."""

    maps: Tensor  # (B,K,H,W)
    balance: Balance | None = None  # None: the method does not propagate relevance
    notes: tuple[str, ...] = ()
    trace: tuple[LayerTrace, ...] = ()
    colours: Tensor | None = None  # (B,K,C,H,W): the share of each channel, if the method attributes to channels


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
    conserves: bool  # on ReLU-like networks the map sums to the starting relevance, minus what the report says
    paper: str
    options: tuple[str, ...]
    scalars: bool  # also explains other functions of the logits: a callable, a contrast
    layers: bool  # uses the layers of the network; otherwise image and logits are enough
    contrastive: bool  # always contrasts the class with others, by construction
    attention: bool  # only for networks with attention; others are refused
    linear: Mapping[str, Any] | None  # with these options, relevance can be followed in parts (`concepts`); None: never
    holds: str  # what it keeps in memory for each class: tensors of "layers", of "inputs", or only "maps"

    @property
    def locates(self) -> bool:
        """Whether its maps of two classes may be compared: each shows only the evidence for its own class."""
        return self.class_specific and not self.contrastive


METHODS: dict[str, Method] = {}


def method(
    name: str, *, family: str, summary: str, class_specific: bool, signed: bool, conserves: bool, paper: str,
    scalars: bool = False, layers: bool = True, contrastive: bool = False, attention: bool = False,
    linear: Mapping[str, Any] | None = None, holds: str | None = None,
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:  # fmt: skip
    """Register a function (Case, **options) -> Result.

    With `scalars` it must use only `scores` and `directions` of the Case, and no class index. With `layers=False` it
    must use only the image, the logits and the gradients at the image: the nodes of the tape may be missing. `linear`
    are the options, often none, with which it is one sweep whose rules are linear in the relevance. `holds` decides how
    many classes it gets at once (`classlens.chunks`); by default "layers" or, without them, "inputs".
    """

    def add(run: Callable[..., Result]) -> Callable[..., Result]:
        options = tuple(inspect.signature(run).parameters)[1:]
        METHODS[name] = Method(
            name, run, family, summary, class_specific, signed, conserves, paper, options, scalars, layers, contrastive,
            attention, linear, holds or ("layers" if layers else "inputs"),
        )  # fmt: skip
        return run

    return add


def resolve(text: str) -> tuple[Method, dict[str, Any]]:
    """A method by name, with options in brackets if there are any."""
    name, options = parse(text, METHODS)
    return METHODS[name], options


def check_options(chosen: Method, options: dict[str, Any]) -> None:
    """Refuse options that a method does not have."""
    refuse_unknown(chosen.name, options, chosen.options)


def is_release(variant: str) -> bool:
    """Whether the variant of the released code is requested."""
    if variant not in ("default", "release"):
        raise MethodError(f"unknown variant={variant!r}; choose default or release")
    return variant == "release"


def method_names(methods: str | Sequence[str]) -> list[str]:
    """`all`, or names separated by commas, or a list; each name is checked.

    >>> method_names("agf, agf-release(without=A)")
    ['agf', 'agf-release(without=A)']
    """
    if methods == "all":
        return list(METHODS)
    names = split_names(methods) if isinstance(methods, str) else list(dict.fromkeys(methods))
    if not names:
        raise MethodError("no method was given; write names separated by commas, or all")
    for name in names:
        resolve(name)
    return names
