"""Weights that torchao quantised: explained through the dequantised weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import classlens


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 32)
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(32, 5)).eval()


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
@pytest.mark.parametrize("method", ["agf", "lrp", "gradient"])
def test_torchao(method: str, config: str) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model, x = network(), torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    quantization.quantize_(model, getattr(quantization, config)())
    e, expected = (classlens.explain(m, x, 1, method) for m in (model, network()))
    alike = torch.corrcoef(torch.stack([e.maps.flatten(), expected.maps.flatten()]))[0, 1]
    assert alike > 0.99
    assert any("Int8Tensor" in note for note in e.report.notes)
