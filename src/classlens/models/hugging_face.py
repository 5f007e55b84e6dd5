"""Image classifiers of Hugging Face transformers, from a folder or by name. A folder needs no network access.

>>> read_config("path/to/folder").id2label
{0: 'cat', 1: 'dog'}
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import nn

from classlens.errors import ClasslensError, ModelError
from classlens.models._text import reason
from classlens.models._torchvision import import_transformers
from classlens.models.own import own_preprocess
from classlens.models.preprocess import INTERPOLATIONS, Preprocess

_LARGEST_DIFFERENCE = 4 / 255  # of two ways to resize the same image, in units of [0,1]


def read_config(name: str) -> Any:
    """The configuration of a model."""
    found = _opened(name, "AutoConfig")
    transformers = import_transformers()
    known = transformers.models.auto.modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
    if type(found) not in known:
        raise ModelError(f"hf:{name} is a {found.model_type} model, for which transformers has no image classifier")
    return found


def build(config: Any, num_classes: int | None = None) -> nn.Module:
    """The network with random weights."""
    if num_classes is not None:
        config = type(config).from_dict(config.to_dict() | {"num_labels": num_classes})
    model: nn.Module = import_transformers().AutoModelForImageClassification.from_config(config)
    return model


def published(name: str) -> nn.Module:
    """The network with its weights; refuses a checkpoint that lacks some of them, such as a backbone without a head."""
    model, loading = _opened(name, "AutoModelForImageClassification", output_loading_info=True)
    if missing := sorted(loading["missing_keys"]):
        raise ModelError(
            f"hf:{name} has no weights for {', '.join(missing[:3])}, so it is not a trained image classifier; "
            "fine-tune it first"
        )
    network: nn.Module = model
    return network


def labels(config: Any) -> tuple[str, ...] | None:
    """The names of the classes; None if the configuration has only placeholders such as LABEL_0."""
    found = tuple(str(config.id2label[i]) for i in sorted(config.id2label))
    return None if all(label == f"LABEL_{i}" for i, label in enumerate(found)) else found


def preprocessing(name: str) -> Preprocess:
    """The preprocessing of a model's processor: as a `Preprocess` if that computes the same, else the processor."""
    processor = _opened(name, "AutoImageProcessor")
    own = own_preprocess(processor)
    with contextlib.suppress(ClasslensError, TypeError, KeyError, AttributeError):
        found = _read(processor)
        if all(_same(found, own, size) for size in ((480, 360), (150, 210))):
            return found
    return own


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


def _same(found: Preprocess, own: Preprocess, size: tuple[int, int]) -> bool:
    """Whether two preprocessings agree on a picture of gradients and edges, up to the rounding of their resizing."""
    y, x = np.mgrid[0 : size[0], 0 : size[1]]
    colours = np.stack([x * 255 // size[1], y * 255 // size[0], 255 * ((x // 40 + y // 40) % 2)], -1)
    picture = Image.fromarray(colours.astype(np.uint8))
    one, other = found(picture), own(picture)
    return one.shape == other.shape and float((one - other).abs().max()) * max(found.std) <= _LARGEST_DIFFERENCE
