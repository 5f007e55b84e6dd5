"""Maps for the overlays of pytorch-grad-cam.

    >>> from pytorch_grad_cam.utils.image import show_cam_on_image
    >>> show_cam_on_image(*cam_on_image(explanation), use_rgb=True)

Its targets need no adapter: `explain(model, images, targets=[ClassifierOutputTarget(281)])`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from classlens.explanation import Explanation
from classlens.render import scaled


def cam_on_image(explanation: Explanation, row: int = 0, k: int = 0) -> tuple[NDArray[Any], NDArray[Any]]:
    """The image (H,W,3) and the evidence for a class (H,W), float32 in [0,1], as `show_cam_on_image` expects them.

    These overlays cannot show evidence against a class: only the positive part of a signed map is kept.
    """
    picture = explanation.pictures[row].detach().float().cpu().permute(1, 2, 0).numpy()
    heat = np.maximum(scaled(explanation.maps[row, k], explanation.signed), 0)
    return picture, heat.astype(np.float32)
