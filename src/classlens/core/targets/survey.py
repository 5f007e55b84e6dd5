"""What can be asked of a network about an image: its classes, the boxes that it finds, the classes of pixels, texts.

>>> survey(network, image, Models(labels)).detections
(Detection(box=Box(left=10.0, ...), label=16, score=0.87, ...), ...)

One ordinary forward pass, without a record: enough to show a visitor what there is to click.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from classlens.core.capture import Recorder, WatchesEnding, of_labels, pick_output
from classlens.core.targets.answers import Answers, Models
from classlens.core.targets.ask import check_logits, fitting
from classlens.core.targets.candidates import Detection, detections, has_boxes
from classlens.core.targets.dense import dense
from classlens.errors import ModelError, TargetError


@dataclass(frozen=True, eq=False)
class Survey:
    """What a network answers about one image: the one that is not None."""

    logits: Tensor | None = None  # (classes,)
    labels: bool = False  # each of these classes has an independent probability: the network ends with a sigmoid
    detections: tuple[Detection, ...] | None = None  # of a detector, the highest score first
    maps: Tensor | None = None  # (classes,h,w), of a segmentation network
    vector: Tensor | None = None  # (D,), of a model of images and texts


def survey(network: nn.Module, image: Tensor, models: Models) -> Survey:
    """Run a network on one image (1,C,H,W); raises an error in one line if nothing can be asked about the result."""
    with torch.no_grad(), WatchesEnding() as watch:
        result = network(image)
    answers = Answers(result, 1, (image.shape[-2], image.shape[-1]), Recorder(()), models)
    if models.embed_text is not None:
        return Survey(vector=answers.vector("text(...)")[1][0])
    if has_boxes(answers):
        return Survey(detections=tuple(detections(answers, 0)))
    try:
        logits, ends = watch.ending.before(pick_output(result, None))
        if logits.dim() != 4:
            check_logits(logits, 1)
            fitting(models.labels, logits.shape[1])
            return Survey(logits=logits[0], labels=of_labels(ends, logits))
    except ModelError as error:  # of several outputs, one may be for each pixel
        return Survey(maps=_maps(answers, error))
    return Survey(maps=_maps(answers))


def _maps(answers: Answers, error: ModelError | None = None) -> Tensor:
    try:
        return dense(answers, "region(...)").maps(0)
    except TargetError:
        if error is None:
            raise
        raise error from None
