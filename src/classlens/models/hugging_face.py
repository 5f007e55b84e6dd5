"""Vision models of Hugging Face transformers, from a folder or by name. A folder needs no network access.

>>> read_config("path/to/folder").id2label
{0: 'cat', 1: 'dog'}
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from classlens.errors import ModelError
from classlens.models._text import reason
from classlens.models._torchvision import import_transformers
from classlens.models.own import equal_or_own, own_preprocess
from classlens.models.preprocess import INTERPOLATIONS, Preprocess
from classlens.models.towers import EmbedText, ImageTower, has_towers, text_embedder

_CLASSIFIER = "AutoModelForImageClassification"
_KINDS = {  # the class that a checkpoint was saved from -> how transformers opens it
    "ForImageClassification": _CLASSIFIER,
    "ForObjectDetection": "AutoModelForObjectDetection",
    "ForSemanticSegmentation": "AutoModelForSemanticSegmentation",
    "ForUniversalSegmentation": "AutoModelForUniversalSegmentation",
}
_TOWERS = "AutoModel"


def read_config(name: str) -> Any:
    """The configuration of a model."""
    found = _opened(name, "AutoConfig")
    transformers = import_transformers()
    known = transformers.models.auto.modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
    if kind(found) == _CLASSIFIER and type(found) not in known:
        raise ModelError(
            f"hf:{name} is a {found.model_type} model, for which transformers has no image classifier; known are "
            "classifiers, detectors, segmentation networks, and models of images and texts"
        )
    return found


def kind(config: Any) -> str:
    """How transformers opens a checkpoint; without another hint, as a classifier."""
    (saved, *_) = getattr(config, "architectures", None) or [""]
    for ending, auto in _KINDS.items():
        if saved.endswith(ending):
            return auto
    made_from = getattr(import_transformers(), saved, None) if saved else None
    towers = made_from is not None and hasattr(made_from, "get_image_features") and hasattr(config, "text_config")
    return _TOWERS if towers else _CLASSIFIER


def has_texts(config: Any) -> bool:
    """Whether it is a model of images and texts."""
    return kind(config) == _TOWERS


def build(config: Any, num_classes: int | None = None) -> nn.Module:
    """The network with random weights."""
    if num_classes is not None:
        config = type(config).from_dict(config.to_dict() | {"num_labels": num_classes})
    return _as_network(getattr(import_transformers(), kind(config)).from_config(config))


def published(name: str, config: Any) -> nn.Module:
    """The network with its weights; refuses a checkpoint that lacks some of them, such as a backbone without a head."""
    model, loading = _opened(name, kind(config), output_loading_info=True)
    if missing := sorted(loading["missing_keys"]):
        what = "image classifier" if kind(config) == _CLASSIFIER else f"{config.model_type} model"
        raise ModelError(
            f"hf:{name} has no weights for {', '.join(missing[:3])}, so it is not a trained {what}; fine-tune it first"
        )
    return _as_network(model)


def _as_network(model: nn.Module) -> nn.Module:
    return ImageTower(model) if has_towers(model) else model


def texts(name: str, model: nn.Module) -> EmbedText:
    """The text tower of a model of images and texts."""
    assert isinstance(model, ImageTower)
    return text_embedder(model, partial(_opened, name, "AutoTokenizer"))


def labels(config: Any) -> tuple[str, ...] | None:
    """The names of the classes; None without any, or if the configuration has only placeholders such as LABEL_0."""
    if has_texts(config):
        return None
    found = tuple(str(config.id2label[i]) for i in sorted(config.id2label))
    return None if all(label == f"LABEL_{i}" for i, label in enumerate(found)) else found


def preprocessing(name: str) -> Preprocess:
    """The preprocessing of a model's processor: as a `Preprocess` if that computes the same, else the processor."""
    processor = _opened(name, "AutoImageProcessor")
    return equal_or_own(partial(_read, processor), own_preprocess(processor))


def _opened(name: str, kind: str, **options: Any) -> Any:
    """What transformers reads from a folder or downloads; code inside a model's folder is never run."""
    folder = Path(name).is_dir()
    read = partial(getattr(import_transformers(), kind).from_pretrained, name, trust_remote_code=False, **options)
    try:
        with _without_bars():
            return read(local_files_only=True) if folder else read()
    except Exception as error:  # the hub and every model raise their own errors
        todo = "check the folder" if folder else "check the name and the connection, or give a folder"
        raise ModelError(f"hf:{name} cannot be loaded ({reason(error)}): {todo}") from error


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """Hide the progress bars of transformers, which would break our own."""
    logging = import_transformers().utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _read(processor: Any) -> Preprocess:
    """The settings of a processor as a `Preprocess`; it may mean something else by them, so the caller compares."""
    size, crop = dict(processor.size), dict(getattr(processor, "crop_size", None) or {})
    edges = (size["height"], size["width"]) if "height" in size else None
    side: Any = size.get("shortest_edge")
    if edges is None and (share := getattr(processor, "crop_pct", None)) is not None and side < 384:
        crop, side = {"height": side, "width": side}, int(side / share)  # the convention of timm
    elif edges is None and share is not None:
        edges = (side, side)
    cropped = bool(crop) and (getattr(processor, "do_center_crop", None) or share is not None)
    return Preprocess(
        resize=(edges or side) if processor.do_resize else None,
        crop=(crop["height"], crop["width"]) if cropped else None,
        interpolation=_interpolation(processor.resample),
        mean=tuple(processor.image_mean) if processor.do_normalize else (0.0, 0.0, 0.0),
        std=tuple(processor.image_std) if processor.do_normalize else (1.0, 1.0, 1.0),
    )


def _interpolation(resample: Any) -> str:
    return next(name for name, number in INTERPOLATIONS.items() if number == int(resample))
