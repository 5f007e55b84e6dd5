"""A loaded model's preprocessing gives what the library that it comes from gives, on pictures of odd sizes."""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from skimage import data

import classlens
from classlens.models._torchvision import import_timm, import_torchvision

SIZES = ((451, 300), (177, 301), (53, 310), (1023, 57), (7, 5), (224, 224))  # (width, height)


def photo(size: tuple[int, int], mode: str) -> Image.Image:
    return Image.fromarray(data.chelsea()).resize(size).convert(mode)


@pytest.mark.parametrize(
    "name",
    [
        "mobilenetv3_small_050",  # bicubic 256 -> 224
        "test_resnet",  # bilinear 168 -> 160, mean 0.5
        "convnextv2_nano.fcmae_ft_in22k_in1k_384",  # squashed to a square
    ],
)
def test_timm(name: str) -> None:
    timm = import_timm()
    loaded = classlens.load(f"timm:{name}", weights=None)
    config = timm.data.resolve_model_data_config(loaded.model)
    transform = timm.data.create_transform(**config, is_training=False)
    for size in SIZES:
        expected = transform(photo(size, "RGB"))
        torch.testing.assert_close(loaded.preprocess(photo(size, "RGB")), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["mobilenet_v3_small", "squeezenet1_1", "shufflenet_v2_x0_5"])
def test_torchvision(name: str) -> None:
    models = import_torchvision().models
    loaded = classlens.load(f"torchvision:{name}", weights=None)
    transform = models.get_model_weights(name).DEFAULT.transforms()
    for size in SIZES:
        expected = transform(photo(size, "RGB"))
        torch.testing.assert_close(loaded.preprocess(photo(size, "RGB")), expected, atol=1e-6, rtol=0)


def test_greys_become_colours_as_they_do_there() -> None:
    loaded = classlens.load("torchvision:squeezenet1_1", weights=None)
    transform = import_torchvision().models.get_model_weights("squeezenet1_1").DEFAULT.transforms()
    grey = photo((120, 90), "L")
    torch.testing.assert_close(loaded.preprocess(grey), transform(grey.convert("RGB")), atol=1e-6, rtol=0)
