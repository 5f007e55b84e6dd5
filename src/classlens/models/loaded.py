"""The result of `load`: a network with everything needed to use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from classlens.models.preprocess import Preprocess


@dataclass(frozen=True)
class LoadedModel:
    """A network in eval mode, with its preprocessing and the names of its classes.

    >>> lite = load("efficientnet-lite0")
    >>> logits = lite.model(lite.preprocess("photo.jpg")[None])
    >>> lite.labels[logits.argmax()]
    """

    name: str
    model: nn.Module
    preprocess: Preprocess
    labels: tuple[str, ...] | None
    multilabel: bool = False  # an independent probability for each class (sigmoid); an image may show several classes
    embed_text: Callable[[Sequence[str]], Tensor] | None = None  # texts -> (n,D), if images give (B,D)
