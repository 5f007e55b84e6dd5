"""Image file -> 8-bit RGB image -> tensor, and back.

Whatever the file holds, `open_image` returns an upright RGB image or raises an `ImageError` that names the file:

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
from contextlib import contextmanager, suppress
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

MAX_PIXELS = 64_000_000  # a 64-megapixel photo; below Pillow's own limit, so ours applies first

# The usual formats of photos. Pillow reads more, but some formats start other programs (EPS runs Ghostscript) and
# some do not give their true size in the header (ICO), where we check it.
_FORMATS = ("AVIF", "BMP", "GIF", "HEIF", "JPEG", "JPEG2000", "PNG", "PPM", "QOI", "TGA", "TIFF", "WEBP")
_HEIC = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"}  # what an iPhone's photo says it is

DEEP_MODES = {"F", "I", "I;16", "I;16B", "I;16L", "I;16N"}  # one channel, more than 8 bits

# Opening a FIFO must not block until a process writes to it.
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)

_warning_filters = threading.Lock()  # Python's warning filters are one list for all threads


def open_image(source: ImageSource, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode an image as an upright, 8-bit RGB PIL image; the source is left unchanged.

    Transparency is blended with white, an animation gives its first frame, and 16-bit values are scaled.

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
    """Decode an image with its stored values, for masks: same formats, limits and errors as `open_image`.

    Palette indices and 16-bit values are kept; nothing is rotated or blended.

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
    """Convert a (3, H, W) tensor in [0, 1] to an image; values slightly outside the range are clamped."""
    if tensor.ndim != 3 or tensor.shape[0] != 3:
        raise ImageError(f"a picture is drawn from a (3, H, W) tensor, not from {tuple(tensor.shape)}")
    if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
        raise ImageError("a picture is drawn from finite floating-point values in [0, 1]; check the tensor")
    pixels = (tensor.detach().clamp(0, 1) * 255).round().to(torch.uint8)
    return Image.fromarray(pixels.permute(1, 2, 0).contiguous().cpu().numpy())


def rescaled(images: Tensor) -> Tensor:
    """(B,C,*size) or (C,H,W) from each image's own range to [0, 1], to draw an input whose preprocessing is unknown.

    Channels that are not red, green and blue become grey: their mean.
    """
    channel = 0 if images.ndim == 3 else 1
    if images.shape[channel] != 3:
        images = images.mean(channel, keepdim=True).repeat_interleave(3, channel)
    axes = tuple(range(channel, images.ndim))
    low, high = images.amin(axes, keepdim=True), images.amax(axes, keepdim=True)
    return (images - low) / (high - low).clamp(min=1e-12)


def check_batch(images: Tensor) -> Tensor:
    """Return the images unchanged if they are a valid network input: (B, C, H, W), floating point, finite.

    Volumes and videos are (B, C, D, H, W): D is the depth, or the number of frames.

    >>> check_batch(torch.zeros(3, 224, 224))
    Traceback (most recent call last):
    classlens.errors.ImageError: expected a batch (B, C, H, W), got (3, 224, 224): add [None] for one image
    """
    if not isinstance(images, Tensor):
        raise ImageError(f"expected a tensor (B, C, H, W), got {type(images).__name__}: preprocess it first")
    shape = tuple(images.shape)
    if images.ndim == 3:
        raise ImageError(f"expected a batch (B, C, H, W), got {shape}: add [None] for one image")
    if images.ndim not in (4, 5):
        raise ImageError(
            f"expected a batch (B, C, H, W), or (B, C, D, H, W) for volumes and videos, "
            f"got {images.ndim} dimensions {shape}: reshape it"
        )
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
    """The name of the source in error messages."""
    if isinstance(source, str | os.PathLike):
        return os.fspath(source)
    if isinstance(source, Image.Image):
        return str(getattr(source, "filename", "") or "the given picture")
    if isinstance(source, bytes):
        return "the given bytes"
    return str(getattr(source, "name", "the given stream"))


def _stream(source: str | os.PathLike[str] | bytes | BinaryIO, name: str) -> BinaryIO:
    """A seekable, non-empty stream of the image's bytes, from its start, that the caller may close."""
    if isinstance(source, str | os.PathLike):
        stream: BinaryIO = open_regular(source, name)
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


