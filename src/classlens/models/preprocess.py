"""Converts an image to a network's input, as in its training: resize, centre crop, normalise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from classlens.data.images import MAX_PIXELS, ImageSource, open_image, to_tensor
from classlens.errors import ImageError, ModelError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

INTERPOLATIONS = {
    "nearest": Image.Resampling.NEAREST,
    "box": Image.Resampling.BOX,
    "bilinear": Image.Resampling.BILINEAR,
    "hamming": Image.Resampling.HAMMING,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
_DEFAULT_SIDE = 224  # of an input, if neither crop nor resize says it
_FITS = ("squash", "cover", "contain")


@dataclass(frozen=True)
class Preprocess:
    """The preprocessing of a network; the default is that of most ImageNet networks.

    - `resize`: an int is the length of the short edge. (height, width) is a frame, and `fit` says how to fill it:
      "squash" to its size, or keep the aspect ratio and "cover" it or be "contain"-ed in it. None keeps the size.
    - `crop`: the size of the centre crop (an int is a square); a smaller image is padded with `fill`.
    - `mean`, `std`: of the values in [0, 1].

        >>> preprocess = Preprocess(resize=232, crop=224)
        >>> x = preprocess("photo.jpg")         # (3, 224, 224)
        >>> picture = preprocess.restore(x)     # the same pixels in [0, 1], for drawing
    """

    resize: int | tuple[int, int] | None = 256
    crop: int | tuple[int, int] | None = 224
    interpolation: str = "bilinear"
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    fit: Literal["squash", "cover", "contain"] = "squash"
    fill: tuple[int, ...] = (0, 0, 0)

    def __post_init__(self) -> None:
        for name, size in (("resize", self.resize), ("crop", self.crop)):
            check(_is_size(size), name, size, "a positive int, two of them (height, width), or null")
        for name, values in (("mean", self.mean), ("std", self.std)):
            check(is_numbers(values, 3), name, values, "three numbers")
        check(all(value > 0 for value in self.std), "std", self.std, "three numbers above 0")
        known = ", ".join(INTERPOLATIONS)
        check(self.interpolation in INTERPOLATIONS, "interpolation", self.interpolation, f"one of {known}")
        check(self.fit in _FITS, "fit", self.fit, f"one of {', '.join(_FITS)}")
        check(is_numbers(self.fill, len(self.mean), 1), "fill", self.fill, "a grey value or three colours")

    def __call__(self, source: ImageSource) -> Tensor:
        """The network input (3, H, W) for an image or an image file."""
        return self.normalise(to_tensor(self.frame(open_image(source))))

    def frame(self, image: Image.Image) -> Image.Image:
        """Resize and crop to the part of the image that the network sees, without normalising; for any PIL mode.

        The same for a mask:
        `replace(preprocess, interpolation="nearest", fill=(0,)).frame(mask)`.
        """
        if self.resize is not None:
            height, width = _resized(image.height, image.width, self.resize, self.fit)
            if height * width > MAX_PIXELS:
                raise ImageError(
                    f"a picture of {image.width}x{image.height} is too elongated: it would become "
                    f"{width}x{height}; crop it first"
                )
            image = image.resize((width, height), INTERPOLATIONS[self.interpolation])
        return image if self.crop is None else _centre_crop(image, _pair(self.crop), self.fill)

    def unframe(self, maps: Tensor, height: int, width: int) -> Tensor:
        """Maps (..., H, W) of what `frame` leaves of an image, placed on the whole image of this size.

        They have the size that the image is resized to, so that no value is interpolated. What was cut off is 0.

            >>> Preprocess(resize=256, crop=224).unframe(torch.ones(224, 224), height=480, width=640).shape
            torch.Size([256, 341])
        """
        if self.resize is not None:
            height, width = _resized(height, width, self.resize, self.fit)
        if self.crop is None:
            return maps
        rows, columns = (_centre(*lengths) for lengths in zip((height, width), _pair(self.crop), strict=True))
        whole = maps.new_zeros(*maps.shape[:-2], rows.padded, columns.padded)
        whole[..., rows.cropped, columns.cropped] = maps
        return whole[..., rows.image, columns.image]

    def normalise(self, pixels: Tensor) -> Tensor:
        """(..., 3, H, W) in [0, 1] -> network input."""
        mean, std = self._moments(pixels)
        return (pixels - mean) / std

    def restore(self, tensor: Tensor) -> Tensor:
        """Network input (..., 3, H, W) -> pixels in [0, 1]: the inverse of the normalisation."""
        mean, std = self._moments(tensor)
        return (tensor * std + mean).clamp(0, 1)

    @property
    def shape(self) -> tuple[int, ...]:
        """(channels, *size) of an input, for a forward pass that needs no image."""
        size = self.crop or self.resize or _DEFAULT_SIDE
        return 3, *_pair(size)

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `Preprocess.from_json` reads."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Preprocess:
        """Read a JSON object; missing fields keep their defaults: `Preprocess.from_json({"crop": 240})`."""
        check_fields(data, [field.name for field in fields(cls)])
        values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in data.items()}
        return cls(**values)

    def _moments(self, like: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = (
            torch.tensor(values, dtype=like.dtype, device=like.device).view(3, 1, 1) for values in (self.mean, self.std)
        )
        return mean, std


def check_fields(data: Any, known: Sequence[str]) -> None:
    """Refuse a JSON value that is not an object with some of these fields."""
    check(isinstance(data, Mapping), "object", data, "a JSON object")
    unknown = sorted(set(data) - set(known))
    if unknown:
        raise ModelError(f"preprocess has the unknown field {', '.join(unknown)}; its fields are {', '.join(known)}")


def check(good: bool, name: str, value: object, expected: str) -> None:
    """Refuse a setting, by name."""
    if not good:
        raise ModelError(f"preprocess: {name} must be {expected}, not {value!r}")


def is_int(value: object) -> bool:
    """Whether a value is an int and not a truth value."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_size(value: object) -> bool:
    if isinstance(value, tuple):
        return len(value) == 2 and all(is_int(v) and v > 0 for v in value)
    return value is None or (isinstance(value, int) and is_int(value) and value > 0)


