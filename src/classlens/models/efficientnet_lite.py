"""EfficientNet-Lite: MobileNet-style blocks with ReLU6 and no squeeze-and-excitation.

Parameter names are those of the published state dicts, hence the leading underscores. The networks were
trained in TensorFlow, hence its "same" padding and its BatchNorm constants. Stochastic depth acts only in
training and is left out.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F


class Variant(NamedTuple):
    """How one member of the family is scaled from lite0."""

    width: float
    depth: float
    size: int  # edge of the square input
    dropout: float


VARIANTS = {
    "efficientnet-lite0": Variant(1.0, 1.0, 224, 0.2),
    "efficientnet-lite1": Variant(1.0, 1.1, 240, 0.2),
    "efficientnet-lite2": Variant(1.1, 1.2, 260, 0.3),
}

# (repeats, kernel, stride of the first block, expansion, channels out) of each stage of lite0.
_STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
_STEM, _HEAD = 32, 1280  # these two are not scaled


class EfficientNetLite(nn.Module):
    """`EfficientNetLite("efficientnet-lite0")(torch.zeros(1, 3, 224, 224))` gives (1, 1000) logits."""

    def __init__(self, variant: str, num_classes: int = 1000) -> None:
        super().__init__()
        scale = VARIANTS[variant]
        self._conv_stem = SameConv2d(3, _STEM, 3, stride=2)
        self._bn0 = _batch_norm(_STEM)
        self._blocks = nn.ModuleList(_blocks(scale))
        self._conv_head = SameConv2d(_round_channels(_STAGES[-1][-1] * scale.width), _HEAD, 1)
        self._bn1 = _batch_norm(_HEAD)
        self._act = nn.ReLU6()
        self._pool = nn.AdaptiveAvgPool2d(1)
        self._dropout = nn.Dropout(scale.dropout)
        self._fc = nn.Linear(_HEAD, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self._act(self._bn0(self._conv_stem(x)))
        for block in self._blocks:
            x = block(x)
        x = self._act(self._bn1(self._conv_head(x)))
        logits: Tensor = self._fc(self._dropout(self._pool(x).flatten(1)))
        return logits


class Block(nn.Module):
    """Inverted bottleneck: widen (1x1), filter each channel (kxk), narrow (1x1), add the input if it fits."""

    def __init__(self, channels_in: int, channels_out: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = channels_in * expansion
        self._skip = stride == 1 and channels_in == channels_out
        self._expand = expansion != 1
        if self._expand:
            self._expand_conv = SameConv2d(channels_in, wide, 1)
            self._bn0 = _batch_norm(wide)
        self._depthwise_conv = SameConv2d(wide, wide, kernel, stride=stride, groups=wide)
        self._bn1 = _batch_norm(wide)
        self._project_conv = SameConv2d(wide, channels_out, 1)
        self._bn2 = _batch_norm(channels_out)
        self._act = nn.ReLU6()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self._act(self._bn0(self._expand_conv(x))) if self._expand else x
        y = self._act(self._bn1(self._depthwise_conv(y)))
        y = self._bn2(self._project_conv(y))
        return x + y if self._skip else y


class SameConv2d(nn.Conv2d):
    """A convolution without bias whose output is ceil(input / stride), with TensorFlow's padding.

    If the number of padding zeros is odd, the extra zero goes to the bottom and the right.
    """

    def __init__(self, channels_in: int, channels_out: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        # With stride 1 the kernel is odd and the padding symmetric: the convolution pads by itself.
        padding = kernel // 2 if stride == 1 else 0
        super().__init__(channels_in, channels_out, kernel, stride, padding, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.stride == (1, 1):
            return super().forward(x)
        rows = _same_padding(x.shape[-2], self.kernel_size[0], self.stride[0])
        columns = _same_padding(x.shape[-1], self.kernel_size[1], self.stride[1])
        return super().forward(F.pad(x, (*columns, *rows)))


def _same_padding(length: int, kernel: int, stride: int) -> tuple[int, int]:
    total = max((math.ceil(length / stride) - 1) * stride + kernel - length, 0)
    return total // 2, total - total // 2


def _blocks(scale: Variant) -> list[Block]:
    blocks = []
    channels_in = _STEM
    for index, (repeats, kernel, stride, expansion, channels) in enumerate(_STAGES):
        channels_out = _round_channels(channels * scale.width)
        if 0 < index < len(_STAGES) - 1:  # the first and the last stage are not deepened
            repeats = math.ceil(repeats * scale.depth)
        for repeat in range(repeats):
            blocks.append(Block(channels_in, channels_out, kernel, stride if repeat == 0 else 1, expansion))
            channels_in = channels_out
    return blocks


def _round_channels(channels: float) -> int:
    """Round to a multiple of 8, but never down by more than a tenth."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


def _batch_norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01)
