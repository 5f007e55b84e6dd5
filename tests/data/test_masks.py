"""Masks go through the reader of pictures, and hold what docs/evaluating.md says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from odd import png_of_size
from PIL import Image

from classlens.data.masks import IGNORE, anything_but_zero, class_indices, classes_in, read_mask, trimap
from classlens.errors import ImageError


def saved(tmp_path: Path, values: Any, mode: str | None = None, suffix: str = ".png") -> Path:
    path = tmp_path / f"mask{suffix}"
    image = Image.fromarray(np.asarray(values))
    (image if mode is None else image.convert(mode)).save(path)
    return path


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", "not a picture in a known format"),
        (png_of_size(13_000, 13_000), "13000x13000, more than 64000000 pixels"),
        (b"", "is empty"),
        (png_of_size(4, 4), "truncated"),
    ],
    ids=["eps", "huge", "empty", "cut"],
)
def test_what_is_no_picture_is_no_mask(tmp_path: Path, content: bytes, text: str) -> None:
    path = tmp_path / "m.png"
    path.write_bytes(content)
    with pytest.raises(ImageError, match=text) as error:
        read_mask(path)
    assert "the mask m.png" in str(error.value)


def test_sixteen_bits_are_read_and_more_than_255_classes_refused(tmp_path: Path) -> None:
    small = saved(tmp_path, np.array([[0, 7, 255]], np.uint16))
    assert class_indices(read_mask(small)).tolist() == [[0, 7, 255]]
    large = saved(tmp_path, np.array([[0, 257, 3]], np.uint16))  # 257 would wrap to class 1
    with pytest.raises(ImageError, match="0 to 255, not 0 to 257"):
        class_indices(read_mask(large))
    with pytest.raises(ImageError, match="0 to 255, not 1 to 257"):
        trimap(np.array([[257, 1]], np.int32))
    assert anything_but_zero(read_mask(large)).tolist() == [[0, 1, 1]]  # no class is meant, so none can be wrong


@pytest.mark.parametrize("value", [0.5, -1.0, np.nan, np.inf])
def test_numbers_that_are_no_class(value: float) -> None:
    with pytest.raises(ImageError, match="0 to 255"):
        class_indices(np.array([[1.0, value]]))


def test_a_palette_is_read_by_its_indices(tmp_path: Path) -> None:
    image = Image.fromarray(np.array([[0, 1, 2]], np.uint8)).convert("P")
    image.putpalette([255, 255, 255, 0, 0, 0, 9, 9, 9] + [0, 0, 0] * 253)  # 0 is white: the colour does not count
    image.putdata([0, 1, 2])
    image.save(tmp_path / "p.png")
    values = read_mask(tmp_path / "p.png")
    assert class_indices(values).tolist() == [[0, 1, 2]]
    assert anything_but_zero(values).tolist() == [[0, 1, 1]]


def test_colours_are_objects_but_no_classes(tmp_path: Path) -> None:
    colours = np.zeros((1, 3, 3), np.uint8)
    colours[0, 2] = (0, 9, 0)
    values = read_mask(saved(tmp_path, colours))
    assert anything_but_zero(values).tolist() == [[0, 0, 1]]
    with pytest.raises(ImageError, match=r"class indices .*, not colours"):
        class_indices(values)


def test_what_is_transparent_is_background_and_opaque_black_too(tmp_path: Path) -> None:
    rgba = np.array([[(0, 0, 0, 255), (255, 255, 255, 0), (255, 255, 255, 255)]], np.uint8)
    assert anything_but_zero(read_mask(saved(tmp_path, rgba))).tolist() == [[0, 0, 1]]
    grey = np.array([[(0, 255), (3, 0), (3, 255)]], np.uint8)
    assert class_indices(read_mask(saved(tmp_path, grey))).tolist() == [[0, 0, 3]]


def test_other_ways_to_store_colours(tmp_path: Path) -> None:
    bits = saved(tmp_path, np.array([[True, False]]))
    assert class_indices(read_mask(bits)).tolist() == [[1, 0]]
    black = saved(tmp_path, np.zeros((1, 2, 3), np.uint8), "CMYK", ".tif")  # black is (0, 0, 0, 255) there
    assert anything_but_zero(read_mask(black)).tolist() == [[0, 0]]


def test_classes_of_a_mask() -> None:
    assert classes_in(np.array([[0, 2, IGNORE, 2, 7]], np.uint8)) == [2, 7]
