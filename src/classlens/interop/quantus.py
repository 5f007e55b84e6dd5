"""Maps for Quantus: pass `explain_func=explain_func` to any metric.

    >>> from classlens.interop.quantus import explain_func
    >>> metric = quantus.PixelFlipping(...)
    >>> metric(model, x_batch, y_batch, explain_func=explain_func, explain_func_kwargs={"method": "agf"})
    >>> quantus.evaluate(metrics, {"agf": explain_func, "gradcam": explain_func}, model, x_batch, y_batch,
    ...                  explain_func_kwargs={})

`quantus.evaluate` passes the name of each entry as `method`, so use names from `classlens.METHODS`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from classlens.explanation import explain
from classlens.models.loaded import LoadedModel


def explain_func(
    model: nn.Module | LoadedModel,
    inputs: NDArray[Any] | Tensor,
    targets: NDArray[Any] | Tensor | int,
    method: str = "agf",
    device: Any = None,
    **options: Any,
) -> NDArray[Any]:
    """Maps (B,1,H,W) of images (B,C,H,W), raw and signed; one class for each image.

    `method` is a name from `classlens.METHODS`, with its `options`. Quantus passes `device`, which is ignored: the
    computation runs on the model's device.
    """
    images = torch.as_tensor(inputs)
    classes = np.broadcast_to(np.asarray(targets, dtype=np.int64).reshape(-1), (len(images),))
    e = explain(model, images, torch.from_numpy(classes.copy())[:, None], method, **options)
    maps: NDArray[Any] = e.maps.cpu().numpy()
    return maps
