"""The tape: the record of one forward pass of an unmodified network.

>>> tape = record(model, images)
>>> [node.op for node in tape.nodes]
['conv2d', 'batch_norm', 'relu', 'adaptive_avg_pool2d', 'flatten', 'linear']
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from classlens.core import ops
from classlens.core.capture import backward
from classlens.errors import CaptureError
from classlens.machine import onednn_errors


@dataclass(eq=False, slots=True)
class Value:
    """A tensor that depends on the image, with its value when it was computed, even if it was overwritten later."""

    kept: Tensor | Callable[[], Tensor]  # the tensor, or how to recompute it
    edge: GradientEdge | None  # the edge of this value in autograd's graph; None: no gradient
    shape: torch.Size
    hidden: bool = False  # it was made in a custom autograd function, so that autograd has no gradient of it
    live: Tensor | None = None  # the tensor with its part of autograd's graph; only of the network's output

    @property
    def tensor(self) -> Tensor:
        if not isinstance(self.kept, Tensor):
            with torch.no_grad():
                self.kept = self.kept()
        return self.kept

    def release(self) -> None:
        """Free the tensor and its part of autograd's graph; only the shape stays."""
        self.kept = _released
        self.cut()

    def cut(self) -> None:
        """Free the part of autograd's graph."""
        self.edge = self.live = None


def _released() -> Tensor:
    raise CaptureError("this value of the forward pass was freed, because the pass was recorded for one explanation")


def value_of(tensor: Tensor) -> Value:
    """The current value of a tensor."""
    return Value(tensor.detach(), get_gradient_edge(tensor) if tensor.requires_grad else None, tensor.shape)


def as_output(value: Value, tensor: Tensor) -> Value:
    """The value of a tensor, from which gradients will start."""
    if value.edge is not None and tensor.grad_fn is value.edge.node:
        value.live = tensor
    return value


def _read(point: Point) -> Value:
    """A value; of a layer, the one that it reads."""
    if isinstance(point, Node):
        value: Value = point.arguments()["input"]
        return value
    return point


def _between(layer: Node) -> tuple[Any, int] | None:
    output, value = layer.outputs[0].edge, _read(layer).edge
    return None if output is None or value is None else backward.function_between(output, value)


def has_own_gradient(layer: Node) -> bool:
    """Whether autograd has the gradient at the input of a layer through this layer alone."""
    return _between(layer) is not None


@dataclass(eq=False, slots=True)
class Node:
    """One operation: its canonical name, the call, its input values and output values."""

    op: str
    func: Callable[..., Any]
    args: tuple[Any, ...]  # as called, with each live tensor replaced by its Value
    kwargs: dict[str, Any]
    outputs: tuple[Value, ...]
    module: str  # dotted name of the module whose forward made the call
    mutates: bool = False
    inputs: tuple[Value, ...] = ()  # the Values among the arguments; found if not given
    cut: bool = False  # it was called in `torch.no_grad()`: no gradient passes through it

    def __post_init__(self) -> None:
        if not self.inputs:
            self.inputs = tuple(leaf for leaf in leaves((self.args, self.kwargs)) if isinstance(leaf, Value))

    @property
    def constants(self) -> tuple[Tensor, ...]:
        """The tensor arguments that do not depend on the image."""
        return tuple(leaf for leaf in leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor))

    @property
    def where(self) -> str:
        """The operation and its module, for messages: `relu in features.3`."""
        return f"{self.op} in {self.module or 'the model itself'}"

    def arguments(self) -> dict[str, Any]:
        """Arguments by name; live ones are Values."""
        return ops.arguments(self.op, self.func, self.args, self.kwargs)

    def call(self, *inputs: Tensor, constants: Callable[[Tensor], Tensor] | None = None) -> tuple[Tensor, ...]:
        """Run the operation again on other inputs, one for each of `inputs`; returns its tensor outputs.

        `constants` changes the floating-point tensors among its other arguments.
        """
        base = self.arguments()["input"] if self.op in _BY_MEMORY else None
        fresh = iter(
            _laid_out(given, base.tensor) if isinstance(base, Value) and value is base else given
            for value, given in zip(self.inputs, inputs, strict=True)
        )

        def fill(leaf: Any) -> Any:
            if isinstance(leaf, Value):
                return next(fresh)
            changes = constants is not None and isinstance(leaf, Tensor) and leaf.is_floating_point()
            return constants(leaf.detach()) if changes and constants else leaf

        args, kwargs = map_leaves((self.args, self.kwargs), fill)
        return _run(self.func, args, kwargs, self.mutates)


