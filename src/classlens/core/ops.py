"""One name for each operation, however it is spelled.

`F.relu(x)`, `torch.relu(x)`, `x.relu()`, `x.relu_()` and `F.relu(x, inplace=True)` are all `"relu"`. Rules are
keyed by these names.

    >>> canonical(torch.Tensor.__iadd__)
    'add'
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

# Spellings that stripping underscores does not bring together.
_ALIASES = {
    "radd": "add", "iadd": "add",
    "sub": "sub", "isub": "sub", "subtract": "sub",
    "rmul": "mul", "imul": "mul", "multiply": "mul",
    "truediv": "div", "itruediv": "div", "idiv": "div", "divide": "div", "true_divide": "div",
    "rtruediv": "rdiv", "rdiv": "rdiv",
    "ipow": "pow", "rpow": "rpow",
    "absolute": "abs", "negative": "neg", "invert": "bitwise_not",
    "rmatmul": "rmatmul", "imatmul": "matmul", "mm": "matmul", "bmm": "matmul",
    "swapaxes": "transpose", "swapdims": "transpose", "moveaxis": "movedim", "concat": "cat", "concatenate": "cat",
    "clip": "clamp", "clamp_min": "clamp", "clamp_max": "clamp",
    "view_as": "view", "reshape_as": "reshape", "ravel": "flatten",
    "unsafe_chunk": "chunk", "unsafe_split": "split", "split_with_sizes": "split", "tensor_split": "split",
    "upsample": "interpolate", "upsample_nearest": "interpolate", "upsample_bilinear": "interpolate",
    "max_pool1d_with_indices": "max_pool1d", "max_pool2d_with_indices": "max_pool2d",
    "max_pool3d_with_indices": "max_pool3d",
    "adaptive_max_pool1d_with_indices": "adaptive_max_pool1d",
    "adaptive_max_pool2d_with_indices": "adaptive_max_pool2d",
    "adaptive_max_pool3d_with_indices": "adaptive_max_pool3d",
    "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le",
    "half": "to", "float": "to", "double": "to", "bfloat16": "to", "type": "to", "type_as": "to",
    "cpu": "to", "cuda": "to",
}  # fmt: skip

# `T`, `mT`, ... are properties: their getter is called `__get__` and only its owner knows the name.
_PROPERTIES = {
    getattr(torch.Tensor, name).__get__: "transpose_all" if name in ("T", "H") else "transpose_last"
    for name in ("T", "H", "mT", "mH")
}
_DATA_GETTER = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_GRAD_SWITCH = torch._C._set_grad_enabled

# What networks ask of a tensor all the time, and what leaves nothing to write down.
ASKS = frozenset((
    torch.Tensor.dim, torch.Tensor.size, torch.Tensor.numel, torch.Tensor.is_floating_point,
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda", "requires_grad")),
))  # fmt: skip

# Operations that look at a tensor's shape, type or device only: what they return does not depend on its values.
MAKES_CONSTANT = frozenset((
    "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor", "zeros_like", "ones_like", "full_like",
    "empty_like", "rand_like", "randn_like", "randint_like",
))  # fmt: skip

# Through these a value leaves the record: what is computed from them afterwards cannot be followed.
LEAVES_TORCH = frozenset(("numpy", "__array__", "tolist", "__dlpack__"))

_PARAMETERS: dict[str, tuple[str, ...]] = {
    "linear": ("input", "weight", "bias"),
    "batch_norm": ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    "add": ("input", "other"),
    "sub": ("input", "other"),
    "mul": ("input", "other"),
    "div": ("input", "other"),
    "rdiv": ("input", "other"),
    "matmul": ("input", "other"),
    "setitem": ("input", "index", "value"),
    "max_pool2d": ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices"),
}
for _n in (1, 2, 3):
    _PARAMETERS[f"conv{_n}d"] = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    _PARAMETERS[f"conv_transpose{_n}d"] = (
        "input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation",
    )  # fmt: skip
# torch.batch_norm takes the same things as F.batch_norm in another order.
_TORCH_BATCH_NORM = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")


@functools.lru_cache(1024)  # each call of a forward pass asks
def canonical(func: Callable[..., Any]) -> str:
    """The one name of an operation."""
    if func in _PROPERTIES:
        return _PROPERTIES[func]
    if func == _DATA_GETTER:
        return "detach"
    name: str = getattr(func, "__name__", str(func))
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
    elif name.endswith("_") and not name.startswith("_"):
        name = name[:-1]
    return _ALIASES.get(name.lstrip("_"), name.lstrip("_"))


def arguments(op: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, for the operations whose rules need them by name.

    >>> arguments("linear", F.linear, (1, 2), {"bias": 3})
    {'input': 1, 'weight': 2, 'bias': 3}
    """
    names = _TORCH_BATCH_NORM if op == "batch_norm" and func is not F.batch_norm else _PARAMETERS[op]
    bound = dict(zip(names, args, strict=False))
    renamed = {"self": "input", "mat2": "other", "tensor2": "other"}
    return bound | {renamed.get(key, key): value for key, value in kwargs.items()}


def per_axis(size: int | Sequence[int], n: int) -> tuple[int, ...]:
    """A size, stride or padding for each of n axes, as convolutions and pools read it.

    >>> per_axis(3, 2), per_axis([3], 2), per_axis((3, 1), 2)
    ((3, 3), (3, 3), (3, 1))
    """
    sizes = (size,) if isinstance(size, int) else tuple(size)
    return sizes * n if len(sizes) == 1 else sizes


def is_mutating(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the call overwrites its first argument.

    >>> is_mutating(torch.Tensor.add_, (), {}), is_mutating(F.relu, (), {"inplace": True})
    (True, True)
    """
    name: str = getattr(func, "__name__", "")
    if name == "__setitem__":
        return True
    if name.startswith("__i") and name.endswith("__") and name not in ("__invert__", "__int__", "__index__"):
        return True
    if name.endswith("_") and not name.endswith("__") and name != "requires_grad_":
        return True
    if kwargs.get("inplace") is True:
        return True
    position = _INPLACE_POSITION.get(name)
    return position is not None and len(args) > position and args[position] is True


def is_grad_switch(func: Callable[..., Any]) -> bool:
    """`torch.no_grad()` inside a forward calls this; the record needs gradients, so it is passed over."""
    return func is _GRAD_SWITCH


# F functions that take `inplace` by position too.
_INPLACE_POSITION = {
    "relu": 1, "relu6": 1, "selu": 1, "silu": 1, "mish": 1, "hardswish": 1, "hardsigmoid": 1, "elu": 2, "celu": 2,
    "leaky_relu": 2, "hardtanh": 3, "threshold": 3, "dropout": 3, "alpha_dropout": 3, "dropout2d": 3, "rrelu": 4,
}  # fmt: skip
