"""What `load` gives: a network with all that is needed to use it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from classlens.models.preprocess import Preprocess


@dataclass(frozen=True)
class LoadedModel:
    """A network in eval mode, how it wants its pictures, and what its outputs are called.

    >>> lite = load("efficientnet-lite0")
    >>> logits = lite.model(lite.preprocess("photo.jpg")[None])
    >>> lite.labels[logits.argmax()]
    """

    name: str
    model: nn.Module
    preprocess: Preprocess
    labels: tuple[str, ...] | None
    multilabel: bool = False  # each class has a probability of its own (sigmoid), and a picture may show several
