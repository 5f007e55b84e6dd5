"""The tape: what one forward pass of an unmodified network did.

    >>> tape = record(model, images)
    >>> [node.op for node in tape.nodes]
    ['conv2d', 'batch_norm', 'relu', 'adaptive_avg_pool2d', 'flatten', 'linear']

One ordinary forward runs under a `TorchFunctionMode`, which sees every operation a network can call, functional
or not. Nothing is attached to the model: no hook, no attribute, no gradient.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from classlens.capture import ops
from classlens.errors import CaptureError, ModelError

Picker = str | int | Callable[[Any], Tensor] | None


# What these gave is made again where it was overwritten and is asked for: it rarely is, and a copy costs as much.
_MADE_AGAIN = frozenset(("batch_norm", "add"))


@dataclass(eq=False, slots=True)
class Value:
    """A tensor that depends on the image, as it was when it was made, also if it was overwritten later."""

    kept: Tensor | Callable[[], Tensor]  # the tensor, or how to make it again
    edge: GradientEdge | None  # where autograd meets this value; None: no gradient flows here
    shape: torch.Size

    @property
    def tensor(self) -> Tensor:
        if not isinstance(self.kept, Tensor):
            with torch.no_grad():
                self.kept = self.kept()
        return self.kept


@dataclass(eq=False, slots=True)
class Node:
    """One operation: its canonical name, the call, and the values that went in and came out."""

    op: str
    func: Callable[..., Any]
    args: tuple[Any, ...]  # as called, with each live tensor replaced by its Value
    kwargs: dict[str, Any]
    outputs: tuple[Value, ...]
    module: str  # dotted name of the module whose forward made the call
    mutates: bool = False
    inputs: tuple[Value, ...] = ()  # the Values among the arguments; looked up where they are not given

    def __post_init__(self) -> None:
        if not self.inputs:
            self.inputs = tuple(leaf for leaf in _leaves((self.args, self.kwargs)) if isinstance(leaf, Value))

    @property
    def constants(self) -> tuple[Tensor, ...]:
        """The tensors among its arguments that do not depend on the image."""
        return tuple(leaf for leaf in _leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor))

    @property
    def where(self) -> str:
        """For messages: `relu in features.3`."""
        return f"{self.op} in {self.module or 'the model itself'}"

    def arguments(self) -> dict[str, Any]:
        """Arguments by name; live ones are Values."""
        return ops.arguments(self.op, self.func, self.args, self.kwargs)

    def call(self, *inputs: Tensor, constants: Callable[[Tensor], Tensor] | None = None) -> tuple[Tensor, ...]:
        """Run the operation again on other inputs, one for each of `inputs`; gives its tensor outputs.

        `constants` changes the floating-point tensors among its other arguments.
        """
        fresh = iter(inputs)

        def fill(leaf: Any) -> Any:
            if isinstance(leaf, Value):
                return next(fresh)
            changes = constants is not None and isinstance(leaf, Tensor) and leaf.is_floating_point()
            return constants(leaf.detach()) if changes and constants else leaf

        args, kwargs = _map((self.args, self.kwargs), fill)
        return _run(self.func, args, kwargs, self.mutates)


def _run(func: Callable[..., Any], args: Any, kwargs: Any, mutates: bool) -> tuple[Tensor, ...]:
    if mutates:  # it writes into its first argument, which belongs to the caller or to the record
        args = (args[0].clone(), *args[1:])
    result = func(*args, **kwargs)
    return tuple(leaf for leaf in _leaves(args[0] if mutates else result) if isinstance(leaf, Tensor))


def _made_again(func: Callable[..., Any], args: Any, kwargs: Any, mutates: bool) -> Tensor:
    """The only output of a call, run again on the values that went in.

    (Not a Node's method: a value that knew its node, which knows its values, would outlive its tape.)
    """
    args, kwargs = _map((args, kwargs), lambda leaf: leaf.tensor if isinstance(leaf, Value) else leaf)
    (output,) = _run(func, args, kwargs, mutates)
    return output


@dataclass(eq=False)
class Tape:
    """Nodes in the order of the forward pass, pruned to those that the output depends on."""

    nodes: tuple[Node, ...]
    image: Value  # the network's input
    output: Value  # the logits, picked from whatever the model returns
    counted: dict[str, int] | None = None  # operations, where they were not written down
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

    def gradients(self, cotangents: Tensor, values: Sequence[Value], keep: bool = True) -> dict[Value, Tensor]:
        """The K scores with gradient `cotangents` (K, *logits.shape) at the logits: their gradient at each value.

        One autograd backward a score gives all of them, {value: (K, *value.shape)}; no layer is run again. A value
        the score does not depend on gets zeros. An edge gives the sum over all uses of a value. `keep=False`: nobody
        asks again, so autograd's memory is given back on the way, which is quicker.
        """
        wanted = [value for value in dict.fromkeys(values) if value.edge is not None]
        last = len(cotangents) - 1
        rows = [_autograd(self.output, c, wanted, keep or i < last) for i, c in enumerate(cotangents) if wanted]
        found = {
            value: _stacked([torch.zeros_like(value.tensor) if g is None else g for g in column])
            for value, column in zip(wanted, zip(*rows, strict=True), strict=True)
        }
        return {
            value: found[value] if value in found else value.tensor.new_zeros(len(cotangents), *value.shape)
            for value in values
        }


def _stacked(rows: list[Tensor]) -> Tensor:
    return torch.stack(rows) if len(rows) > 1 else rows[0][None]


def _autograd(output: Value, cotangent: Tensor, wanted: Sequence[Value], keep: bool) -> tuple[Tensor | None, ...]:
    if output.edge is None:
        raise CaptureError("the model's output has no gradient (a part of it is detached); gradients are needed here")
    edges: Any = [value.edge for value in wanted]
    try:
        return torch.autograd.grad(output.edge, edges, cotangent, retain_graph=keep, allow_unused=True)  # type: ignore
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise CaptureError(
            "the model overwrites a value that its own gradient needs (an in-place operation), so it has no "
            "gradients; write that operation without the underscore or inplace=True"
        ) from error


def record(model: nn.Module, images: Tensor, output: Picker = None) -> Tape:
    """Run `model(images)` once and write down what it does.

    `output` picks the logits when the model returns a dict or a tuple: a key, an index, or a function.
    The recorded output equals the plain forward bit for bit, or a CaptureError says so (checked once for each
    model and input shape).
    """
    model = unwrap(model)
    modules = tuple(model.named_modules())  # once: walking the tree takes a millisecond
    _check_modes(modules)
    with _as_found(modules, images):
        recorder = _Recorder(modules)
        image = _taken_in(images)
        value = recorder.admit(image)
        with recorder:
            logits = pick_output(_call(model, image), output)
        if id(logits) not in recorder.values:
            raise CaptureError("the model's output does not depend on the image, so there is nothing to explain")
        tape = Tape(_prune(recorder.nodes, recorder.values[id(logits)]), value, recorder.values[id(logits)])
        _verify(model, images, output, tape, recorder.switched)
    return tape


def glance(model: nn.Module, images: Tensor, output: Picker = None) -> Tape:
    """Like `record`, without the nodes: the image and the logits, for methods that ask for nothing else.

    The first pass of a model with such images is recorded and checked; later ones are spared the writing.
    """
    model = unwrap(model)
    known = _recorded(model).get(_kind(images, output))
    if known is None:
        return record(model, images, output)
    counted, switched = known
    modules = tuple(model.named_modules())
    _check_modes(modules)
    with _as_found(modules, images), GradientsStayOn() if switched else contextlib.nullcontext():
        image = _taken_in(images)
        logits = pick_output(_call(model, image), output)
    return Tape((), _value(image), _value(logits), counted)


def _taken_in(images: Tensor) -> Tensor:
    """The images with gradients, and no leaf, so that a network may write into its input."""
    return images.detach().requires_grad_().clone()


class GradientsStayOn(TorchFunctionMode):
    """Passes over `torch.no_grad()` inside a network, as the record does."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return None if ops.is_grad_switch(func) else func(*args, **(kwargs or {}))


def unwrap(model: nn.Module) -> nn.Module:
    """The network inside DataParallel, DistributedDataParallel and torch.compile wrappers."""
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif _is_compiled(model):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def _is_compiled(model: nn.Module) -> bool:
    # By name: asking for the class would import the compiler, which takes a second.
    return type(model).__name__ == "OptimizedModule" and hasattr(model, "_orig_mod")


def pick_output(result: Any, output: Picker) -> Tensor:
    """The logits in what a model returns.

    >>> pick_output({"logits": torch.zeros(1, 10), "aux": torch.zeros(1, 10)}, None).shape
    torch.Size([1, 10])
    """
    if callable(output):
        picked = output(result)
    elif output is not None:
        try:
            picked = result[output]
        except (KeyError, IndexError, TypeError) as error:
            has = _describe(result)
            raise ModelError(f"output={output!r} is not in what the model returns; it has {has}") from error
    elif isinstance(result, Tensor):
        picked = result
    elif isinstance(result, dict) and isinstance(result.get("logits"), Tensor):
        picked = result["logits"]
    else:
        tensors = [leaf for leaf in _leaves(result) if isinstance(leaf, Tensor)]
        if len(tensors) != 1:
            raise ModelError(f"the model returns {_describe(result)}; say which are the logits with output=")
        picked = tensors[0]
    if not isinstance(picked, Tensor):
        raise ModelError(f"output={output!r} gives a {type(picked).__name__}, not a tensor of logits")
    return picked


def _describe(result: Any) -> str:
    def name(item: Any) -> str:
        return f"tensor {tuple(item.shape)}" if isinstance(item, Tensor) else type(item).__name__

    if isinstance(result, dict):
        return "a dict of " + ", ".join(f"{key!r}: {name(item)}" for key, item in result.items())
    if isinstance(result, tuple | list):
        return f"a {type(result).__name__} of " + ", ".join(f"{i}: {name(item)}" for i, item in enumerate(result))
    return f"a {name(result)}"


def _call(model: nn.Module, images: Tensor) -> Any:
    """The model's forward; what a user's network or a wrong input raises becomes one line."""
    try:
        return model(images)
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError, AttributeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"the model cannot run on input of shape {tuple(images.shape)} {str(images.dtype)[6:]}: {reason}"
        ) from error


