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
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from classlens.core.capture.checks import check_modules
from classlens.core.capture.modes import GradientsStayOn, has_hooks
from classlens.core.capture.precision import autocast_off, frees_weights, in_float32, low_precision
from classlens.core.capture.probabilities import Ending, WatchesEnding, looks_like_probabilities
from classlens.core.capture.reading import Reading, inside_of
from classlens.core.capture.recorder import LOW, Recorder
from classlens.core.capture.tape import Node, Tape, Value, as_output, leaves, value_of
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
    `Reading`, or decides for one when the result is known. Of a network that returns probabilities, the logits before
    its softmax or sigmoid are taken.
    The recorded output equals the plain forward pass bit for bit; otherwise a CaptureError is raised. This is checked
    once for each model and input shape.
    """
    model = unwrap(model)
    modules = tuple(model.named_modules())  # once: walking the tree takes a millisecond
    check_modules(modules)
    with _recording_state(modules, images) as state:
        float32 = bool(state.lower) or frees_weights(modules)
        recorder, logits, picker, ends = _pass(model, modules, images, output, float32)
        if recorder.cut and not recorder.reaches_image(logits):  # torch has no gradient at all
            recorder, logits, picker, ends = _pass(model, modules, images, output, float32, obeys=False)
        lower = state.lower or ("half precision in some parts" if recorder.low else "")
        if recorder.low:  # it computes in less than float32 although its weights do not show it
            float32 = True
            recorder, logits, picker, ends = _pass(model, modules, images, output, float32, recorder.obeys)
        if id(logits) not in recorder.values:
            raise CaptureError("the model's output does not depend on the image, so there is nothing to explain")
        found = as_output(recorder.current(logits), logits)
        kept, notes = _prune(recorder.nodes, found), _notes(lower, state.autocast, recorder.number, ends, logits)
        how = recorder.odd, recorder.obeys, ends
        tape = Tape(kept, recorder.image, found, None, float32, recorder.opaque, notes, *how)
        known = _Known(
            tape.ops(), recorder.switched, float32, lower, recorder.opaque, tape.sizes(), recorder.number, *how
        )
        _verify(model, images, picker, _kind(modules, images, picker), tape, known)
    return tape


def _pass(
    model: nn.Module, modules: Sequence[tuple[str, nn.Module]], images: Tensor, output: Picker | Asking, float32: bool,
    obeys: bool = True,
) -> tuple[Recorder, Tensor, Picker, str]:  # fmt: skip
    """One recorded forward pass: the recorder, the logits, how they were selected and what the network made of them."""
    recorder = Recorder(modules, _layers(output), obeys)
    image = _as_grad_input(images, float32)
    recorder.admit_image(image)
    with recorder, in_float32(float32, recorder.names):
        result = run_model(model, image)
    picker = output.bind(result, recorder) if isinstance(output, Asking) else output
    ending, recorder.ending = recorder.ending, Ending()  # a softmax that `output` calls is what the user asks for
    with recorder, in_float32(float32, recorder.names):
        selected = _selected(result, picker, recorder)
    logits, ends = ending.before(selected)
    return recorder, logits, picker, ends


def _layers(output: Picker | Asking) -> frozenset[str]:
    found: frozenset[str] = getattr(output, "layers", frozenset())
    return found


def _selected(result: Any, output: Picker, recorder: Recorder | None) -> Tensor:
    if not isinstance(output, Reading):
        return pick_output(result, output)
    whole = result if output.output is None else pick_part(result, output.output)
    return output.read(whole, inside_of(recorder))


def outputs_at(model: nn.Module, images: Tensor, output: Picker, like: Tape | _Known) -> Tensor:
    """The selected output at other images, with gradients if the caller enabled them; nothing is kept.

    `like` is the tape of an image, whose output it is.
    """
    if not _layers(output):
        with in_float32(like.float32):
            with WatchesEnding() if like.ends else contextlib.nullcontext() as watch:
                result = run_model(model, images)
            selected = _selected(result, output, None)
        return watch.ending.before(selected)[0] if watch else selected
    recorder = Recorder(tuple(model.named_modules()), _layers(output))
    (recorder.admit_image if images.requires_grad else recorder.admit)(images)
    with recorder, in_float32(like.float32, recorder.names):
        return _selected(run_model(model, images), output, recorder)


def logits_of(model: nn.Module, images: Tensor, output: Picker = None) -> Tensor:
    """The logits of a plain forward pass: those that `record` finds."""
    watch = WatchesEnding()
    with watch:
        result = model(images)
    return watch.ending.before(pick_output(result, output))[0]


def record_logits(model: nn.Module, images: Tensor, output: Picker | Asking = None) -> Tape:
    """Like `record`, without the nodes: the image and the logits, for methods that need nothing else.

    The first pass for a model and kind of input is recorded and checked in full; later passes skip the recording.
    """
    model = unwrap(model)
    if isinstance(output, Asking) or _layers(output):
        return record(model, images, output)
    modules = tuple(model.named_modules())
    known = _recorded(model).get(_kind(modules, images, output))
    if known is None:
        return record(model, images, output)
    check_modules(modules)
    with _recording_state(modules, images) as state:
        image = _as_grad_input(images, known.float32)
        stay_on = GradientsStayOn(known.obeys) if known.switched or has_hooks(modules) else contextlib.nullcontext()
        with stay_on:
            logits = outputs_at(model, image, output, known)
    return _without_nodes(image, logits, known, state.autocast)


def plain_logits(model: nn.Module, images: Tensor, output: Picker = None) -> Tape:
    """Like `record_logits`, without gradients: it needs far less memory, and serves to choose targets."""
    model = unwrap(model)
    modules = tuple(model.named_modules())
    known = _known(model, images[:1], output)
    check_modules(modules)
    image = _wide(images, known.float32).detach()
    with _recording_state(modules, images) as state, torch.no_grad():
        logits = outputs_at(model, image.clone(), output, known)
    return _without_nodes(image, logits, known, state.autocast)


def _without_nodes(image: Tensor, logits: Tensor, known: _Known, autocast: bool) -> Tape:
    return Tape(
        (), value_of(image), as_output(value_of(logits), logits), known.ops, known.float32, known.opaque,
        _notes(known.lower, autocast, known.number, known.ends, logits), known.odd, known.obeys, known.ends,
    )  # fmt: skip


def footprint(model: nn.Module, image: Tensor, output: Picker = None) -> tuple[int, int]:
    """The bytes of all values that a recorded forward pass keeps, and of the largest one; recorded at the first call.

    >>> footprint(model, torch.zeros(1, 3, 224, 224))
    (88486444, 4903296)
    """
    return _known(unwrap(model), image, output).sizes


def _known(model: nn.Module, images: Tensor, output: Picker) -> _Known:
    found, kind = _recorded(model), _kind(tuple(model.named_modules()), images, output)
    if kind not in found:
        record(model, images, output)
    return found[kind]


def _as_grad_input(images: Tensor, float32: bool) -> Tensor:
    """The images as a non-leaf tensor with gradients, so that a network may write into its input."""
    return _wide(images, float32).detach().requires_grad_().clone()


def _wide(images: Tensor, float32: bool) -> Tensor:
    return images.float() if float32 and images.dtype in LOW else images


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


def run_model(model: nn.Module, images: Tensor) -> Any:
    """Run the model; any exception of the network becomes a one-line error."""
    try:
        with onednn_errors():
            return model(images)
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError, AttributeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"the model cannot run on input of shape {tuple(images.shape)} {str(images.dtype)[6:]}: {reason}"
        ) from error


class _State(NamedTuple):
    """The circumstances of a forward pass."""

    lower: str  # the precision of the weights, if it is below float32
    autocast: bool  # the caller's autocast was on


@contextlib.contextmanager
def _recording_state(modules: Sequence[tuple[str, nn.Module]], images: Tensor) -> Iterator[_State]:
    """Enable gradients whatever the caller's mode, run compiled parts uncompiled, and restore the random state."""
    compiled = any(_is_compiled(m) or m._compiled_call_impl is not None for _, m in modules)
    devices = [images.device] if images.is_cuda else []
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.random.fork_rng(devices=devices))
        autocast = stack.enter_context(autocast_off(images.device))
        if compiled:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield _State(low_precision(modules), autocast)


