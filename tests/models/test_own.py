"""A user's own preprocessing: called as its library does, drawn in its own colours, or refused in one line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import classlens
from classlens.errors import ClasslensError, ImageError, ModelError
from classlens.models import LoadedModel, Preprocess
from classlens.models._torchvision import import_timm, import_torchvision
from classlens.models.own import own_preprocess
from networks import build

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
SAME = Preprocess(resize=40, crop=32, mean=MEAN, std=STD)  # what the functions below compute


@pytest.fixture
def picture() -> Image.Image:
    values = np.random.default_rng(0).integers(0, 255, (7, 9, 3), dtype=np.uint8)
    return Image.fromarray(values).resize((90, 70), Image.Resampling.BICUBIC)


def by_torchvision() -> Any:
    import_torchvision()
    from torchvision import transforms

    steps = [transforms.Resize(40), transforms.CenterCrop(32), transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    return transforms.Compose(steps)


def by_timm() -> Any:
    data = import_timm().data
    return data.create_transform((3, 32, 32), mean=MEAN, std=STD, interpolation="bilinear", crop_pct=0.8)


class Albumentations:
    """Called as the library of that name: with keywords, on arrays (H,W,3), for a dict of arrays."""

    transforms = (SimpleNamespace(mean=MEAN, std=STD),)

    def __call__(self, *, image: np.ndarray) -> dict[str, np.ndarray]:
        return {"image": SAME(Image.fromarray(image)).permute(1, 2, 0).numpy()}


Albumentations.__module__ = "albumentations.core.composition"


class Processor:
    """Called as a processor of Hugging Face."""

    model_input_names = ("pixel_values",)
    image_mean, image_std = list(MEAN), list(STD)

    def __call__(self, *, images: Image.Image, return_tensors: str) -> dict[str, torch.Tensor]:
        assert return_tensors == "pt"
        return {"pixel_values": SAME(images)[None]}


KINDS = {
    "torchvision": by_torchvision, "timm": by_timm, "albumentations": Albumentations, "processor": Processor,
    "function": lambda: lambda image: SAME(image),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_called_as_its_library_does(kind: str, picture: Image.Image) -> None:
    own = own_preprocess(KINDS[kind]())
    torch.testing.assert_close(own(picture), SAME(picture))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "function"])
def test_pictures_are_drawn_in_their_own_colours(kind: str, picture: Image.Image) -> None:
    seen = SAME(picture)
    torch.testing.assert_close(own_preprocess(KINDS[kind]()).restore(seen), SAME.restore(seen))


def test_without_known_colours_pictures_are_rescaled(picture: Image.Image) -> None:
    drawn = own_preprocess(lambda image: SAME(image)).restore(SAME(picture))
    assert (float(drawn.min()), float(drawn.max())) == (0.0, 1.0)


def test_explain_takes_preprocess_and_labels_for_a_bare_network(picture: Image.Image) -> None:
    net, names = build("plain"), [f"name {i}" for i in range(7)]
    e = classlens.explain(net, picture, "name 3", "gradient", preprocess=by_torchvision(), labels=names)
    assert (e.name(), e.model) == ("name 3", type(net).__name__)
    torch.testing.assert_close(e.maps, classlens.explain(net, SAME(picture)[None], 3, "gradient").maps)


def test_labels_alone_are_enough_for_tensors() -> None:
    net, x = build("plain"), torch.rand(1, 3, 32, 32)
    e = classlens.explain(net, x, "name 3", "gradient", labels=[f"name {i}" for i in range(7)])
    assert e.name() == "name 3"
    with pytest.raises(ImageError, match="give preprocess="):
        classlens.explain(net, Image.new("RGB", (32, 32)), labels=[f"name {i}" for i in range(7)])


def test_a_loaded_model_takes_another_preprocessing(picture: Image.Image) -> None:
    loaded = LoadedModel("mine", build("plain"), Preprocess(crop=64), None)
    e = classlens.explain(loaded, picture, 3, "gradient", preprocess=by_torchvision())
    assert e.maps.shape == (1, 1, 32, 32)


def fails(_image: Image.Image) -> None:
    raise ValueError("two\nlines")


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        (fails, ModelError, r"the preprocessing fails failed \(ValueError: two lines\)"),
        (lambda image: image, ImageError, "gives a Image; it must give one image as a tensor"),
        (lambda image: torch.zeros(2, 3, 8, 8), ImageError, r"gives shape \(2, 3, 8, 8\)"),
        (7, ModelError, "preprocess is a int; give a function"),
    ],
)
def test_one_line_says_what_is_wrong(function: Any, error: type, words: str, picture: Image.Image) -> None:
    with pytest.raises(error, match=words) as caught:
        classlens.explain(build("plain"), picture, preprocess=function)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("use", ["frame", "normalise", "to_json"])
def test_what_a_function_cannot_tell_is_refused(use: str, picture: Image.Image) -> None:
    own = own_preprocess(fails)
    arguments = {"frame": (picture,), "normalise": (torch.zeros(3, 8, 8),), "to_json": ()}[use]
    with pytest.raises(ClasslensError, match="fails is your own function, which cannot"):
        getattr(own, use)(*arguments)
