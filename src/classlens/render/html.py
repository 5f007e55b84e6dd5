"""HTML pages: templates next to the code that fills them, and images embedded in the page.

    >>> pages("report").get_template("page.html").render(title="A & B")

Values are always escaped. A report is one self-contained file, so its images are `data:` URLs.
"""

from __future__ import annotations

import base64
import functools
import io
import re

import numpy as np
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from jinja2.ext import Extension
from markupsafe import Markup, escape
from numpy.typing import NDArray
from PIL import Image


class _Tight(Extension):
    """Removes line breaks between tags, so that templates may have one tag per line without gaps in the page."""

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        return re.sub(r"(?<=[>}])\n\s*(?=[<{])", "", source)


@functools.cache
def pages(*rooms: str) -> Environment:
    """The templates of packages: `pages("report")` reads report/templates. A missing value is an error."""
    loader = ChoiceLoader([PackageLoader("classlens", f"{room}/templates") for room in rooms])
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, extensions=[_Tight])
    environment.filters |= {"prose": prose, "data_uri": data_uri}
    return environment


def prose(words: str) -> Markup:
    """Plain text as HTML; a number and its % stay together.

    >>> prose("5 % < 9 %")
    Markup('5&nbsp;% &lt; 9&nbsp;%')
    """
    return Markup(escape(words).replace(" %", Markup("&nbsp;%")))


def jpeg(pixels: NDArray[np.uint8], side: int, quality: int = 88) -> bytes:
    """An image (H,W,3) as JPEG, downscaled if it is larger than `side`."""
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