class _Known(NamedTuple):
    """What was recorded and checked of a forward pass."""

    ops: dict[str, int]
    switched: bool  # it switches gradients off (a mode that keeps them on costs as much as the rest of record_logits)
    float32: bool
    lower: str
    opaque: str
    sizes: tuple[int, int]  # the bytes of all values, and of the largest one
    number: str  # a module that turns a value into a number of Python
    odd: bool  # a batch norm reads an odd memory layout
    obeys: bool  # `torch.no_grad()` inside it makes constants
    ends: str  # the softmax or sigmoid that it ends with


_ROUNDING = 64  # times the precision: as much as two orders of summation may differ
_KINDS = 32  # at most, for each model: every new shape and every new `output=` function makes another
_verified: weakref.WeakKeyDictionary[nn.Module, dict[Any, _Known]] = weakref.WeakKeyDictionary()
_verified_lock = threading.Lock()


def _recorded(model: nn.Module) -> dict[Any, _Known]:
    with _verified_lock:
        return _verified.setdefault(model, {})


def _kind(modules: Sequence[tuple[str, nn.Module]], images: Tensor, output: Any) -> Any:
    read = tuple((p.path, p.layer, p.call) for p in output.picks) if isinstance(output, Reading) else output
    return images.shape, images.dtype, images.device, read, low_precision(modules), frees_weights(modules)