def _check_modes(modules: Sequence[tuple[str, nn.Module]]) -> None:
    training = [name for name, module in modules if module.training]
    if training:
        which = "the model is" if "" in training else f"part of the model ({training[0]}) is"
        raise ModelError(f"{which} in training mode, where its answer is not repeatable; call model.eval() first")
    if any(p is not None and p.is_inference() for _, module in modules for p in module._parameters.values()):
        raise ModelError("the model's weights were made in inference mode and have no gradients; load them outside it")
    if any(isinstance(module, torch.jit.ScriptModule) for _, module in modules):
        raise CaptureError("a scripted model hides its operations; explain the nn.Module it was made from")


@contextlib.contextmanager
def _as_found(modules: Sequence[tuple[str, nn.Module]], images: Tensor) -> Iterator[None]:
    """Gradients on whatever the caller's mode, compiled parts run as written, random state put back."""
    compiled = any(_is_compiled(m) or m._compiled_call_impl is not None for _, m in modules)
    devices = [images.device] if images.is_cuda else []
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.random.fork_rng(devices=devices))
        if compiled:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


# What was recorded and checked: for each kind of input the operations of its forward pass, and whether that switches
# gradients off (a mode that keeps them on costs as much as the rest of a glance).
_Known = dict[Any, tuple[dict[str, int], bool]]
_verified: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()
_verified_lock = threading.Lock()


