"""A unit inside the network.

>>> explain(model, image, neuron("layer3", 7))              # channel 7, mean over its positions
>>> explain(model, image, neuron("layer3", 7, (4, 5)))      # at row 4, column 5 of the feature map
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from classlens.core.capture import Pick
from classlens.core.ops import channels_last
from classlens.core.targets.answers import Answers
from classlens.core.targets.questions import Found, Question
from classlens.errors import TargetError


@dataclass(frozen=True)
class Neuron(Question):
    """A channel of a layer's output, at one position or as the mean over all positions."""

    layer: str
    channel: int
    place: tuple[int, ...] | None = None

    @property
    def layers(self) -> frozenset[str]:
        return frozenset((self.layer,))

    def find(self, answers: Answers, image: int) -> Found:
        found = answers.inside(self.layer)[-1]
        if found.dim() < 2 or found.shape[0] != answers.images:
            raise TargetError(f"the layer {self.layer!r} returns {tuple(found.shape)}, not an output for each image")
        if found.dim() == 4 and channels_last(found.shape, answers.size):
            raise TargetError(
                f"the layer {self.layer!r} returns {tuple(found.shape)}, which looks like channels last; a neuron "
                "needs channels first (B,C,h,w) or tokens (B,n,C): name another layer"
            )
        tokens = found.dim() == 3  # (B,tokens,C)
        sizes = tuple(found.shape[1:-1] if tokens else found.shape[2:])
        channels = found.shape[-1] if tokens else found.shape[1]
        if not 0 <= self.channel < channels:
            raise TargetError(f"the layer {self.layer!r} has channels 0..{channels - 1}, not {self.channel}")
        text = f"channel {self.channel} of {self.layer}"
        if self.place is None:
            pick = Pick(layer=self.layer, index=() if tokens else (self.channel,))
            step = channels if tokens else 1
            return Found(text, (pick,), lambda numbers: _mean(numbers, self.channel if tokens else 0, step))
        if len(self.place) != len(sizes) or not all(0 <= p < s for p, s in zip(self.place, sizes, strict=True)):
            raise TargetError(f"the layer {self.layer!r} has positions {sizes}, so there is no position {self.place}")
        index = (*self.place, self.channel) if tokens else (self.channel, *self.place)
        at = ", ".join(map(str, self.place))
        return Found(f"{text} at ({at})", (Pick(layer=self.layer, index=index),), lambda numbers: numbers[0].sum())


def _mean(numbers: Sequence[Tensor], first: int, step: int) -> Tensor:
    return numbers[0][first::step].mean()


def neuron(layer: str, channel: int, place: Sequence[int] | None = None) -> Neuron:
    """A unit of a layer: a channel, at a position (row, column) of its feature map or as the mean over all positions.

    >>> classlens.explain(model, "photo.jpg", classlens.neuron("layer3", 7, (4, 5)))

    For tokens (B,tokens,channels) the position is (token,). If a layer is called several times, it is the last call.
    """
    if not isinstance(layer, str) or not layer:
        raise TargetError(f"a layer is given by its name, such as layer3.0.conv1, not {layer!r}")
    if not isinstance(channel, int) or isinstance(channel, bool):
        raise TargetError(f"a channel is an index, not {channel!r}")
    return Neuron(layer, channel, None if place is None else tuple(place))