def _remember(done: dict[Any, _Known], kind: Any, known: _Known) -> None:
    with _verified_lock:
        done[kind] = known
        while len(done) > _KINDS:
            del done[next(iter(done))]


def _verify(model: nn.Module, images: Tensor, output: Picker, kind: Any, tape: Tape, known: _Known) -> None:
    """Compare with a plain forward pass, once for each model and kind of input.

    They are equal bit by bit, unless a kernel that runs only without gradients rounds differently. A pass of the
    mirrored images goes before: a network that remembers its last input would otherwise be asked twice about one.
    """
    done, recorded = _recorded(model), tape.logits
    if kind in done:
        return
    for grad in (False, True):  # some fused kernels run only in one of the two modes
        with torch.set_grad_enabled(grad):
            _plain(model, images.flip(-1), output, tape)
            plain = _plain(model, images, output, tape)
        if torch.equal(plain, recorded.detach()) or torch.isnan(plain).any():
            _remember(done, kind, known)
            return
    distance = (plain - recorded).abs().max().item()
    rounding = _ROUNDING * torch.finfo(plain.dtype).eps * plain.abs().max().item()
    if distance <= rounding and torch.equal(plain, _plain(model, images, output, tape)):  # the same each time
        _remember(done, kind, known)
        return
    raise CaptureError(
        f"two forward passes of the model differ by {distance:.1e}: it is random or keeps state between calls, "
        "so one pass cannot be explained; switch its randomness off"
    )


def _plain(model: nn.Module, images: Tensor, output: Picker, tape: Tape) -> Tensor:
    return outputs_at(model, _wide(images, tape.float32).detach().clone(), output, tape)


def _notes(lower: str, autocast: bool, number: str, ends: str, logits: Tensor) -> tuple[str, ...]:
    """What the report says about precision, about what was not followed, and about probabilities."""
    own = lower or ("autocast" if autocast else "")
    precision = f"the model computes in {own}; logits and map were computed in float32, with its weights"
    fixed = f"{number} reads a value as a number of Python (item); the map takes that number as fixed"
    before = f"the model returns probabilities; explained are the logits that its {ends} reads"
    one = "the explained output adds up to 1 like probabilities, flat near 0 and 1; select logits with output="
    said = [(own, precision), (number, fixed), (ends, before), (looks_like_probabilities(logits), one)]
    return tuple(note for given, note in said if given)


def home(model: nn.Module, images: Tensor) -> tuple[torch.device, torch.dtype]:
    """The device and precision of a network: those of its first floating-point weight."""
    for weight in model.parameters():
        if weight.is_floating_point():
            return weight.device, weight.dtype
    return images.device, images.dtype


def placed(model: nn.Module, images: Tensor) -> Tensor:
    """Images on the device of a network, in the precision in which it is explained: its own, but at least float32."""
    device, dtype = home(model, images)
    return images.to(device, torch.float32 if dtype in LOW else dtype)


def _prune(nodes: list[Node], output: Value) -> tuple[Node, ...]:
    """Keep only nodes that the output depends on, so that use counts are correct."""
    needed, kept = {output}, []
    for node in reversed(nodes):
        if needed.intersection(node.outputs):
            needed.update(node.inputs)
            kept.append(node)
    return tuple(reversed(kept))
