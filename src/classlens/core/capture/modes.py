"""What a network may do to its own gradients: backward hooks and inference mode do not count, `torch.no_grad()` may.

A backward hook neither runs nor is changed: code of torch that would attach it is told that there are no gradients.

A part in `torch.no_grad()` is a constant for torch, as in a straight-through estimator, `x + q` with q = round(x) - x
computed without gradients. So it is here, if torch's own gradient reaches the image on another way. If it does not (a
frozen backbone under `torch.no_grad()`), there would be nothing to explain, and gradients stay on.
"""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.utils.hooks
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from classlens.core import ops

_HERE, _TORCH = str(Path(__file__).parent), Path(torch.__file__).parent
_SHARDED = "distributed/fsdp/_common_utils.py"  # collects what needs gradients
_ATTACHING = tuple(str(_TORCH / path) for path in ("utils/hooks.py", "nn/modules/module.py", _SHARDED))
_ASKED = {ops.getter("requires_grad"): False, ops.getter("grad_fn"): None}
_OVERRULED = frozenset((ops.GRAD_SWITCH, Tensor.register_hook, Tensor.retain_grad, *_ASKED))


def is_overruled(func: Callable[..., Any]) -> bool:
    """Whether a call would switch gradients or attach a hook to them; unless it is obeyed, `instead_of` answers it."""
    return func in _OVERRULED and (func not in _ASKED or _attaches_hooks())


def instead_of(func: Callable[..., Any]) -> Any:
    """What an overruled call returns."""
    return torch.utils.hooks.RemovableHandle(OrderedDict()) if func is Tensor.register_hook else _ASKED.get(func)


def _attaches_hooks() -> bool:
    """Whether the code that asks is the code of torch that attaches backward hooks."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_ATTACHING)


def has_hooks(modules: Sequence[tuple[str, nn.Module]]) -> bool:
    """Whether a hook may attach something to gradients: backward hooks do, and forward hooks may."""
    kinds = ("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks")
    return any(getattr(module, kind) for _, module in modules for kind in kinds)


@contextlib.contextmanager
def no_inference() -> Iterator[None]:
    """Operations keep their gradients here, although the network is in inference mode."""
    with torch.inference_mode(False):
        yield


class GradientsStayOn(TorchFunctionMode):
    """Ignores inference mode and backward hooks inside a network, and `torch.no_grad()` unless it `obeys`."""

    def __init__(self, obeys: bool) -> None:
        super().__init__()
        self.obeys = obeys

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_overruled(func) and not (self.obeys and func is ops.GRAD_SWITCH):
            return instead_of(func)
        with no_inference() if torch.is_inference_mode_enabled() else contextlib.nullcontext():
            return func(*args, **(kwargs or {}))
