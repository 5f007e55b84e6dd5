"""Published files of self-supervised networks: made here with the projects' own key names, and read."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from classlens.errors import ModelError
from classlens.models import load, selfsup
from classlens.models._torchvision import import_torchvision

State = dict[str, Tensor]
pytestmark = pytest.mark.skipif(find_spec("torchvision") is None, reason="needs torchvision")


def slim(num_classes: int) -> nn.Module:
    """A ResNet of bottlenecks with torchvision's names, a hundredth of the size."""
    models = import_torchvision().models
    return models.ResNet(models.resnet.Bottleneck, [1, 1, 1, 1], num_classes=num_classes, width_per_group=2)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_torchvision().models, "resnet50", slim)
    monkeypatch.setattr(selfsup, "_HIDDEN", 8)
    torch.manual_seed(0)


def prefixed(state: State, prefix: str) -> State:
    return {prefix + key: value for key, value in state.items()}


def body(state: State) -> State:
    return {key: value for key, value in state.items() if not key.startswith("fc.")}


def answer(network: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        return network.eval()(images)


IMAGES = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(1))


# ---------------------------------------------------------------------------------------------------------- AlexNet


@pytest.mark.parametrize("options", [
    {"norm": True}, {"norm": False, "width": 96}, {"sobel": True, "norm": True, "width": 96}, {"dense_norm": True},
])  # fmt: skip
def test_an_alexnet_is_built_as_its_file_says(tmp_path: Path, options: dict[str, bool]) -> None:
    network = selfsup.AlexNet(4, **options)
    torch.save({"epoch": 3, "state_dict": prefixed(network.state_dict(), "module.")}, tmp_path / "rotnet.pth")
    loaded = load("selfsup:rotnet", tmp_path / "rotnet.pth")
    assert loaded.labels is not None
    assert len(loaded.labels) == 4
    assert torch.equal(answer(loaded.model, IMAGES), answer(network, IMAGES))


