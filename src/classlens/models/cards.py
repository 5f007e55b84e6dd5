"""Cards: a network described by a small JSON file beside its weights.

A folder with `card.json` and `model.safetensors` is all that `load` needs:

    {
      "architecture": "torchvision:resnet50",      any name that `load` accepts, except a card
      "weights": "model.safetensors",              relative to the card; "default"; or null (random)
      "labels": ["cat", "dog"],                    or "imagenet", or null
      "preprocess": {"resize": 256, "crop": 224},  the fields of `Preprocess`; for scans, of `ScanPreprocess`
      "overrides": {                               optional: changed settings of the architecture
        "layer2.0.conv1.stride": [2, 2],           one attribute of one module
        "*BatchNorm2d.eps": 0.001                  an attribute of all modules of a class
      },
      "head": {                                    optional: fully connected layers instead of a module
        "path": "fc", "sizes": [2048, 20]          inputs, hidden layers, classes; "dropout" between them
      },
      "pyramid": {                                 optional: a segmentation head on layers of the architecture
        "layers": ["layer2", "layer3", "layer4"], "channels": [512, 1024, 2048], "classes": 21
      },
      "multilabel": true,                          optional: an independent probability for each class (sigmoid)
      "training": {},                              optional: how it was trained, for information
      "choice": {},                                optional: the method that `classlens choose` found for it
      "about": "where the weights come from"       optional, for information
    }

A card whose architecture is "package.module:function" runs that function: only use such cards from people you trust.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from safetensors.torch import save_file
from torch import Tensor, nn

from classlens.data.labels import imagenet
from classlens.errors import ModelError
from classlens.files import creating, replacing, write_text
from classlens.models._text import reason
from classlens.models.heads import Head
from classlens.models.preprocess import Preprocess
from classlens.models.pyramid import Pyramid
from classlens.models.scans import preprocess_from_json

Number: TypeAlias = bool | int | float
Override: TypeAlias = Number | Sequence[Number]

CARD = "card.json"
WEIGHTS = "model.safetensors"
_REQUIRED = ("architecture", "weights", "labels", "preprocess")
_OPTIONAL = ("overrides", "head", "pyramid", "multilabel", "training", "choice", "about")


@dataclass(frozen=True)
class Card:
    """A parsed card: paths resolved, labels and preprocessing as objects."""

    architecture: str
    weights: str | Path | None
    labels: tuple[str, ...] | None
    preprocess: Preprocess
    overrides: Mapping[str, Any] = field(default_factory=dict)
    head: Head | None = None
    multilabel: bool = False
    pyramid: Pyramid | None = None


def read_card(path: str | os.PathLike[str]) -> Card:
    """The card in a JSON file, or in `card.json` of a folder."""
    file = Path(path) / CARD if Path(path).is_dir() else Path(path)
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"there is no card {file}: a card is a JSON file, or a folder that contains {CARD}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not a JSON card ({reason(error)}); pass a weight file with weights=") from error
    try:
        return _card(data, file.parent)
    except ModelError as error:
        raise ModelError(f"{file}: {error}") from error


def write_card(
    folder: str | os.PathLike[str],
    model: nn.Module | Mapping[str, Tensor],
    *,
    architecture: str,
    preprocess: Preprocess,
    labels: Sequence[str] | None = None,
    overrides: Mapping[str, Override] | None = None,
    head: Head | None = None,
    multilabel: bool = False,
    about: str | None = None,
) -> Path:
    """Write a network, or its state dict, atomically as a new folder that `load` reads.

    >>> write_card("pets", model, architecture="timm:resnet18", preprocess=Preprocess(), labels=breeds)
    >>> load("pets")
    """
    target = Path(folder)
    if target.exists():
        raise ModelError(f"{target} exists: choose a new folder for the card, or remove this one first")
    text = card_text(
        architecture=architecture, preprocess=preprocess, labels=labels, overrides=overrides, head=head,
        multilabel=multilabel, about=about,
    )  # fmt: skip
    try:
        with creating(target) as draft:
            write_weights(draft / WEIGHTS, model)
            write_text(draft / CARD, text)
    except OSError as error:
        raise ModelError(f"{target} cannot be written: {error}") from error
    return target


def card_text(
    *,
    architecture: str,
    preprocess: Preprocess,
    labels: Sequence[str] | None = None,
    overrides: Mapping[str, Override] | None = None,
    head: Head | None = None,
    multilabel: bool = False,
    pyramid: Pyramid | None = None,
    training: Mapping[str, Any] | None = None,
    about: str | None = None,
) -> str:
    """The JSON of a card whose weights are in the same folder; settings that `load` cannot read are refused."""
    card = {
        "architecture": architecture,
        "weights": WEIGHTS,
        "labels": _labels_to_json(labels),
        "preprocess": preprocess.to_json(),
        **({"overrides": dict(overrides)} if overrides else {}),
        **({"head": head.to_json()} if head else {}),
        **({"pyramid": pyramid.to_json()} if pyramid else {}),
        **({"multilabel": True} if multilabel else {}),
        **({"training": dict(training)} if training else {}),
        **({"about": about} if about else {}),
    }
    text = json.dumps(card, indent=2) + "\n"
    _card(json.loads(text), Path())
    return text


def write_weights(path: Path, model: nn.Module | Mapping[str, Tensor]) -> None:
    """Write the tensors of a network as safetensors, atomically."""
    state = model.state_dict() if isinstance(model, nn.Module) else model
    # Copies, because safetensors refuses tensors that share memory (tied weights).
    tensors = {key: value.detach().cpu().clone().contiguous() for key, value in state.items()}
    with replacing(path) as draft:
        save_file(tensors, draft)


def apply_overrides(model: nn.Module, overrides: Mapping[str, Override]) -> None:
    """Replace existing numeric attributes of modules, and nothing else.

    >>> apply_overrides(model, {"layer2.0.conv1.stride": [2, 2], "*BatchNorm2d.eps": 1e-3})
    """
    for key, value in overrides.items():
        path, _, attribute = key.rpartition(".")
        for module in _modules(model, path, key):
            setattr(module, attribute, _replacement(module, attribute, key, value))


def _card(data: Any, folder: Path) -> Card:
    if not isinstance(data, dict):
        raise ModelError("a card is a JSON object")
    missing = [key for key in _REQUIRED if key not in data]
    unknown = [key for key in data if key not in (*_REQUIRED, *_OPTIONAL)]
    if missing or unknown:
        wrong = [f"lacks {key}" for key in missing] + [f"has the unknown field {key}" for key in unknown]
        raise ModelError(f"the card {', '.join(wrong)}; its fields are {', '.join((*_REQUIRED, *_OPTIONAL))}")
    if not isinstance(data["architecture"], str):
        raise ModelError('architecture must be a name such as "torchvision:resnet50"')
    weights = data["weights"]
    if not (weights is None or isinstance(weights, str)):
        raise ModelError('weights must be a file name, "default" or null')
    overrides = data.get("overrides", {})
    if not isinstance(overrides, dict):
        raise ModelError("overrides must be an object of attribute names and numbers")
    if not isinstance(data.get("multilabel", False), bool):
        raise ModelError("multilabel must be true or false")
    if "head" in data and "pyramid" in data:
        raise ModelError("a card has a head or a pyramid, not both")
    if not isinstance(data.get("training", {}), dict):
        raise ModelError("training must be an object: how the network was trained")
    if not isinstance(data.get("choice", {}), dict):
        raise ModelError("choice must be an object, as `classlens choose` writes it")
    return Card(
        architecture=data["architecture"],
        weights=folder / weights if weights not in (None, "default") else weights,
        labels=_labels_from_json(data["labels"]),
        preprocess=preprocess_from_json(data["preprocess"]),
        overrides=overrides,
        head=Head.from_json(data["head"]) if "head" in data else None,
        multilabel=data.get("multilabel", False),
        pyramid=Pyramid.from_json(data["pyramid"]) if "pyramid" in data else None,
    )


def _labels_from_json(labels: Any) -> tuple[str, ...] | None:
    if labels is None:
        return None
    if labels == "imagenet":
        return imagenet()
    if not (isinstance(labels, list) and labels and all(isinstance(label, str) for label in labels)):
        raise ModelError('labels must be a list of names, "imagenet" or null')
    return tuple(labels)


def _labels_to_json(labels: Sequence[str] | None) -> list[str] | str | None:
    if labels is None:
        return None
    return "imagenet" if tuple(labels) == imagenet() else list(labels)


def _modules(model: nn.Module, path: str, key: str) -> list[nn.Module]:
    """The modules of an override: one by its path, or all of a class by `*ClassName`."""
    if path.startswith("*"):
        found = [module for module in model.modules() if type(module).__name__ == path[1:]]
    else:
        found = [module for name, module in model.named_modules() if name == path]
    if not found:
        raise ModelError(f"override {key!r}: the network has no module {path!r}")
    return found


def _replacement(module: nn.Module, attribute: str, key: str, value: Any) -> Number | tuple[Number, ...]:
    """The new value, if it replaces a number by a number, or a tuple by as many numbers."""
    # `vars` excludes methods and properties; `training` is not a setting of the architecture.
    current = vars(module).get(attribute) if attribute != "training" else None
    new = tuple(value) if isinstance(value, list | tuple) else value
    if type(current) is float and type(new) is int:
        new = float(new)  # JSON writers may drop the decimal point
    if not (_is_numeric(current) and _is_numeric(new)):
        raise ModelError(f"override {key!r}: only existing numbers and tuples of numbers can be overridden, by numbers")
    if _form(new) != _form(current):
        raise ModelError(f"override {key!r}: {new!r} does not have the form of {current!r}")
    result: Number | tuple[Number, ...] = new
    return result


def _is_numeric(value: object) -> bool:
    return all(isinstance(part, bool | int | float) for part in (value if isinstance(value, tuple) else (value,)))


def _form(value: Any) -> object:
    """What an override must keep: the length of a tuple, and whether a value is a bool, an int or a float."""
    if isinstance(value, tuple):
        return tuple(_form(part) for part in value)
    return type(value)
