"""Detours: run an unmodified network, but change a tensor on its way.

>>> with Detour({17: lambda features: other}):
...     logits = model(images)                  # the result of call 17 was replaced

Calls of torch functions are counted in the order in which the forward pass makes them. `survey` lists those that
return feature maps, and finds the one that makes the features of the head: what is pooled last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from classlens.errors import ModelError

Change = Callable[[Tensor], Tensor]


class Detour(TorchFunctionMode):
    """Replaces the results of some calls. Other modes, such as a recorder, see the replacements."""

    def __init__(self, changes: Mapping[int, Change]) -> None:
        super().__init__()
        self._changes = changes
        self._count = -1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, Tensor):
            return result
        self._count += 1
        change = self._changes.get(self._count)
        return self.seen(args, result) if change is None else change(result)

    def seen(self, args: Any, result: Tensor) -> Tensor:
        """For subclasses: a call whose result is not changed."""
        return result


@dataclass(frozen=True)
class Survey:
    """The feature maps that a forward pass makes."""

    sizes: dict[int, tuple[int, int]]  # call -> (height, width) of its result
    final: int  # the call that makes the features of the head
    pooled: int  # the call that makes what the head pools; most heads begin with that


class _Surveyor(Detour):
    """Notes which calls make feature maps, and which feature map is pooled last."""

    def __init__(self, batch: int) -> None:
        super().__init__({})
        self._batch = batch
        self._made: dict[int, Tensor] = {}  # results are kept, so that no other tensor can have their identity
        self.sizes: dict[int, tuple[int, int]] = {}
        self.channels: dict[int, int] = {}
        self.final: int | None = None

    def seen(self, args: Any, result: Tensor) -> Tensor:
        pooled = result.dim() == 2 or (result.dim() == 4 and result.shape[2:].numel() == 1)
        if pooled and args and isinstance(args[0], Tensor) and _is_map(args[0], self._batch):
            makers = [call for call, made in self._made.items() if made is args[0]]
            self.final = makers[-1] if makers else None
        if _is_map(result, self._batch):
            self._made[self._count] = result
            self.sizes[self._count] = (result.shape[2], result.shape[3])
            self.channels[self._count] = result.shape[1]
        return result


def _is_map(t: Tensor, batch: int) -> bool:
    return t.dim() == 4 and t.shape[0] == batch and t.shape[2:].numel() > 1


@torch.no_grad()
def survey(model: nn.Module, images: Tensor) -> Survey:
    """Where a network makes its feature maps; an error if it has no pooled head.

    What is pooled may be a map of the classes, as in SqueezeNet. Then the convolution that makes it is the head.
    """
    with _Surveyor(len(images)) as found:
        classes = model(images).shape[1]
    if found.final is None:
        raise ModelError(f"{type(model).__name__} has no feature map that a head pools, so its head cannot be split")
    final = pooled = found.final
    if found.channels[pooled] == classes:
        before = [call for call, channels in found.channels.items() if call < pooled and channels != classes]
        final = next((call for call in reversed(before) if is_cut(model, images, call)), pooled)
    return Survey(found.sizes, final, pooled)


@torch.no_grad()
def is_cut(model: nn.Module, images: Tensor, call: int) -> bool:
    """Whether everything that reaches the logits passes through the result of a call: nothing else has to be known."""
    kept: list[Tensor] = []

    def keep(features: Tensor) -> Tensor:
        kept.append(features.clone())
        return features

    with Detour({call: keep}):
        logits = model(images)
    empty = torch.zeros_like(images)
    with Detour({call: lambda features: kept[0]}):
        again = model(empty)
    return torch.equal(again, logits)


def cut_at(model: nn.Module, images: Tensor, found: Survey, stride: int) -> int:
    """The last call that all evidence passes through and whose map is at most `stride` times smaller than the image."""
    least = images.shape[2] // stride
    for call in sorted((call for call, size in found.sizes.items() if size[0] >= least), reverse=True):
        if is_cut(model, images, call):
            return call
    raise ModelError(
        f"{type(model).__name__} has no feature map at most {stride} times smaller that all evidence passes"
    )
