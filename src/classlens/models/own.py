"""A user's own function as the preprocessing: a transform of torchvision, timm or albumentations, or an HF processor.

>>> explain(model, "photo.jpg", preprocess=weights.transforms(), labels=names)
>>> LoadedModel("mine", model, albumentations.Compose([...]), names)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from classlens.data.images import ImageSource, open_image, rescaled
from classlens.errors import ClasslensError, ImageError, ModelError
from classlens.models._text import reason
from classlens.models.preprocess import Preprocess

_LARGEST_DIFFERENCE = 4 / 255  # of two ways to resize the same image, in units of [0,1]


@dataclass(frozen=True)
class OwnPreprocess(Preprocess):
    """Calls a user's function with the opened RGB image. Where the result lies in the image is not known."""

    function: Any = None  # image -> the network's input
    normalises: bool = False  # whether the mean and std of the function are known

    def __call__(self, source: ImageSource) -> Tensor:
        image = open_image(source)
        try:
            made = _called(self.function, image)
        except ClasslensError:
            raise
        except Exception as error:  # the user's function may raise anything
            raise ModelError(f"the preprocessing {self._name} failed ({reason(error)}); check it") from error
        return _one_image(made, self._name)

    def restore(self, tensor: Tensor) -> Tensor:
        return super().restore(tensor) if self.normalises else rescaled(tensor)

    def frame(self, image: Image.Image) -> Image.Image:
        self._refuse("place masks and figures on the image")

    def unframe(self, maps: Tensor, height: int, width: int) -> Tensor:
        self._refuse("place maps on the whole image")

    def normalise(self, pixels: Tensor) -> Tensor:
        self._refuse("normalise pixels")

    def to_json(self) -> dict[str, Any]:
        self._refuse("be written to a file")

    @property
    def _name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def _refuse(self, wanted: str) -> NoReturn:
        raise ModelError(
            f"the preprocessing {self._name} is your own function, which cannot {wanted}; describe it with "
            "classlens.models.Preprocess instead"
        )


def own_preprocess(function: Callable[..., Any]) -> Preprocess:
    """A `Preprocess` that calls the function; a `Preprocess` itself is returned unchanged."""
    if isinstance(function, Preprocess):
        return function
    if not callable(function):
        raise ModelError(f"preprocess is a {type(function).__name__}; give a function of an image, or a Preprocess")
    own = OwnPreprocess(function=function)
    found = _moments(function)
    return own if found is None else replace(own, mean=found[0], std=found[1], normalises=True)


def equal_or_own(read: Callable[[], Preprocess], own: Preprocess) -> Preprocess:
    """What `read` makes of a library's settings, if it computes the same as the library's own function; else the own.

    A `Preprocess` also places masks and boxes; settings may mean something else than they say, so both are compared.
    """
    with contextlib.suppress(ClasslensError, TypeError, KeyError, AttributeError, StopIteration):
        found = read()
        if all(_same(found, own, size) for size in ((480, 360), (150, 210))):
            return found
    return own


def _same(found: Preprocess, own: Preprocess, size: tuple[int, int]) -> bool:
    """Whether two preprocessings agree on a picture of gradients and edges, up to the rounding of their resizing."""
    y, x = np.mgrid[0 : size[0], 0 : size[1]]
    colours = np.stack([x * 255 // size[1], y * 255 // size[0], 255 * ((x // 40 + y // 40) % 2)], -1)
    picture = Image.fromarray(colours.astype(np.uint8))
    one, other = found(picture), own(picture)
    return one.shape == other.shape and float((one - other).abs().max()) * max(found.std) <= _LARGEST_DIFFERENCE


def _called(function: Any, image: Image.Image) -> Any:
    """Call the function as its library does."""
    if hasattr(function, "model_input_names"):  # a processor of Hugging Face
        return function(images=image, return_tensors="pt")
    if type(function).__module__.partition(".")[0] == "albumentations":
        return function(image=np.array(image))["image"]
    return function(image)


def _one_image(made: Any, name: str) -> Tensor:
    """The result of a preprocessing as one (C,H,W) tensor."""
    if isinstance(made, Mapping) and "pixel_values" in made:
        made = made["pixel_values"]
    if isinstance(made, np.ndarray):  # (H,W,C), as libraries for arrays keep it
        made = torch.from_numpy(np.ascontiguousarray(made.transpose(2, 0, 1) if made.ndim == 3 else made))
    if isinstance(made, Tensor) and made.ndim == 4 and len(made) == 1:
        made = made[0]
    if not isinstance(made, Tensor) or made.ndim != 3:
        what = f"shape {tuple(made.shape)}" if isinstance(made, Tensor) else f"a {type(made).__name__}"
        raise ImageError(f"the preprocessing {name} gives {what}; it must give one image as a tensor (C, H, W)")
    return made


def _moments(function: Any) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """The mean and std of a transform that states them, itself or as its last such step; only for drawing."""
    steps = getattr(function, "transforms", ())
    for step in (function, *reversed(steps if isinstance(steps, list | tuple) else ())):
        for mean, std in (("image_mean", "image_std"), ("mean", "std")):
            values = [_three_numbers(getattr(step, name, None)) for name in (mean, std)]
            if values[0] and values[1] and min(values[1]) > 0:
                return values[0], values[1]
    return None


def _three_numbers(values: Any) -> tuple[float, ...] | None:
    try:
        numbers = tuple(float(value) for value in values)
    except (TypeError, ValueError):
        return None
    return numbers if len(numbers) == 3 else None