def is_numbers(value: object, *lengths: int) -> bool:
    """Whether a value is a tuple of numbers, of one of the lengths."""
    return isinstance(value, tuple) and len(value) in lengths and all(is_int(v) or isinstance(v, float) for v in value)


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def _resized(height: int, width: int, size: int | tuple[int, int], fit: str) -> tuple[int, int]:
    """The (height, width) that an image is resized to, rounded as in torchvision and timm."""
    if isinstance(size, int):
        short, long = min(height, width), max(height, width)
        other = int(size * long / short)
        return (size, other) if height <= width else (other, size)
    if fit == "squash":
        return size
    ratios = (height / size[0], width / size[1])
    ratio = min(ratios) if fit == "cover" else max(ratios)
    return max(1, round(height / ratio)), max(1, round(width / ratio))


class _Centre(NamedTuple):
    """One axis of a centre crop: where the image and its crop lie once the image is padded to at least the crop."""

    padded: int
    image: slice
    cropped: slice


def _centre(length: int, crop: int) -> _Centre:
    padded = max(length, crop)
    before = (padded - length) // 2
    # Python rounds halves to even, and so do the libraries whose crops we must match.
    start = round((padded - crop) / 2)
    return _Centre(padded, slice(before, before + length), slice(start, start + crop))


def _centre_crop(image: Image.Image, size: tuple[int, int], fill: tuple[int, ...]) -> Image.Image:
    """The centre of an image, after padding it to at least that size."""
    rows, columns = _centre(image.height, size[0]), _centre(image.width, size[1])
    if (columns.padded, rows.padded) != image.size:
        canvas = Image.new(image.mode, (columns.padded, rows.padded), fill)
        canvas.paste(image, (columns.image.start, rows.image.start))
        image = canvas
    return image.crop((columns.cropped.start, rows.cropped.start, columns.cropped.stop, rows.cropped.stop))
