"""ImageNet-Segmentation: images and masks inside one Matlab 7.3 file (HDF5), `gtsegs_ijcv.mat`.

    >>> names_in(Path("gtsegs_ijcv.mat"))[0]
    'n01440764_10026'

Matlab stores arrays column by column, so every array read from HDF5 is transposed.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from classlens.errors import DataError, ImageError


def names_in(path: Path) -> list[str]:
    """The ImageNet names of the images if the file has them (as character codes), otherwise their positions."""
    content = _hdf5(path)
    if "value" not in content or not {"img", "gt"} <= set(content["value"]):
        raise DataError(
            f"{path} is expected to hold value/img and value/gt (gtsegs_ijcv.mat); found {', '.join(content)}"
        )
    count = len(content["value/img"])
    if "id" not in content["value"]:
        return [str(index) for index in range(count)]
    return ["".join(chr(code) for code in _cell(path, "id", index).ravel()) for index in range(count)]


def read_image(path: Path, index: int) -> NDArray[np.uint8]:
    """(H,W,3)."""
    return np.ascontiguousarray(_cell(path, "img", index).T).astype(np.uint8)


def read_mask(path: Path, index: int) -> NDArray[Any]:
    """The stored values, (H,W)."""
    return _cell(path, "gt", index, nested=True).T


def _cell(path: Path, name: str, index: int, nested: bool = False) -> NDArray[Any]:
    """One array of the file; each mask is inside its own cell array."""
    content = _hdf5(path)
    try:
        cell = content[content[f"value/{name}"][index, 0]]
        return np.asarray(content[cell[0, 0]] if nested else cell)
    except (OSError, KeyError, RuntimeError, ValueError) as error:  # h5py has no exception of its own
        raise ImageError(f"picture {index} of {path.name} cannot be read: {error}") from error


@cache
def _hdf5(path: Path) -> Any:
    try:
        import h5py
    except ImportError:
        raise DataError(f"{path.name} is an HDF5 file: pip install 'classlens[hdf5]' to read it") from None
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise DataError(f"{path} cannot be read as HDF5: {error}") from error
