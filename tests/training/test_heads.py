"""Heads: found, replaced, and filled with the weights of a body alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from squares import net
from torch import nn

from classlens.errors import ModelError
from classlens.models import Preprocess
from classlens.models.heads import Head
from classlens.training.heads import find_head, with_new_head
from networks import build

SMALL = Preprocess(resize=16, crop=16)


@pytest.mark.parametrize(
    ("name", "path", "inputs"),
    [("plain", "head.3", 12), ("residual", "fc", 12), ("dense-head", "head.4", 12), ("modern", "fc", 12)],
)
def test_the_last_linear_layer_is_found(name: str, path: str, inputs: int) -> None:
    assert find_head(build(name), Preprocess(resize=32, crop=32)) == (path, inputs)


def test_the_whole_fully_connected_end() -> None:
    assert find_head(net().model, SMALL, whole=True) == ("classifier", 48)
    assert find_head(build("dense-head"), Preprocess(resize=16, crop=16), whole=True) == ("head", 128)
    assert find_head(build("residual"), Preprocess(resize=32, crop=32), whole=True) == ("fc", 12)


def test_a_network_without_a_linear_head() -> None:
    with pytest.raises(ModelError, match="must be the output of a linear layer"):
        find_head(build("conv-head"), Preprocess(resize=32, crop=32))


def test_features_are_what_the_head_reads() -> None:
    backbone = with_new_head("squares:net", "default", 3, hidden=(10,))
    assert backbone.head == Head("classifier", (48, 10, 3), 0.5)
    images = torch.rand(2, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(backbone.head_module(backbone.features(images)), backbone.model(images))
    again, other = (with_new_head("squares:net", "default", 3, hidden=(10,), seed=seed) for seed in (0, 1))
    assert torch.equal(again.model(images), backbone.model(images))
    assert not torch.equal(other.model(images), backbone.model(images))


def test_weights_of_the_body_alone(tmp_path: Path) -> None:
    body = {key: value + 1 for key, value in net().model.state_dict().items() if key.startswith("features")}
    save_file(body, tmp_path / "body.safetensors")
    backbone = with_new_head("squares:net", tmp_path / "body.safetensors", 3, hidden=(10,))
    assert torch.equal(backbone.model.state_dict()["features.0.bias"], body["features.0.bias"])
    body.pop("features.0.bias")
    save_file(body, tmp_path / "less.safetensors")
    with pytest.raises(ModelError, match=r"1 \(features.0.bias\) weights missing outside the head"):
        with_new_head("squares:net", tmp_path / "less.safetensors", 3, hidden=(10,))
    save_file({"features.0.weight": torch.zeros(1)}, tmp_path / "odd.safetensors")
    with pytest.raises(ModelError, match="of another shape"):
        with_new_head("squares:net", tmp_path / "odd.safetensors", 3)


def test_backbones_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no card .*card\.json"):
        with_new_head(str(tmp_path), "default", 3)
    (tmp_path / "body.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="give the name of a network or a card, and pass the file with --weights"):
        with_new_head(str(tmp_path / "body.safetensors"), "default", 3)
    pyramid = {"layers": ["eighth"], "channels": [12], "classes": 4}
    card = {"architecture": "squares:stages", "weights": None, "labels": None, "preprocess": {}, "pyramid": pyramid}
    (tmp_path / "card.json").write_text(json.dumps(card))
    with pytest.raises(ModelError, match="is a segmentation network"):
        with_new_head(str(tmp_path), "default", 3)


def test_a_backbone_without_a_head_ends_with_an_identity() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 12), nn.ReLU(), nn.Identity())
    assert find_head(model, SMALL) == ("3", 12)
    with pytest.raises(ModelError, match="layer is a ReLU; a backbone without a head must end with an nn"):
        find_head(model[:3], SMALL)
    with pytest.raises(ModelError, match=r"must end with an nn\.Identity in its place and return \(B,D\)"):
        find_head(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Identity()), SMALL)
