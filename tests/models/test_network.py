from __future__ import annotations

import copy

import pytest
import torch

from classlens.core.capture import record
from classlens.models import LoadedModel, Preprocess, network
from classlens.models.network import Network, fingerprint, framed, images_per_forward, short_name
from networks import Plain


def plain() -> LoadedModel:
    torch.manual_seed(0)
    return LoadedModel("plain", Plain().eval(), Preprocess(resize=36, crop=32), None)


def test_the_number_of_classes_is_asked_of_the_network() -> None:
    assert Network(plain()).classes == 7


def test_a_fingerprint_sees_weights_and_preprocessing() -> None:
    loaded = plain()
    other = copy.deepcopy(loaded)
    assert fingerprint(loaded) == fingerprint(other)
    with torch.no_grad():
        other.model.head[3].bias[0] += 1e-6
    assert fingerprint(loaded) != fingerprint(other)
    assert fingerprint(loaded) != fingerprint(LoadedModel("x", loaded.model, Preprocess(crop=31), None))


def test_names_do_not_tell_where_things_lie() -> None:
    assert short_name("/home/someone/nets/resnet50/card.json") == "resnet50"
    assert short_name("/home/someone/nets/resnet50") == "resnet50"
    assert short_name("../cards/vgg.json") == "vgg"
    assert short_name("timm:resnet50.a1_in1k") == "timm:resnet50.a1_in1k"


def test_the_whole_picture_is_squashed() -> None:
    assert framed(Preprocess(resize=256, crop=224), "model") == Preprocess(resize=256, crop=224)
    whole = framed(Preprocess(resize=256, crop=224), "whole")
    assert (whole.resize, whole.crop, whole.fit) == ((224, 224), None, "squash")


def test_memory_decides_how_many_go_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 2, 1))
    model = torch.nn.Sequential(model, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    tape = record(model.eval(), torch.randn(2, 3, 10, 10))
    # The convolution's output and the ReLU's, 8 channels each, are the most that is alive at once.
    assert network.peak_bytes(tape) == 2 * (8 + 8) * 100 * 4
    assert images_per_forward(tape, 2 * 5 * 16 * 100 * 4 / 1e9) == 5
    assert images_per_forward(tape, 1e-9) == 1
    monkeypatch.setattr(network, "_REUSED_BLOCK", 3 * 8 * 100 * 4)
    assert images_per_forward(tape, None) == 3