Point = Value | Node  # where a gradient is wanted: at a value, or at the input of a layer through the layer

_BY_MEMORY = ("as_strided", "as_strided_scatter")  # their strides are those of the recorded tensor


def _laid_out(x: Tensor, like: Tensor) -> Tensor:
    """The same values in the memory layout of another tensor."""
    if x.stride() == like.stride():
        return x
    return torch.empty_strided(like.shape, like.stride(), dtype=x.dtype, device=x.device).copy_(x)


def _run(func: Callable[..., Any], args: Any, kwargs: Any, mutates: bool) -> tuple[Tensor, ...]:
    if mutates:  # it writes to its first argument, which belongs to the caller or to the tape
        args = (args[0].clone(), *args[1:])
    result = func(*args, **kwargs)
    return tuple(leaf for leaf in leaves(args[0] if mutates else result) if isinstance(leaf, Tensor))


def recomputed(func: Callable[..., Any], args: Any, kwargs: Any, mutates: bool) -> Tensor:
    """Recompute the only output of a call from its input values.

    (Not a method of Node: a value that refers to its node would form a reference cycle and outlive its tape.)
    """
    args, kwargs = map_leaves((args, kwargs), lambda leaf: leaf.tensor if isinstance(leaf, Value) else leaf)
    (output,) = _run(func, args, kwargs, mutates)
    return output


@dataclass(eq=False)
class Tape:
    """Nodes in the order of the forward pass, pruned to those that the output depends on."""

    nodes: tuple[Node, ...]
    image: Value  # the network's input
    output: Value  # the logits, selected from the model's return value
    counted: dict[str, int] | None = None  # counts of operations, if the nodes were not recorded
    float32: bool = False  # the network computes in less, and was run in float32: run it so again
    opaque: str = ""  # an operation that torch cannot differentiate, and where it is
    notes: tuple[str, ...] = ()  # for the report
    odd: bool = False  # a batch norm read an odd memory layout: its gradients need care
    obeys: bool = True  # `torch.no_grad()` inside the network makes constants: see `modes`
    ends: str = ""  # the softmax or sigmoid that the network ends with; the output is what it reads
    producer: dict[Value, Node] = field(init=False)
    consumers: dict[Value, list[Node]] = field(init=False)

    def __post_init__(self) -> None:
        self.producer = {value: node for node in self.nodes for value in node.outputs}
        self.consumers = {}
        for node in self.nodes:
            for value in node.inputs:
                self.consumers.setdefault(value, []).append(node)

    @property
    def logits(self) -> Tensor:
        return self.output.tensor

    def ops(self) -> dict[str, int]:
        """How often each operation occurs."""
        if self.counted is not None:
            return dict(self.counted)
        return dict(Counter(node.op for node in self.nodes))

    def sizes(self) -> tuple[int, int]:
        """The bytes of all values, and of the largest one."""
        each = self.image.tensor.element_size()
        found = [each * value.shape.numel() for node in self.nodes for value in node.outputs]
        return sum(found), max(found, default=0)

    def gradients(self, cotangents: Tensor, at: Sequence[Point], keep: bool = True) -> dict[Point, Tensor]:
        """The gradients of K scores at each value, {value: (K, *value.shape)}.

        `cotangents` (K, *logits.shape) are the gradients of the scores at the logits. Each score takes one autograd
        backward pass; no layer runs again. A value that does not affect the score gets zeros. The gradient is the sum
        over all uses of a value; with a layer in place of a value, it is the gradient at the layer's input through
        this layer alone (`has_own_gradient`). `keep=False` frees autograd's buffers on the way, which is faster, for
        the last call.
        """
        read = {point: _read(point) for point in at}
        self.check_gradients(list(read.values()))
        wanted = [point for point, value in read.items() if value.edge is not None]
        last = len(cotangents) - 1
        with self.differentiating():
            rows = [self._backward(c, wanted, keep or i < last) for i, c in enumerate(cotangents) if wanted]
        found = {
            point: _stacked([torch.zeros_like(read[point].tensor) if g is None else g for g in column])
            for point, column in zip(wanted, zip(*rows, strict=True), strict=True)
        }
        return {
            point: found[point] if point in found else value.tensor.new_zeros(len(cotangents), *value.shape)
            for point, value in read.items()
        }

    def _backward(self, cotangent: Tensor, wanted: Sequence[Point], keep: bool) -> list[Tensor | None]:
        assert self.output.edge is not None
        layers = [point for point in wanted if isinstance(point, Node)]
        values = list(dict.fromkeys(_read(point) for point in wanted))
        edges = [value.edge for value in values if value.edge is not None]
        with backward.caught([between for layer in layers if (between := _between(layer)) is not None]) as caught:
            output = self.output.edge if self.output.live is None else self.output.live
            gradients = backward.gradients([output], edges, [cotangent], self.odd, retain_graph=keep, allow_unused=True)
        found: dict[Point, Tensor | None] = dict(zip(values, gradients, strict=True))
        found |= zip(layers, caught, strict=True)
        return [found[point] for point in wanted]

    def check_gradients(self, values: Sequence[Value] = ()) -> None:
        """Refuse gradients that autograd would silently get wrong."""
        self.check_attached()
        if self.opaque:
            raise CaptureError(f"torch has no gradient of the operation {self.opaque}; this method needs one")
        if any(value.hidden for value in values):
            raise CaptureError(
                "a layer is inside a custom autograd function (reentrant checkpointing is one), where it has no "
                "gradient of its own; switch the function off (use_reentrant=False), or use a method without gradients"
            )

    def check_attached(self) -> None:
        """Refuse a network whose output is cut off from the image."""
        if self.output.edge is None:
            raise CaptureError("the model's output has no gradient (a part of it is detached); this method needs one")

    @contextlib.contextmanager
    def differentiating(self) -> Iterator[None]:
        """Autograd's errors as one line, with the module if it is known.

        A checkpointed part of the network runs again in here, in the precision of the recorded pass.
        """
        from classlens.core.capture.precision import in_float32  # which needs this module

        try:
            with onednn_errors(), in_float32(self.float32):
                yield
        except RuntimeError as error:
            if "modified by an inplace operation" in str(error):
                raise CaptureError(
                    "the model overwrites a value that its own gradient needs (an in-place operation), so it has no "
                    "gradients; write that operation without the underscore or inplace=True"
                ) from error
            reason = " ".join(str(error).split(". ")[0].split())
            where = next((f" ({node.where})" for node in self.nodes if str(node.func) in reason), "")
            raise CaptureError(f"the model has no gradient: {reason}{where}; this method needs one") from error


