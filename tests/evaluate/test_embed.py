from __future__ import annotations

import base64
import io

import numpy as np
from PIL import Image

from classlens.evaluate.embed import data_uri, jpeg


def test_a_picture_is_made_smaller_never_larger() -> None:
    pixels = np.full((40, 80, 3), 128, np.uint8)
    for side, size in ((20, (20, 10)), (200, (80, 40))):
        with Image.open(io.BytesIO(jpeg(pixels, side))) as image:
            assert (image.format, image.size) == ("JPEG", size)
            assert np.abs(np.asarray(image).astype(int) - 128).max() <= 2


def test_an_address_holds_the_bytes() -> None:
    kind, _, content = data_uri(b"\x00\xff abc", "jpeg").partition(",")
    assert kind == "data:image/jpeg;base64"
    assert base64.b64decode(content) == b"\x00\xff abc"
