"""Picture file -> 8-bit RGB picture -> tensor, and back.

Whatever the file holds, `open_image` gives an upright RGB picture or an `ImageError` that names the file:

    >>> picture = open_image("cat.jpg")
    >>> x = to_tensor(picture)              # (3, H, W), float32 in [0, 1]
    >>> to_image(x).save("same-cat.png")
"""

from __future__ import annotations

import io
import os
import stat
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import BinaryIO, TypeAlias, TypeVar

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from classlens.errors import ImageError

Item = TypeVar("Item")
Made = TypeVar("Made")
ImageSource: TypeAlias = str | os.PathLike[str] | bytes | BinaryIO | Image.Image

MAX_PIXELS = 64_000_000  # a 64-megapixel photo; below Pillow's own limit, so ours speaks first

# What people keep photos in. Pillow reads more, but some of that starts other programs (EPS runs
# Ghostscript) and some hides its true size from the header (ICO), which is where we check it.
_FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "QOI", "TGA", "TIFF", "WEBP")

DEEP_MODES = {"F", "I", "I;16", "I;16B", "I;16L", "I;16N"}  # one channel, more than 8 bits

# Opening a FIFO must not wait for somebody to write into it.
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)

_warning_filters = threading.Lock()  # Python's warning filters are one list for all threads