def _stacked(rows: list[Tensor]) -> Tensor:
    return torch.stack(rows) if len(rows) > 1 else rows[0][None]


# The arguments of each operation are searched several times, and most have these types: checking the type is fastest.
_ATOMS = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size))
_WHOLE = frozenset((Tensor, nn.Parameter, Value))


def leaves(tree: Any) -> list[Any]:
    """The leaves of nested tuples, lists, dicts and slices, without numbers, strings and other plain values."""
    if type(tree) in _ATOMS:
        return []
    if isinstance(tree, tuple | list):
        items: Any = tree
    elif isinstance(tree, dict):
        items = tree.values()
    elif isinstance(tree, slice):
        items = (tree.start, tree.stop, tree.step)
    else:
        return [tree]
    found: list[Any] = []
    for item in items:
        kind = type(item)
        if kind in _WHOLE:
            found.append(item)
        elif kind not in _ATOMS:
            found.extend(leaves(item))
    return found


def map_leaves(tree: Any, change: Callable[[Any], Any]) -> Any:
    """The same nested containers with each leaf changed."""
    kind = type(tree)
    if kind in _ATOMS:
        return tree
    if kind in _WHOLE:
        return change(tree)
    if kind is tuple:  # the most frequent case, inlined because a function call for each item adds up
        return tuple([item if type(item) in _ATOMS else map_leaves(item, change) for item in tree])
    if isinstance(tree, tuple | list):
        items = [map_leaves(item, change) for item in tree]
        return kind(*items) if hasattr(tree, "_fields") else kind(items)
    if isinstance(tree, dict):
        return {key: map_leaves(item, change) for key, item in tree.items()} if tree else tree
    if isinstance(tree, slice):
        return slice(*(map_leaves(item, change) for item in (tree.start, tree.stop, tree.step)))
    return change(tree)
