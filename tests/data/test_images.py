"""Every kind of file a user may hand over: the right pixels, or one line that names the file."""

from __future__ import annotations

import io
import re
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from odd import LATIN, REFUSED, SHOWN, odd_files, png_of_size
from PIL import Image, ImageFile

from classlens.data import images
from classlens.data.images import ahead, check_batch, open_image, to_image, to_tensor
from classlens.errors import ImageError

RED, GREEN, WHITE = (255, 0, 0), (0, 255, 0), (255, 255, 255)


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def photo(height: int = 20, width: int = 30) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def pixels(image: Image.Image) -> list[list[tuple[int, ...]]]:
    return [[tuple(pixel) for pixel in row] for row in np.asarray(image).tolist()]


# Sources.


def test_every_kind_of_source_gives_the_same_pixels(tmp_path: Path) -> None:
    path = tmp_path / "photo.png"
    path.write_bytes(encoded(photo()))
    at_its_end = io.BytesIO(path.read_bytes())
    at_its_end.seek(0, io.SEEK_END)
    with path.open("rb") as stream, Image.open(path) as lazy:
        for source in (path, str(path), path.read_bytes(), stream, at_its_end, lazy, photo()):
            opened = open_image(source)
            assert opened.mode == "RGB"
            assert pixels(opened) == pixels(photo())
        assert not stream.closed


def test_a_stream_that_cannot_seek_is_read() -> None:
    class Pipe(io.RawIOBase):
        def __init__(self, content: bytes) -> None:
            self.content = content

        def read(self, size: int = -1) -> bytes:
            return self.content

    assert pixels(open_image(Pipe(encoded(photo())))) == pixels(photo())  # type: ignore[arg-type]


def test_the_source_picture_is_left_alone() -> None:
    source = photo()
    open_image(source).paste((0, 0, 0), (0, 0, 5, 5))
    assert pixels(source) == pixels(photo())


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "is empty"),
        (b"this is no picture at all", "not a picture"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a picture"),  # would start Ghostscript
        (encoded(photo(60, 60))[:-400], "truncated"),
        (encoded(photo(60, 60), "JPEG")[:-400], "truncated"),
        (encoded(photo(60, 60)).replace(b"IDAT", b"IDAT\xff\xff\xff", 1), "corrupt"),
        (png_of_size(4, 4), "truncated"),
    ],
    ids=["empty", "text", "eps", "truncated-png", "truncated-jpeg", "corrupt-png", "png-without-pixels"],
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes, text: str) -> None:
    path = tmp_path / "broken.png"
    path.write_bytes(content)
    with pytest.raises(ImageError, match=text) as error:
        open_image(path)
    assert "broken.png" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_a_folder_and_a_wrong_type_are_named(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"nowhere\.png does not exist"):
        open_image(tmp_path / "nowhere.png")
    with pytest.raises(ImageError, match="is a folder"):
        open_image(tmp_path)
    with pytest.raises(ImageError, match="cannot be opened"):
        open_image("a\0b.png")
    with pytest.raises(ImageError, match="not ndarray"):
        open_image(np.zeros((4, 4, 3)))  # type: ignore[arg-type]
    with pytest.raises(ImageError, match="binary mode"):
        open_image(io.StringIO("text"))  # type: ignore[arg-type]
    closed = io.BytesIO(b"x")
    closed.close()
    with pytest.raises(ImageError, match="cannot be read"):
        open_image(closed)


def test_only_regular_files_are_read_and_nothing_is_waited_for(tmp_path: Path) -> None:
    with odd_files(tmp_path):
        for name, text in REFUSED.items():
            with pytest.raises(ImageError, match=re.escape(text)) as error:
                open_image(tmp_path / name)
            assert name in str(error.value)


