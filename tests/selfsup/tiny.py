"""A network for 16 px that learns in a second; importing this makes it known as "tiny"."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from classlens.selfsup.networks import NETWORKS, SmallNetwork, TwoParts


def net() -> TwoParts:
    body = OrderedDict(
        conv1=nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        conv2=nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        pool=nn.AvgPool2d(2),
        flatten=nn.Flatten(),
    )
    return TwoParts(nn.Sequential(body), nn.Linear(64, 4))


NETWORKS["tiny"] = SmallNetwork("tiny", net, side=16, room=16)
