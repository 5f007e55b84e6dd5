"""A callable on an output that is not (B,classes): it gets the output of one image, such as (classes,H,W).

>>> explain(model, images, SemanticSegmentationTarget(15, mask))       # of pytorch-grad-cam
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from classlens.core.capture import Pick, described
from classlens.core.targets.answers import Answers, tensors
from classlens.core.targets.base import Scalar
from classlens.core.targets.numbers import Number
from classlens.core.targets.questions import Found, Question
from classlens.errors import TargetError


@dataclass(frozen=True, eq=False)
class Called(Question):
    """The number that a callable computes from one image's output."""

    function: Scalar

    def find(self, answers: Answers, image: int) -> Found:
        number = Number(self.function)
        found = list(tensors(answers.result))
        if len(found) != 1 or found[0][1].shape[0] != answers.images:
            raise TargetError(
                f"{number.name!r} gets the output of one image, but the model returns {described(answers.result)}; "
                "select a tensor with output=, or ask a question such as classlens.region or classlens.detection"
            )
        path, output = found[0]
        shape = output.shape[1:]

        def value(numbers: Sequence[Tensor]) -> Tensor:
            return number.value(numbers[0].reshape(shape))

        return Found(number.name, (Pick(path),), value)
