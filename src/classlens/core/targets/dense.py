"""The evidence for each class at each pixel, in what a segmentation network returns.

| result | the value of class c at a place |
|---|---|
| a tensor (B,C,h,w), alone or by a usual name | its logit |
| `class_queries_logits` (B,Q,C+1) and `masks_queries_logits` (B,Q,h,w) (MaskFormer, Mask2Former) | the sum over queries of the probability of c times that of the mask |
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from classlens.core.capture import Pick
from classlens.core.targets.answers import Answers

_CLASSES, _MASKS = "class_queries_logits", "masks_queries_logits"


@dataclass(frozen=True, eq=False)
class Dense:
    """How to read the class maps of an image."""

    maps: Callable[[int], Tensor]  # an image -> (C,h,w), without gradients
    picks: Callable[[int], tuple[Pick, ...]]  # a class -> what to read
    values: Callable[[Sequence[Tensor], int], Tensor]  # the numbers that were read, a class -> (h*w,)

    def where(self, image: int, index: int) -> Tensor:
        """(h,w): where the network finds a class; with a single class, where its logit is positive."""
        maps = self.maps(image)
        return maps[0] > 0 if len(maps) == 1 else maps.argmax(0) == index


def dense(answers: Answers, asks: str) -> Dense:
    """The class maps of a segmentation network; other networks are refused."""
    result = answers.result
    if isinstance(result, dict) and {_CLASSES, _MASKS} <= result.keys():
        return _of_queries(result[_CLASSES], result[_MASKS])
    path, logits = answers.dense(asks)
    return Dense(
        maps=lambda image: logits[image].detach(),
        picks=lambda index: (Pick(path, index=(index,)),),
        values=lambda numbers, index: numbers[0],
    )


def _of_queries(classes: Tensor, masks: Tensor) -> Dense:
    """The last class of a query means that it shows no object."""

    def combined(of_classes: Tensor, of_masks: Tensor) -> Tensor:
        return torch.einsum("qc,qp->cp", of_classes.softmax(1)[:, :-1], of_masks.sigmoid())

    def values(numbers: Sequence[Tensor], index: int) -> Tensor:
        queries = classes.shape[1]
        return combined(numbers[0].reshape(queries, -1), numbers[1].reshape(queries, -1))[index]

    def maps(image: int) -> Tensor:
        found = combined(classes[image].detach(), masks[image].detach().flatten(1))
        return found.reshape(-1, *masks.shape[2:])

    return Dense(maps, lambda index: (Pick((_CLASSES,)), Pick((_MASKS,))), values)
