"""The tab with the concepts of a class in a real browser, on a desk and on a phone."""

import parts
import pytest

pytest.importorskip("selenium")
from selenium.webdriver.common.keys import Keys

from app.browsing import CHROMIUM, DRIVER, Server, all_of, notice, open_fresh, open_tab, resize, send, wait

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    photos = parts.draw_parts(tmp_path_factory.mktemp("parts") / "photos")
    made = Server(tmp_path_factory.mktemp("server"), "worlds.parts:make", data=photos)
    yield made
    made.stop()


def settings(page):
    """Those in sight that concepts do not have."""
    found = all_of(page, "#method, #opacity, #question")
    return {part.get_attribute("id") for part in found if part.is_displayed()}


@pytest.mark.parametrize("size", [(1280, 900), (390, 844)], ids=["desk", "phone"])
def test_the_tab_in_a_browser(server, browser, size, tmp_path):
    resize(browser, *size)
    page = open_fresh(browser, server.address)
    (tmp_path / "thing.png").write_bytes(parts.file(1))
    before = page.find_element("css selector", "#stage-one").text
    send(page, tmp_path / "thing.png")
    wait(page, lambda: page.find_element("css selector", "#stage-one").text != before)
    assert settings(page) == {"method", "opacity", "question"}
    open_tab(page, "Concepts")
    wait(page, lambda: len(all_of(page, "#stage-concepts .shares tbody tr")) == 3)
    assert notice(page) == ""
    assert page.execute_script("return document.documentElement.scrollWidth - innerWidth") <= 0
    drawn = page.execute_script("return document.querySelector('#stage-concepts .drawn').naturalWidth")
    assert drawn > 800
    scroll = all_of(page, "#stage-concepts .scroll")[0]
    scroll.send_keys(Keys.ARROW_RIGHT)  # the keyboard reaches the figure
    assert page.execute_script("return document.activeElement === arguments[0]", scroll)
    assert settings(page) == set()
