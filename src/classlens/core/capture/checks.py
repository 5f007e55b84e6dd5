"""What a network must be before its forward pass is recorded: repeatable, differentiable, not scripted."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from classlens.errors import CaptureError, ModelError

# Layers of torch whose code reads the mode, with settings for which both modes compute the same.
_ALIKE: tuple[tuple[type[nn.Module], Callable[[Any], bool]], ...] = (
    (_DropoutNd, lambda module: module.p == 0),
    (_NormBase, lambda module: not module.track_running_stats),
    (nn.RReLU, lambda module: module.lower == module.upper),
    (nn.MultiheadAttention, lambda module: module.dropout == 0),
)
# Methods that do not compute the output: `train` is how a class would set the mode.
_ELSEWHERE = frozenset(("__init__", "train", "eval", "extra_repr", "__repr__", "__setstate__", "__getstate__"))


def check_modules(modules: Sequence[tuple[str, nn.Module]]) -> None:
    """Refuse a network in training mode, without weights, made in inference mode, or scripted."""
    training = [name for name, module in modules if module.training and depends_on_mode(module)]
    if training:
        which = "the model is" if modules[0][1].training else f"part of the model ({training[0]}) is"
        raise ModelError(f"{which} in training mode, so its output is not repeatable; call model.eval() first")
    for name, module in modules:
        if any(p is not None and is_lazy(p) for p in module._parameters.values()):
            raise ModelError(f"{name or 'the model'} has no weights yet ({type(module).__name__}); run the model once")
        if any(p is not None and p.is_meta for p in module._parameters.values()):
            raise ModelError(f"the weights of {name or 'the model'} are on the meta device, without values; load them")
    if any(p is not None and p.is_inference() for _, module in modules for p in module._parameters.values()):
        raise ModelError("the model's weights were made in inference mode and have no gradients; load them outside it")
    if any(isinstance(module, torch.jit.ScriptModule) for _, module in modules):
        raise CaptureError("a scripted model hides its operations; explain the nn.Module it was made from")


def depends_on_mode(module: nn.Module) -> bool:
    """Whether `train()` and `eval()` make a difference to what a module computes itself, without its children.

    >>> depends_on_mode(nn.Dropout(0.5)), depends_on_mode(nn.Dropout(0.0)), depends_on_mode(nn.Conv2d(3, 8, 3))
    (True, False, False)

    A module can only depend on the mode if its code reads `training`.
    """
    if any(isinstance(module, kind) and alike(module) for kind, alike in _ALIKE):
        return False
    own = module.__dict__.get("forward")
    kind: Any = type(module)  # mypy takes the classes of modules for unhashable
    return _reads_mode(kind) or (own is not None and _mentions_training(own))


@functools.lru_cache(1024)
def _reads_mode(kind: Any) -> bool:
    bases = kind.__mro__[: kind.__mro__.index(nn.Module)]
    functions = (thing for base in bases for name, thing in vars(base).items() if name not in _ELSEWHERE)
    return any(_mentions_training(function) for function in functions)


def _mentions_training(thing: Any) -> bool:
    if isinstance(thing, property):
        return any(_mentions_training(part) for part in (thing.fget, thing.fset) if part is not None)
    code = getattr(inspect.unwrap(getattr(thing, "__func__", thing)), "__code__", None) if callable(thing) else None
    return code is not None and any("training" in part.co_names for part in _nested(code))


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
