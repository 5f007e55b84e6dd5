"""Loads a network by name, ready to be explained. `load` is the only entry point."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from classlens.errors import ModelError
from classlens.models._text import nearest, reason
from classlens.models.cards import Card, apply_overrides, read_card
from classlens.models.checkpoint import build_with_weights, load_weights
from classlens.models.heads import replace_head
from classlens.models.loaded import LoadedModel
from classlens.models.preprocess import Preprocess
from classlens.models.pyramid import Segmenter
from classlens.models.selfsup import FAMILIES
from classlens.models.sources import EMBEDDED, LIBRARIES, Architecture, ModelInfo, embedded

DEFAULT = "efficientnet-lite0"

SHIPPED: dict[str, ModelInfo] = {
    "rotnet-96": ModelInfo("a small RotNet, trained without labels to predict rotations", 96),
}
"""Networks whose cards are included in this package."""

MODELS: dict[str, ModelInfo] = {name: entry.info for name, entry in EMBEDDED.items()} | SHIPPED
"""The networks that need no download, for `classlens models`."""

KINDS: dict[str, ModelInfo] = {
    "torchvision:NAME": ModelInfo("a classifier of torchvision", install="pip install 'classlens[torchvision]'"),
    "timm:NAME": ModelInfo("a network of timm", install="pip install 'classlens[timm]'"),
    "hf:NAME_OR_FOLDER": ModelInfo(
        "a classifier, detector, segmentation network or CLIP of Hugging Face transformers",
        install="pip install 'classlens[hf]'",
    ),
    "open_clip:NAME_OR_FOLDER": ModelInfo(
        "a model of images and texts of open_clip", install="pip install 'classlens[open_clip]'"
    ),
    "selfsup:NAME": ModelInfo(
        f"a network trained without labels, from the project's checkpoint: {', '.join(FAMILIES)}",
        install="pip install 'classlens[torchvision]'",
    ),
    "package.module:function": ModelInfo("your own function that returns an nn.Module or a LoadedModel"),
    "path/to/card.json": ModelInfo("a card, or a folder that contains card.json"),
}
"""The other kinds of names that `load` accepts."""

_ASSETS = Path(__file__).parent.parent / "assets"
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def load(
    name: str | os.PathLike[str] = DEFAULT,
    weights: str | os.PathLike[str] | None = "default",
    device: str | torch.device = "cpu",
) -> LoadedModel:
    """Load a network in eval mode on a device, with its preprocessing and labels.

    `name` is one of `MODELS`, or of one of the `KINDS`. `weights` is "default" for the published weights, None
    for random weights, or a file (.safetensors, or a torch checkpoint of tensors).

        >>> load("efficientnet-lite0")
        >>> load("timm:resnet50", weights="my-fine-tuned.safetensors", device="cuda")
    """
    text = os.fspath(name)
    loaded = _from_card(text, weights) if is_card(name) else _from_name(text, weights)
    return replace(loaded, name=text, model=_place(loaded.model, device).eval())


def is_card(name: str | os.PathLike[str]) -> bool:
    """Whether a name is a card: a path that exists and is no other kind of name."""
    if not isinstance(name, str):
        return True
    if name in MODELS or name.partition(":")[0] in LIBRARIES:
        return False
    return name.endswith(".json") or "/" in name or os.sep in name or os.path.exists(name)


def _from_name(name: str, weights: str | os.PathLike[str] | None) -> LoadedModel:
    library, _, rest = name.partition(":")
    if name in EMBEDDED:
        return _from_architecture(name, embedded(name), weights)
    if name in SHIPPED:
        return _from_card(str(_ASSETS / name), weights)
    if library in LIBRARIES:
        return _from_architecture(name, LIBRARIES[library](rest), weights)
    if _FUNCTION.fullmatch(name):
        return _from_function(name, weights)
    hint = _elsewhere(name) or nearest(name, MODELS)
    choices = f"; choose one of {', '.join(MODELS)}, or a name of the form {', '.join(KINDS)}"
    raise ModelError(f"there is no model {name!r}{hint or choices}")


def _elsewhere(name: str) -> str:
    """The library that has a network of this name, as part of an error message: "; did you mean timm:resnet50?"."""
    for library in ("torchvision", "timm"):
        with suppress(ModelError):  # it has no such network, or it is not installed
            LIBRARIES[library](name)
            return f"; did you mean {library}:{name}?"
    return ""


def _from_architecture(name: str, source: Architecture, weights: str | os.PathLike[str] | None) -> LoadedModel:
    labels = source.labels
    if weights is None:
        model = source.build()
    elif weights == "default":
        model = source.published()
    elif source.read is not None:
        model = source.read(Path(weights))
    else:
        model, other_classes = build_with_weights(source.build, weights)
        labels = labels if other_classes is None else None
    texts = None if source.texts is None else source.texts(model)
    return LoadedModel(name, model, source.preprocess(model), labels, source.multilabel, texts)


def _from_function(name: str, weights: str | os.PathLike[str] | None) -> LoadedModel:
    """The result of a user's function; "default" and None both keep the weights that it returns."""
    made = _call(name)
    loaded = made if isinstance(made, LoadedModel) else LoadedModel(name, made, Preprocess(), None)
    if weights not in (None, "default"):
        load_weights(loaded.model, weights)
    return loaded


