"""Converts a scan, or an image with named channels, to a network's input: turn, resample, scale, normalise.

The preprocessing of a card is one of these if it names channels:

    "preprocess": {
      "channels": ["CT"],                 one name for each channel of the file
      "axes": 3,                          3 for volumes and videos, 2 for images
      "orientation": "RAS",               optional: turn the axes to right, anterior, superior
      "spacing": [2.0, 2.0, 2.0],         optional: resample to this many millimetres along each axis
      "size": [96, 96, 96],               optional: resample to this size
      "window": [-1000, 400],             these values become 0 and 1; null: the smallest and largest of each channel
      "mean": [0.5], "std": [0.25],       of the values in [0, 1]
      "show": ["CT"]                      optional: one channel to draw as grey, or three as red, green and blue
    }
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from classlens.data.scans import Scan, library, open_scan
from classlens.errors import ImageError, ModelError
from classlens.models.preprocess import Preprocess, check, check_fields, is_int, is_numbers

_MODES = {2: "bilinear", 3: "trilinear"}
_UNKNOWN_SIZE = 64  # of each axis of an example, if the card gives no size


@dataclass(frozen=True)
class ScanPreprocess(Preprocess):
    """The preprocessing of a network that reads volumes, or images with other channels than red, green and blue.

        >>> preprocess = ScanPreprocess(channels=("T1", "T2"), size=(96, 96, 96))
        >>> x = preprocess("scan.nii.gz")           # (2, 96, 96, 96)
        >>> pictures = preprocess.restore(x)        # (3, 96, 96, 96) in [0, 1]: T1 as grey

    Resampling is linear. Orientation and spacing need a file that knows where its voxels lie.
    """

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    channels: tuple[str, ...] = ("intensity",)
    axes: int = 3
    orientation: str | None = None
    spacing: tuple[float, ...] | None = None
    size: tuple[int, ...] | None = None
    window: tuple[Any, ...] | None = None
    show: tuple[str, ...] = ()

    FIELDS: ClassVar[tuple[str, ...]] = (
        "channels", "axes", "orientation", "spacing", "size", "window", "mean", "std", "show",
    )  # fmt: skip

    def __post_init__(self) -> None:
        c, n, names = len(self.channels), self.axes, self.channels
        named = isinstance(names, tuple) and all(isinstance(name, str) and name for name in names)
        check(named and c == len(set(names)) > 0, "channels", names, "different names")
        check(n in (2, 3), "axes", n, "2 or 3")
        for key, values in (("mean", self.mean), ("std", self.std)):
            check(is_numbers(values, 1, c), key, values, f"one number, or {c}")
        check(all(value > 0 for value in self.std), "std", self.std, "numbers above 0")
        sized = self.size is None or (len(self.size) == n and all(is_int(v) and v > 0 for v in self.size))
        check(sized, "size", self.size, f"{n} positive ints, or null")
        spaced = self.spacing is None or (n == 3 and is_numbers(self.spacing, 3) and min(self.spacing) > 0)
        check(spaced, "spacing", self.spacing, "three numbers above 0 of a volume, or null")
        check(self.size is None or self.spacing is None, "spacing", self.spacing, "null if size is given")
        turned = self.orientation is None or (n == 3 and _is_orientation(self.orientation))
        check(turned, "orientation", self.orientation, "three letters such as RAS, of a volume, or null")
        for low, high in self._windows() or ():
            check(low < high, "window", self.window, "the lower value, then the higher one")
        shown = set(self.show) <= set(names) and len(self.show) in (0, 1, 3)
        check(shown, "show", self.show, f"one or three of {', '.join(names)}")

    def __call__(self, source: Any) -> Tensor:
        """The network input (C,*size) for a file, or for a folder with one DICOM series."""
        return self.prepared(self.read(source))

    def read(self, source: Any) -> Scan:
        """The values of a file; its channels are those that the card names."""
        if not isinstance(source, str | os.PathLike):
            raise ImageError(f"a network that reads {self._names} needs a file, not a {type(source).__name__}")
        scan = open_scan(source, self.axes)
        if len(scan.values) != len(self.channels):
            raise ImageError(
                f"{os.fspath(source)} has {len(scan.values)} channels, but the network reads {len(self.channels)}: "
                f"{self._names}"
            )
        if scan.affine is None and (self.orientation or self.spacing):
            raise ImageError(
                f"{os.fspath(source)} does not say where its voxels lie, which orientation and spacing of the card need"
            )
        return scan

    def prepared(self, scan: Scan) -> Tensor:
        """The network's input of a scan: turned, resampled, scaled and normalised."""
        turned = self._turned(scan)
        values = torch.from_numpy(np.ascontiguousarray(turned.values))
        size = self._resampled(turned)
        if size != tuple(values.shape[1:]):
            values = F.interpolate(values[None], size, mode=_MODES[self.axes], align_corners=False)[0]
        return self.normalise(self._scaled(values))

    def back(self, maps: Tensor, scan: Scan) -> Tensor:
        """Maps (K,*size) of the prepared scan -> (K,*size of the scan): resampled and turned back."""
        turned = self._turned(scan)
        size = turned.values.shape[1:]
        large = F.interpolate(maps[None].float().cpu(), size, mode=_MODES[self.axes], align_corners=False)[0]
        return torch.from_numpy(np.ascontiguousarray(_reoriented(large.numpy(), turned.affine, scan.affine)))

    def restore(self, tensor: Tensor) -> Tensor:
        """Network input (..., C, *size) -> (..., 3, *size) in [0, 1], of the channels that are shown."""
        mean, std = self._moments(tensor)
        shown = self.show or (self.channels if len(self.channels) == 3 else self.channels[:1])
        places = [self.channels.index(name) for name in (shown * 3 if len(shown) == 1 else shown)]
        channel_axis = tensor.dim() - 1 - self.axes
        return (tensor * std + mean).index_select(channel_axis, torch.tensor(places, device=tensor.device)).clamp(0, 1)

    def frame(self, image: Image.Image) -> Image.Image:
        self._refuse_photos()

    def unframe(self, maps: Tensor, height: int, width: int) -> Tensor:
        self._refuse_photos()

    def _refuse_photos(self) -> NoReturn:
        raise ModelError(f"this network reads {self._names}, not photos: only explain and compare work with it")

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.channels), *(self.size or (_UNKNOWN_SIZE,) * self.axes)

    def to_json(self) -> dict[str, Any]:
        return {key: _lists(getattr(self, key)) for key in self.FIELDS}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ScanPreprocess:
        check_fields(data, cls.FIELDS)
        return cls(**{key: _tuples(value) for key, value in data.items()})

    @property
    def _names(self) -> str:
        return ", ".join(self.channels)

    def _windows(self) -> tuple[tuple[float, float], ...] | None:
        """The window of each channel."""
        if self.window is None:
            return None
        pairs = (self.window,) * len(self.channels) if is_numbers(self.window, 2) else self.window
        fits = len(pairs) == len(self.channels) and all(is_numbers(pair, 2) for pair in pairs)
        check(fits, "window", self.window, "two numbers, or two for each channel, or null")
        return tuple(pairs)

    def _scaled(self, values: Tensor) -> Tensor:
        """The window of each channel as [0, 1]."""
        flat, like = values.flatten(1), (-1, *[1] * self.axes)
        own = torch.stack([flat.amin(1), flat.amax(1)], 1)
        ends = own if self.window is None else torch.tensor(self._windows(), dtype=flat.dtype)
        low, high = ends[:, 0].reshape(like), ends[:, 1].reshape(like)
        return ((values - low) / (high - low).clamp(min=torch.finfo(values.dtype).tiny)).clamp(0, 1)

    def _moments(self, like: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = (
            torch.tensor(values, dtype=like.dtype, device=like.device).view(-1, *[1] * self.axes)
            for values in (self.mean, self.std)
        )
        return mean, std

    def _turned(self, scan: Scan) -> Scan:
        if self.orientation is None:
            return scan
        orientations = library("nibabel.orientations", "turning a scan")
        assert scan.affine is not None  # `read` checked it
        wanted = orientations.axcodes2ornt(tuple(self.orientation))
        change = orientations.ornt_transform(orientations.io_orientation(scan.affine), wanted)
        affine = scan.affine @ orientations.inv_ornt_aff(change, scan.values.shape[1:])
        return Scan(_reoriented(scan.values, scan.affine, affine), affine)

    def _resampled(self, scan: Scan) -> tuple[int, ...]:
        """The size of the network's input."""
        sides = tuple(scan.values.shape[1:])
        if self.spacing is not None and scan.affine is not None:
            millimetres = np.linalg.norm(scan.affine[:3, :3], axis=0)
            wanted = zip(sides, millimetres, self.spacing, strict=True)
            return tuple(max(1, round(float(side * own / new))) for side, own, new in wanted)
        return self.size or sides


def _reoriented(values: Any, before: Any, after: Any) -> Any:
    """Volumes (C,*size) with the axes of one affine, turned to those of another."""
    if before is None or after is None or before is after:
        return values
    orientations = library("nibabel.orientations", "turning a scan")
    change = orientations.ornt_transform(orientations.io_orientation(before), orientations.io_orientation(after))
    return np.moveaxis(orientations.apply_orientation(np.moveaxis(values, 0, -1), change), -1, 0)


def preprocess_from_json(data: Any) -> Preprocess:
    """The preprocessing of a card: of scans if it names channels, otherwise of photos."""
    names_channels = isinstance(data, Mapping) and "channels" in data
    return ScanPreprocess.from_json(data) if names_channels else Preprocess.from_json(data)


def _is_orientation(text: Any) -> bool:
    """Three letters, one of each of left-right, posterior-anterior and inferior-superior."""
    pairs = ("LR", "PA", "IS")
    return isinstance(text, str) and len(text) == 3 and all(sum(text.count(a) for a in pair) == 1 for pair in pairs)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _lists(value: Any) -> Any:
    return [_lists(item) for item in value] if isinstance(value, tuple) else value
