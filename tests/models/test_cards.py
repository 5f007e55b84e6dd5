"""Cards: written whole, read strictly, and able to describe networks that differ in a few numbers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from classlens.data.labels import imagenet
from classlens.errors import ModelError
from classlens.models import Preprocess, load, write_card
from classlens.models._torchvision import import_torchvision
from classlens.models.cards import apply_overrides, read_card

NETWORK = """
from torch import nn

def small():
    return nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder with `my_small_network:small` in it."""
    (tmp_path / "my_small_network.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("my_small_network", None)


def small(fill: float = 0.5) -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(fill)
    return model.eval()


def write(path: Path, **changes: Any) -> Path:
    card = {"architecture": "efficientnet-lite0", "weights": None, "labels": None, "preprocess": {}} | changes
    path.write_text(json.dumps({key: value for key, value in card.items() if value is not ...}))
    return path


def test_a_card_written_is_the_network_read(folder: Path) -> None:
    preprocess = Preprocess(8, 7, "bicubic", (0.1, 0.2, 0.3), (0.5, 0.6, 0.7))
    written = write_card(
        "zoo/pets",
        small(),
        architecture="my_small_network:small",
        preprocess=preprocess,
        labels=["cat", "dog"],
        overrides={"1.eps": 0.5},
        about="made here",
    )
    loaded = load(written)
    assert loaded.preprocess == preprocess
    assert loaded.labels == ("cat", "dog")
    assert loaded.model[1].eps == 0.5
    expected = small()
    expected[1].eps = 0.5
    x = torch.rand(2, 3, 7, 7)
    torch.testing.assert_close(loaded.model(x), expected(x), rtol=0, atol=0)
    for name in ("zoo/pets", "zoo/pets/card.json", folder / "zoo" / "pets"):
        torch.testing.assert_close(load(name).model(x), expected(x), rtol=0, atol=0)
    assert sorted(path.name for path in (folder / "zoo").rglob("*")) == ["card.json", "model.safetensors", "pets"]


def test_other_weights_can_be_put_into_a_card(folder: Path) -> None:
    write_card("pets", small(0.5), architecture="my_small_network:small", preprocess=Preprocess())
    save_file(small(0.25).state_dict(), "other.safetensors")
    assert load("pets", weights="other.safetensors").model[4].bias.tolist() == [0.25, 0.25]


def test_the_imagenet_labels_are_written_by_name(tmp_path: Path) -> None:
    write_card(tmp_path / "a", small(), architecture="x:y", preprocess=Preprocess(), labels=imagenet())
    assert json.loads((tmp_path / "a" / "card.json").read_text())["labels"] == "imagenet"
    assert read_card(tmp_path / "a").labels == imagenet()


def test_tied_weights_can_be_written(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    write_card(tmp_path / "tied", model, architecture="x:y", preprocess=Preprocess())
    assert torch.equal(load_file(tmp_path / "tied" / "model.safetensors")["1.weight"], model[0].weight)


def test_a_card_is_never_half_written_nor_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full_disk)
        with pytest.raises(ModelError, match="cannot be written: No space left"):
            write_card(tmp_path / "a", small(), architecture="x:y", preprocess=Preprocess())
    assert list(tmp_path.iterdir()) == []
    write_card(tmp_path / "a", small(), architecture="x:y", preprocess=Preprocess())
    with pytest.raises(ModelError, match="exists: choose a new folder"):
        write_card(tmp_path / "a", small(), architecture="x:y", preprocess=Preprocess())
    with pytest.raises(ModelError, match="labels must be a list"):
        write_card(tmp_path / "b", small(), architecture="x:y", preprocess=Preprocess(), labels=[])
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"architecture": ...}, "lacks architecture"),
        ({"preprocess": ..., "colour": 3}, "lacks preprocess, has the unknown field colour"),
        ({"architecture": 5}, "architecture must be a name"),
        ({"architecture": "other/card.json"}, "is not the name of an architecture"),
        ({"architecture": "no-such-net"}, "there is no model 'no-such-net'"),
        ({"weights": 5}, "weights must be"),
        ({"weights": "nowhere.safetensors"}, r"no weight file .*nowhere\.safetensors"),
        ({"labels": ["a", 5]}, "labels must be"),
        ({"labels": "cifar"}, "labels must be"),
        ({"preprocess": {"crop": -1}}, r"my-card\.json: preprocess: crop must be"),
        ({"preprocess": None}, "must be a JSON object"),
        ({"overrides": [1]}, "overrides must be"),
        ({"overrides": {"_fc.nothing": 1}}, "'_fc.nothing'"),
    ],
)
def test_a_wrong_card_is_refused(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelError, match=text) as error:
        load(write(tmp_path / "my-card.json", **changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"[1, 2]", b"[" * 99999])
def test_a_file_that_is_no_card_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "card.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"card\.json"):
        load(tmp_path)


def test_a_missing_card_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no card .*nowhere\.json"):
        load(tmp_path / "nowhere.json")
    with pytest.raises(ModelError, match=r"a folder that contains card\.json"):
        load(tmp_path)


# Overrides.


def test_overrides_set_one_attribute_or_that_of_a_class() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1)), nn.BatchNorm2d(3))
    model.flag = False
    apply_overrides(model, {"1.1.stride": [2, 3], "*BatchNorm2d.eps": 1, "flag": True})
    assert model[1][1].stride == (2, 3)
    assert model[0].stride == (1, 1)
    assert [model[1][0].eps, model[2].eps] == [1.0, 1.0]
    assert isinstance(model[2].eps, float)
    assert model.flag is True


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("0.strides", [2, 2], "only existing numbers"),  # no such attribute
        ("7.stride", [2, 2], "no module '7'"),
        ("*BatchNorm3d.eps", 0.1, "no module"),
        ("0.stride", [2, 2, 2], "does not have the form"),
        ("0.stride", 2, "does not have the form"),
        ("0.stride", [2.0, 2.0], "does not have the form"),
        ("0.stride", ["2", "2"], "only existing numbers"),
        ("0.stride", None, "only existing numbers"),
        ("1.eps", True, "does not have the form"),
        ("0.padding_mode", "circular", "only existing numbers"),  # text
        ("0.weight", 0.0, "only existing numbers"),  # a parameter
        ("0.forward", 1, "only existing numbers"),  # a method
        ("0.training", True, "only existing numbers"),  # load() sets it
        ("0.__class__", 1, "only existing numbers"),
        ("1._version", 1, "only existing numbers"),  # of the class, not of the module
    ],
)
def test_overrides_touch_nothing_else(key: str, value: Any, text: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)).eval()
    before = [dict(vars(module)) for module in model.modules()]
    with pytest.raises(ModelError, match=text):
        apply_overrides(model, {key: value})
    assert [dict(vars(module)) for module in model.modules()] == before


# A real case: ResNet-50 as Keras makes it, with the stride on another convolution and another eps.


def test_a_card_for_keras_resnet50(tmp_path: Path) -> None:
    by_hand = import_torchvision().models.resnet50(weights=None).eval()
    overrides: dict[str, Any] = {"*BatchNorm2d.eps": 1e-3}
    for i in (2, 3, 4):
        overrides |= {f"layer{i}.0.conv{j}.stride": [3 - j, 3 - j] for j in (1, 2)}
    card = tmp_path / "resnet50"
    write_card(card, by_hand, architecture="torchvision:resnet50", preprocess=Preprocess(), overrides=overrides)
    for layer in (by_hand.layer2, by_hand.layer3, by_hand.layer4):
        layer[0].conv1.stride, layer[0].conv2.stride = (2, 2), (1, 1)
    for module in by_hand.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 1e-3
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        expected, found = by_hand(x), load(card).model(x)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
