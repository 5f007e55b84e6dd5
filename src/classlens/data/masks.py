"""Masks: converts the values in a file to 0 background, 1.. objects, 255 unlabelled.

    >>> trimap(read_mask(Path("annotations/trimaps/beagle_1.png")))     # (H,W), holds 0, 1 and 255
    array([[0, 0, 1, ...

Each layout names the function below that converts its masks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from classlens.data.images import DEEP_MODES, open_stored
from classlens.errors import ImageError

IGNORE = 255  # unlabelled pixels of a mask, ignored by every score
Mask = NDArray[np.uint8]  # (H,W)


def read_mask(path: Path) -> NDArray[Any]:
    """The stored values, (H,W) or (H,W,channels); for a palette image the indices, not the colours.

    Transparent pixels have the value 0, whatever their colour. Same formats, limits and errors as for images.
    """
    image = open_stored(path, f"the mask {path.name}")
    bands = image.getbands()
    if bands[-1] in ("A", "a"):  # a transparent pixel shows no object
        values = np.array(image)
        colours = values[..., :-1] * (values[..., -1:] > 0)
        return colours[..., 0] if len(bands) == 2 else colours
    if image.mode in ("1", "L", "P", "RGB", *DEEP_MODES):
        return np.asarray(image)
    return np.asarray(image.convert("RGB"))  # CMYK and similar modes, where 0 is not black


def class_indices(values: NDArray[Any]) -> Mask:
    """The values of a mask as class indices, 0 background. Values above 255 are refused."""
    if values.ndim != 2:
        raise ImageError("a mask must hold class indices (a palette or grey picture), not colours")
    with np.errstate(invalid="ignore"):  # NaN is refused below
        indices = values.astype(np.uint8)
    if not np.array_equal(indices, values):
        raise ImageError(
            f"a mask holds class indices 0 to 255, not {values.min()} to {values.max()}: save it with 8 bits"
        )
    return indices


def anything_but_zero(values: NDArray[Any]) -> Mask:
    """Every colour or value except 0 is an object."""
    if values.ndim not in (2, 3):
        raise ImageError("a mask must be a picture (H,W) or (H,W,channels)")
    if not np.isfinite(values).all():
        raise ImageError("a mask holds NaN or infinite values: save it with whole numbers")
    return np.asarray((values.reshape(*values.shape[:2], -1) != 0).any(2), np.uint8)


def trimap(values: NDArray[Any]) -> Mask:
    """1 the animal, 2 background, 3 the unlabelled border between them."""
    indices = class_indices(values)
    if not np.isin(indices, (1, 2, 3)).all():
        raise ImageError("a trimap may hold only 1, 2 and 3")
    meaning = np.array([IGNORE, 1, 0, IGNORE], np.uint8)
    mask: Mask = meaning[indices]
    return mask


def classes_in(mask: Mask) -> list[int]:
    """The classes in a mask, 1.., without background and unlabelled pixels."""
    return [int(value) for value in np.unique(mask) if value not in (0, IGNORE)]
