"""The result of `load`: a network with everything needed to use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from classlens.errors import ImageError
from classlens.models.own import own_preprocess
from classlens.models.preprocess import Preprocess


@dataclass(frozen=True)
class LoadedModel:
    """A network in eval mode, with its preprocessing and the names of its classes.

    >>> lite = load("efficientnet-lite0")
    >>> logits = lite.model(lite.preprocess("photo.jpg")[None])
    >>> lite.labels[logits.argmax()]

    `preprocess` may also be a function of your own, such as a transform of torchvision.
    """

    name: str
    model: nn.Module
    preprocess: Preprocess
    labels: tuple[str, ...] | None
    multilabel: bool = False  # an independent probability for each class (sigmoid); an image may show several classes
    embed_text: Callable[[Sequence[str]], Tensor] | None = None  # texts -> (n,D), if images give (B,D)

    def __post_init__(self) -> None:
        object.__setattr__(self, "preprocess", own_preprocess(self.preprocess))


def described(
    model: nn.Module | LoadedModel, preprocess: Callable[..., Any] | None, labels: Sequence[str] | None
) -> nn.Module | LoadedModel:
    """A network with the preprocessing and the labels that a user gives; without both, unchanged.

    >>> described(resnet, weights.transforms(), weights.meta["categories"])
    """
    if (preprocess is None and labels is None) or not isinstance(model, nn.Module | LoadedModel):
        return model
    if not isinstance(model, LoadedModel):
        model = LoadedModel(type(model).__name__, model, own_preprocess(_unknown), None)
    if preprocess is not None:
        model = replace(model, preprocess=own_preprocess(preprocess))
    return model if labels is None else replace(model, labels=tuple(labels))


def _unknown(_image: object) -> object:
    raise ImageError("files and pictures need preprocessing: give preprocess=")
