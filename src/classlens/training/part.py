"""The last part of a network, trained on features of the first part, which are computed once.

>>> part = LastPart(backbone, "blocks.8")
>>> features = part.features(images)        # what blocks.8 reads
>>> logits = part(features)                 # runs blocks.8 and what follows it

The network runs as it is written. Modules that end before the start return what they returned for empty images, without
computing anything, and the starting module reads the features instead. So the code between the modules needs no
analysis, and no architecture is known here. If the rest of the network also reads something else of the image (a skip
connection past the start), its logits are wrong: this is tested with noise, and refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from classlens.core.capture import Tape, Value, home, pick_output, record
from classlens.core.capture.reading import is_inside
from classlens.errors import ModelError
from classlens.models.network import input_size
from classlens.training.heads import Backbone

_ROUNDING = 1e-4  # of the largest logit: a batch may be computed in another order than single images

Returned = list[tuple[nn.Module, Any]]  # modules that end before the start, and what they return


class LastPart(nn.Module):
    """A network from the first call of one of its modules on; what runs before that is frozen."""

    def __init__(self, backbone: Backbone, start: str) -> None:
        super().__init__()
        self.loaded, self.head_path, self.model = backbone.loaded, start, backbone.model
        empty = torch.zeros(1, 3, *input_size(backbone.loaded.preprocess))
        self.empty = empty.to(home(self.model, empty)[0])
        reason = _problem(self.model, start, self.empty)
        if reason:
            names = ", ".join(_possible(self.model, self.empty))
            raise ModelError(f"--train-from {start}: {reason}; training can start from {names}")
        self.returned: dict[int, Returned] = {}  # by batch size
        with torch.enable_grad():
            features, before = _until(self.model, self.start, self.empty)
        self.before = tuple(module for module, _ in before)
        for parameter in _read_by(features, self.model):
            parameter.requires_grad_(False)

    @property
    def start(self) -> nn.Module:
        """The first module that is trained."""
        return self.model.get_submodule(self.head_path)

    def features(self, images: Tensor) -> Tensor:
        """(B,...): what the start reads."""
        with torch.no_grad():
            return _until(self.model, self.start, images)[0]

    def forward(self, features: Tensor) -> Tensor:
        """The logits, from features (B,...)."""
        images = self.empty.expand(len(features), -1, -1, -1)
        if len(images) not in self.returned:
            with torch.no_grad():
                self.returned[len(images)] = _until(self.model, self.start, images)[1]
        return _rest(self.model, self.start, images, self.returned[len(images)], features)

    def train(self, mode: bool = True) -> LastPart:
        """As for every module, but modules that run before the start stay in eval mode."""
        super().train(mode)
        for module in self.before:
            module.eval()
        return self


def _read_by(features: Tensor, model: nn.Module) -> list[nn.Parameter]:
    """The parameters on which features depend."""
    own = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not features.requires_grad or not own:
        return []
    found = torch.autograd.grad(features.sum(), own, allow_unused=True)
    return [parameter for parameter, gradient in zip(own, found, strict=True) if gradient is not None]


# ------------------------------------------------------------------------------------------------ before the start


class _Reached(Exception):
    """The start is called; its input is known, so nothing after it needs to run."""


def _until(model: nn.Module, start: nn.Module, images: Tensor) -> tuple[Tensor, Returned]:
    """What the start reads first, and what the outermost modules that end before it returned, in their order."""
    returned: Returned = []
    begun: list[int] = []  # for each running module, how many had returned when it began

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module is start:
            raise _Reached(_first_tensor(args, kwargs))
        begun.append(len(returned))

    def end(module: nn.Module, _: Any, output: Any) -> None:
        del returned[begun.pop() :]  # the modules inside it
        returned.append((module, output))

    hooks = [module.register_forward_pre_hook(begin, with_kwargs=True) for module in model.modules()]
    hooks += [module.register_forward_hook(end) for module in model.modules()]
    try:
        model(images)
    except _Reached as reached:
        return reached.args[0], returned
    finally:
        for hook in hooks:
            hook.remove()
    raise ModelError("the network does not run this module")


def _first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    values = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if not values or not values[0].is_floating_point():
        raise ModelError("this module reads no tensor of features")
    return values[0]


# ------------------------------------------------------------------------------------------------- after the start


def _rest(model: nn.Module, start: nn.Module, images: Tensor, returned: Returned, features: Tensor) -> Tensor:
    """The output of the network if the start reads these features."""
    with _replayed(returned, start, features):
        return pick_output(model(images), None)


@contextmanager
def _replayed(returned: Returned, start: nn.Module, features: Tensor) -> Iterator[None]:
    """Until the start is called, modules return what they returned; the start reads the features; then all run."""
    waiting: dict[nn.Module, deque[Any]] = {}
    for module, output in returned:
        waiting.setdefault(module, deque()).append(output)
    own = {module: vars(module).get("forward") for module in (*waiting, start)}
    started = False

    def replacing(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal started
            if started:
                return forward(*args, **kwargs)
            if module is not start:
                if not waiting[module]:
                    raise ModelError("the network runs other modules when it is trained; train all of it")
                output = waiting[module].popleft()
                return output.clone() if isinstance(output, Tensor) else output  # the network may overwrite it
            started = True
            first = _first_tensor(args, kwargs)
            swapped = [features if value is first else value for value in args]
            return forward(*swapped, **{name: features if v is first else v for name, v in kwargs.items()})

        return call

    try:
        for module in own:
            module.forward = replacing(module, module.forward)
        yield
    finally:
        for module, forward in own.items():
            vars(module).pop("forward", None)
            if forward is not None:
                module.forward = forward


# ------------------------------------------------------------------------------------------------------- the choice


@torch.no_grad()
def _problem(model: nn.Module, start: str, empty: Tensor) -> str:
    """Why the network cannot be trained from a module, or an empty string: tested with noise."""
    modules = dict(model.named_modules())
    if not start or start not in modules:
        return "the network has no such module"
    noise = torch.randn(2, *empty.shape[1:], generator=torch.Generator().manual_seed(0)).to(empty)
    try:
        rows = [_until(model, modules[start], image[None])[0] for image in noise]
        if any(len(row) != 1 for row in rows):
            return "this module reads no single row for each image"
        returned = _until(model, modules[start], empty.expand_as(noise))[1]
        found = _rest(model, modules[start], empty.expand_as(noise), returned, torch.cat(rows))
    except ModelError as error:
        return str(error)
    logits = pick_output(model(noise), None)
    if (found - logits).abs().max() > _ROUNDING * logits.abs().max():
        return "what follows this module also reads something else of the image"
    return ""


def _possible(model: nn.Module, empty: Tensor) -> list[str]:
    """The modules from which a network can be trained, in their order: blocks, and layers directly below the network.

    Such a module is the only one that reads a value through which everything of the image passes.
    """
    tape = record(model, empty)
    found: list[str] = []
    waiting = {tape.output}  # what the operations after this point read
    for node in reversed(tape.nodes):
        waiting = waiting.difference(node.outputs).union(node.inputs)
        if len(waiting) == 1:
            found = [*_entered(tape, *waiting), *found]
    modules = dict(model.named_modules())
    return [name for name in dict.fromkeys(found) if _is_block(modules[name], "." not in name)]


def _is_block(module: nn.Module, outermost: bool) -> bool:
    """Whether a module is run (a list of modules is not), has weights, and is outermost or made of other modules."""
    runs = type(module).forward is not nn.Module.forward
    return runs and any(True for _ in module.parameters()) and (outermost or any(True for _ in module.children()))


def _entered(tape: Tape, value: Value) -> list[str]:
    """The modules, outermost first, that hold every operation that reads a value, and not the one that made it."""
    readers, maker = tape.consumers.get(value, []), tape.producer.get(value)
    parts = readers[0].module.split(".") if readers else []
    names = [".".join(parts[: i + 1]) for i in range(len(parts)) if parts[0]]
    return [
        name
        for name in names
        if all(is_inside(reader, name) for reader in readers) and not (maker and is_inside(maker, name))
    ]
