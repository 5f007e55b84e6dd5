"""Boxes, pixels and texts in a real browser, on a desk and on a phone: what is clicked or typed is explained."""

import pytest

from app import small

pytest.importorskip("selenium")
from selenium.common.exceptions import TimeoutException
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

from app.browsing import CHROMIUM, DRIVER, Server, all_of, notice, resize, shown, wait
from classlens.app.studio import Studio, samples

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver")

DESK, PHONE = (1280, 900), (390, 844)
DETECTOR, SEGMENTER, WORDS = (f"app.small:{name}" for name in ("detector", "segmenter", "words"))
both = pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = Server(tmp_path_factory.mktemp("server"), DETECTOR, SEGMENTER, WORDS)
    yield made
    made.stop()


@pytest.fixture
def page(server, browser):
    """Opens the page with one of the networks, on a screen of a size."""

    def opened(model, size):
        resize(browser, *size)
        browser.get("about:blank")
        browser.get(f"{server.address}/#sample=cat&model={model}")
        wait(browser, lambda: shown(browser) and f"where {model.lower()} finds" in lead(browser).lower())
        assert browser.execute_script("return document.documentElement.scrollWidth - innerWidth") == 0
        return browser

    return opened


def lead(browser):
    return browser.execute_script("return document.querySelector('#stage-one .lead')?.innerText || ''")


def visible(browser, selector):
    return [part for part in all_of(browser, selector) if part.is_displayed()]


def click(browser, x, y):
    """Click the picture at a share of its width and height."""
    frame = browser.find_element(By.CSS_SELECTOR, "#stage-one .aim")
    width, height = frame.size["width"], frame.size["height"]
    ActionChains(browser).move_to_element_with_offset(frame, (x - 0.5) * width, (y - 0.5) * height).click().perform()


def ask(browser, x, y, words):
    """Click until the page answers: while its first answer is under way, it takes no question."""
    for _ in range(9):
        click(browser, x, y)
        try:
            return WebDriverWait(browser, 10, 0.05).until(lambda _: words in lead(browser))
        except TimeoutException:
            continue
    raise AssertionError(f"no answer {words!r} but {lead(browser)!r}")


@both
def test_a_box_is_clicked_in_the_picture(page, size):
    browser = page(DETECTOR, size)
    assert "Objects that the network finds" in browser.page_source
    assert not visible(browser, "#text, #question")
    boxes = all_of(browser, "#stage-one .box")
    assert len(boxes) == len(all_of(browser, ".bar")) > 1
    assert all_of(browser, "#stage-one .box.chosen")[0].get_attribute("data-index") == "0"
    first = shown(browser)[0]
    # A corner of the box, where no smaller one lies upon it: what is there is asked of the browser itself.
    free = browser.execute_script(
        """
        document.querySelector('#views').scrollIntoView();
        for (const box of document.querySelectorAll('#stage-one .box:not(.chosen)')) {
          const {left, top, width, height} = box.getBoundingClientRect();
          for (const [x, y] of [[left + 1, top + 1], [left + width - 2, top + height - 2]])
            if (document.elementFromPoint(x, y) === box) return [box.dataset.index, x, y];
        }
        """
    )
    assert free
    index, x, y = free
    browser.execute_cdp_cmd(
        "Input.dispatchMouseEvent", {"type": "mousePressed", "x": x, "y": y, "button": "left", "clickCount": 1}
    )
    browser.execute_cdp_cmd(
        "Input.dispatchMouseEvent", {"type": "mouseReleased", "x": x, "y": y, "button": "left", "clickCount": 1}
    )
    wait(browser, lambda: shown(browser)[0][0].endswith(f"(box {index})"))
    assert shown(browser)[0][1] != first[1]
    wait(browser, lambda: all_of(browser, ".bar.chosen")[0].get_attribute("data-index") == index)
    assert all_of(browser, "#stage-one .box.chosen")[0].get_attribute("data-index") == index
    assert len(all_of(browser, "#stage-one .panel .lines")) == 1  # its frame on the map
    titles = [tab.text.replace("\n", " ") for tab in visible(browser, "#views button[role=tab]")]
    assert titles[:2] == ["One box", "Two boxes"]
    assert notice(browser) == ""


@both
def test_a_pixel_is_clicked_in_the_picture_and_a_bar_leads_back_to_the_whole_class(page, size, server):
    browser = page(SEGMENTER, size)
    assert not visible(browser, "#text, #question")
    whole = shown(browser)[0]
    ask(browser, 0.3, 0.7, "at pixel (9, 22)")
    studio = Studio({SEGMENTER: small.segmenter()})
    picture = studio.open(samples()["cat"])
    expected = studio.offer(picture, SEGMENTER).names[studio.offer(picture, SEGMENTER).at((9, 22), (32, 32))]
    assert expected in lead(browser)
    at_pixel = shown(browser)[0]
    assert at_pixel[1] != whole[1]
    assert len(all_of(browser, "#stage-one .panel .lines")) == 2  # on the picture and on the map
    wait(browser, lambda: "at=9%2C22" in browser.current_url)
    link = browser.current_url
    bar = browser.find_element(By.CSS_SELECTOR, ".bar")
    bar.click()
    wait(browser, lambda: "at pixel" not in lead(browser) and shown(browser))
    browser.get("about:blank")
    browser.get(link)
    wait(browser, lambda: shown(browser) == [at_pixel])


@both
def test_a_pixel_is_reached_with_the_keyboard(page, size):
    browser = page(SEGMENTER, size)
    browser.execute_script("document.querySelector('#stage-one .aim').focus()")
    for key in (Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_UP):
        ActionChains(browser).send_keys(key).perform()
    ActionChains(browser).send_keys(Keys.ENTER).perform()
    wait(browser, lambda: "at pixel (18, 14)" in lead(browser))  # 0.5 + 2 * 0.04, 0.5 - 0.04, of 32


@both
def test_a_text_is_typed_and_compared_with_another(page, size):
    browser = page(WORDS, size)
    assert visible(browser, "#text")
    assert not visible(browser, "#search")
    assert [bar.text.split("\n")[0] for bar in all_of(browser, ".bar")] == ["a photo of a cat", "a cup of coffee"]
    field = browser.find_element(By.CSS_SELECTOR, "#text input, #text textarea")
    field.send_keys("a red <b>car</b>", Keys.ENTER)
    wait(browser, lambda: "a red <b>car</b>" in lead(browser))
    wait(browser, lambda: len(all_of(browser, ".bar")) == 3)
    assert all_of(browser, ".bar.chosen")[0].get_attribute("data-index") == "0"
    wait(browser, lambda: not browser.execute_script("return arguments[0].value", field))
    own = shown(browser)[0][1]
    browser.find_element(By.CSS_SELECTOR, "#question input").click()
    wait(browser, lambda: len(all_of(browser, "[role=option]")) == 4)
    all_of(browser, "[role=option]")[3].click()
    wait(browser, lambda: "rather than a cup of coffee" in lead(browser))
    assert shown(browser)[0][1] != own


@both
def test_a_screen_reader_has_a_name_for_boxes_pixels_and_texts(page, size):
    wanted = {DETECTOR: "Box in the picture: ", SEGMENTER: "Click a pixel of the picture", WORDS: "Ask for a text"}
    for model, words in wanted.items():
        browser = page(model, size)
        nodes = browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
        names = [node.get("name", {}).get("value", "") for node in nodes if not node["ignored"]]
        assert any(name.startswith(words) for name in names)
