"""The only backward loop: walks the tape from the output to the image and passes relevance on, rule by rule."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from classlens.core.capture import Axis, Node, Point, Tape, Value, image_index
from classlens.core.ops import KEEPS_CONSTANTS, SEVERAL_OUTPUTS, Constants, Kind, of_kind
from classlens.core.rules.generic import Shares
from classlens.errors import UnsupportedOp
from classlens.machine import MUCH_MEMORY, give_back_memory

# A rule gets a node and the relevance (K, *shape) of its output; for an operation with several outputs, a tuple
# of them with None where nothing arrived. It returns one share for each live input of the node.
Rule = Callable[[Node, Any], Shares]
Merge = Callable[[Value, list[Tensor]], Tensor]
Watch = Callable[[Node, Sequence[Tensor | None], Shares], None]  # sees each step, for traces

RULES: dict[str, Rule] = {}
MULTI_OUTPUT: set[str] = set(SEVERAL_OUTPUTS)
ABSORBING: set[str] = set()  # operations whose rule keeps relevance on purpose
# Operations whose rule multiplies relevance with a matrix.
_PRODUCTS = of_kind(Kind.LINEAR, Kind.PRODUCT, Kind.ADDED_PRODUCT, Kind.ATTENTION) - {"mul", "addcmul"}


def register(*names: str, multi_output: bool = False, absorbs: bool = False) -> Callable[[Rule], Rule]:
    """Register a function as the rule of one or more operations, including your own.

    >>> @register("my_scale")
    ... def my_scale(node, relevance):
    ...     return [relevance]

    `multi_output`: the rule gets a list, the relevance of each output or None. `absorbs`: the rule keeps the relevance
    that its shares lack on purpose, and it is reported as absorbed; otherwise it counts as lost.
    """

    def add(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        if multi_output:
            MULTI_OUTPUT.update(names)
        (ABSORBING.update if absorbs else ABSORBING.difference_update)(names)
        return rule

    return add


def add_shares(value: Value, shares: list[Tensor]) -> Tensor:
    """The relevance of a value with several uses: the sum over its uses."""
    total = shares[0]
    for share in shares[1:]:
        total = total + share
    return total


@dataclass
class Sweep:
    """The result of a sweep: the relevance at the image, and what was absorbed and noted on the way."""

    relevance: Tensor  # (K, B, C, H, W) at the image
    absorbed: Tensor  # (K, B) relevance that rules absorbed on purpose (the share of biases), float64
    notes: list[str] = field(default_factory=list)


@dataclass
class Ledger:
    """Records relevance that goes no further: the shares of biases and of constants."""

    images: int
    absorbed: Tensor | float = 0.0
    axes: Mapping[Value, Axis] = field(default_factory=dict)  # where the images are in each value
    node: Node | None = None  # whose rule is running; None outside of a sweep, where images are along the first axis

    def emptied(self) -> Ledger:
        """The same ledger for another sweep: rules keep a reference to it."""
        self.absorbed, self.node = 0.0, None
        return self

    def absorb(self, relevance: Tensor, weight: float = 1.0) -> None:
        """`weight` times this relevance (K, *shape of the running node's output or input) stays where it is."""
        self.absorbed = torch.add(torch.as_tensor(self.absorbed), self.total(relevance), alpha=weight)

    def total(self, relevance: Tensor) -> Tensor:
        """(K, B) sums."""
        if self.images == 1:  # the usual case, and no index is needed
            rows = relevance.flatten(3).sum(3) if relevance.dim() > 3 else relevance
            return rows.flatten(1).sum(1, keepdim=True, dtype=torch.float64)
        return self._axis(relevance).total(relevance, self.images)

    def _axis(self, relevance: Tensor) -> Axis:
        """The images in relevance of the running node: at its output, or at an input of it."""
        if self.node is None:
            return Axis(0, torch.arange(self.images))
        for value in (*self.node.outputs, *self.node.inputs):
            found = self.axes.get(value)
            if found is not None and relevance.shape[1 : 2 + found.axis] == value.shape[: 1 + found.axis]:
                return found
        raise UnsupportedOp(
            f"relevance stays at {self.node.where}, where the {self.images} images cannot be told apart; "
            "explain one image at a time"
        )

    def quotient(self, relevance: Tensor, total: Tensor) -> Tensor:
        """R / z. If no input contributes to a unit, its value comes from its bias: the relevance stays there.

        The same holds for a contribution that a smooth activation reduced to almost 0 (1e-39), where R / z would be
        infinite. That relevance is recorded as absorbed.
        """
        least = torch.finfo(total.dtype).tiny ** 0.5
        per_unit = relevance / total
        if total.numel() and (total.amin() >= least or total.abs().amin() >= least):
            return per_unit
        nothing = total.abs() < least
        self.absorb(torch.where(nothing, relevance, 0))
        return per_unit.masked_fill_(nothing, 0)


def smallest_peak(relevance: Iterable[Tensor]) -> float:
    """The largest magnitude of each class and image (K, B, ...), and of these the smallest that is not 0.

    >>> smallest_peak([torch.tensor([[[1.0, -8.0]], [[2.0, 0.5]]])])
    2.0
    """
    peaks = torch.cat([r.abs().reshape(*r.shape[:2], -1).amax(-1).flatten() for r in relevance])
    return float(peaks[peaks > 0].min()) if peaks.any() else 1.0


def without_denormals(relevance: Tensor, peak: float) -> Tensor:
    """Relevance with its negligible values set to 0: for a start of 1 or more, those up to 5e-26 in float32.

    After fifty layers, a few units in a hundred hold less than 1e-38. Such denormal numbers are below all rounding
    errors, but they make matrix products on many CPUs ten times as slow. If the start itself is small (`peak`), so is
    the threshold, so that tiny relevance is not lost.
    """
    limits = torch.finfo(relevance.dtype)
    if relevance.device.type != "cpu" or limits.bits < 32:  # other devices and half precision have no slow numbers
        return relevance
    return F.hardshrink(relevance, max(limits.tiny, limits.tiny ** (2 / 3) * min(peak, 1.0)))


class Reached(Exception):
    """A sweep arrived at the value of `stopping_at`. It is no error: it carries what is needed to go on.

    `relevance` (K, *shape) is that of the value, summed over its uses. `onward` sweeps other relevance (N, *shape) of
    the value on to the image, by the same rules. Relevance that bypasses the value is left behind.
    """

    def __init__(self, relevance: Tensor, onward: Callable[[Tensor], Sweep]) -> None:
        super().__init__("the sweep arrived at the value")
        self.relevance, self.onward = relevance, onward


_axes: ContextVar[Mapping[Value, Axis]] = ContextVar("classlens_axes", default=types.MappingProxyType({}))


def images_in(value: Value) -> Axis | None:
    """Where the images are in a value of the running sweep; None if there is one image, or if it is unknown."""
    return _axes.get().get(value)


@contextmanager
def _images_at(axes: Mapping[Value, Axis]) -> Iterator[None]:
    token = _axes.set(axes)
    try:
        yield
    finally:
        _axes.reset(token)


_stop: ContextVar[Value | None] = ContextVar("classlens_stop", default=None)


@contextmanager
def stopping_at(value: Value) -> Iterator[None]:
    """Within this block, a sweep that arrives at `value` raises `Reached`. It is local to the thread (and task)."""
    token = _stop.set(value)
    try:
        yield
    finally:
        _stop.reset(token)


def propagate(
    tape: Tape,
    start: Mapping[Value, Tensor],
    choose: Callable[[Node], Rule],
    merge: Merge = add_shares,
    ledger: Ledger | None = None,
    watch: Watch | None = None,
    done: Callable[[Node], None] | None = None,
) -> Sweep:
    """Propagate relevance from `start` ({value: (K, *shape)}) back to the image.

    `choose` returns the rule of a node. The relevance of a value with several uses is merged before its producer is
    visited, so each node is visited once. `done` is called after each node.
    """
    ledger = ledger or Ledger(tape.image.shape[0])
    ledger.axes = ledger.axes or (image_index(tape) if ledger.images > 1 else {})
    peak = smallest_peak(start.values())
    pending: dict[Value, list[Tensor]] = {value: [relevance] for value, relevance in start.items()}

    def settle(value: Value) -> Tensor | None:
        shares = pending.pop(value, None)
        return None if shares is None else shares[0] if len(shares) == 1 else merge(value, shares)

    with torch.no_grad(), _images_at(ledger.axes):
        for node in reversed(tape.nodes):
            arrived = [settle(value) for value in node.outputs]
            _stop_at(node, arrived, start, lambda parts: propagate(tape, parts, choose, merge, ledger.emptied()))
            if all(relevance is None for relevance in arrived):
                continue
            ledger.node = node
            if node.op in _PRODUCTS:
                arrived = [None if r is None else without_denormals(r, peak) for r in arrived]
            shares = choose(node)(node, arrived if node.op in MULTI_OUTPUT else arrived[0])
            if watch is not None:
                watch(node, arrived, shares)
            if _keeps_relevance(node):
                _write_down_rest(ledger, arrived, shares)
            for value, share in _pairs(node, shares):
                pending.setdefault(value, []).append(share)
            if done is not None:
                done(node)
        arriving = settle(tape.image)
    relevance = _nothing(start, tape.image) if arriving is None else arriving
    absorbed = torch.zeros(relevance.shape[:2], dtype=torch.float64) + torch.as_tensor(ledger.absorbed).cpu()
    return Sweep(relevance, absorbed)


def _stop_at(
    node: Node, arrived: Sequence[Tensor | None], start: Mapping[Value, Tensor],
    onward: Callable[[Mapping[Value, Tensor]], Sweep],
) -> None:  # fmt: skip
    """Raise `Reached` if the node makes the value of `stopping_at`."""
    stop = _stop.get()
    if stop in node.outputs:
        there = arrived[node.outputs.index(stop)]
        raise Reached(_nothing(start, stop) if there is None else there, lambda parts: onward({stop: parts}))


def _nothing(start: Mapping[Value, Tensor], value: Value) -> Tensor:
    """Relevance 0 of a value that none arrived at: (K, *shape)."""
    return torch.zeros(len(next(iter(start.values()))), *value.shape).to(value.tensor)


def forgetting(tape: Tape, gradients: dict[Point, Tensor] | None = None) -> Callable[[Node], None]:
    """A callback that frees the values of a tape, and their gradients, behind the sweep: for the last use of a tape.

    No earlier node reads an output of a later one. `tape` is the whole tape, also if the sweep walks a folded one.
    """
    ahead, freed = list(tape.nodes), 0
    each = tape.image.tensor.element_size()

    def forget(node: Node) -> None:
        nonlocal freed
        tape.output.cut()  # it holds all of autograd's graph
        if gradients is not None:
            gradients.pop(node, None)
        while ahead:
            last = ahead.pop()
            for value in last.outputs:
                if value is not tape.output:
                    value.release()
                    freed += each * value.shape.numel()
                if gradients is not None:
                    gradients.pop(value, None)
            if last.outputs == node.outputs:
                break
        if freed >= MUCH_MEMORY:
            give_back_memory()
            freed = 0

    return forget


def _keeps_relevance(node: Node) -> bool:
    """Whether relevance may stay at a node: at its constants, or because its rule absorbs it."""
    constants = KEEPS_CONSTANTS.get(node.op)
    return (
        constants is Constants.YES or node.op in ABSORBING or (constants is Constants.IF_THERE and bool(node.constants))
    )


def _write_down_rest(ledger: Ledger, arrived: Sequence[Tensor | None], shares: Shares) -> None:
    for relevance in arrived:
        if relevance is not None:
            ledger.absorb(relevance)
    for share in shares:
        if share is not None:
            ledger.absorb(share, -1.0)


def _pairs(node: Node, shares: Shares) -> Sequence[tuple[Value, Tensor]]:
    return [(v, s) for v, s in zip(node.inputs, shares, strict=True) if s is not None]


def rule_for(node: Node) -> Rule:
    """The rule registered for a node's operation, or an error that names operation and module."""
    try:
        return RULES[node.op]
    except KeyError:
        raise UnsupportedOp(
            f"no rule for the operation {node.where}; register one with "
            f"@classlens.core.rules.register({node.op!r}), or use a gradient method"
        ) from None
