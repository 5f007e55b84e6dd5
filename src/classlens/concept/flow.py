"""Relevance that flows through parts of a layer: through single channels, or through directions (Achtibat et al., CRP).

    images, classes -> relevance at the layer (K,B,C,h,w) -> parts of it -> a map of each part

>>> found = flow(network.record(images), model, targets, "lrp-epsilon-plus-flat", layer)
>>> found.channels(range(64)).shape         # (64,K,B,H,W): all channels of a layer, as many at once as memory allows

The sweep of a method stops at the layer. Its relevance there is divided into parts, and the same rules take each part
on to the image. The rules are linear in the relevance, so the maps of parts that sum to the whole sum to the
map of everything that flows through the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from classlens import chunks
from classlens.core.capture import Tape, Value, autocast_off, unwrap
from classlens.core.method_text import written
from classlens.core.rules.propagate import Reached, Sweep, stopping_at
from classlens.errors import MethodError
from classlens.machine import onednn_errors
from classlens.methods import METHODS, Case, Method, check_options, resolve
from classlens.methods.featuremaps import FeatureMap

METHOD = "lrp-epsilon-plus-flat"  # the default: that of the paper


@dataclass(frozen=True, eq=False)
class Flow:
    """The relevance of K classes at a layer, and the way on to the image."""

    layer: FeatureMap
    relevance: Tensor  # (K,B,C,*places)
    onward: Callable[[Tensor], Sweep]
    at_once: int  # parts that one sweep takes

    @property
    def features(self) -> Tensor:
        """(B,C,*places): the activations of the layer."""
        return self.layer.as_map(self.layer.value.tensor)

    def through(self, parts: Sequence[Tensor]) -> Tensor:
        """(M,B,H,W): the map of each part (B,C,*places) of the relevance, as many at once as memory allows."""
        return torch.cat(list(self._swept(parts)))

    def channels(self, numbers: Sequence[int]) -> Tensor:
        """(M,K,B,H,W): the map of the relevance through each of these channels, for each class."""
        count, places = self.relevance.shape[2], [1] * (self.relevance.dim() - 3)
        masks = (torch.eye(count)[n].reshape(count, *places).to(self.relevance) for n in numbers)
        maps = self.through([one * mask for mask in masks for one in self.relevance])
        by_class: Tensor = maps.unflatten(0, (len(numbers), len(self.relevance)))
        return by_class

    def _swept(self, parts: Sequence[Tensor]) -> Iterator[Tensor]:
        for start in range(0, len(parts), self.at_once):
            some = torch.stack(list(parts[start : start + self.at_once]))
            with onednn_errors(), autocast_off(some.device):
                yield self.onward(self.layer.restored(some)).relevance.sum(2)


def flow(
    tape: Tape, model: nn.Module, targets: Tensor, method: str, layer: FeatureMap, multilabel: bool = False
) -> Flow:
    """The relevance of classes (B,K) at a feature map of a recorded forward pass."""
    chosen, options = followed(method)
    case = Case(unwrap(model), tape.image.tensor, tape, targets, multilabel=multilabel)
    at_once = max(1, int(chunks.budget() // 2 // chunks.held(chosen, case)))
    with onednn_errors(), torch.inference_mode(False), autocast_off(case.images.device):
        found = _stopped(lambda: chosen.run(case, **options), layer.value)
    return Flow(layer, layer.as_map(found.relevance), found.onward, at_once)


def _stopped(sweep: Callable[[], object], value: Value) -> Reached:
    try:
        with stopping_at(value):
            sweep()
    except Reached as reached:
        return reached
    raise MethodError(
        "no relevance arrives at this layer: it is folded into the normalisation after it, or it is part of the head; "
        "name another layer"
    )


def can_follow(method: str) -> bool:
    """Whether the rules of a method are linear in the relevance, so that it can be followed in parts."""
    chosen, options = resolve(method)
    needed = chosen.linear
    return needed is not None and all(options.get(name) == value for name, value in needed.items())


def followed(method: str) -> tuple[Method, dict[str, object]]:
    """A method by name, if its relevance can be followed in parts."""
    chosen, options = resolve(method)
    check_options(chosen, options)
    if not can_follow(method):
        able = ", ".join(written(name, one.linear) for name, one in METHODS.items() if one.linear is not None)
        raise MethodError(f"the relevance of {method} cannot be followed in parts; choose one of {able}")
    return chosen, options