def test_rotnet_as_feature_learning_rotnet_saves_it(tmp_path: Path) -> None:
    """Blocks of convolution, batch normalisation and ReLU in a ModuleList; a dense block that begins with Flatten."""

    def conv(before: int, after: int, kernel: int, stride: int = 1, padding: int = 1) -> nn.Module:
        layers = nn.Conv2d(before, after, kernel, stride, padding), nn.BatchNorm2d(after), nn.ReLU()
        return nn.Sequential(*layers)

    dense = [nn.Flatten()]
    for inputs in (9216, 8):
        dense += [nn.Linear(inputs, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU()]
    blocks = nn.ModuleList([
        conv(3, 64, 11, 4, 2), nn.MaxPool2d(3, 2), conv(64, 192, 5, 1, 2), nn.MaxPool2d(3, 2), conv(192, 384, 3),
        conv(384, 256, 3), conv(256, 256, 3), nn.MaxPool2d(3, 2), nn.Sequential(*dense), nn.Sequential(nn.Linear(8, 4)),
    ])  # fmt: skip
    whole = nn.Sequential(*blocks)
    answer(whole.train(), IMAGES)  # other statistics than the usual ones
    # In 2018 batch normalisation did not count its batches.
    old = {key: value for key, value in blocks.state_dict().items() if not key.endswith("num_batches_tracked")}
    torch.save({"epoch": 50, "network": prefixed(old, "_feature_blocks.")}, tmp_path / "net")
    loaded = load("selfsup:rotnet", tmp_path / "net")
    assert torch.equal(answer(loaded.model, IMAGES), answer(whole, IMAGES))


def test_rotnet_has_four_rotations(tmp_path: Path) -> None:
    torch.save(selfsup.AlexNet(7).state_dict(), tmp_path / "seven.pth")
    with pytest.raises(ModelError, match="4 rotations, this file has 7 classes"):
        load("selfsup:rotnet", tmp_path / "seven.pth")
    assert answer(load("selfsup:sela", tmp_path / "seven.pth").model, IMAGES).shape == (2, 7)


# -------------------------------------------------------------------------------------------------------- ResNet-50


def several_heads(name: str, count: int, classes: int) -> State:
    return {
        f"{name}{i}.{part}": torch.randn(classes, 2048) if part == "weight" else torch.randn(classes)
        for i in range(count)
        for part in ("weight", "bias")
    }


def with_head(network: nn.Module, heads: State, name: str) -> nn.Module:
    state = body(network.state_dict()) | {f"fc.{part}": heads[f"{name}.{part}"] for part in ("weight", "bias")}
    network.load_state_dict(state)
    return network


def sela_names(state: State) -> State:
    """conv1 -> features.0, layer1 -> features.4, ..."""
    places = {"conv1": 0, "bn1": 1, "layer1": 4, "layer2": 5, "layer3": 6, "layer4": 7}
    return {f"features.{places[key.split('.')[0]]}.{key.partition('.')[2]}": value for key, value in state.items()}


@pytest.mark.parametrize(("name", "head"), [("selfsup:sela", 0), ("selfsup:sela:2", 2)])
def test_sela_with_several_heads(tmp_path: Path, name: str, head: int) -> None:
    network, heads = slim(11), several_heads("top_layer", 3, 11)
    labels = torch.zeros(3, 100, dtype=torch.int64)
    saved = sela_names(body(network.state_dict())) | heads
    torch.save({"state_dict": saved, "L": labels}, tmp_path / "resnet-3x11.pth")
    loaded = load(name, tmp_path / "resnet-3x11.pth")
    expected = answer(with_head(network, heads, f"top_layer{head}"), IMAGES)
    assert torch.equal(answer(loaded.model, IMAGES), expected)
    with pytest.raises(ModelError, match="3 heads, counted from 0; there is no head 7"):
        load("selfsup:sela:7", tmp_path / "resnet-3x11.pth")


def test_sela_with_torchvision_names(tmp_path: Path) -> None:
    network = slim(5)
    torch.save({"state_dict": network.state_dict(), "L": torch.zeros(9)}, tmp_path / "resnet50_pp.pth")
    assert torch.equal(
        answer(load("selfsup:sela", tmp_path / "resnet50_pp.pth").model, IMAGES), answer(network, IMAGES)
    )  # fmt: skip


def test_sela_pre_activation(tmp_path: Path) -> None:
    """SeLa's resnetv2: 7 entries of `features`, blocks with bn1..3, conv1..3 and `shortcut.0`, all without biases."""
    state = selfsup.PreActivationResNet(3).state_dict()
    keys = {key for key in state if "num_batches" not in key}
    assert {"features.0.weight", "features.2.0.shortcut.0.weight", "features.3.0.bn1.running_mean",
            "features.5.2.conv3.weight"} <= keys  # fmt: skip
    assert "features.2.1.shortcut.0.weight" not in keys
    assert len(keys) == 1 + 16 * (3 + 3 * 4) + 4 + 2  # stem; blocks of 3 convolutions and 3 norms; shortcuts; head
    heads = {f"top_layer{i}.{part}": state[f"top_layer.{part}"] + i for i in range(2) for part in ("weight", "bias")}
    saved = {key: value.half() for key, value in state.items() if not key.startswith("top_layer")} | heads
    torch.save(saved, tmp_path / "resnet-2x3.pth")
    network = load("selfsup:sela:1", tmp_path / "resnet-2x3.pth").model
    assert torch.equal(network.state_dict()["top_layer.bias"], state["top_layer.bias"] + 1)
    assert answer(network, IMAGES[:1, :, :64, :64]).shape == (1, 3)


def test_scan(tmp_path: Path) -> None:
    network, heads = slim(10), several_heads("cluster_head.", 2, 10)
    saved = prefixed(body(network.state_dict()), "module.backbone.") | prefixed(heads, "module.")
    torch.save({"model": saved, "head": 1}, tmp_path / "scan.pth.tar")
    torch.save({"model": saved}, tmp_path / "silent.pth.tar")
    for name, file, head in (
        ("selfsup:scan:1", "silent", 1), ("selfsup:scan", "silent", 0),
        ("selfsup:scan", "scan", 1), ("selfsup:scan:0", "scan", 0),  # the file says that its second head is the best
    ):  # fmt: skip
        loaded = load(name, tmp_path / f"{file}.pth.tar")
        expected = answer(with_head(network, heads, f"cluster_head.{head}"), IMAGES)
        assert torch.equal(answer(loaded.model, IMAGES), expected), (name, file)


def moco(state: State) -> object:
    both = prefixed(state, "module.encoder_q.") | prefixed(state, "module.encoder_k.")
    fc = {"module.encoder_q.fc.0.weight": torch.zeros(4, 2048), "module.queue": torch.zeros(128, 4)}
    return {"epoch": 200, "arch": "resnet50", "state_dict": both | fc}


def simclr(state: State) -> object:
    projection = {"backbone.fc.0.weight": torch.zeros(4, 2048), "backbone.fc.2.bias": torch.zeros(4)}
    return {"epoch": 100, "arch": "resnet50", "state_dict": prefixed(state, "backbone.") | projection}


def dino(state: State) -> object:
    return {"teacher": prefixed(state, "backbone.") | {"head.mlp.0.weight": torch.zeros(4, 4)}, "epoch": 1}


def swav(state: State) -> object:
    more = {"projection_head.0.weight": torch.zeros(4, 4), "prototypes.weight": torch.zeros(4, 4)}
    return prefixed(state | more, "module.")


@pytest.mark.parametrize("saved", [moco, simclr, dino, swav], ids=lambda f: f.__name__)
def test_a_backbone_gives_its_latent(tmp_path: Path, saved: Callable[[State], object]) -> None:
    network = slim(1)
    torch.save(saved(body(network.state_dict())), tmp_path / "file.pth")
    loaded = load(f"selfsup:{saved.__name__}", tmp_path / "file.pth")
    network.fc = nn.Identity()
    latents = answer(loaded.model, IMAGES)
    assert latents.shape == (2, 2048)
    assert torch.equal(latents, answer(network, IMAGES))


# ----------------------------------------------------------------------------------------------------- what is wrong


def test_a_mismatch_lists_missing_and_unexpected_keys(tmp_path: Path) -> None:
    state = body(slim(1).state_dict())
    state["layer9.conv.weight"] = state.pop("layer1.0.conv1.weight")
    torch.save(state, tmp_path / "odd.pth")
    with pytest.raises(
        ModelError, match=r"1 \(layer1.0.conv1.weight\) weights missing, 1 \(layer9.conv.weight\) unexp"
    ):
        load("selfsup:dino", tmp_path / "odd.pth")


def test_a_file_of_another_family_says_what_it_lacks(tmp_path: Path) -> None:
    torch.save(body(slim(1).state_dict()), tmp_path / "backbone.pth")
    with pytest.raises(ModelError, match="cannot be read as selfsup:scan: it lacks fc"):
        load("selfsup:scan", tmp_path / "backbone.pth")
    with pytest.raises(ModelError, match="cannot be read as selfsup:rotnet: it lacks features"):
        load("selfsup:rotnet", tmp_path / "backbone.pth")
    with pytest.raises(ModelError, match="a backbone has no heads"):
        load("selfsup:dino:1", tmp_path / "backbone.pth")


def test_objects_are_not_unpickled(tmp_path: Path) -> None:
    torch.save({"state_dict": {"a": Path("x")}}, tmp_path / "pickled.pth")
    with pytest.raises(ModelError, match="pickled objects"):
        load("selfsup:moco", tmp_path / "pickled.pth")


def test_names() -> None:
    with pytest.raises(ModelError, match="no selfsup:rotnett; nearest: rotnet; choose one of rotnet, sela"):
        load("selfsup:rotnett")
    with pytest.raises(ModelError, match="a number from 0"):
        load("selfsup:sela:first")
    with pytest.raises(ModelError, match="has no included weights"):
        load("selfsup:sela")
    assert load("selfsup:rotnet", None).labels == selfsup.ROTATIONS
