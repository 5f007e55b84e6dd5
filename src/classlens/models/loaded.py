"""The result of `load`: a network with everything needed to use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from classlens.errors import ImageError
from classlens.models.own import own_preprocess
from classlens.models.preprocess import Preprocess
from classlens.models.towers import EmbedText, ImageTower, has_towers, own_tokenizer, text_embedder


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
    embed_text: EmbedText | None = None  # texts -> (n,D), if images give (B,D)

    def __post_init__(self) -> None:
        object.__setattr__(self, "preprocess", own_preprocess(self.preprocess))
        if has_towers(self.model):  # CLIP as its library builds it
            tower = ImageTower(self.model)
            function = getattr(self.preprocess, "function", None)
            object.__setattr__(self, "embed_text", text_embedder(tower, own_tokenizer(self.model, function)))
            object.__setattr__(self, "model", tower)


def probabilities(logits: Tensor, multilabel: bool) -> Tensor:
    """The softmax of logits (...,classes) or, if an image may show several classes, the sigmoid; float64, on the CPU.

    >>> probabilities(torch.zeros(2), multilabel=False)
    tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    values = logits.detach().double().cpu()
    return values.sigmoid() if multilabel else values.softmax(-1)


def described(
    model: nn.Module | LoadedModel, preprocess: Callable[..., Any] | None, labels: Sequence[str] | None
) -> nn.Module | LoadedModel:
    """A network with the preprocessing and the labels that a user gives; without both, unchanged.

    >>> described(resnet, weights.transforms(), weights.meta["categories"])

    Of a model of images and texts, it is the image tower, with the text tower beside it.
    """
    nothing = preprocess is None and labels is None and not has_towers(model)
    if nothing or not isinstance(model, nn.Module | LoadedModel):
        return model
    if not isinstance(model, LoadedModel):
        model = LoadedModel(type(model).__name__, model, own_preprocess(preprocess or _unknown), None)
    elif preprocess is not None:
        model = replace(model, preprocess=own_preprocess(preprocess))
    return model if labels is None else replace(model, labels=tuple(labels))


def _unknown(_image: object) -> object:
    raise ImageError("files and pictures need preprocessing: give preprocess=")