def _recorded(model: nn.Module) -> _Known:
    with _verified_lock:
        return _verified.setdefault(model, {})


def _kind(images: Tensor, output: Picker) -> Any:
    return images.shape, images.dtype, images.device, output


def _verify(model: nn.Module, images: Tensor, output: Picker, tape: Tape, switched: bool) -> None:
    """Compare with a plain forward, once for each model and kind of input."""
    done, key, recorded = _recorded(model), _kind(images, output), tape.logits
    if key in done:
        return
    for grad in (False, True):  # some fused kernels serve only one of the two
        with torch.set_grad_enabled(grad):
            plain = pick_output(_call(model, images.detach().clone()), output)
        if torch.equal(plain, recorded.detach()) or torch.isnan(plain).any():
            done[key] = tape.ops(), switched
            return
    distance = (plain - recorded).abs().max().item()
    raise CaptureError(
        f"two forward passes of the model differ by {distance:.1e}: it is random or keeps state between calls, "
        "so one pass cannot be explained; switch its randomness off"
    )


def _value(tensor: Tensor) -> Value:
    return Value(tensor.detach(), get_gradient_edge(tensor) if tensor.requires_grad else None, tensor.shape)


def _prune(nodes: list[Node], output: Value) -> tuple[Node, ...]:
    """Only what the output depends on, so that counts of uses mean something."""
    needed, kept = {output}, []
    for node in reversed(nodes):
        if needed.intersection(node.outputs):
            needed.update(node.inputs)
            kept.append(node)
    return tuple(reversed(kept))


