"""What a network answered, as questions look at it: the tensors of its result, by name and shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from classlens.core.capture import Recorder, described
from classlens.core.capture.reading import Inside, at_path, inside_of
from classlens.core.names import match
from classlens.errors import TargetError

Path = tuple[str | int, ...]

_DENSE = ("out", "logits", "masks", "pred")  # the usual names of logits for each pixel, if there are several
_VECTORS = ("image_embeds", "image_features", "embedding", "embeddings", "features", "pooler_output", "logits")


@dataclass(frozen=True)
class Models:
    """What the user's model can do besides running on images. A question asks for what it needs."""

    labels: Sequence[str] | None = None
    embed: Callable[[Any], Tensor] | None = None  # an image, in any form that `explain` accepts -> its vector (D,)
    embed_text: Callable[[Sequence[str]], Tensor] | None = None  # n texts -> (n,D); None: no text tower


@dataclass(frozen=True)
class Answers:
    """The result of one forward pass."""

    result: Any
    images: int  # in the batch
    size: tuple[int, int]  # (H,W) of the network's input
    recorder: Recorder
    models: Models

    @cached_property
    def inside(self) -> Inside:
        """The outputs of the layers."""
        return inside_of(self.recorder)

    def class_index(self, given: int | str, classes: int) -> int:
        """The class that an index or a name means, among so many classes."""
        labels = self.models.labels
        if isinstance(given, str) and not given.strip().isdigit():
            if labels is None:
                raise TargetError(f"the model has no class names, so {given!r} cannot be found; give an index")
            given = match(labels, given)
        index = int(given)
        if not 0 <= index < classes:
            raise TargetError(f"class {index} is out of range; the output has classes 0..{classes - 1}")
        return index

    def label(self, index: int) -> str:
        """The name of a class."""
        labels = self.models.labels
        return labels[index] if labels is not None and index < len(labels) else f"class {index}"

    def dense(self, asks: str) -> tuple[Path, Tensor]:
        """The logits of every pixel (B,C,h,w), and where they are in the result."""
        return self._one(4, _DENSE, f"{asks} needs an output for each pixel (B,classes,h,w)")

    def vector(self, asks: str) -> tuple[Path, Tensor]:
        """The embedding (B,D), and where it is in the result."""
        return self._one(2, _VECTORS, f"{asks} needs an embedding (B,D)")

    def _one(self, dims: int, names: Sequence[str], needs: str) -> tuple[Path, Tensor]:
        """The tensor with so many axes; of several, the one with a usual name."""
        fitting = {p: t for p, t in tensors(self.result) if t.dim() == dims and t.shape[0] == self.images}
        if len(fitting) == 1:
            return next(iter(fitting.items()))
        for name in names:
            if (name,) in fitting:
                return (name,), fitting[(name,)]
        hint = "select one with output=" if fitting else "this network has none"
        raise TargetError(f"{needs}; {hint}: it returns {described(self.result)}")


def tensors(result: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """The tensors in nested dicts, tuples and lists, each with its path."""
    if isinstance(result, Tensor):
        yield path, result
    elif isinstance(result, dict):
        for key in result:
            yield from tensors(result[key], (*path, key))
    elif isinstance(result, tuple | list):
        for i, item in enumerate(result):
            yield from tensors(item, (*path, i))


__all__ = ["Answers", "Models", "at_path", "tensors"]
