"""Maps of fixed images in Weights & Biases, once for each step; it works offline too.

>>> run = wandb.init(project="pets", mode="offline")
>>> log_maps(run, model, images, targets=3, step=epoch)
"""

from __future__ import annotations

from typing import Any

from torch import nn

from classlens.errors import ClasslensError
from classlens.interop.training import as_image, drawn
from classlens.models.loaded import LoadedModel


def log_maps(
    run: Any, model: nn.Module | LoadedModel, images: Any, targets: Any = None, *, step: int | None = None,
    name: str = "classlens", **how: Any,
) -> None:  # fmt: skip
    """Log a picture of the maps with a run of wandb; `how` is passed to `classlens.explain`, with `scale`."""
    try:
        import wandb
    except ImportError:
        raise ClasslensError("Weights & Biases is not installed: pip install wandb") from None
    run.log({name: wandb.Image(as_image(drawn(model, images, targets, **how)))}, step=step)
