"""Every method on real architectures, as torchvision builds them: nothing in src/ knows any of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import classlens
from classlens.methods import METHODS
from classlens.models._torchvision import import_torchvision
from networks import pictures
from quick import ANYWHERE, QUICK

ARCHITECTURES = ("resnet50", "vgg19", "densenet121", "mobilenet_v3_large", "convnext_tiny", "squeezenet1_1")
SOURCE = Path(classlens.__file__).parent


@pytest.fixture(scope="module", params=[*ARCHITECTURES, "efficientnet-lite0"])
def network(request: pytest.FixtureRequest) -> nn.Module:
    if request.param == "efficientnet-lite0":
        return classlens.load("efficientnet-lite0").model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = getattr(import_torchvision().models, request.param)(weights=None)
        if request.param == "vgg19":  # a narrow head: 120 million weights take long and show nothing that 3 do not
            model.classifier[0], model.classifier[3] = nn.Linear(512 * 7 * 7, 128), nn.Linear(128, 128)
            model.classifier[6] = nn.Linear(128, 1000)
        norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
        for module in norms:
            module.momentum = 1.0  # statistics of what they see, so that signals neither vanish nor explode
        with torch.no_grad():
            model.train()(pictures(4, (64, 64)))
    return model.eval()


@pytest.mark.parametrize("method", ANYWHERE)
def test_method_serves_the_architecture(network: nn.Module, method: str) -> None:
    e = classlens.explain(network, pictures(1, (64, 64)), classlens.top(2), method, **QUICK.get(method, {}))
    assert torch.isfinite(e.maps).all()
    assert e.maps.abs().sum() > 0
    if METHODS[method].class_specific:
        assert (e.maps[0, 0] - e.maps[0, 1]).norm() > 1e-3 * e.maps[0, 0].norm()
    if METHODS[method].conserves and method != "fullgrad":  # fullgrad is complete for piecewise linear networks only
        assert e.report.conservation.max() < 1e-3


def test_no_architecture_is_named_in_the_code() -> None:
    names = re.compile(r"\b(VGG|ResNet|DenseNet|EfficientNet|MobileNet|ConvNeXt|SqueezeNet|Swin|ViT)\b", re.IGNORECASE)
    allowed = {"models", "data", "selfsup"}
    for path in SOURCE.rglob("*.py"):
        if allowed.isdisjoint(path.relative_to(SOURCE).parts):
            code = re.sub(r'"""[\s\S]*?"""|#.*|"[^"\n]*"', "", path.read_text())
            assert not names.search(code), path
