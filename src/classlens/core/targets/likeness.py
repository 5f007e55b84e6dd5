"""How alike the embedding of a picture is to another direction: of an image, a vector or a text.

>>> explain(encoder, image, like("other.jpg"))
>>> explain(clip, image, text("a photo of a cat") - text("a photo of a dog"))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from classlens.core.capture import Pick
from classlens.core.targets.answers import Answers
from classlens.core.targets.questions import Found, Mix, Question
from classlens.errors import TargetError


def cosine_to(vector: Tensor, answers: Answers, asks: str, words: str) -> Found:
    """The cosine between the embedding of an image and a vector."""
    path, embedding = answers.vector(asks)
    if vector.shape != embedding.shape[1:]:
        raise TargetError(f"the vector has {vector.numel()} numbers, but the embedding has {embedding.shape[1]}")
    if not vector.any() or not torch.isfinite(vector).all():
        raise TargetError("the vector has no direction: it is 0, or holds NaN or infinite values")
    direction = F.normalize(vector.detach().to(embedding), dim=0)

    def cosine(numbers: Sequence[Tensor]) -> Tensor:
        return (numbers[0] * direction.to(numbers[0])).sum()

    return Found(words, (Pick(path, unit=True),), cosine)


@dataclass(frozen=True)
class Embedding(Question):
    """The embedding itself: what another image is compared with."""

    def find(self, answers: Answers, image: int) -> Found:
        path, _ = answers.vector("like(...)")
        return Found("the embedding", (Pick(path),), lambda numbers: numbers[0].sum())


@dataclass(frozen=True, eq=False)
class Like(Question):
    """The cosine between the embedding and that of another image, or a vector (D,)."""

    other: Any

    def find(self, answers: Answers, image: int) -> Found:
        vector = self.other
        words = "likeness to the vector"
        if not isinstance(vector, Tensor) or vector.dim() != 1:
            assert answers.models.embed is not None
            vector, words = answers.models.embed(self.other), f"likeness to {_named(self.other)}"
        return cosine_to(vector, answers, "like(...)", words)


@dataclass(frozen=True)
class Text(Question):
    """The cosine between the embeddings of the image and of a text."""

    words: str

    def find(self, answers: Answers, image: int) -> Found:
        if answers.models.embed_text is None:
            raise TargetError(
                f"the network has no text tower, so it cannot be asked about the text {self.words!r}; use a model with "
                "one, or give the vector of the text with classlens.like(vector)"
            )
        (vector,) = answers.models.embed_text([self.words])
        return cosine_to(vector, answers, "text(...)", f"the text {self.words!r}")


def _named(other: Any) -> str:
    return str(other) if isinstance(other, str) or hasattr(other, "__fspath__") else "the other image"


def like(other: Any) -> Like:
    """Likeness of the embedding to that of another image (as `explain` accepts it), or to a vector (D,).

    >>> classlens.explain(encoder, "a.jpg", classlens.like("b.jpg"))
    """
    if isinstance(other, list | tuple) and other and all(isinstance(x, int | float) for x in other):
        other = torch.tensor(other, dtype=torch.float32)
    if type(other).__name__ == "ndarray" and other.ndim == 1:
        other = torch.as_tensor(other)
    return Like(other)


def unlike(other: Any) -> Mix:
    """What makes the embedding unlike that of another image, or a vector: the negative of `like`."""
    return -like(other)


def text(words: str) -> Text:
    """Likeness of the image to a text, for models with a text tower.

    >>> classlens.explain(clip, "photo.jpg", classlens.text("a photo of a cat"))
    """
    if not isinstance(words, str) or not words.strip():
        raise TargetError(f"a text is a string with words in it, not {words!r}")
    return Text(words)
