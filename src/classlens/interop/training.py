"""A picture of maps while a network trains, for the loggers of this package: the model is left as it was.

>>> pixels = drawn(model, images, targets=3)       # (H,W,3) uint8: a row for each image
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from classlens import render
from classlens.data.images import open_image
from classlens.explanation import explain
from classlens.models.loaded import LoadedModel


def drawn(
    model: nn.Module | LoadedModel, images: Any, targets: Any = None, method: str = "agf", *,
    scale: str | float = "own", **options: Any,
) -> render.RGB:  # fmt: skip
    """The figure of an explanation as pixels. The model is explained in evaluation mode; then its modes are restored.

    `scale` is that of `Explanation.figure`: a number keeps one scale over all steps of a training. All else is passed
    to `classlens.explain`.
    """
    network = model.model if isinstance(model, LoadedModel) else model
    # A framework may log without gradients, or in inference mode, where autograd cannot be used at all.
    with evaluating(network), torch.inference_mode(False), torch.enable_grad():
        explanation = explain(model, images, targets, method, **options)
    return np.asarray(open_image(render.png(explanation.figure(scale))))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards each module is in its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def as_image(pixels: render.RGB) -> Image.Image:
    """Pixels as a PIL image, which some loggers expect."""
    return Image.fromarray(pixels)
