"""Records one forward pass of an unmodified network.

    >>> tape = record(model, images)
    >>> [node.op for node in tape.nodes]
    ['conv2d', 'batch_norm', 'relu', 'adaptive_avg_pool2d', 'flatten', 'linear']

Nothing is attached to the model: no hook, no attribute, no gradient.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from classlens.core import ops
from classlens.core.capture.reading import Reading, inside_of
from classlens.core.capture.recorder import Recorder
from classlens.core.capture.tape import Node, Tape, Value, leaves, value_of
from classlens.errors import CaptureError, ModelError
from classlens.machine import onednn_errors

Picker = str | int | Callable[[Any], Tensor] | Reading | None


@runtime_checkable
class Asking(Protocol):
    """Decides what to read once the result of the network is known."""

    @property
    def layers(self) -> frozenset[str]:
        """The layers that it will look into, as far as it knows."""
        ...

    def bind(self, result: Any, recorder: Recorder) -> Reading:
        """What to read in this forward pass, and in others like it."""
        ...


def record(model: nn.Module, images: Tensor, output: Picker | Asking = None) -> Tape:
    """Run `model(images)` once and record every operation.

    `output` selects the logits if the model returns a dict or a tuple: a key, an index, or a function. Or it is a
    `Reading`, or decides for one when the result is known.
    The recorded output equals the plain forward pass bit for bit; otherwise a CaptureError is raised. This is checked
    once for each model and input shape.
    """
    model = unwrap(model)
    modules = tuple(model.named_modules())  # once: walking the tree takes a millisecond
    _check_modes(modules)
    with _recording_state(modules, images):
        recorder = Recorder(modules, _layers(output))
        image = _as_grad_input(images)
        value = recorder.admit(image)
        with recorder:
            result = _call(model, image)
        picker: Picker = output.bind(result, recorder) if isinstance(output, Asking) else output
        with recorder:
            logits = _selected(result, picker, recorder)
        if id(logits) not in recorder.values:
            raise CaptureError("the model's output does not depend on the image, so there is nothing to explain")
        tape = Tape(_prune(recorder.nodes, recorder.values[id(logits)]), value, recorder.values[id(logits)])
        _verify(model, images, picker, tape, recorder.switched)
    return tape


def _layers(output: Picker | Asking) -> frozenset[str]:
    found: frozenset[str] = getattr(output, "layers", frozenset())
    return found


def _selected(result: Any, output: Picker, recorder: Recorder | None) -> Tensor:
    if not isinstance(output, Reading):
        return pick_output(result, output)
    whole = result if output.output is None else pick_part(result, output.output)
    return output.read(whole, inside_of(recorder) if recorder is not None else _nothing_inside)


def _nothing_inside(layer: str) -> list[Tensor]:
    raise CaptureError(f"the layer {layer!r} cannot be read without recording")


def outputs_at(model: nn.Module, images: Tensor, output: Picker) -> Tensor:
    """The selected output at other images, with gradients if the caller enabled them; nothing is kept."""
    model = unwrap(model)
    if not _layers(output):
        with GradientsStayOn():
            return _selected(_call(model, images), output, None)
    recorder = Recorder(tuple(model.named_modules()), _layers(output))
    recorder.admit(images)
    with recorder:
        return _selected(_call(model, images), output, recorder)


def record_logits(model: nn.Module, images: Tensor, output: Picker | Asking = None) -> Tape:
    """Like `record`, without the nodes: the image and the logits, for methods that need nothing else.

    The first pass for a model and kind of input is recorded and checked in full; later passes skip the recording.
    """
    model = unwrap(model)
    if isinstance(output, Asking) or _layers(output):
        return record(model, images, output)
    known = _recorded(model).get(_kind(images, output))
    if known is None:
        return record(model, images, output)
    counted, switched = known
    modules = tuple(model.named_modules())
    _check_modes(modules)
    with _recording_state(modules, images), GradientsStayOn() if switched else contextlib.nullcontext():
        image = _as_grad_input(images)
        logits = _selected(_call(model, image), output, None)
    return Tape((), value_of(image), value_of(logits), counted)


def _as_grad_input(images: Tensor) -> Tensor:
    """The images as a non-leaf tensor with gradients, so that a network may write into its input."""
    return images.detach().requires_grad_().clone()


class GradientsStayOn(TorchFunctionMode):
    """Ignores `torch.no_grad()` inside a network, as the recorder does."""

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
    """Select the logits from the return value of a model.

    >>> pick_output({"logits": torch.zeros(1, 10), "aux": torch.zeros(1, 10)}, None).shape
    torch.Size([1, 10])
    """
    if output is not None:
        picked = pick_part(result, output)
    elif isinstance(result, Tensor):
        picked = result
    elif isinstance(result, dict) and isinstance(result.get("logits"), Tensor):
        picked = result["logits"]
    else:
        tensors = [leaf for leaf in leaves(result) if isinstance(leaf, Tensor)]
        if len(tensors) != 1:
            raise ModelError(f"the model returns {described(result)}; select the logits with output=")
        picked = tensors[0]
    if not isinstance(picked, Tensor):
        raise ModelError(f"output={output!r} gives a {type(picked).__name__}, not a tensor of logits")
    return picked


def pick_part(result: Any, output: Picker) -> Any:
    """The part of a result that a key, an index or a function selects."""
    if callable(output):
        return output(result)
    try:
        return result[output]
    except (KeyError, IndexError, TypeError) as error:
        raise ModelError(f"the model returns no output={output!r}; it returns {described(result)}") from error


def described(result: Any) -> str:
    """What a model returns, for messages: "a dict of 'out': tensor (1, 21, 64, 64)"."""

    def name(item: Any) -> str:
        return f"tensor {tuple(item.shape)}" if isinstance(item, Tensor) else type(item).__name__

    if isinstance(result, dict):
        return "a dict of " + ", ".join(f"{key!r}: {name(item)}" for key, item in result.items())
    if isinstance(result, tuple | list):
        return f"a {type(result).__name__} of " + ", ".join(f"{i}: {name(item)}" for i, item in enumerate(result))
    return f"a {name(result)}"


def _call(model: nn.Module, images: Tensor) -> Any:
    """Run the model; any exception of the network becomes a one-line error."""
    try:
        with onednn_errors():
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
        raise ModelError(f"{which} in training mode, so its output is not repeatable; call model.eval() first")
    if any(p is not None and p.is_inference() for _, module in modules for p in module._parameters.values()):
        raise ModelError("the model's weights were made in inference mode and have no gradients; load them outside it")
    if any(isinstance(module, torch.jit.ScriptModule) for _, module in modules):
        raise CaptureError("a scripted model hides its operations; explain the nn.Module it was made from")


@contextlib.contextmanager
def _recording_state(modules: Sequence[tuple[str, nn.Module]], images: Tensor) -> Iterator[None]:
    """Enable gradients whatever the caller's mode, run compiled parts uncompiled, and restore the random state."""
    compiled = any(_is_compiled(m) or m._compiled_call_impl is not None for _, m in modules)
    devices = [images.device] if images.is_cuda else []
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.random.fork_rng(devices=devices))
        if compiled:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


