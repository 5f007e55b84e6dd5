"""Relevance that flows through parts of a layer: through single channels, or through directions (Achtibat et al., CRP).

    images, classes -> relevance at the layer (K,B,C,h,w) -> parts of it -> a map of each part

>>> found = flow(network.record(images), model, targets, "lrp-epsilon-plus-flat", layer)
>>> found.channels(range(64)).shape         # (64,K,B,H,W): all channels of a layer, as many at once as memory allows

The sweep of a method stops at the layer. Its relevance there is multiplied with weights, and the same rules take each
product on to the image. The rules are linear in the relevance, so the maps of parts that sum to the whole sum to the
map of everything that flows through the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from classlens import chunks
from classlens.core.capture import Tape, autocast_off, unwrap
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

    def through(self, weights: Sequence[Tensor]) -> Tensor:
        """(M,K,B,H,W): the map of each part; `weights` are shares of the relevance, each shaped to be multiplied."""
        maps: Tensor = torch.cat(list(self._swept(weights))).unflatten(0, (len(weights), len(self.relevance)))
        return maps

    def channels(self, numbers: Sequence[int]) -> Tensor:
        """(M,K,B,H,W): the map of the relevance through each of these channels."""
        count, places = self.relevance.shape[2], [1] * (self.relevance.dim() - 3)
        return self.through([torch.eye(count)[n].reshape(count, *places).to(self.relevance) for n in numbers])

    def _swept(self, weights: Sequence[Tensor]) -> Iterator[Tensor]:
        for start in range(0, len(weights), self.at_once):
            parts = torch.cat([self.relevance * weight for weight in weights[start : start + self.at_once]])
            with onednn_errors(), autocast_off(parts.device):
                yield self.onward(self.layer.restored(parts)).relevance.sum(2)


def flow(
    tape: Tape, model: nn.Module, targets: Tensor, method: str, layer: FeatureMap, multilabel: bool = False
) -> Flow:
    """The relevance of classes (B,K) at a feature map of a recorded forward pass."""
    chosen, options = followed(method)
    case = Case(unwrap(model), tape.image.tensor, tape, targets, multilabel=multilabel)
    try:
        with onednn_errors(), torch.inference_mode(False), autocast_off(case.images.device), stopping_at(layer.value):
            chosen.run(case, **options)
    except Reached as reached:
        one = chunks.held(chosen, case) * targets.shape[1]
        at_once = max(1, int(chunks.budget() // 2 // one))
        return Flow(layer, layer.as_map(reached.relevance), reached.onward, at_once)
    raise MethodError(
        "no relevance arrives at this layer: it is folded into the normalisation after it, or it is part of the head; "
        "name another layer"
    )


def followed(method: str) -> tuple[Method, dict[str, object]]:
    """A method by name, if its relevance can be followed in parts."""
    chosen, options = resolve(method)
    check_options(chosen, options)
    needed = chosen.linear
    if needed is None or any(options.get(name) != value for name, value in needed.items()):
        able = ", ".join(written(name, one.linear) for name, one in METHODS.items() if one.linear is not None)
        raise MethodError(f"the relevance of {method} cannot be followed in parts; choose one of {able}")
    return chosen, options
