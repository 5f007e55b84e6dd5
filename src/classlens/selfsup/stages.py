"""The stages of a network, and the network cut after one of them.

>>> [stage.name for stage in find_stages(alexnet, images)]
['features.1', 'features.4', 'features.7', 'features.9', 'features.11']
>>> Probe(alexnet, find_stages(alexnet, images)[1], pool=2, classes=20)(images).shape
torch.Size([8, 20])
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from classlens.core.capture import unwrap
from classlens.errors import ModelError

_FEW = 8  # a network with at most this many convolutions has a stage for each
_POINTWISE = (
    nn.BatchNorm2d,
    nn.GroupNorm,
    nn.Dropout,
    nn.Identity,
)  # modules that belong to a convolution, besides activations


@dataclass(frozen=True)
class Stage:
    """A module whose output is a feature map, and its shape (C,h,w)."""

    name: str
    shape: tuple[int, int, int]


@dataclass(frozen=True)
class _Call:
    name: str
    module: nn.Module
    shape: tuple[int, ...]

    @property
    def leaf(self) -> bool:
        return not list(self.module.children())


def find_stages(model: nn.Module, images: Tensor, names: Sequence[str] = ()) -> tuple[Stage, ...]:
    """The stages of a network, found by a forward pass of some images (one is enough).

    `names` are modules. Without them, each convolution with its normalisation and activation is a stage; in a deep
    network, the last feature map of each resolution.
    """
    calls = _calls(model, images)
    maps = {call.name: call for call in calls if len(call.shape) == 4}
    if names:
        unknown = [name for name in names if name not in maps]
        if unknown:
            raise ModelError(f"no module {unknown[0]!r} returns a feature map; choose from {', '.join(maps)}")
        chosen = [maps[name] for name in names]
    else:
        chosen = _convolutions(calls) if _count_convolutions(calls) <= _FEW else _resolutions(calls)
    if not chosen:
        raise ModelError("the network has no convolution whose output is a feature map; name stages with --stages")
    return tuple(Stage(call.name, (call.shape[1], call.shape[2], call.shape[3])) for call in chosen)


def stage_outputs(model: nn.Module, images: Tensor, stages: Sequence[Stage]) -> dict[str, Tensor]:
    """The feature maps (B,C,h,w) of all stages from one forward pass."""
    found: dict[str, Tensor] = {}

    def keep(name: str, _module: nn.Module, output: Any) -> None:
        found[name] = output.clone()  # a later operation may overwrite it

    _run_watched(unwrap(model), images, [stage.name for stage in stages], keep)
    return found


def _run_watched(
    network: nn.Module, images: Tensor, names: Sequence[str], keep: Callable[[str, nn.Module, Any], None]
) -> None:
    """One forward pass; `keep` gets the output of each named module. Nothing stays on the network."""
    hooks = [
        network.get_submodule(name).register_forward_hook(
            lambda module, _inputs, output, name=name: keep(name, module, output)
        )
        for name in names
    ]
    try:
        with torch.no_grad():
            network(images)
    finally:
        for hook in hooks:
            hook.remove()


def pooled(features: Tensor, pool: int) -> Tensor:
    """(B,C,h,w) -> (B,C*pool*pool): means over a grid, the input of a probe."""
    size = (min(pool, features.shape[2]), min(pool, features.shape[3]))
    return nn.functional.adaptive_avg_pool2d(features, size).flatten(1)


class Probe(nn.Module):
    """A frozen network up to a stage, a pool, and one linear layer: an ordinary classifier.

    >>> probe = Probe(network, stage, pool=2, classes=20).eval()
    >>> classlens.explain(probe, images, targets=14)

    It shares the weights of the network; its modules are copies, so that nothing is attached to the network.
    """

    def __init__(self, network: nn.Module, stage: Stage, pool: int, classes: int) -> None:
        super().__init__()
        network = unwrap(network)
        shared = {id(tensor): tensor for tensor in (*network.parameters(), *network.buffers())}
        self.body = copy.deepcopy(network, shared).eval()
        self.pool = pool
        channels, height, width = stage.shape
        self.linear = nn.Linear(channels * min(pool, height) * min(pool, width), classes)
        self.body.get_submodule(stage.name).register_forward_hook(_stop)

    def forward(self, images: Tensor) -> Tensor:
        try:
            self.body(images)
        except _Reached as reached:
            logits: Tensor = self.linear(pooled(reached.output, self.pool))
            return logits
        raise ModelError("the forward pass did not reach the stage of this probe; probe another one")

    def train(self, mode: bool = True) -> Probe:
        """The body stays frozen: its batch statistics never change."""
        super().train(mode)
        self.body.eval()
        return self


class _Reached(Exception):
    """Carries the output of a stage out of a forward pass, which then stops."""

    def __init__(self, output: Tensor) -> None:
        super().__init__("stage reached")
        self.output = output


def _stop(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
    raise _Reached(output)


# ------------------------------------------------------------------------------------------------------- finding


def _calls(model: nn.Module, images: Tensor) -> list[_Call]:
    """Every module in the order in which it finishes, with the shape of its output if that is a tensor."""
    found: list[_Call] = []
    network = unwrap(model)

    def keep(name: str, module: nn.Module, output: Any) -> None:
        found.append(_Call(name, module, tuple(output.shape) if isinstance(output, Tensor) else ()))

    _run_watched(network, images, [name for name, _ in network.named_modules() if name], keep)
    return found


def _count_convolutions(calls: Sequence[_Call]) -> int:
    return sum(isinstance(call.module, nn.Conv2d) for call in calls)


def _convolutions(calls: Sequence[_Call]) -> list[_Call]:
    """For each convolution, the last pointwise module after it: normalisation or activation."""
    found: list[_Call] = []
    open_ = False
    for call in calls:
        if isinstance(call.module, nn.Conv2d):
            found.append(call)
            open_ = True
        elif open_ and call.shape == found[-1].shape and (not call.leaf or _is_pointwise(call.module)):
            found[-1] = call
        elif call.leaf:
            open_ = False
    return [call for call in found if len(call.shape) == 4 and call.shape[2] * call.shape[3] > 1]


def _is_pointwise(module: nn.Module) -> bool:
    return isinstance(module, _POINTWISE) or type(module).__module__ == "torch.nn.modules.activation"


def _resolutions(calls: Sequence[_Call]) -> list[_Call]:
    """The last feature map of each resolution that has a convolution."""
    groups: dict[tuple[int, ...], list[_Call]] = {}
    for call in calls:
        if len(call.shape) == 4 and call.shape[2] * call.shape[3] > 1:
            groups.setdefault(call.shape[2:], []).append(call)
    return [group[-1] for group in groups.values() if _count_convolutions(group)]