def open_image(source: ImageSource, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """A picture as a decoded, upright, 8-bit RGB PIL image of its own (the source is left as it was).

    Transparency is put on white, of an animation the first frame is taken, 16-bit values are scaled.

        >>> open_image("photo.jpg").mode
        'RGB'
    """
    name = _name(source)
    with _decoded(source, name, max_pixels) as image:
        try:
            upright = ImageOps.exif_transpose(image)
        except Exception as error:  # a broken EXIF block raises all kinds
            raise _corrupt(name, error) from error
        return _to_rgb(upright, name)


def open_stored(source: ImageSource, name: str, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """A picture as it is stored, for files whose numbers have a meaning: same formats, limits and errors.

    A palette stays indices, 16 bits stay 16 bits, nothing is turned or blended.

        >>> open_stored("mask.png", "the mask mask.png").mode
        'P'
    """
    with _decoded(source, name, max_pixels) as image:
        return image.copy()


def to_tensor(image: Image.Image) -> Tensor:
    """(3, H, W) float32 in [0, 1]: `to_tensor(open_image("photo.jpg"))`."""
    rgb = image if image.mode == "RGB" else open_image(image)
    pixels = torch.from_numpy(np.array(rgb))  # (H, W, 3) uint8
    return pixels.permute(2, 0, 1).contiguous().to(torch.float32) / 255


def to_image(tensor: Tensor) -> Image.Image:
    """The picture of a (3, H, W) tensor in [0, 1]; what rounding left outside is clamped."""
    if tensor.ndim != 3 or tensor.shape[0] != 3:
        raise ImageError(f"a picture is drawn from a (3, H, W) tensor, not from {tuple(tensor.shape)}")
    if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
        raise ImageError("a picture is drawn from finite floating-point values in [0, 1]; check the tensor")
    pixels = (tensor.detach().clamp(0, 1) * 255).round().to(torch.uint8)
    return Image.fromarray(pixels.permute(1, 2, 0).contiguous().cpu().numpy())


def check_batch(images: Tensor) -> Tensor:
    """The network input as it was given, if it is one: (B, C, H, W), floating point, finite.

    >>> check_batch(torch.zeros(3, 224, 224))
    Traceback (most recent call last):
    classlens.errors.ImageError: expected a batch (B, C, H, W), got (3, 224, 224): add [None] for one image
    """
    if not isinstance(images, Tensor):
        raise ImageError(f"expected a tensor (B, C, H, W), got {type(images).__name__}: preprocess it first")
    shape = tuple(images.shape)
    if images.ndim == 3:
        raise ImageError(f"expected a batch (B, C, H, W), got {shape}: add [None] for one image")
    if images.ndim != 4:
        raise ImageError(f"expected a batch (B, C, H, W), got {images.ndim} dimensions {shape}: reshape it")
    if not images.is_floating_point():
        raise ImageError(f"expected preprocessed floating-point images, got {images.dtype}: preprocess them first")
    if 0 in shape:
        raise ImageError(f"the batch {shape} is empty: every dimension must be at least 1")
    finite = torch.isfinite(images).flatten(1).all(1)  # (B,)
    if not bool(finite.all()):
        row = int((~finite).nonzero()[0])
        raise ImageError(f"image {row} of the batch holds NaN or Inf: check its preprocessing")
    return images


def _name(source: object) -> str:
    """How error texts call the source."""
    if isinstance(source, str | os.PathLike):
        return os.fspath(source)
    if isinstance(source, Image.Image):
        return str(getattr(source, "filename", "") or "the given picture")
    if isinstance(source, bytes):
        return "the given bytes"
    return str(getattr(source, "name", "the given stream"))


def _stream(source: str | os.PathLike[str] | bytes | BinaryIO, name: str) -> BinaryIO:
    """A seekable, non-empty stream of the picture's bytes, from its start, free to be closed."""
    if isinstance(source, str | os.PathLike):
        stream: BinaryIO = _open_file(source, name)
    elif isinstance(source, bytes):
        stream = io.BytesIO(source)
    elif hasattr(source, "read"):
        stream = io.BytesIO(_read(source, name))
    else:
        raise ImageError(f"a picture is a path, bytes, a binary stream or a PIL image, not {type(source).__name__}")
    try:
        empty = not stream.read(1)
        stream.seek(0)
    except OSError as error:
        stream.close()
        raise ImageError(f"{name} cannot be read: {error}") from error
    if empty:
        stream.close()
        raise ImageError(f"{name} is empty (0 bytes): give a picture file")
    return stream


def _open_file(path: str | os.PathLike[str], name: str) -> BinaryIO:
    """A regular file, opened without waiting: nothing that blocks (a FIFO), never ends or acts (a device)."""
    try:
        file = os.open(path, _FLAGS)
    except FileNotFoundError:
        raise ImageError(f"{name} does not exist: check the path") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
        raise ImageError(f"{name} cannot be opened: {error}") from error
    mode = os.fstat(file).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(file, "rb")
    os.close(file)
    if stat.S_ISDIR(mode):
        raise ImageError(f"{name} is a folder: give a picture file")
    raise ImageError(f"{name} is no regular file but a pipe or a device: give a picture file")


def _read(stream: BinaryIO, name: str) -> bytes:
    """All bytes of a stream, from its start where it can go back there."""
    try:
        if stream.seekable():
            stream.seek(0)
        content = stream.read()
    except (OSError, ValueError) as error:
        raise ImageError(f"{name} cannot be read: {error}") from error
    if not isinstance(content, bytes):
        raise ImageError(f"{name} gives text, not bytes: open it in binary mode ('rb')")
    return content


@cache
def _formats() -> tuple[str, ...]:
    """The formats of `_FORMATS` this build of Pillow can read."""
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


def _open(stream: BinaryIO, name: str) -> Image.Image:
    """The picture's header; its pixels are not decoded yet."""
    try:
        with _warning_filters, warnings.catch_warnings():
            # Our own limit in _decode takes the place of Pillow's warning.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            return Image.open(stream, formats=_formats())
    except Image.DecompressionBombError as error:
        raise ImageError(f"{name} is as large as a decompression bomb and refused: scale it down first") from error
    except UnidentifiedImageError:
        raise ImageError(f"{name} is not a picture in a known format ({', '.join(_formats())})") from None
    except Exception as error:  # each format's reader raises its own kinds on a broken header
        raise _corrupt(name, error) from error


@contextmanager
def _decoded(source: ImageSource, name: str, max_pixels: int) -> Iterator[Image.Image]:
    """The picture with its pixels, as the file has them; closed afterwards, unless it was given as a picture."""
    if isinstance(source, Image.Image):
        _decode(source, name, max_pixels)
        yield source
        return
    with _stream(source, name) as stream, _open(stream, name) as image:
        _decode(image, name, max_pixels)
        yield image


def _decode(image: Image.Image, name: str, max_pixels: int) -> None:
    width, height = image.size
    if width * height == 0:
        raise ImageError(f"{name} is {width}x{height}: a picture needs at least one pixel")
    if width * height > max_pixels:
        raise ImageError(f"{name} is {width}x{height}, more than {max_pixels} pixels: scale it down first")
    try:
        image.load()
    except Exception as error:  # each format's decoder raises its own kinds (OSError, SyntaxError, ...)
        raise _corrupt(name, error) from error


def _corrupt(name: str, error: Exception) -> ImageError:
    """What a decoder's complaint means: the disk's own errors have a number, those about the content have none."""
    if isinstance(error, OSError) and error.errno is not None:
        return ImageError(f"{name} cannot be read: {error}")
    return ImageError(f"{name} is corrupt or cut short: {error}; give a sound file")


def _to_rgb(image: Image.Image, name: str) -> Image.Image:
    if image.mode in DEEP_MODES:
        return _scale_to_8_bits(image, name).convert("RGB")
    if image.has_transparency_data:
        # Pillow has no direct way from La (grey times alpha) to RGBA.
        colours = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, colours).convert("RGB")
    return image.convert("RGB")


def _scale_to_8_bits(image: Image.Image, name: str) -> Image.Image:
    """Grey values over the range of their mode -> 0..255, where Pillow's own conversion clips at 255.

    Integers are 16-bit values 0..65535 (Pillow keeps those in mode I too); floats run over [0, 1], or
    over [0, 255] as Pillow makes them. There is no telling what other values mean.
    """
    values = np.asarray(image)  # (H, W)
    low, high = values.min(), values.max()
    top = 65535 if image.mode != "F" else 1 if high <= 1 else 255
    if not (low >= 0 and high <= top):  # also when they are NaN
        raise ImageError(f"{name} has values {low}..{high} (mode {image.mode}): save it with 8 or 16 bits a channel")
    scaled = np.multiply(values, np.float32(255 / top), dtype=np.float32)
    return Image.fromarray(np.rint(scaled).astype(np.uint8))


def ahead(work: Callable[[Item], Made], items: Sequence[Item], workers: int = 2) -> Iterator[Callable[[], Made]]:
    """Do `work` on items in threads, a few ahead of whoever takes the results, in order; each is asked for by a call.

    >>> [ready() for ready in ahead(len, ["a", "bb"])]
    [1, 2]
    """
    with ThreadPoolExecutor(workers) as pool:
        waiting: deque[Future[Made]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) > workers:
                    yield waiting.popleft().result
            while waiting:
                yield waiting.popleft().result
        finally:  # whoever took the results has gone: do not begin what nobody waits for
            pool.shutdown(wait=False, cancel_futures=True)
