"""The layers at which concepts are looked for."""

from __future__ import annotations

import torch
from torch import nn

from classlens.concept.layers import candidates
from classlens.core.capture import record


def names(network: nn.Module, side: int = 64) -> list[str]:
    tape = record(network.eval(), torch.rand(1, 3, side, side))
    return [tape.producer[cut.value].module or "" for cut in candidates(tape)]


def body() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Conv2d(3, 4, 8, stride=8), nn.ReLU(), nn.Conv2d(4, 6, 2, stride=2), nn.ReLU()]


def test_the_deepest_map_of_each_of_two_resolutions() -> None:
    network = nn.Sequential(*body(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2))
    assert names(network) == ["3", "1"]


def test_maps_of_classes_are_not_features() -> None:
    """As in SqueezeNet, where the last convolution has a channel for each class."""
    network = nn.Sequential(*body(), nn.Conv2d(6, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    assert names(network) == ["3", "1"]


def test_fine_maps_are_left_out() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 2, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    network.append(nn.Linear(4, 2))
    assert names(network) == []