# What was recorded and checked: for each kind of input, the operations of its forward pass, and whether it switches
# gradients off (a mode that keeps them on costs as much as the rest of record_logits).
_Known = dict[Any, tuple[dict[str, int], bool]]
_verified: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()
_verified_lock = threading.Lock()


def _recorded(model: nn.Module) -> _Known:
    with _verified_lock:
        return _verified.setdefault(model, {})


def _kind(images: Tensor, output: Any) -> Any:
    read = tuple((p.path, p.layer, p.call) for p in output.picks) if isinstance(output, Reading) else output
    return images.shape, images.dtype, images.device, read


def _verify(model: nn.Module, images: Tensor, output: Picker, tape: Tape, switched: bool) -> None:
    """Compare with a plain forward pass, once for each model and kind of input."""
    done, key, recorded = _recorded(model), _kind(images, output), tape.logits
    if key in done:
        return
    for grad in (False, True):  # some fused kernels run only in one of the two modes
        with torch.set_grad_enabled(grad):
            plain = outputs_at(model, images.detach().clone(), output)
        if torch.equal(plain, recorded.detach()) or torch.isnan(plain).any():
            done[key] = tape.ops(), switched
            return
    distance = (plain - recorded).abs().max().item()
    raise CaptureError(
        f"two forward passes of the model differ by {distance:.1e}: it is random or keeps state between calls, "
        "so one pass cannot be explained; switch its randomness off"
    )


def _prune(nodes: list[Node], output: Value) -> tuple[Node, ...]:
    """Keep only nodes that the output depends on, so that use counts are correct."""
    needed, kept = {output}, []
    for node in reversed(nodes):
        if needed.intersection(node.outputs):
            needed.update(node.inputs)
            kept.append(node)
    return tuple(reversed(kept))
