"""Runs a network in float32 if it computes in less: half precision, 8-bit integers, autocast.

A map is a sum of many shares, some of which cancel. In 8 or 11 bits little of it is left, so every operation runs in
float32, with the same weights. The network itself is not changed: an operation gets a float32 copy of each weight.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from classlens.core import ops
from classlens.core.capture.modes import no_inference
from classlens.core.capture.quantised import ROUNDINGS, in_float
from classlens.core.capture.recorder import LOW, running
from classlens.core.capture.tape import map_leaves
from classlens.errors import CaptureError

_AUTOCASTS = "cpu", "cuda"
_CASTS: dict[Any, Any] = {Tensor.half: Tensor.float, Tensor.bfloat16: Tensor.float}


def low_precision(modules: Sequence[tuple[str, nn.Module]]) -> str:
    """The precision of a network's weights where it is below float32, in words; "" if it is not.

    >>> low_precision([("", nn.Linear(2, 2).bfloat16())])
    'bfloat16'
    """
    found = set()
    for _, module in modules:
        if hasattr(module, "_packed_params"):  # a quantised layer of torch, whose weight is no parameter
            found.add("int8")
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and _is_quantised(tensor):
                found.add("int8" if tensor.is_quantized else type(tensor).__name__)
            elif tensor is not None and tensor.dtype in LOW:
                found.add(str(tensor.dtype)[6:])
    return " and ".join(sorted(found))


def _is_quantised(tensor: Tensor) -> bool:
    """A quantised tensor of torch, or of a library that keeps weights as tensors of its own class (torchao)."""
    return tensor.is_quantized or type(tensor).dequantize is not Tensor.dequantize


def frees_weights(modules: Sequence[tuple[str, nn.Module]]) -> bool:
    """Whether weights are gathered for a forward pass and freed after it (FSDP2), so that a tape needs copies."""
    sharded = [m for _, m in modules if "FSDPModule" in (base.__name__ for base in type(m).__mro__)]
    for module in sharded:
        state: Any = module._get_fsdp_state()  # type: ignore[operator]
        if state._mp_policy.param_dtype in LOW:
            raise CaptureError("the model is sharded in half precision; explain it before fully_shard")
    return bool(sharded)


class InFloat32(TorchFunctionMode):
    """Runs each operation on float32 copies of less precise tensors, and lets no operation return less than float32.

    Every weight is copied, because some networks free theirs after a forward pass. `names` are those of the modules by
    id, for messages.
    """

    def __init__(self, names: Mapping[int, str] | None = None) -> None:
        super().__init__()
        self.names = names or {}
        self.lifted: dict[int, tuple[Tensor, Tensor]] = {}  # by id, with the original: its id must not be reused

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for device in _AUTOCASTS:  # a network may enter autocast itself, and restores what was before when it leaves
            if torch.is_autocast_enabled(device):
                torch.set_autocast_enabled(device, False)
        if torch.is_inference_mode_enabled():  # a copy that is made there would have no gradients later
            with no_inference(), self:
                return func(*args, **(kwargs or {}))
        if func in ops.QUERIES:
            return _wide(func(*args, **(kwargs or {})))
        args, kwargs = map_leaves((args, kwargs or {}), self._lift)
        args, kwargs = tuple(map(_wide, args)), {key: _wide(value) for key, value in kwargs.items()}
        name, quantised = _operation(func)
        if quantised:
            func = in_float(name, args) or self._refuse(name) if args else func
        return _wide(_CASTS.get(func, func)(*args, **kwargs))

    def _lift(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        quantised = _is_quantised(leaf)
        if not (quantised or leaf.dtype in LOW or isinstance(leaf, nn.Parameter)):
            return leaf
        if not leaf.is_leaf:
            return leaf.float()
        if id(leaf) not in self.lifted:
            whole = leaf.detach().dequantize() if quantised else leaf.detach().clone()
            self.lifted[id(leaf)] = leaf, whole.to(_wide(whole.dtype))
        return self.lifted[id(leaf)][1]

    def _refuse(self, name: str) -> Any:
        raise CaptureError(
            f"{running(self.names) or 'the model'} calls the quantised operation {name}, whose form in floating point "
            "is unknown; explain the network before quantisation"
        )


def _wide(thing: Any) -> Any:
    """float32 for a lower precision; anything else unchanged."""
    return torch.float32 if type(thing) is torch.dtype and thing in LOW else thing


@functools.lru_cache(1024)  # called for each operation
def _operation(func: Callable[..., Any]) -> tuple[str, bool]:
    """The name of an operation, and whether it is one on quantised tensors."""
    space, _, name = str(func).partition(".")
    name = name.split(".")[0] if space.startswith("quantized") else getattr(func, "__name__", "").split(".")[0]
    return name, space.startswith("quantized") or name in ROUNDINGS


def in_float32(float32: bool, names: Mapping[int, str] | None = None) -> contextlib.AbstractContextManager[Any]:
    """The mode that a forward pass needs: `InFloat32`, or none."""
    return InFloat32(names) if float32 else contextlib.nullcontext()


@contextlib.contextmanager
def autocast_off(device: torch.device) -> Iterator[bool]:
    """Switch the caller's autocast off; gives whether it was on."""
    on = torch.is_autocast_enabled(device.type)
    with torch.autocast(device.type, enabled=False) if on else contextlib.nullcontext():
        yield on
