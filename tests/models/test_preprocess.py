"""Preprocessing equals the libraries' own, pixel for pixel, and can be undone and written down."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from skimage import data

from classlens.data.images import to_tensor
from classlens.errors import ImageError, ModelError
from classlens.models import Preprocess
from classlens.models._torchvision import import_timm, import_torchvision
from classlens.models.sources import from_timm, from_torchvision

SIZES = ((451, 300), (177, 301), (97, 310), (224, 224))  # (width, height)


def photo(size: tuple[int, int]) -> Image.Image:
    return Image.fromarray(data.chelsea()).resize(size)


@pytest.mark.parametrize(
    "weights",
    [
        "ResNet50_Weights.IMAGENET1K_V1",  # bilinear 256 -> 224
        "ResNet50_Weights.IMAGENET1K_V2",  # bilinear 232 -> 224
        "EfficientNet_B1_Weights.IMAGENET1K_V1",  # bicubic 256 -> 240
        "EfficientNet_V2_L_Weights.IMAGENET1K_V1",  # bicubic 480, mean 0.5
        "Swin_V2_T_Weights.IMAGENET1K_V1",  # bicubic 260 -> 256
        "Inception_V3_Weights.IMAGENET1K_V1",  # bilinear 342 -> 299
        "VGG16_Weights.IMAGENET1K_FEATURES",  # std of 1/255
    ],
)
def test_equals_torchvision(weights: str) -> None:
    transforms = import_torchvision().models.get_weight(weights).transforms()
    preprocess = from_torchvision(transforms)
    for size in SIZES:
        expected = transforms(photo(size))
        # Values reach 255 where std is 1/255: the tolerance is that of pixels in [0, 1].
        torch.testing.assert_close(preprocess(photo(size)), expected, atol=1e-6 / min(preprocess.std), rtol=0)


@pytest.mark.parametrize("crop_mode", ["center", "squash", "border"])
@pytest.mark.parametrize("size", [(224, 224), (224, 160), (96, 128)])
@pytest.mark.parametrize("crop_pct", [0.875, 0.95, 1.0])
def test_equals_timm(crop_mode: str, size: tuple[int, int], crop_pct: float) -> None:
    config: dict[str, Any] = {
        "input_size": (3, *size),
        "interpolation": "bicubic",
        "mean": (0.5, 0.4, 0.3),
        "std": (0.2, 0.3, 0.4),
        "crop_pct": crop_pct,
        "crop_mode": crop_mode,
    }
    transform = import_timm().data.create_transform(**config, is_training=False)
    for picture in SIZES:
        torch.testing.assert_close(from_timm(config)(photo(picture)), transform(photo(picture)), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"crop_mode": "spiral"}, "crop mode 'spiral'"),
        ({"input_size": (1, 28, 28)}, "1 channels"),
        ({"interpolation": "random"}, "interpolation must be one of"),
    ],
)
def test_a_timm_config_we_cannot_follow_is_refused(change: dict[str, Any], text: str) -> None:
    config = {
        "input_size": (3, 224, 224),
        "interpolation": "bicubic",
        "mean": (0.5, 0.5, 0.5),
        "std": (0.5, 0.5, 0.5),
        "crop_pct": 0.9,
        "crop_mode": "center",
    }
    with pytest.raises(ModelError, match=text):
        from_timm(config | change)


def test_nothing_is_resized_or_cropped_when_nothing_is_said() -> None:
    preprocess = Preprocess(resize=None, crop=None, mean=(0, 0, 0), std=(1, 1, 1))
    assert torch.equal(preprocess(photo((31, 17))), to_tensor(photo((31, 17))))


def test_a_small_picture_is_padded_around_its_centre() -> None:
    preprocess = Preprocess(None, (3, 4), mean=(0, 0, 0), std=(1, 1, 1), fill=(255, 0, 51))
    x = preprocess(Image.new("RGB", (2, 1), (0, 255, 0)))
    assert x.shape == (3, 3, 4)
    assert x[:, 1].T.tolist() == [pytest.approx([1, 0, 0.2]), [0, 1, 0], [0, 1, 0], pytest.approx([1, 0, 0.2])]


def test_a_mask_lands_where_the_picture_does() -> None:
    picture = np.zeros((90, 140, 3), dtype=np.uint8)
    picture[20:60, 30:80] = 255
    mask = Image.fromarray((picture[..., 0] // 255 * 7).astype(np.uint8))
    preprocess = Preprocess(64, 56)
    framed = np.asarray(replace(preprocess, interpolation="nearest", fill=(0,)).frame(mask))
    seen = preprocess.restore(preprocess(Image.fromarray(picture)))[0].numpy()
    assert set(framed.flatten()) == {0, 7}
    inside, outside = seen > 0.99, seen < 0.01
    assert (framed[inside] == 7).all()
    assert (framed[outside] == 0).all()
    assert inside.sum() > 500


def test_a_long_thin_picture_is_refused_before_it_fills_the_memory() -> None:
    with pytest.raises(ImageError, match=r"1x100000 is too elongated: it would become 256x25600000"):
        Preprocess()(Image.new("RGB", (1, 100_000)))


def test_a_thin_picture_keeps_a_pixel() -> None:
    assert Preprocess((8, 8), 8, fit="contain")(Image.new("RGB", (1, 1000))).shape == (3, 8, 8)


def test_restore_undoes_the_normalisation() -> None:
    preprocess = Preprocess(mean=(127 / 255,) * 3, std=(128 / 255, 0.25, 1 / 255))
    framed = to_tensor(preprocess.frame(photo(SIZES[0])))
    x = preprocess(photo(SIZES[0]))
    torch.testing.assert_close(preprocess.restore(x), framed, atol=1e-6, rtol=0)
    torch.testing.assert_close(preprocess.restore(x.double().expand(2, 5, -1, -1, -1))[1, 4], framed.double())
    assert preprocess.restore(x + 1000).max() == 1


def test_json_round_trip() -> None:
    for preprocess in (
        Preprocess(),
        Preprocess(None, None),
        Preprocess((24, 32), (16, 20), "lanczos", (0.1, 0.2, 0.3), (1, 2, 3), "cover", (1, 2, 3)),
    ):
        assert Preprocess.from_json(json.loads(json.dumps(preprocess.to_json()))) == preprocess
    assert Preprocess.from_json({"crop": 240, "mean": [0, 0, 0]}) == Preprocess(crop=240, mean=(0, 0, 0))


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ({"resize": -1}, "resize must be"),
        ({"resize": True}, "resize must be"),
        ({"resize": [1, 2, 3]}, "resize must be"),
        ({"crop": 2.5}, "crop must be"),
        ({"mean": [0.5]}, "mean must be three"),
        ({"mean": "red"}, "mean must be three"),
        ({"std": [1, 0, 1]}, "std must be"),
        ({"interpolation": "magic"}, "interpolation must be one of"),
        ({"fit": "wobble"}, "fit must be one of"),
        ({"fill": [1, 2]}, "fill must be"),
        ({"colour": "red"}, "has the unknown field colour"),
        ([], "must be a JSON object"),
    ],
)
def test_a_wrong_json_is_refused(bad: Any, text: str) -> None:
    with pytest.raises(ModelError, match=text):
        Preprocess.from_json(bad)


@pytest.mark.parametrize(
    "preprocess",
    [
        Preprocess(resize=96, crop=80, interpolation="nearest"),
        Preprocess(resize=64, crop=(90, 72), interpolation="nearest"),
        Preprocess(resize=(96, 80), crop=(96, 80), interpolation="nearest", fit="contain"),
        Preprocess(resize=(96, 80), crop=(96, 80), interpolation="nearest", fit="cover"),
        Preprocess(resize=(96, 80), crop=None, interpolation="nearest"),
        Preprocess(resize=None, crop=201, interpolation="nearest"),
        Preprocess(resize=None, crop=None),
    ],
)
@pytest.mark.parametrize("size", SIZES)
def test_unframe_puts_every_pixel_back_in_its_place(preprocess: Preprocess, size: tuple[int, int]) -> None:
    width, height = size
    numbers = Image.fromarray(1 + np.arange(width * height, dtype=np.int32).reshape(height, width), "I")
    resized = np.asarray(replace(preprocess, crop=None, fill=(0,)).frame(numbers))
    framed = torch.from_numpy(np.array(replace(preprocess, fill=(0,)).frame(numbers)))
    whole = preprocess.unframe(torch.stack([framed, 2 * framed]), height, width)
    assert whole.shape[1:] == resized.shape
    assert torch.equal(whole[1], 2 * whole[0])
    seen = whole[0].numpy() != 0
    assert (whole[0].numpy()[seen] == resized[seen]).all()
    assert seen.sum() == np.count_nonzero(framed)
