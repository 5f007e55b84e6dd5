"""What people hold in their hands -> a batch (B,C,H,W): tensors, arrays, lists of them, and batches of processors.

>>> as_batch(processor(images=picture, return_tensors="pt"))      # a mapping with pixel_values
>>> as_batch([first, second])                                     # tensors (C,H,W) of the same size
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from classlens.errors import ImageError


def as_batch(images: Any) -> Tensor | None:
    """The network's input, if `images` already holds it; None if it holds pictures that need preprocessing."""
    if isinstance(images, Mapping):
        if "pixel_values" not in images:
            raise ImageError(
                f"a batch with the keys {', '.join(map(str, images))} has no pixel_values; give the tensor"
            )
        return as_batch(images["pixel_values"])
    if isinstance(images, Tensor):
        return _plain(images)
    if isinstance(images, np.ndarray):
        return None if _is_picture(images) else torch.from_numpy(images)
    if isinstance(images, list | tuple) and images and all(isinstance(item, Tensor) for item in images):
        return stacked(images)
    return None


def _plain(images: Tensor) -> Tensor:
    """Without the metadata that a subclass of Tensor adds."""
    if type(images).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise ImageError(f"the images are a {type(images).__name__}, not a plain tensor; give its values")
    return images if type(images) is Tensor else images.detach().as_subclass(Tensor)


def pictures(images: Any) -> list[Any]:
    """The pictures in `images`, each of a kind that `open_image` reads; arrays of 8-bit values become PIL images."""
    sources = list(images) if isinstance(images, list | tuple) else [images]
    if not sources:
        raise ImageError("no images were given; give at least one")
    return [_picture(source) for source in sources]


def _is_picture(array: np.ndarray[Any, Any]) -> bool:
    """(H,W) or (H,W,C) of 8-bit values: pixels, not a network's input."""
    return array.dtype == np.uint8 and (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (1, 3, 4)))


def _picture(source: Any) -> Any:
    if not isinstance(source, np.ndarray):
        return source
    if not _is_picture(source):
        raise ImageError(
            f"an array of {source.dtype} values and shape {source.shape} is not a picture; give (H, W, 3) of uint8, or "
            "a preprocessed batch (B, C, H, W) of floats"
        )
    return Image.fromarray(source[:, :, 0] if source.shape[2:] == (1,) else source)


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """One batch of images (C,H,W), or of batches (B,C,H,W); of volumes only batches, (B,C,D,H,W)."""
    shapes = {tuple(t.shape) for t in tensors}
    if len(shapes) > 1:
        raise ImageError(
            f"the images have different shapes ({', '.join(map(str, sorted(shapes)))}); explain them apart"
        )
    (shape,) = shapes
    return torch.cat(list(tensors)) if len(shape) >= 4 else torch.stack(list(tensors))