def open_regular(path: str | os.PathLike[str], name: str) -> BinaryIO:
    """Open a regular file without blocking. Refuses a FIFO, which blocks, and a device, which may never end.

    >>> with open_regular("photo.jpg", "the photo") as file:
    ...     file.read(3)
    """
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
    raise ImageError(f"{name} is a pipe or a device, not a regular file: give a picture file")


def _read(stream: BinaryIO, name: str) -> bytes:
    """All bytes of a stream, from its start if it can seek."""
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
    """The formats of `_FORMATS` this build of Pillow can read; HEIF (an iPhone's HEIC) with the extra `heic`."""
    Image.init()
    with suppress(ImportError):
        import pillow_heif

        pillow_heif.register_heif_opener()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


def _open(stream: BinaryIO, name: str) -> Image.Image:
    """Read the header of an image; its pixels are not decoded yet."""
    try:
        with _warning_filters, warnings.catch_warnings():
            # Our own limit in _decode replaces Pillow's warning.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            return Image.open(stream, formats=_formats())
    except Image.DecompressionBombError as error:
        raise ImageError(f"{name} is as large as a decompression bomb and refused: scale it down first") from error
    except UnidentifiedImageError:
        if _is_heic(stream) and "HEIF" not in _formats():
            raise ImageError(f"{name} is a HEIC photo: save it as JPEG, or pip install 'classlens[heic]'") from None
        raise ImageError(f"{name} is not a picture in a known format ({', '.join(_formats())})") from None
    except Exception as error:  # each format raises its own exceptions for a broken header
        raise _corrupt(name, error) from error


def _is_heic(stream: BinaryIO) -> bool:
    stream.seek(0)
    head = stream.read(12)
    return head[4:8] == b"ftyp" and head[8:] in _HEIC


@contextmanager
def _decoded(source: ImageSource, name: str, max_pixels: int) -> Iterator[Image.Image]:
    """The image with its stored pixels; closed afterwards, unless the caller passed a PIL image."""
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
    except Exception as error:  # each decoder raises its own exceptions (OSError, SyntaxError, ...)
        raise _corrupt(name, error) from error


def _corrupt(name: str, error: Exception) -> ImageError:
    """Interpret a decoder's error: errors of the disk have an errno, errors about the content do not."""
    if isinstance(error, OSError) and error.errno is not None:
        return ImageError(f"{name} cannot be read: {error}")
    return ImageError(f"{name} is corrupt or truncated: {error}; give an intact file")


def _to_rgb(image: Image.Image, name: str) -> Image.Image:
    if image.mode in DEEP_MODES:
        return _scale_to_8_bits(image, name).convert("RGB")
    if image.has_transparency_data:
        # Pillow has no direct conversion from La (grey times alpha) to RGBA.
        colours = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, colours).convert("RGB")
    return image.convert("RGB")


def _scale_to_8_bits(image: Image.Image, name: str) -> Image.Image:
    """Scale grey values from the range of their mode to 0..255; Pillow's own conversion clips at 255.

    Integers are 16-bit values 0..65535 (Pillow also stores these in mode I). Floats are in [0, 1], or in
    [0, 255] as Pillow writes them. Other values are refused, because their meaning is unknown.
    """
    values = np.asarray(image)  # (H, W)
    low, high = values.min(), values.max()
    top = 65535 if image.mode != "F" else 1 if high <= 1 else 255
    if not (low >= 0 and high <= top):  # also when they are NaN
        raise ImageError(f"{name} has values {low}..{high} (mode {image.mode}): save it with 8 or 16 bits per channel")
    scaled = np.multiply(values, np.float32(255 / top), dtype=np.float32)
    return Image.fromarray(np.rint(scaled).astype(np.uint8))


def ahead(work: Callable[[Item], Made], items: Sequence[Item], workers: int = 2) -> Iterator[Callable[[], Made]]:
    """Run `work` on the items in threads, a few ahead of the consumer; yields, in order, a call for each result.

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
        finally:  # the consumer stopped early: do not start work that nobody needs
            pool.shutdown(wait=False, cancel_futures=True)