class _Recorder(TorchFunctionMode):
    """Sees each operation of a forward pass and writes a Node for those that depend on the image."""

    def __init__(self, modules: Sequence[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.values: dict[int, Value] = {}  # id of a live tensor -> what it holds now
        self.alive: list[Tensor] = []  # every tensor seen: a freed one would give its id to another
        self.by_storage: dict[int, list[Tensor]] = {}
        self.makers: dict[Value, Node] = {}
        self.constants: set[int] = set()
        self.names: dict[int, str] = {id(module): name for name, module in modules}
        self.image_node: Any = None
        self.switched = False  # the network tried to switch gradients off

    def admit(self, tensor: Tensor) -> Value:
        """Note a live tensor as it is now."""
        value = _value(tensor)
        if self.image_node is None and value.edge is not None:
            self.image_node = value.edge.node
        if id(tensor) not in self.values:
            self.alive.append(tensor)
            self.by_storage.setdefault(_storage(tensor), []).append(tensor)
        self.values[id(tensor)] = value
        return value

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in ops.ASKS:
            return func(*args, **kwargs)
        if ops.is_grad_switch(func):
            self.switched = True
            return None
        frozen, inputs = self._freeze((args, kwargs))
        if not inputs:
            return self._constant(func(*args, **kwargs))
        name: str = getattr(func, "__name__", "")
        if name in ops.LEAVES_TORCH:
            raise CaptureError(
                f"{self._module() or 'the model'} takes a tensor out of torch ({name}), where it cannot be followed; "
                "write that step with torch operations"
            )
        if name in ops.MAKES_CONSTANT:
            return self._constant(func(*args, **kwargs))
        if ops.is_mutating(func, args, kwargs):
            return self._mutation(func, args, kwargs, frozen)
        if isinstance(kwargs.get("out"), Tensor):
            raise CaptureError(f"{self._module() or 'the model'} writes with out=, which cannot be followed")
        result = func(*args, **kwargs)
        made = [leaf for leaf in _leaves(result) if isinstance(leaf, Tensor)]
        # A call that hands back one of its arguments (contiguous, to, eval-mode dropout) did nothing.
        if made and not all(id(t) in self.values for t in made):
            self._write(func, frozen, [self.admit(t) for t in made], inputs)
        return result

    def _constant(self, result: Any) -> Any:
        for leaf in _leaves(result):
            if isinstance(leaf, Tensor) and id(leaf) not in self.constants:
                self.constants.add(id(leaf))
                self.alive.append(leaf)
        return result

    def _write(
        self, func: Callable[..., Any], frozen: Any, outputs: Sequence[Value], inputs: Sequence[Value] = (),
        mutates: bool = False,
    ) -> None:  # fmt: skip
        args, kwargs = frozen
        node = Node(ops.canonical(func), func, args, kwargs, tuple(outputs), self._module(), mutates, tuple(inputs))
        self.makers.update(dict.fromkeys(outputs, node))
        self.nodes.append(node)

    def _freeze(self, call: Any) -> tuple[Any, list[Value]]:
        """The call with each live tensor replaced by its Value, and these Values."""
        found: list[Value] = []

        def freeze(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            value = self.values.get(id(leaf))
            if value is None:
                self._reject_unseen(leaf)
                return leaf
            if value.edge is None and leaf.requires_grad:  # made inside a custom autograd function, wired up after it
                value.edge = get_gradient_edge(leaf)
            found.append(value)
            return value

        return _map(call, freeze), found

    def _mutation(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], frozen: tuple[Any, Any]
    ) -> Any:
        """An operation that overwrites its first argument, and with it everything that shares its memory."""
        target: Tensor = args[0] if args else kwargs["input"]
        aliases = [t for t in self.by_storage.get(_storage(target), []) if id(t) in self.values]
        for t in aliases:  # keep what was there
            value = self.values[id(t)]
            if isinstance(value.kept, Tensor) and _storage(value.kept) == _storage(target):
                self._keep(value)
        before = self._now(target)
        base = target._base if target._is_view() else None
        base_before = None if base is None else self._now(base)
        if not isinstance(before, Value):  # a constant buffer becomes live
            frozen = _map(frozen, lambda leaf: before if leaf is target else leaf)

        if base is not None and isinstance(before, Value):
            # In place on a view, autograd drops the old view from its graph; on a copy, written back, it stays.
            scratch = target.clone()
            func(*_map(args, lambda leaf: scratch if leaf is target else leaf), **kwargs)
            target.copy_(scratch)
            result: Any = target
        else:
            result = func(*args, **kwargs)

        self._write(func, frozen, [self.admit(target)], mutates=True)
        if base is not None:
            self._refresh_base(target, base, base_before)
        owner = target if base is None else base
        for t in _overlapping([t for t in aliases if t is not target and t is not base], target):
            geometry = (t.size(), t.stride(), t.storage_offset() - owner.storage_offset())
            frozen = ((self.values[id(owner)], *geometry), {})
            self._write(torch.as_strided, frozen, [self.admit(t)])
        return result

    def _keep(self, value: Value) -> None:
        """Keep a value whose memory is about to hold something else."""
        maker = self.makers.get(value)
        if maker is not None and maker.op in _MADE_AGAIN:
            value.kept = functools.partial(_made_again, maker.func, maker.args, maker.kwargs, maker.mutates)
        else:
            value.kept = value.tensor.clone()

    def _now(self, tensor: Tensor) -> Value | Tensor:
        """What a tensor holds: its value if it is live, else a copy."""
        return self.values[id(tensor)] if id(tensor) in self.values else tensor.detach().clone()

    def _refresh_base(self, view: Tensor, base: Tensor, before: Any) -> None:
        """The tensor under a view that was written to holds a new value: the old one with the view pasted in."""
        geometry = (view.size(), view.stride(), view.storage_offset() - base.storage_offset())
        args = (before, self.values[id(view)], *geometry)
        self._write(torch.as_strided_scatter, (args, {}), [self.admit(base)])

    def _reject_unseen(self, tensor: Tensor) -> None:
        """A tensor computed from the image by something this record did not see must not pass for a constant."""
        if tensor.grad_fn is None or id(tensor) in self.constants or id(tensor) in self.values:
            return
        if _depends(tensor.grad_fn, self.image_node):
            raise CaptureError(
                f"a value that reaches {self._module() or 'the model'} was computed from the image out of sight "
                "(in a scripted part or another thread); write that part as a plain nn.Module"
            )

    def _module(self) -> str:
        """Dotted name of the innermost module whose forward is running: found on the stack, nothing is hooked."""
        frame: Any = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code.co_argcount and code.co_varnames[0] == "self" and code.co_filename != __file__:
                owner = id(frame.f_locals.get("self"))
                if owner in self.names:
                    return self.names[owner]
            frame = frame.f_back
        return ""


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


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _overlapping(tensors: Sequence[Tensor], target: Tensor) -> list[Tensor]:
    """Those of some tensors on one storage that share an element with `target`."""
    if not tensors:  # nearly always, and the rest costs as much memory as the storage has
        return []
    covered = torch.zeros(target.untyped_storage().nbytes() // target.element_size(), dtype=torch.bool)

    def cover(tensor: Tensor) -> Tensor:
        return covered.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    cover(target).fill_(True)
    return [tensor for tensor in tensors if cover(tensor).any()]


# Each operation's arguments are searched several times, and most of them are such: asking for the type is quickest.
_ATOMS = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size))
_WHOLE = frozenset((Tensor, nn.Parameter, Value))


def _leaves(tree: Any) -> list[Any]:
    """What stands in nested tuples, lists, dicts and slices, without numbers, names and the like."""
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
            found.extend(_leaves(item))
    return found


def _map(tree: Any, change: Callable[[Any], Any]) -> Any:
    kind = type(tree)
    if kind in _ATOMS:
        return tree
    if kind in _WHOLE:
        return change(tree)
    if kind is tuple:  # nearly all calls have one of tensors and numbers, and a function call for each item adds up
        return tuple([item if type(item) in _ATOMS else _map(item, change) for item in tree])
    if isinstance(tree, tuple | list):
        items = [_map(item, change) for item in tree]
        return kind(*items) if hasattr(tree, "_fields") else kind(items)
    if isinstance(tree, dict):
        return {key: _map(item, change) for key, item in tree.items()} if tree else tree
    if isinstance(tree, slice):
        return slice(*(_map(item, change) for item in (tree.start, tree.stop, tree.step)))
    return change(tree)
