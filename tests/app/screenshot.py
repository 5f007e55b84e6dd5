"""The pictures of the page in the docs (needs chromium): page.jpg, and a strip of screens on a desk and on a phone.

PYTHONPATH=tests python tests/app/screenshot.py docs/images
PYTHONPATH=tests python tests/app/screenshot.py docs/images/page-boxes.jpg DETECTOR "class=0"
PYTHONPATH=tests python tests/app/screenshot.py docs/images/page-pixel.jpg SEGMENTER "class=8&at=70,60"
PYTHONPATH=tests python tests/app/screenshot.py docs/images/page-trust.jpg efficientnet-lite0 "class=285&view=trust"
PYTHONPATH=tests python tests/app/screenshot.py docs/images/page-concepts.jpg oxford-pets
"""

import io
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import parse_qsl

from PIL import Image

from app.browsing import Server, all_of, open_browser, resize, shown, wait

CAT = 285
DESK, PHONE = (1280, 880), (390, 844)
HEIGHT, GAP = 620, 16  # of the strip
MAPS = {"two": 3, "trust": 2}  # in a view
# A screen of the strip: its size, the address of the view, how many maps it shows.
SCREENS = (
    (DESK, "", "one", 1),
    (PHONE, "", "one", 1),
    (PHONE, f"#sample=cat+and+espresso&class={CAT}", "one", 1),
    (PHONE, f"#sample=cat+and+espresso&class={CAT}&view=two&with=967", "two", 3),
    (PHONE, f"#sample=cat+and+espresso&class={CAT}&view=methods", "methods", 6),
)


def screen(browser, address: str, size: tuple[int, int], view: str, maps: int) -> Image.Image:
    """What the screen shows once all maps of a view are there."""
    resize(browser, *size)
    browser.get("about:blank")
    browser.get(address)
    wait(browser, lambda: len(shown(browser, view)) == maps and not all_of(browser, ".pending, .waiting"))
    if size == PHONE and "class=" in address:  # as after a tap on the class
        browser.execute_script("document.querySelector('#views').scrollIntoView()")
    return Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")


def side_by_side(pictures: list[Image.Image]) -> Image.Image:
    """Pictures of one height on white."""
    small = [picture.resize((round(picture.width * HEIGHT / picture.height), HEIGHT)) for picture in pictures]
    strip = Image.new("RGB", (sum(p.width + GAP for p in small) - GAP, HEIGHT), "white")
    left = 0
    for picture in small:
        strip.paste(picture, (left, 0))
        left += picture.width + GAP
    return strip


def asked(file: Path, model: str, link: str) -> None:
    """The page of another kind of network, or another tab, on a desk and on a phone."""
    view = dict(parse_qsl(link)).get("view", "one")
    with tempfile.TemporaryDirectory() as scratch:
        server, browser = Server(Path(scratch), model), open_browser(scratch)
        try:
            address = f"{server.address}/#sample=cat+and+espresso&{link}"
            strip = [screen(browser, address, size, view, MAPS.get(view, 1)) for size in (DESK, PHONE)]
        finally:
            browser.quit()
            server.stop()
    side_by_side(strip).save(file, quality=82, optimize=True)


def concepts(file: Path, data: Path) -> None:
    """The tab with concepts of the sample cat, found in the pictures of a folder, on a desk and on a phone."""
    with tempfile.TemporaryDirectory() as scratch:
        server, browser = Server(Path(scratch), "efficientnet-lite0", data=data), open_browser(scratch)
        strip = []
        try:
            for size in (DESK, PHONE):
                resize(browser, *size)
                browser.get("about:blank")
                browser.get(f"{server.address}/#sample=cat&class={CAT}&view=concepts")
                while not all_of(browser, "#stage-concepts .shares"):  # the first time takes minutes
                    time.sleep(1)
                browser.execute_script("document.querySelector('#views').scrollIntoView()")
                strip.append(Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB"))
        finally:
            browser.quit()
            server.stop()
    side_by_side(strip).save(file, quality=82, optimize=True)


def main(folder: Path) -> None:
    """Take them all."""
    with tempfile.TemporaryDirectory() as scratch:
        server, browser = Server(Path(scratch), "efficientnet-lite0"), open_browser(scratch)
        try:
            cat = f"{server.address}/#sample=cat+and+espresso&class={CAT}"
            page = screen(browser, cat, (1400, 900), "one", 1)
            strip = [screen(browser, f"{server.address}/{link}", size, view, n) for size, link, view, n in SCREENS]
        finally:
            browser.quit()
            server.stop()
    page.save(folder / "page.jpg", quality=88, optimize=True)
    side_by_side(strip).save(folder / "page-strip.jpg", quality=82, optimize=True)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        concepts(Path(sys.argv[1]), Path(sys.argv[2]).resolve())
    elif len(sys.argv) > 3:
        asked(Path(sys.argv[1]), *sys.argv[2:])
    else:
        main(Path(sys.argv[1]))
