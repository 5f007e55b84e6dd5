"""The page as a person meets it: `classlens serve` and a real browser (Debian's chromium; skipped without it)."""

import re

import pytest

from app import small

pytest.importorskip("selenium")
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from app.browsing import (
    CHROMIUM,
    DRIVER,
    all_of,
    click_class,
    notice,
    open_fresh,
    open_tab,
    send,
    shown,
    wait,
)  # fmt: skip

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver")


@pytest.fixture
def page(server, browser):
    return open_fresh(browser, server.address)


def test_a_picture_is_uploaded_and_two_classes_are_clicked(page, tmp_path):
    before = shown(page)
    (tmp_path / "mine.png").write_bytes(small.file(300, 200))
    send(page, tmp_path / "mine.png")
    wait(page, lambda: shown(page) != before)
    assert len(all_of(page, ".bar")) == len(small.LABELS)
    cat, cup = click_class(page, 0), click_class(page, 3)
    assert cat != cup
    assert click_class(page, 0) == cat
    assert all_of(page, ".bar.chosen")[0].get_attribute("data-index") == "0"
    assert notice(page) == ""


def test_a_class_is_found_by_its_name(page):
    box = page.find_element(By.CSS_SELECTOR, "#search input")
    box.send_keys("cran")
    offered = "return [...document.querySelectorAll('[role=option]')].map(option => option.innerText.trim())"
    wait(page, lambda: [re.split(r"\W+", text) for text in page.execute_script(offered)] == [["crane", "4"]])
    box.send_keys(Keys.ENTER)
    wait(page, lambda: shown(page)[0][0] == "crane")


def test_the_other_question_is_asked_and_said(page):
    click_class(page, 0)
    heading = "return document.querySelector('#stage-one .lead').innerText"
    wait(page, lambda: "finds cat" in page.execute_script(heading))
    page.find_element(By.CSS_SELECTOR, "#question input").click()
    wait(page, lambda: all_of(page, "[role=option]"))
    all_of(page, "[role=option]")[1].click()
    wait(
        page, lambda: page.execute_script(heading).startswith("Evidence for cat rather than its rivals (most likely: ")
    )
    legend = "return document.querySelector('#stage-one .legends').innerText"
    wait(page, lambda: "blue: for its rivals" in page.execute_script(legend))
    page.find_element(By.CSS_SELECTOR, "#question input").click()
    wait(page, lambda: all_of(page, "[role=option]"))
    all_of(page, "[role=option]")[0].click()
    wait(page, lambda: "finds cat" in page.execute_script(heading))


def test_a_broken_file_gives_a_friendly_line_and_the_picture_stays(page, tmp_path):
    before = shown(page)
    (tmp_path / "broken.jpg").write_text("this is no picture")
    send(page, tmp_path / "broken.jpg")
    wait(page, lambda: notice(page))
    assert notice(page).startswith("This file is not a picture in a known format")
    assert "Traceback" not in page.page_source
    assert shown(page) == before
    click_class(page, 1)
    wait(page, lambda: not notice(page))  # the next click clears it


def test_a_file_that_is_too_large_is_not_even_sent(page, tmp_path):
    (tmp_path / "large.jpg").write_bytes(b"0" * (20 * 2**20 + 1))
    send(page, tmp_path / "large.jpg")
    wait(page, lambda: "larger than 20 MB" in notice(page))


def test_the_slider_blends_without_computing_anew(page):
    before = shown(page)
    slider = page.find_element(By.CSS_SELECTOR, "#opacity input[type=range]")
    for _ in range(20):
        slider.send_keys(Keys.ARROW_LEFT)
    seen = "return getComputedStyle(document.querySelector('#stage-one .evidence')).opacity"
    wait(page, lambda: float(page.execute_script(seen)) == pytest.approx(0.6))
    assert shown(page) == before


def test_the_other_views(page):
    open_tab(page, "Two classes")
    wait(page, lambda: [title for title, _ in shown(page, "two")][2:] == ["difference"])
    open_tab(page, "Several methods")
    wait(page, lambda: len(shown(page, "methods")) == 6)
    assert len({colours for _, colours in shown(page, "methods")}) == 6


def test_downloads_reach_the_browser(page, tmp_path):
    page.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    for button, name, start in (("png", "classlens.png", b"\x89PNG"), ("npz", "classlens.npz", b"PK")):
        page.find_element(By.CSS_SELECTOR, f"#{button}").click()
        wait(page, (tmp_path / name).exists)
        assert (tmp_path / name).read_bytes().startswith(start)


def test_everything_comes_from_the_server_itself(page, server):
    fetched = page.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert len(fetched) > 10
    assert [name for name in fetched if not name.startswith((server.address, "data:", "blob:"))] == []
    said = [entry["message"] for entry in page.get_log("browser")]
    assert [text for text in said if "Content Security Policy" in text or "net::" in text] == []  # nor was it tried


def test_ctrl_c_ends_it_tidily_while_a_page_is_open(page, server):  # so it stands last
    code, _, complained = server.stop()
    assert code in (0, 130)  # it was not killed, which `stop` does after a while
    assert complained == ""
    assert list(server.folder.iterdir()) == []
