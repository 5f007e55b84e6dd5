"""Masks: from the numbers in a file to 0 background, 1.. objects, 255 not labelled.

    >>> trimap(read_mask(Path("annotations/trimaps/beagle_1.png")))     # (H,W), holds 0, 1 and 255
    array([[0, 0, 1, ...

A layout says which of the functions below its masks go through.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from classlens.errors import ImageError

IGNORE = 255  # in a mask: not labelled, left out of every score
Mask = NDArray[np.uint8]  # (H,W)


def read_mask(path: Path) -> NDArray[Any]:
    """The values as they are stored: of a palette picture the indices, not the colours."""
    try:
        with Image.open(path) as image:
            return np.asarray(image)
    except FileNotFoundError:
        raise ImageError(f"the mask {path.name} does not exist") from None
    except Exception as error:  # each format's decoder raises its own kinds
        raise ImageError(f"the mask {path.name} cannot be read: {error}") from error


def class_indices(values: NDArray[Any]) -> Mask:
    """The values of a mask as they are: each is a class, 0 background."""
    if values.ndim != 2:
        raise ImageError("a mask must hold class indices (a palette or grey picture), not colours")
    return values.astype(np.uint8)


def anything_but_zero(values: NDArray[Any]) -> Mask:
    """Every colour or number but 0 is an object."""
    if values.ndim not in (2, 3):
        raise ImageError("a mask must be a picture (H,W) or (H,W,channels)")
    return np.asarray((values.reshape(*values.shape[:2], -1) != 0).any(2), np.uint8)


def trimap(values: NDArray[Any]) -> Mask:
    """1 the animal, 2 background, 3 the border between them, which is not labelled."""
    indices = class_indices(values)
    if not np.isin(indices, (1, 2, 3)).all():
        raise ImageError("a trimap holds 1, 2 and 3 alone")
    meaning = np.array([IGNORE, 1, 0, IGNORE], np.uint8)
    mask: Mask = meaning[indices]
    return mask


def classes_in(mask: Mask) -> list[int]:
    """The classes of a mask, 1.., without background and what is not labelled."""
    return [int(value) for value in np.unique(mask) if value not in (0, IGNORE)]
