"""Records a forward pass: a `TorchFunctionMode` intercepts every operation that a network calls.

It sees functional calls, methods and operators, and keeps values that are overwritten in place.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from classlens.core import ops
from classlens.core.capture.backward import has_odd_layout
from classlens.core.capture.layers import LIKE, OPENED, as_biased, as_layer, as_limit, as_move, as_sum
from classlens.core.capture.memory import dense, overlapping, storage
from classlens.core.capture.modes import instead_of, is_overruled, no_inference
from classlens.core.capture.norm import is_fixed, may_be_lean, run_lean
from classlens.core.capture.probabilities import Ending
from classlens.core.capture.tape import Node, Value, leaves, map_leaves, recomputed, value_of
from classlens.core.signatures import INPUT_NAMES
from classlens.errors import CaptureError
from classlens.machine import MUCH_MEMORY, check_memory

LARGE = 4 * 2**20  # bytes: a smaller output of a layer is kept, because running the layer again takes longer
_EIGHT_BITS = frozenset(getattr(torch, name) for name in dir(torch) if name.startswith("float8_"))
LOW = frozenset((torch.float16, torch.bfloat16)) | _EIGHT_BITS
_PLAIN = frozenset((Tensor, nn.Parameter))
_NUMBERS = frozenset((Tensor.item, Tensor.__float__))
_NO_GRADIENT = "torch::autograd::WarnNotImplemented"  # an operation for which torch returns no gradient, with a warning


class Recorder(TorchFunctionMode):
    """Intercepts each operation of a forward pass and records a Node for those that depend on the image."""

    def __init__(
        self, modules: Sequence[tuple[str, nn.Module]], keep: frozenset[str] = frozenset(), obeys: bool = True
    ) -> None:
        """`keep` names layers whose outputs are copied before something outside the layer overwrites them.

        `obeys` says whether `torch.no_grad()` inside the network makes constants: see `modes`.
        """
        super().__init__()
        self.keep, self.copies, self.obeys = keep, dict[Value, Tensor](), obeys
        self.nodes: list[Node] = []
        self.values: dict[int, Value] = {}  # id of a live tensor -> what it holds now
        self.alive: dict[int, Tensor] = {}  # tensors seen, by id: the id of a freed tensor could be reused
        self.leaving: dict[int, weakref.ref[Tensor]] = {}  # those that live as long as the network needs them
        self.by_storage: dict[int, list[weakref.ref[Tensor]]] = {}
        self.makers: dict[Value, Node] = {}
        self.constants: set[int] = set()
        self.stripped: dict[int, tuple[Tensor, Tensor]] = {}  # constants of a subclass of Tensor, and as plain ones
        self.names: dict[int, str] = {id(module): name for name, module in modules}
        self.image: Value
        self.image_node: Any = None
        self.switched = False  # the network tried to switch gradients off, or to attach a hook to them
        self.off = self.cut = False  # gradients are off by its wish now; something live was computed meanwhile
        self.opaque = ""  # an operation that torch cannot differentiate, and where it is
        self.kept_bytes = self.largest = self.checked = 0  # of tensors so far, and at the last check of free memory
        self.input: tuple[int, ...] = ()  # the shape of the first tensor
        self.odd = False  # a batch norm read an odd memory layout: see `backward`
        self.low = False  # something was computed in less than float32
        self.ending = Ending()
        self.number = ""  # where the network turned a value into a number of Python, which cannot be followed

    def admit_image(self, image: Tensor) -> None:
        """Register the network's input, on which everything depends that is recorded."""
        self.image = self.admit(image)
        assert self.image.edge is not None
        self.image_node = self.image.edge.node

    def admit(self, tensor: Tensor) -> Value:
        """Register a live tensor with its current value."""
        value = value_of(tensor)
        value.hidden = not (torch.is_grad_enabled() or self.off)  # inside a custom autograd function
        self.low = self.low or tensor.dtype in LOW or tensor.is_quantized
        if id(tensor) not in self.values:
            self.alive[id(tensor)] = tensor
            self._count(tensor)
            self.by_storage.setdefault(storage(tensor), []).append(weakref.ref(tensor))
        self.values[id(tensor)] = value
        return value

    def _count(self, tensor: Tensor) -> None:
        """Count the memory of a new tensor, and stop where a sweep would not fit into what is left.

        At the largest value, a sweep needs up to eight tensors of its size (`chunks.held`).
        """
        if tensor.device.type != "cpu" or any(ref() is not None for ref in self.by_storage.get(storage(tensor), ())):
            return
        self.input = self.input or tensor.shape
        self.kept_bytes, self.largest = self.kept_bytes + tensor.nbytes, max(self.largest, tensor.nbytes)
        if self.kept_bytes >= self.checked + MUCH_MEMORY:
            self.checked = self.kept_bytes
            size = " x ".join(map(str, self.input))
            check_memory(8 * self.largest, f"after {self._module() or 'a part of the model'}, input of {size}")

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_overruled(func):
            self.switched = True
            return self._switch(*args) if func is ops.GRAD_SWITCH else instead_of(func)
        if func in ops.QUERIES:
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled():
            self.switched = True
            with no_inference(), self:
                return func(*args, **kwargs)
        if func in OPENED:
            with self:
                return OPENED[func](*args, **kwargs)
        if not _PLAIN.issuperset(types):
            args, kwargs = map_leaves((args, kwargs), self._plain)
        if func in LIKE:
            rest, kwargs = map_leaves((args[1:], kwargs), self._hollow)
            args = args[:1] + rest
        return self._recorded(func, args, kwargs)

    def _switch(self, on: bool) -> None:
        """Obey `torch.no_grad()`, but not inside a custom autograd function, where gradients are off anyway."""
        if self.obeys and (self.off or torch.is_grad_enabled()):
            ops.GRAD_SWITCH(on)
            self.off = not on

    def _recorded(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, and write it down if it depends on the image."""
        frozen, inputs = self._freeze((args, kwargs))
        if not inputs:
            return self._constant(func(*args, **kwargs))
        kind = ops.kind_of(func)
        if kind is ops.Kind.EXPORT:
            raise CaptureError(
                f"{self._module() or 'the model'} takes a tensor out of torch ({func.__name__}), where it cannot be "
                "recorded; write that step with torch operations"
            )
        if kind is ops.Kind.CREATION:
            self._refuse_copies(func, args[1:], kwargs)
            return self._constant(func(*args, **kwargs))
        if ops.is_mutating(func, args, kwargs):
            return self._mutation(func, args, kwargs, frozen)
        if isinstance(kwargs.get("out"), Tensor):
            raise CaptureError(f"{self._module() or 'the model'} writes with out=, which cannot be recorded")
        norm = self._fixed_norm(kind, func, args, kwargs) if len(inputs) == 1 else {}
        result = run_lean(norm, lambda: func(*args, **kwargs)) if norm else func(*args, **kwargs)
        self.ending.see(func, args, kwargs, result)
        made = [leaf for leaf in leaves(result) if isinstance(leaf, Tensor)]
        if func in _NUMBERS and args[0].is_floating_point():
            self.number = self.number or self._module() or "the model"
        # A call that returns one of its arguments (contiguous, to, eval-mode dropout) did nothing.
        if made and not all(id(t) in self.values for t in made):
            self._write(func, frozen, [self.admit(t) for t in made], inputs)
        if norm:
            self._let_go(norm["input"])
        return result

    def _fixed_norm(self, kind: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a batch norm that only scales and shifts a live input; {} for anything else."""
        if kind is not ops.Kind.NORM or ops.canonical(func) != "batch_norm" or not may_be_lean():
            return {}
        named = ops.arguments("batch_norm", func, args, kwargs)
        return named if is_fixed(named) and id(named["input"]) in self.values else {}

    def _let_go(self, tensor: Tensor) -> None:
        """Free the large output of a layer, which its norm does not need, as soon as the network frees it.

        A rule that reads it runs the layer again.
        """
        key, values = id(tensor), self.values
        maker = self.makers.get(values[key])
        if (
            maker is None
            or maker.op not in ops.LINEAR_OPS
            or tensor.nbytes < LARGE
            or self.keep
            or key not in self.alive
        ):
            return
        values[key].kept = _again(maker)
        del self.alive[key]
        self.kept_bytes -= tensor.nbytes
        self.leaving[key] = weakref.ref(tensor, lambda _: values.pop(key, None))

    def _plain(self, leaf: Any) -> Any:
        """A constant of a subclass of Tensor that only holds data (a buffer with metadata) as a plain tensor."""
        if not isinstance(leaf, Tensor) or type(leaf) in _PLAIN or computes_itself(leaf):
            return leaf
        if id(leaf) not in self.stripped:
            self.stripped[id(leaf)] = leaf, leaf.detach().as_subclass(Tensor)
        return self.stripped[id(leaf)][1]

    def _hollow(self, leaf: Any) -> Any:
        """A constant of the same shape and type in place of a live tensor, whose values make no difference."""
        if not isinstance(leaf, Tensor) or id(leaf) not in self.values:
            return leaf
        return torch.zeros((), dtype=leaf.dtype, device=leaf.device).expand(leaf.shape)

    def _refuse_copies(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a new tensor with the content of a live one, such as `x.new_tensor(y)`: it would be a constant."""
        others = leaves((args, {key: value for key, value in kwargs.items() if key not in ("input", *INPUT_NAMES)}))
        if any(id(leaf) in self.values for leaf in others):
            raise CaptureError(
                f"{self._module() or 'the model'} copies a value out of the record ({func.__name__}); use clone()"
            )

    def _constant(self, result: Any) -> Any:
        for leaf in leaves(result):
            if isinstance(leaf, Tensor) and id(leaf) not in self.constants:
                self.constants.add(id(leaf))
                self.alive[id(leaf)] = leaf
        return result

    def _write(
        self, func: Callable[..., Any], frozen: Any, outputs: Sequence[Value], inputs: Sequence[Value] = (),
        mutates: bool = False,
    ) -> None:  # fmt: skip
        args, kwargs = frozen
        op = ops.canonical(func)
        call = (op, func, args, kwargs)
        layer = (
            as_layer(*call)
            or as_sum(*call, self.makers)
            or as_biased(*call, self.makers)
            or as_move(*call)
            or as_limit(*call)
        )
        if layer is not None:
            op, func, args, kwargs = layer
            inputs, mutates = (), False
        if op in ops.LINEAR_OPS and not isinstance(args[0] if args else kwargs["input"], Value):
            op = ops.LIVE_WEIGHTS
        if any(value.edge is not None and value.edge.node.name() == _NO_GRADIENT for value in outputs):
            self.opaque = self.opaque or f"{op} in {self._module() or 'the model itself'}"
        node = Node(op, func, args, kwargs, tuple(outputs), self._module(), mutates, tuple(inputs), self.off)
        self.cut = self.cut or self.off
        self.odd = self.odd or (op == "batch_norm" and has_odd_layout(node.inputs[0].tensor))
        self.makers.update(dict.fromkeys(outputs, node))
        self.nodes.append(node)

    def _freeze(self, call: Any) -> tuple[Any, list[Value]]:
        """Replace each live tensor in a call by its Value; returns the call and these Values."""
        found: list[Value] = []

        def freeze(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            value = self.values.get(id(leaf))
            if value is None:
                self._reject_unseen(leaf)
                return leaf if leaf.layout is torch.strided else leaf.to_dense()  # sparse weights
            found.append(self.current(leaf))
            return found[-1]

        return map_leaves(call, freeze), found

    def current(self, tensor: Tensor) -> Value:
        """The value of a live tensor. One that a custom autograd function returned has its edge only now."""
        value = self.values[id(tensor)]
        if value.edge is None and tensor.requires_grad:
            value.edge, value.hidden = get_gradient_edge(tensor), False
        return value

    def _mutation(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], frozen: tuple[Any, Any]
    ) -> Any:
        """An operation that overwrites its first argument, and everything that shares memory with it."""
        target: Tensor = args[0] if args else kwargs["input"]
        seen = [reference() for reference in self.by_storage.get(storage(target), [])]
        aliases = [t for t in seen if t is not None and id(t) in self.values]
        self._copy_kept(aliases)
        for t in aliases:  # keep the old values
            value = self.values[id(t)]
            if isinstance(value.kept, Tensor) and storage(value.kept) == storage(target):
                self._keep(value)
        before = self._now(target)
        base = target._base if target._is_view() else None
        base_before = None if base is None else self._now(base)
        if not isinstance(before, Value):  # a constant buffer becomes live
            frozen = map_leaves(frozen, lambda leaf: before if leaf is target else leaf)

        if base is not None and isinstance(before, Value):
            # An in-place operation on a view drops the old view from autograd's graph; writing back a copy keeps it.
            scratch = target.clone()
            func(*map_leaves(args, lambda leaf: scratch if leaf is target else leaf), **kwargs)
            target.copy_(scratch)
            result: Any = target
        else:
            result = func(*args, **kwargs)

        self._write(func, frozen, [self.admit(target)], mutates=True)
        if base is not None:
            self._refresh_base(target, base, base_before)
        owner = target if base is None else base
        for t in overlapping([t for t in aliases if t is not target and t is not base], target):
            geometry = (t.size(), t.stride(), t.storage_offset() - owner.storage_offset())
            frozen = ((self.values[id(owner)], *geometry), {})
            self._write(torch.as_strided, frozen, [self.admit(t)])
        return result

    def _copy_kept(self, tensors: Sequence[Tensor]) -> None:
        """Copy the outputs of the layers to keep, as an operation of its own, before they are overwritten."""
        for t in tensors if self.keep else ():
            value = self.values[id(t)]
            layer = self.makers[value].module if value in self.makers else ""
            if any(layer == name or layer.startswith(f"{name}.") for name in self.keep) and value not in self.copies:
                self.copies[value] = self.__torch_function__(Tensor.clone, (), (t,))

    def live(self) -> dict[Value, Tensor]:
        """The tensor of each value that was not overwritten, and the copies of kept ones."""
        return {self.values[key]: t for key, t in self.alive.items() if key in self.values} | self.copies

    def _keep(self, value: Value) -> None:
        """Keep a value whose memory is about to be overwritten."""
        maker = self.makers.get(value)
        if maker is not None and maker.op in ops.RECOMPUTED:
            value.kept = _again(maker)
        else:
            value.kept = value.tensor.clone()

    def _now(self, tensor: Tensor) -> Value | Tensor:
        """The current content of a tensor: its Value if it is live, otherwise a copy."""
        return self.values[id(tensor)] if id(tensor) in self.values else tensor.detach().clone()

    def _refresh_base(self, view: Tensor, base: Tensor, before: Any) -> None:
        """After a write to a view, its base has a new value: the old one with the view pasted in.

        If the view is all of the base, nothing of the old value is left, so it has no further use.
        """
        written = self.values[id(view)]
        whole = view.numel() == base.numel() and dense(view) and dense(base)
        if whole and view.is_contiguous() and base.is_contiguous():
            self._write(Tensor.reshape, ((written, tuple(base.shape)), {}), [self.admit(base)])
            return
        geometry = (view.size(), view.stride(), view.storage_offset() - base.storage_offset())
        args = (base.detach() if whole else before, written, *geometry)
        self._write(torch.as_strided_scatter, (args, {}), [self.admit(base)])

    def _reject_unseen(self, tensor: Tensor) -> None:
        """Refuse a tensor that was computed from the image unseen: it must not be taken for a constant."""
        if id(tensor) not in self.constants and id(tensor) not in self.values and self.reaches_image(tensor):
            raise CaptureError(
                f"a value that reaches {self._module() or 'the model'} was computed from the image unrecorded "
                "(in a scripted part or another thread); write that part as a plain nn.Module"
            )

    def reaches_image(self, tensor: Tensor) -> bool:
        """Whether torch has a gradient of a tensor at the image."""
        return tensor.grad_fn is not None and _depends(tensor.grad_fn, self.image_node)

    def _module(self) -> str:
        """Dotted name of the innermost module whose forward is running, found on the stack without hooks."""
        return running(self.names)


def running(names: Mapping[int, str]) -> str:
    """Dotted name of the innermost module whose forward is running; `names` are by the modules' ids."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and code.co_varnames[0] == "self" and code.co_filename != __file__:
            owner = id(frame.f_locals.get("self"))
            if owner in names:
                return names[owner]
        frame = frame.f_back
    return ""


def computes_itself(tensor: Tensor) -> bool:
    """Whether a tensor is of a class that replaces torch's operations by its own (masked, distributed, nested)."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def _again(maker: Node) -> Callable[[], Tensor]:
    """Runs an operation again: how to get its output back."""
    return functools.partial(recomputed, maker.func, maker.args, maker.kwargs, maker.mutates)


def _depends(node: Any, ancestor: Any) -> bool:
    seen, todo = set(), [node]
    while todo:
        current = todo.pop()
        if current is ancestor:
            return True
        if current is not None and current not in seen:
            seen.add(current)
            todo.extend(following for following, _ in current.next_functions)
    return False
