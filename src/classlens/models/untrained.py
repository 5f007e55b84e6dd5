"""Every image classifier of Hugging Face transformers, built from its default configuration with random weights.

>>> names()[:2]
['transformers:BeitForImageClassification eager', 'transformers:BeitForImageClassification sdpa']
>>> model, size = build("transformers:ViTForImageClassification sdpa")

An architecture that offers both implementations of attention is listed twice.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

from torch import nn

from classlens.errors import ModelError
from classlens.models._torchvision import import_transformers

PREFIX = "transformers:"

_CLASSES = 10
_BLOCKS = 2  # of equal blocks that follow one another; networks of several stages keep all blocks
_LARGEST = 256  # of the side of an image

# Fields without which the default configuration gives no image classifier, or a needlessly deep one.
_FIELDS: dict[str, dict[str, Any]] = {
    "perceiver": {"num_self_attends_per_block": _BLOCKS, "num_cross_attention_heads": 1}
}
_NO_IMAGES = {"input_ids", "spatial_shapes"}  # what a network reads that also takes texts, tokens or cut patches


def names() -> list[str]:
    """The class of every network, and the implementation of its attention."""
    return [f"{PREFIX}{name} {attention}" for name in _classes() for attention in _attentions(_class(name))]


def build(name: str) -> tuple[nn.Module, int]:
    """The network in eval mode, and the side of the images it takes."""
    class_name, _, attention = name.removeprefix(PREFIX).partition(" ")
    if class_name not in _classes() or attention not in _attentions(_class(class_name)):
        raise ModelError(f"transformers has no classifier {name.removeprefix(PREFIX)!r}")
    made = _class(class_name)
    if also := _NO_IMAGES.intersection(signature(made.forward).parameters):
        raise ModelError(f"it reads {', '.join(also)}, not images alone")
    config = made.config_class(num_labels=_CLASSES, **_FIELDS.get(made.config_class.model_type, {}))
    return made._from_config(_shortened(config), attn_implementation=attention).eval(), _side(config)


def _classes() -> list[str]:
    known = import_transformers().models.auto.modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
    return [name for found in known.values() for name in ((found,) if isinstance(found, str) else found)]


def _class(name: str) -> Any:
    transformers = import_transformers()
    transformers.logging.set_verbosity_error()
    return getattr(transformers, name)


def _attentions(made: Any) -> tuple[str, ...]:
    return ("eager", "sdpa") if made._supports_sdpa else ("eager",)


def _shortened(config: Any) -> Any:
    for part in _parts(config):
        if isinstance(getattr(part, "num_hidden_layers", None), int) and not hasattr(part, "depths"):
            part.num_hidden_layers = min(part.num_hidden_layers, _BLOCKS)
    return config


def _side(config: Any) -> int:
    """The size of the configuration; networks whose size is larger take smaller images too."""
    sides = [getattr(part, "image_size", None) for part in _parts(config)]
    found = next((side for side in sides if side), 224)
    return min(int(side) for side in (*(found if isinstance(found, list | tuple) else (found,)), _LARGEST))


def _parts(config: Any) -> list[Any]:
    """The configuration, and that of the vision tower inside it."""
    return [part for part in (config, getattr(config, "vision_config", None)) if part is not None]
