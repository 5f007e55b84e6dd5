"""Pictures inside a page, so that a report is one file that can be mailed."""

from __future__ import annotations

import base64
import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def jpeg(pixels: NDArray[np.uint8], side: int, quality: int = 88) -> bytes:
    """A picture (H,W,3) as JPEG, made smaller where it is longer than `side`."""
    buffer = io.BytesIO()
    image = Image.fromarray(pixels)
    image.thumbnail((side, side))
    image.save(buffer, format="jpeg", quality=quality)
    return buffer.getvalue()


def data_uri(content: bytes, kind: str = "png") -> str:
    """For the src of an <img>.

    >>> data_uri(b"GIF89a", "gif")
    'data:image/gif;base64,R0lGODlh'
    """
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
