"""Maps of fixed images in TensorBoard, once for each step.

>>> from torch.utils.tensorboard import SummaryWriter
>>> with SummaryWriter("runs/first") as writer:
...     log_maps(writer, model, images, targets=3, step=epoch)
"""

from __future__ import annotations

from typing import Any

from torch import nn

from classlens.interop.training import drawn
from classlens.models.loaded import LoadedModel


def log_maps(
    writer: Any, model: nn.Module | LoadedModel, images: Any, targets: Any = None, *, step: int,
    name: str = "classlens", **how: Any,
) -> None:  # fmt: skip
    """Write a picture of the maps with a `SummaryWriter`; `how` is passed to `classlens.explain`, with `scale`."""
    writer.add_image(name, drawn(model, images, targets, **how), global_step=step, dataformats="HWC")