def test_a_disk_that_fails_is_told_from_a_broken_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(encoded(photo()))

    def fails(self: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(ImageFile.ImageFile, "load", fails)  # in the middle of the file, after a sound header
    with pytest.raises(ImageError, match=r"a\.png cannot be read: \[Errno 5\]"):
        open_image(path)


def test_a_name_that_is_no_utf8_is_escaped(tmp_path: Path) -> None:
    with pytest.raises(ImageError) as error:
        open_image(tmp_path / LATIN)
    assert str(error.value) == f"{tmp_path}/{SHOWN} does not exist: check the path"


# Sizes.


def test_a_huge_picture_is_refused_before_it_is_decoded() -> None:
    limit = Image.MAX_IMAGE_PIXELS
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Pillow's warning at 89 megapixels must not come through
        with pytest.raises(ImageError, match="10000x10000, more than 64000000 pixels"):
            open_image(png_of_size(10_000, 10_000))
    with pytest.raises(ImageError, match="decompression bomb"):
        open_image(png_of_size(100_000, 100_000))
    assert limit == Image.MAX_IMAGE_PIXELS


def test_the_limit_can_be_set() -> None:
    assert open_image(photo(20, 30), max_pixels=600).size == (30, 20)
    with pytest.raises(ImageError, match="30x20, more than 599 pixels"):
        open_image(photo(20, 30), max_pixels=599)


def test_a_picture_without_pixels_is_refused() -> None:
    with pytest.raises(ImageError, match="0x5"):
        open_image(Image.new("RGB", (0, 5)))


def test_warning_filters_survive_many_threads() -> None:
    before = list(warnings.filters)
    content = encoded(photo())
    threads = [threading.Thread(target=open_image, args=(content,)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(warnings.filters) == before


# Colours.


def test_grey_and_one_bit_become_rgb() -> None:
    grey = Image.fromarray(np.array([[0, 100, 255]], dtype=np.uint8))
    assert pixels(open_image(encoded(grey))) == [[(0, 0, 0), (100, 100, 100), (255, 255, 255)]]
    bits = Image.fromarray(np.array([[False, True]]))
    assert pixels(open_image(encoded(bits))) == [[(0, 0, 0), WHITE]]


def test_palette_with_and_without_transparency() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([*RED, *GREEN])
    image.putdata([0, 1])
    assert pixels(open_image(encoded(image))) == [[RED, GREEN]]
    assert pixels(open_image(encoded(image, transparency=1))) == [[RED, WHITE]]
    half = encoded(image, transparency=bytes([255, 128]))  # an alpha for each colour
    assert pixels(open_image(half)) == [[RED, (127, 255, 127)]]


def test_alpha_is_put_on_white() -> None:
    image = Image.new("RGBA", (3, 1))
    image.putdata([(255, 0, 0, 255), (255, 0, 0, 0), (0, 0, 0, 128)])
    assert pixels(open_image(encoded(image))) == [[RED, WHITE, (127, 127, 127)]]
    grey = Image.new("LA", (2, 1))
    grey.putdata([(50, 255), (50, 0)])
    assert pixels(open_image(encoded(grey))) == [[(50, 50, 50), WHITE]]
    assert pixels(open_image(grey.convert("La"))) == [[(50, 50, 50), WHITE]]


def test_a_transparent_colour_key_is_put_on_white() -> None:
    image = Image.new("RGB", (2, 1))
    image.putdata([RED, GREEN])
    assert pixels(open_image(encoded(image, transparency=RED))) == [[WHITE, GREEN]]


def test_cmyk() -> None:
    image = Image.new("CMYK", (1, 1), (0, 255, 255, 0))
    assert pixels(open_image(encoded(image, "TIFF"))) == [[RED]]
    ((near_red,),) = pixels(open_image(encoded(image, "JPEG", quality=100)))
    assert np.abs(np.subtract(near_red, RED)).max() <= 3


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_sixteen_bits_are_scaled_not_clipped(kind: str) -> None:
    """65535 / 255 = 257 values share one; Pillow's convert would turn all but the first two white."""
    values = np.array([[0, 200, 257 * 100, 257 * 100 + 129, 65535]], dtype=np.uint16)
    (row,) = pixels(open_image(encoded(Image.fromarray(values), kind)))
    assert [pixel[0] for pixel in row] == [0, 1, 100, 101, 255]


def test_integers_and_floats_are_scaled_by_their_range() -> None:
    integers = Image.fromarray(np.array([[0, 25700, 65535]], dtype=np.int32))
    assert integers.mode == "I"
    assert np.asarray(open_image(integers))[0, :, 0].tolist() == [0, 100, 255]
    unit = Image.fromarray(np.array([[0.0, 0.2, 1.0]], dtype=np.float32))
    assert np.asarray(open_image(encoded(unit, "TIFF")))[0, :, 0].tolist() == [0, 51, 255]
    bytes_range = Image.fromarray(np.array([[0.0, 51.0, 255.0]], dtype=np.float32))
    assert np.asarray(open_image(bytes_range))[0, :, 0].tolist() == [0, 51, 255]


@pytest.mark.parametrize("bad", [-1.0, 256.0, float("nan"), float("inf")])
def test_values_without_a_known_range_are_refused(bad: float) -> None:
    with pytest.raises(ImageError, match="save it with 8 or 16 bits"):
        open_image(Image.fromarray(np.array([[0.5, bad]], dtype=np.float32)))


def test_large_integers_are_refused() -> None:
    with pytest.raises(ImageError, match=r"values 0\.\.70000"):
        open_image(Image.fromarray(np.array([[0, 70000]], dtype=np.int32)))


# Frames and turns.


def test_the_first_frame_of_an_animation() -> None:
    frames = [Image.new("RGB", (2, 2), colour) for colour in (RED, GREEN)]
    for kind in ("GIF", "WEBP", "PNG"):
        options = {"lossless": True} if kind == "WEBP" else {}
        content = encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=50, **options)
        assert pixels(open_image(content)) == [[RED, RED], [RED, RED]]


@pytest.mark.parametrize(
    ("orientation", "expected"),
    [
        (1, [["a", "b", "c"], ["d", "e", "f"]]),
        (2, [["c", "b", "a"], ["f", "e", "d"]]),
        (3, [["f", "e", "d"], ["c", "b", "a"]]),
        (4, [["d", "e", "f"], ["a", "b", "c"]]),
        (5, [["a", "d"], ["b", "e"], ["c", "f"]]),
        (6, [["d", "a"], ["e", "b"], ["f", "c"]]),
        (7, [["f", "c"], ["e", "b"], ["d", "a"]]),
        (8, [["c", "f"], ["b", "e"], ["a", "d"]]),
    ],
)
def test_exif_orientation(orientation: int, expected: list[list[str]]) -> None:
    letters = {"a": 10, "b": 20, "c": 30, "d": 40, "e": 50, "f": 60}
    image = Image.fromarray(np.array([[10, 20, 30], [40, 50, 60]], dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    for mode in ("L", "I;16"):
        stored = Image.fromarray(np.asarray(image).astype(np.uint16) * 257) if mode == "I;16" else image
        opened = open_image(encoded(stored, exif=exif))
        assert np.asarray(opened)[..., 0].tolist() == [[letters[letter] for letter in row] for row in expected]
        assert pixels(open_image(opened)) == pixels(opened)  # not turned a second time


def test_a_picture_with_broken_exif_is_still_a_picture() -> None:
    content = encoded(photo(), "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x05\0\0\0", quality=100)
    with pytest.warns(UserWarning, match="Corrupt EXIF"):
        assert open_image(content).size == (30, 20)


# Tensors.


def test_to_tensor_and_back() -> None:
    image = photo()
    x = to_tensor(image)
    assert x.shape == (3, 20, 30)
    assert x.dtype == torch.float32
    assert x.is_contiguous()
    assert x[2, 7, 11].item() == pytest.approx(image.getpixel((11, 7))[2] / 255)
    assert pixels(to_image(x)) == pixels(image)
    assert to_tensor(Image.new("L", (1, 1), 51)).flatten().tolist() == pytest.approx([0.2] * 3)


def test_to_image_clamps_and_rounds() -> None:
    x = torch.tensor([-0.5, 0.5, 1.5]).view(3, 1, 1)
    assert pixels(to_image(x)) == [[(0, 128, 255)]]


@pytest.mark.parametrize(
    "bad", [torch.zeros(1, 3, 4, 4), torch.zeros(4, 4, 3), torch.full((3, 2, 2), torch.nan), torch.zeros(3, 2, 2).int()]
)
def test_to_image_refuses_what_is_no_picture(bad: torch.Tensor) -> None:
    with pytest.raises(ImageError, match="a picture is drawn from"):
        to_image(bad)


def test_check_batch_gives_a_good_batch_back() -> None:
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        batch = torch.zeros(2, 3, 4, 5, dtype=dtype)
        assert check_batch(batch) is batch


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (torch.zeros(3, 4, 4), r"add \[None\]"),
        (torch.zeros(4, 4), "2 dimensions"),
        (torch.zeros(1, 1, 1, 3, 4, 4), "6 dimensions"),
        (torch.zeros(1, 3, 4, 4, dtype=torch.uint8), "torch.uint8: preprocess"),
        (torch.zeros(0, 3, 4, 4), "empty"),
        (torch.zeros(1, 3, 0, 4), "empty"),
        (torch.zeros(1, 3, 4, 0), "empty"),
        (np.zeros((1, 3, 4, 4)), "got ndarray"),
    ],
)
def test_check_batch_says_what_is_wrong(bad: torch.Tensor, text: str) -> None:
    with pytest.raises(ImageError, match=text):
        check_batch(bad)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_check_batch_names_the_first_bad_row(value: float) -> None:
    batch = torch.zeros(4, 3, 2, 2)
    batch[2, 1, 0, 1] = batch[3, 0, 0, 0] = value
    with pytest.raises(ImageError, match="image 2 of the batch"):
        check_batch(batch)


def test_work_ahead_comes_in_order_and_says_what_went_wrong() -> None:
    def work(i: int) -> int:
        if i == 2:
            raise ValueError("two")
        return 10 * i

    found = []
    for ready in ahead(work, range(5), workers=2):
        try:
            found.append(ready())
        except ValueError as error:
            found.append(str(error))
    assert found == [0, 10, "two", 30, 40]


def test_work_ahead_stays_only_a_few_steps_ahead() -> None:
    begun: list[int] = []
    results = ahead(begun.append, range(100), workers=2)
    next(results)()
    results.close()
    assert len(begun) <= 3


def test_a_heic_photo_is_read_with_its_extra(tmp_path):
    heif = pytest.importorskip("pillow_heif")
    heif.register_heif_opener()
    Image.new("RGB", (64, 48), (200, 30, 40)).save(tmp_path / "photo.heic", quality=95)
    opened = images.open_image(tmp_path / "photo.heic")
    assert (opened.mode, opened.size) == ("RGB", (64, 48))
    assert np.abs(np.asarray(opened).astype(int) - (200, 30, 40)).max() < 12


@pytest.mark.parametrize("brand", [b"heic", b"mif1"])
def test_a_heic_photo_without_the_extra_is_a_hint(brand, monkeypatch):
    without = tuple(name for name in images._formats() if name != "HEIF")
    monkeypatch.setattr(images, "_formats", lambda: without)
    with pytest.raises(ImageError, match=r"a HEIC photo: save it as JPEG, or pip install 'classlens\[heic\]'"):
        images.open_image(b"\x00\x00\x00\x1cftyp" + brand + bytes(64))
    with pytest.raises(ImageError, match="not a picture in a known format"):
        images.open_image(b"\x00\x00\x00\x1cftypmp42" + bytes(64))
