"""Networks trained without labels, from published checkpoints: `load("selfsup:scan", weights=FILE)`.

| name | checkpoint | output |
|---|---|---|
| `rotnet` | RotNet's AlexNet, as FeatureLearningRotNet or the linear-probes project save it | 4 rotations |
| `sela` | SeLa's ResNet-50 (torchvision's names or `features.N`, pre-activation too) or AlexNet | clusters of a head |
| `scan` | SCAN's ResNet-50, `backbone.` and `cluster_head.N.` | clusters of a head |
| `moco`, `simclr`, `dino`, `swav` | a ResNet-50, its projection left out | latents (2048), no classes |

If a checkpoint has several heads, the one that the file marks as its best is used (SCAN's do, under `head`), otherwise
the first; `selfsup:sela:3` selects the fourth. The architecture (width, batch normalisation, Sobel filters, number of
clusters) is inferred from the shapes in the file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from classlens.errors import ModelError
from classlens.models._text import nearest
from classlens.models._torchvision import import_torchvision
from classlens.models.checkpoint import fill, read_file, unwrap

State = dict[str, Tensor]

ROTATIONS = ("rotated by 0°", "rotated by 90°", "rotated by 180°", "rotated by 270°")


@dataclass(frozen=True)
class Family:
    """How the networks of a project are built, and how its files are read."""

    description: str
    read: Callable[[State, int], tuple[nn.Module, State]]  # (state, which head) -> a network, and its weights
    build: Callable[[], nn.Module]  # the project's usual network with random weights
    labels: tuple[str, ...] | None = None


# ---------------------------------------------------------------------------------------------------------- AlexNet

_CHANNELS = {96: (96, 256, 384, 384, 256), 64: (64, 192, 384, 256, 256)}  # by the channels of the first layer
_KERNELS = ((11, 4, 2), (5, 1, 2), (3, 1, 1), (3, 1, 1), (3, 1, 1))  # size, stride, padding
_POOLED = (0, 1, 4)  # convolutions that are followed by a max-pool
_FLAT, _HIDDEN = 256 * 6 * 6, 4096


class AlexNet(nn.Module):
    """AlexNet with the options of self-supervised projects; parameters have DeepCluster's names."""

    def __init__(
        self, classes: int = 4, width: int = 64, *, norm: bool = True, sobel: bool = False, dense_norm: bool = False,
        dense_bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.sobel = nn.Sequential(nn.Conv2d(3, 1, 1), nn.Conv2d(1, 2, 3, padding=1)) if sobel else nn.Identity()
        self.features = nn.Sequential(*_convolutions(width, 2 if sobel else 3, norm))
        hidden: list[nn.Module] = []
        for inputs in (_FLAT, _HIDDEN):
            layer = nn.Linear(inputs, _HIDDEN, bias=dense_bias)
            hidden += [layer, nn.BatchNorm1d(_HIDDEN), nn.ReLU()] if dense_norm else [nn.Dropout(), layer, nn.ReLU()]
        self.classifier = nn.Sequential(*hidden)
        self.top_layer = nn.Linear(_HIDDEN, classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.top_layer(self.classifier(self.features(self.sobel(images)).flatten(1)))
        return logits


def _convolutions(width: int, channels: int, norm: bool) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for i, (after, (kernel, stride, padding)) in enumerate(zip(_CHANNELS[width], _KERNELS, strict=True)):
        layers.append(nn.Conv2d(channels, after, kernel, stride, padding))
        layers += [nn.BatchNorm2d(after), nn.ReLU()] if norm else [nn.ReLU()]
        layers += [nn.MaxPool2d(3, 2)] if i in _POOLED else []
        channels = after
    return layers


# The layers of FeatureLearningRotNet's numbered blocks -> their names in the network above.
_ROTNET_NAMES = {
    f"_feature_blocks.{theirs}.": f"{ours}."
    for theirs, ours in (
        ("0.0", "features.0"), ("0.1", "features.1"), ("2.0", "features.4"), ("2.1", "features.5"),
        ("4.0", "features.8"), ("4.1", "features.9"), ("5.0", "features.11"), ("5.1", "features.12"),
        ("6.0", "features.14"), ("6.1", "features.15"), ("8.1", "classifier.0"), ("8.2", "classifier.1"),
        ("8.4", "classifier.3"), ("8.5", "classifier.4"), ("9.0", "top_layer"),
    )
}  # fmt: skip


def _read_alexnet(state: State, head: int) -> tuple[nn.Module, State]:
    state = {_renamed(key, _ROTNET_NAMES): value for key, value in state.items()}
    state = _one_head(state, "top_layer", "top_layer", head)
    first, top = _tensor(state, "features.0.weight"), _tensor(state, "top_layer.weight")
    if first.shape[0] not in _CHANNELS:
        raise ModelError(f"AlexNet's first layer has 96 or 64 filters, this file has {first.shape[0]}")
    dense_norm = "classifier.1.running_mean" in state
    network = AlexNet(
        top.shape[0],
        first.shape[0],
        norm="features.1.running_mean" in state,
        sobel=first.shape[1] == 2,
        dense_norm=dense_norm,
        dense_bias=f"classifier.{0 if dense_norm else 1}.bias" in state,
    )
    return network, state


def _read_rotnet(state: State, head: int) -> tuple[nn.Module, State]:
    network, state = _read_alexnet(state, head)
    classes = _tensor(state, "top_layer.weight").shape[0]
    if classes != len(ROTATIONS):
        raise ModelError(
            f"RotNet predicts {len(ROTATIONS)} rotations, this file has {classes} classes; read it with selfsup:sela"
        )
    return network, state


# -------------------------------------------------------------------------------------------------------- ResNet-50


def _resnet50(outputs: int | None = None) -> nn.Module:
    """torchvision's ResNet-50; without classes its output is the latent (2048)."""
    network: nn.Module = import_torchvision().models.resnet50(num_classes=outputs or 1)
    if outputs is None:
        network.fc = nn.Identity()
    return network


class PreActivation(nn.Module):
    """A bottleneck block with batch normalisation and ReLU before each convolution (He et al., 2016)."""

    def __init__(self, before: int, inside: int, stride: int) -> None:
        super().__init__()
        after = 4 * inside
        self.bn1, self.conv1 = nn.BatchNorm2d(before), nn.Conv2d(before, inside, 1, bias=False)
        self.bn2, self.conv2 = nn.BatchNorm2d(inside), nn.Conv2d(inside, inside, 3, stride, 1, bias=False)
        self.bn3, self.conv3 = nn.BatchNorm2d(inside), nn.Conv2d(inside, after, 1, bias=False)
        same = stride == 1 and before == after
        self.shortcut = None if same else nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.bn1(x))
        skip = x if self.shortcut is None else self.shortcut(active)
        out = self.conv2(F.relu(self.bn2(self.conv1(active))))
        result: Tensor = self.conv3(F.relu(self.bn3(out))) + skip
        return result


class PreActivationResNet(nn.Module):
    """SeLa's first ResNet-50: no normalisation after the stem or before the pool."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        stages, before = [], 64
        for inside, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            rest = [PreActivation(4 * inside, inside, 1) for _ in range(blocks - 1)]
            stages.append(nn.Sequential(PreActivation(before, inside, stride), *rest))
            before = 4 * inside
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.MaxPool2d(3, 2, 1), *stages, nn.AdaptiveAvgPool2d(1)
        )
        self.top_layer = nn.Linear(before, classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.top_layer(self.features(images).flatten(1))
        return logits


# SeLa's numbered layers of the post-activation ResNet -> torchvision's names.
_SELA_NAMES = {
    "features.0.": "conv1.", "features.1.": "bn1.", "features.4.": "layer1.", "features.5.": "layer2.",
    "features.6.": "layer3.", "features.7.": "layer4.", "top_layer.": "fc.",
}  # fmt: skip


def _read_sela(state: State, head: int) -> tuple[nn.Module, State]:
    if any(key.startswith("classifier.") for key in state):
        return _read_alexnet(state, head)
    state = {re.sub(r"^top_layer\.0\.", "top_layer.", key): value for key, value in state.items()}
    state = _one_head(state, "top_layer", "top_layer", head)
    if "features.2.0.bn1.weight" in state:
        return PreActivationResNet(_tensor(state, "top_layer.weight").shape[0]), state
    state = {_renamed(key, _SELA_NAMES): value for key, value in state.items()}
    return _resnet50(_tensor(state, "fc.weight").shape[0]), state


def _read_scan(state: State, head: int) -> tuple[nn.Module, State]:
    state = _one_head(state, "cluster_head.", "fc", head)
    return _resnet50(_tensor(state, "fc.weight").shape[0]), _without(state, "backbone.")


def _read_backbone(state: State, head: int, prefixes: tuple[str, ...], projections: tuple[str, ...]) -> Any:
    """The ResNet-50 in a file: the weights with the first prefix that occurs, without the projection."""
    if head:
        raise ModelError("a backbone has no heads; remove the number from its name")
    prefix = next((p for p in prefixes if f"{p}conv1.weight" in state), "")
    chosen = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    return _resnet50(), {key: value for key, value in chosen.items() if not key.startswith(projections)}


# ------------------------------------------------------------------------------------------------------------- keys


def _one_head(state: State, name: str, target: str, head: int) -> State:
    """`name`3.weight -> `target`.weight for the selected head; the other heads are dropped."""
    pattern = re.compile(rf"^{re.escape(name)}(\d+)\.(weight|bias)$")
    heads = {int(m[1]) for key in state if (m := pattern.match(key))}
    if head and head not in heads:
        raise ModelError(f"the file has {max(len(heads), 1)} heads, counted from 0; there is no head {head}")
    kept: State = {}
    for key, value in state.items():
        match = pattern.match(key)
        if match is None:
            kept[key] = value
        elif int(match[1]) == head:
            kept[f"{target}.{match[2]}"] = value
    return kept


def _renamed(key: str, names: Mapping[str, str]) -> str:
    old = next((old for old in names if key.startswith(old)), None)
    return key if old is None else names[old] + key.removeprefix(old)


def _without(state: State, prefix: str) -> State:
    return {key.removeprefix(prefix): value for key, value in state.items()}


def _tensor(state: State, key: str) -> Tensor:
    if key not in state:
        some = ", ".join(list(state)[:4])
        raise ModelError(f"it lacks {key}, so it does not belong to this family; its first keys are {some}")
    return state[key]


_HEADS = ("fc.", "projection_head.", "prototypes.", "projector.", "predictor.", "head.", "contrastive_head.")

FAMILIES: dict[str, Family] = {
    "rotnet": Family("RotNet, AlexNet that predicts rotations", _read_rotnet, AlexNet, ROTATIONS),
    "sela": Family("SeLa, ResNet-50 that predicts clusters", _read_sela, partial(_resnet50, 3000)),
    "scan": Family("SCAN, ResNet-50 that predicts clusters", _read_scan, partial(_resnet50, 50)),
    **{
        name: Family(f"{title}, ResNet-50 without a head",
                     partial(_read_backbone, prefixes=prefixes, projections=_HEADS), _resnet50)
        for name, title, prefixes in (
            ("moco", "MoCo", ("encoder_q.", "base_encoder.", "backbone.")),
            ("simclr", "SimCLR", ("backbone.", "encoder.", "convnet.")),
            ("dino", "DINO", ("backbone.",)),
            ("swav", "SwAV", ("backbone.",)),
        )
    },
}  # fmt: skip
"""Every family by name."""


def family(name: str) -> tuple[Family, int | None]:
    """A family, and the number of a head if one is given: `family("sela:3")`."""
    word, colon, number = name.partition(":")
    if word not in FAMILIES:
        raise ModelError(f"there is no selfsup:{word}{nearest(word, FAMILIES)}; choose one of {', '.join(FAMILIES)}")
    if colon and not number.isdigit():
        raise ModelError(f"selfsup:{name}: the head must be a number from 0, as in selfsup:{word}:3")
    return FAMILIES[word], int(number) if number else None


def read(name: str, path: str | os.PathLike[str]) -> nn.Module:
    """The network in a published file."""
    chosen, head = family(name)
    content = read_file(path)
    state = unwrap(content, path)
    while state and all(key.startswith("module.") for key in state):
        state = _without(state, "module.")
    try:
        network, weights = chosen.read(state, _best_head(content) if head is None else head)
    except ModelError as error:
        raise ModelError(f"{os.fspath(path)} cannot be read as selfsup:{name}: {error}") from error
    fill(network, weights, path)
    return network


def _best_head(content: Any) -> int:
    """The head that a file marks as its best, as SCAN's do; otherwise the first."""
    best = content.get("head")
    return best if isinstance(best, int) else 0
