"""Maps of fixed images in MLflow, once for each step.

>>> with mlflow.start_run() as run:
...     log_maps(run.info.run_id, model, images, targets=3, step=epoch)
"""

from __future__ import annotations

from typing import Any

from torch import nn

from classlens.errors import ClasslensError
from classlens.interop.training import as_image, drawn
from classlens.models.loaded import LoadedModel


def log_maps(
    run_id: str, model: nn.Module | LoadedModel, images: Any, targets: Any = None, *, step: int,
    name: str = "classlens", client: Any = None, **how: Any,
) -> None:  # fmt: skip
    """Log a picture of the maps to a run of MLflow; `how` is passed to `classlens.explain`, with `scale`.

    `client` is an `MlflowClient`; by default one for the current tracking URI.
    """
    try:
        import mlflow
    except ImportError:
        raise ClasslensError("MLflow is not installed: pip install mlflow") from None
    pixels = as_image(drawn(model, images, targets, **how))
    (client or mlflow.MlflowClient()).log_image(run_id, pixels, key=name, step=step)
