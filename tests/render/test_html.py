from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from jinja2 import UndefinedError
from PIL import Image

from classlens.render.html import data_uri, jpeg, pages, prose


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


def test_what_is_filled_in_is_escaped_and_what_is_missing_is_an_error() -> None:
    environment = pages("report").overlay()
    assert environment.from_string("<b>{{ x }}</b>").render(x="<i>&'") == "<b>&lt;i&gt;&amp;&#39;</b>"
    with pytest.raises(UndefinedError, match="'y' is undefined"):
        environment.from_string("{{ y }}").render()


def test_line_ends_between_tags_are_no_content() -> None:
    text = pages("report").from_string("<p>\n  <b>one\n  word</b>\n  {% if true %}\n  {{ x }}\n  {% endif %}\n</p>")
    assert text.render(x="<a>\n<b>") == "<p><b>one\n  word</b>&lt;a&gt;\n&lt;b&gt;</p>"


def test_a_number_and_its_percent_sign_stay_together() -> None:
    assert prose("5 % < 9 %") == "5&nbsp;% &lt; 9&nbsp;%"
