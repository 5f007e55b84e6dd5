"""Networks small enough to train on two CPU cores: a body, and one linear layer as the head.

>>> net = NETWORKS["alexnet-96"].build(4)
>>> net(torch.zeros(1, 3, 96, 96)).shape, net.features(torch.zeros(1, 3, 96, 96)).shape
(torch.Size([1, 4]), torch.Size([1, 864]))

`forward` is `head(features(images))`: the latent is the input of the head.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from classlens.models import Preprocess


class TwoParts(nn.Module):
    """A body that computes a latent (B,D) from images, and a linear head that reads it."""

    def __init__(self, features: nn.Sequential, head: nn.Linear) -> None:
        super().__init__()
        self.features = features
        self.head = head

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(images))
        return logits


def alexnet96() -> TwoParts:
    """Five convolutions as in AlexNet, narrower, with batch normalisation, for 96 px; 1.0 MB of weights."""
    body = OrderedDict(
        conv1=_conv(3, 24, kernel=5, stride=2),  # 48 px
        pool1=nn.MaxPool2d(2),
        conv2=_conv(24, 64),  # 24 px
        pool2=nn.MaxPool2d(2),
        conv3=_conv(64, 96),  # 12 px
        conv4=_conv(96, 96),
        conv5=_conv(96, 96),
        pool5=nn.AvgPool2d(4),  # 3 px: the orientation of an image also depends on positions
        flatten=nn.Flatten(),
    )
    return TwoParts(nn.Sequential(body), nn.Linear(96 * 9, 4))


def resnet32() -> TwoParts:
    """Three residual blocks for 32 px, the last feature map 8x8; 1.2 MB of weights."""
    body = OrderedDict(
        stem=_conv(3, 16),
        layer1=Block(16, 32, stride=2),  # 16 px
        layer2=Block(32, 64, stride=2),  # 8 px
        layer3=Block(64, 128, stride=1),
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
    )
    return TwoParts(nn.Sequential(body), nn.Linear(128, 10))


class Block(nn.Module):
    """Two convolutions with a skip connection (the basic block of ResNet)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, outputs, stride=stride)
        self.conv2 = nn.Sequential(nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs))
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.skip = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.relu(self.conv2(self.conv1(x)) + self.skip(x))
        return result


def _conv(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


@dataclass(frozen=True)
class SmallNetwork:
    """An architecture for self-supervised training."""

    name: str
    function: Callable[[], TwoParts]
    side: int  # of the input
    room: int  # side of the cached images, from which random crops are taken

    @property
    def architecture(self) -> str:
        """Its name in a card."""
        return f"{self.function.__module__}:{self.function.__name__}"

    @property
    def preprocess(self) -> Preprocess:
        return Preprocess(resize=self.room, crop=self.side)

    def build(self, outputs: int) -> TwoParts:
        """A network with random weights, and a head with this many outputs."""
        net = self.function()
        net.head = nn.Linear(net.head.in_features, outputs)
        return net


NETWORKS: dict[str, SmallNetwork] = {
    "alexnet-96": SmallNetwork("alexnet-96", alexnet96, side=96, room=120),
    "resnet-32": SmallNetwork("resnet-32", resnet32, side=32, room=32),
}
"""Every network that `classlens selfsup train --network` accepts."""
