"""Inputs as people have them become one batch, or are refused in one line."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from classlens.data.batches import as_batch, pictures
from classlens.errors import ImageError

BATCH = torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)


@pytest.mark.parametrize(
    "images",
    [
        BATCH, BATCH.numpy(), list(BATCH), tuple(BATCH), [BATCH[:1], BATCH[1:]],
        {"pixel_values": BATCH, "pixel_mask": BATCH}, {"pixel_values": BATCH.numpy()}, {"pixel_values": list(BATCH)},
    ],
)  # fmt: skip
def test_what_is_preprocessed_becomes_a_batch(images: Any) -> None:
    found = as_batch(images)
    assert found is not None
    assert torch.equal(found, BATCH)


@pytest.mark.parametrize("images", ["photo.jpg", b"bytes", Image.new("RGB", (3, 3)), ["a.jpg"], []])
def test_pictures_need_preprocessing(images: Any) -> None:
    assert as_batch(images) is None


@pytest.mark.parametrize(("shape", "mode"), [((5, 7), "L"), ((5, 7, 1), "L"), ((5, 7, 3), "RGB"), ((5, 7, 4), "RGBA")])
def test_arrays_of_pixels_are_pictures(shape: tuple[int, ...], mode: str) -> None:
    array = np.random.default_rng(0).integers(0, 255, shape, dtype=np.uint8)
    assert as_batch(array) is None
    (picture,) = pictures(array)
    assert (picture.mode, picture.size) == (mode, (7, 5))
    np.testing.assert_array_equal(np.asarray(picture).reshape(shape), array)


@pytest.mark.parametrize(
    ("images", "words"),
    [
        ([], "no images were given"),
        ([np.zeros((5, 7, 3))], r"an array of float64 values and shape \(5, 7, 3\) is not a picture"),
        ([np.zeros((3, 5, 7), np.uint8)], "is not a picture"),
    ],
)
def test_other_arrays_are_no_pictures(images: Any, words: str) -> None:
    with pytest.raises(ImageError, match=words):
        pictures(images)


@pytest.mark.parametrize(
    ("images", "words"),
    [
        ({"input_ids": BATCH}, "with the keys input_ids has no pixel_values"),
        ([BATCH[0], BATCH[1, :, :2]], r"different shapes \(\(3, 2, 5\), \(3, 4, 5\)\)"),
    ],
)
def test_one_line_says_what_is_wrong(images: Any, words: str) -> None:
    with pytest.raises(ImageError, match=words):
        as_batch(images)
