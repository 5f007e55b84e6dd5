"""Models of images and texts of open_clip, by name or from a folder. A folder needs no network access.

>>> published("ViT-B-32/openai")                 # a name, and one of its published weights
>>> published("path/to/folder")                  # open_clip_config.json and the weights
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from classlens.errors import ModelError
from classlens.models._text import nearest, reason
from classlens.models._torchvision import import_open_clip
from classlens.models.checkpoint import load_weights
from classlens.models.own import equal_or_own, own_preprocess
from classlens.models.preprocess import Preprocess
from classlens.models.towers import EmbedText, ImageTower, text_embedder

_CONFIG = "open_clip_config.json"


def check_name(name: str) -> None:
    """Refuse a name that open_clip does not know."""
    library = import_open_clip()
    if Path(name).is_dir():
        if not (Path(name) / _CONFIG).is_file():
            raise ModelError(f"open_clip:{name} has no {_CONFIG}; give a folder that open_clip wrote, or a name")
        return
    model, _, tag = name.partition("/")
    if model not in library.list_models():
        raise ModelError(f"open_clip has no model {model!r}{nearest(model, library.list_models())}")
    tags = library.list_pretrained_tags_by_model(model)
    if tag and tag not in tags:
        raise ModelError(f"open_clip has no weights {tag!r} of {model}; it has {', '.join(tags) or 'none'}")


def build(name: str) -> nn.Module:
    """The image tower with random weights."""
    return ImageTower(_created(name, load_weights=False, pretrained_text=False))


def published(name: str) -> nn.Module:
    """The image tower with the weights of the folder, or those that open_clip downloads."""
    if Path(name).is_dir():
        return ImageTower(_created(name, require_pretrained=True))
    model, _, tag = name.partition("/")
    tags = import_open_clip().list_pretrained_tags_by_model(model)
    if not tags:
        raise ModelError(f"open_clip publishes no weights of {model}; give a file of weights")
    return ImageTower(_created(name, pretrained=tag or tags[0], require_pretrained=True))


def with_weights(name: str, file: Path) -> nn.Module:
    """The image tower with the weights in a file."""
    tower = ImageTower(_created(name, load_weights=False, pretrained_text=False))
    load_weights(tower.both, file)
    return tower


def _created(name: str, **options: Any) -> nn.Module:
    library = import_open_clip()
    folder = Path(name).is_dir()
    called = f"local-dir:{name}" if folder else name.partition("/")[0]
    try:
        model: nn.Module = library.create_model(called, **options)
    except Exception as error:  # the hub and every model raise their own errors
        todo = "check the folder" if folder else "check the connection, or give a folder or a file of weights"
        raise ModelError(f"open_clip:{name} cannot be loaded ({reason(error)}): {todo}") from error
    return model.eval()


def preprocessing(model: nn.Module) -> Preprocess:
    """The preprocessing of a tower: as a `Preprocess` if that computes the same, else open_clip's own transform."""
    library = import_open_clip()
    assert isinstance(model, ImageTower)
    settings = library.get_model_preprocess_cfg(model.both)
    config = library.transform.PreprocessCfg(**settings)
    return equal_or_own(
        partial(_read, config), own_preprocess(library.transform.image_transform_v2(config, is_train=False))
    )


def _read(config: Any) -> Preprocess:
    size = config.size if isinstance(config.size, int) else tuple(config.size)
    side = size if isinstance(size, int) else size[0]
    frame = (side, side) if isinstance(size, int) else size
    resize: Any
    fit: Any
    resize, fit = {"shortest": (side, "squash"), "squash": (frame, "squash"), "longest": (frame, "contain")}[
        config.resize_mode
    ]
    return Preprocess(
        resize,
        frame,
        config.interpolation,
        tuple(config.mean),
        tuple(config.std),
        fit=fit,
        fill=(config.fill_color,) * 3,
    )


def texts(name: str, model: nn.Module) -> EmbedText:
    """The text tower of a model."""
    assert isinstance(model, ImageTower)

    def tokenizer() -> Any:
        library = import_open_clip()
        if not Path(name).is_dir():
            return library.get_tokenizer(name.partition("/")[0])
        config = json.loads((Path(name) / _CONFIG).read_text())["model_cfg"].get("text_cfg", {})
        if config.get("hf_tokenizer_name") and not (Path(name) / "tokenizer_config.json").is_file():
            raise ModelError(
                f"open_clip:{name} has no tokenizer in its folder: save {config['hf_tokenizer_name']} there"
            )
        return library.get_tokenizer(f"local-dir:{name}")

    return text_embedder(model, tokenizer)