def _call(name: str) -> nn.Module | LoadedModel:
    module_name, _, function_name = name.partition(":")
    with _current_folder_importable():
        try:
            module = import_module(module_name)
        except (Exception, SystemExit) as error:  # importing the user's module may raise anything
            raise ModelError(f"{name} cannot be imported ({reason(error)}): check the name and the module") from error
        function: Any = getattr(module, function_name, None)
        if not callable(function):
            raise ModelError(f"{name}: the module {module_name} has no function {function_name}; check the name")
        try:
            made = function()
        except (Exception, SystemExit) as error:  # the user's function may raise anything
            raise ModelError(f"{name}() failed ({reason(error)}): it must run without arguments") from error
    if not isinstance(made, nn.Module | LoadedModel):
        raise ModelError(f"{name}() gave a {type(made).__name__}: it must return an nn.Module or a LoadedModel")
    return made


@contextmanager
def _current_folder_importable() -> Iterator[None]:
    """Make the current folder importable during the import and the call, as `python -m` does."""
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def _from_card(path: str, weights: str | os.PathLike[str] | None) -> LoadedModel:
    card = read_card(path)
    if is_card(card.architecture):
        raise ModelError(f"{path}: its architecture {card.architecture!r} is not the name of an architecture")
    loaded = _with_head(card, card.weights if weights == "default" else weights)
    apply_overrides(loaded.model, card.overrides)
    return replace(loaded, preprocess=card.preprocess, labels=card.labels, multilabel=card.multilabel)


def _with_head(card: Card, weights: str | os.PathLike[str] | None) -> LoadedModel:
    if card.head is None and card.pyramid is None:
        return _from_name(card.architecture, weights)
    if weights == "default":
        raise ModelError('a card with its own head needs a weight file: "default" has no weights for this head')
    loaded = _from_name(card.architecture, None)
    if card.head is not None:
        replace_head(loaded.model, card.head)
    if card.pyramid is not None:
        loaded = replace(loaded, model=Segmenter(loaded.model, card.pyramid))
    if weights is not None:
        load_weights(loaded.model, weights)
    return loaded


def pick_device(name: str) -> str:
    """`auto` is the fastest available device; other names are returned unchanged: `pick_device("cuda:1")`."""
    if name != "auto":
        return name
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _place(model: nn.Module, device: str | torch.device) -> nn.Module:
    try:
        return model.to(torch.device(device))
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was compiled with CUDA
        raise ModelError(
            f"the model cannot be moved to {str(device)!r} ({reason(error)}): choose another device"
        ) from error
