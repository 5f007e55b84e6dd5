"""The page on a desk and on a phone, in a real browser: what is in sight, what a reload keeps, what keys reach."""

import pytest

from app import small

pytest.importorskip("selenium")
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from app.browsing import (
    CHROMIUM,
    DRIVER,
    all_of,
    click_class,
    notice,
    open_fresh,
    open_tab,
    resize,
    send,
    shown,
    wait,
)  # fmt: skip
from classlens.app.actions import VIEWS

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver")

DESK, PHONE = (1280, 900), (390, 844)
both = pytest.mark.parametrize("page", [DESK, PHONE], indirect=True, ids=["desk", "phone"])
phone = pytest.mark.parametrize("page", [PHONE], indirect=True, ids=["phone"])


@pytest.fixture
def page(server, browser, request):
    """The page of a visitor who has not been here before, on a screen of this size."""
    resize(browser, *request.param)
    return open_fresh(browser, server.address)


def box(browser, selector):
    """Left, top, right and bottom of an element on the screen."""
    script = "const b = document.querySelector(arguments[0]).getBoundingClientRect(); return b.toJSON()"
    found = browser.execute_script(script, selector)
    return [found[side] for side in ("left", "top", "right", "bottom")]


def lead(browser, view="one"):
    return browser.execute_script(
        "return document.querySelector(arguments[0])?.innerText || ''", f"#stage-{view} .lead"
    )


def chosen(browser):
    return browser.execute_script("return document.querySelector('.bar.chosen')?.dataset.index")


def come_back(browser):
    """Load the page anew, and wait until it is another one."""
    browser.execute_script("document.body.dataset.old = true")
    browser.refresh()
    wait(browser, lambda: not all_of(browser, "[data-old]") and lead(browser, "one") + lead(browser, "two"))


@both
def test_nothing_sticks_out_and_every_tab_can_be_opened(page):
    assert page.execute_script("return document.documentElement.scrollWidth - innerWidth") == 0
    titles = [tab.text.replace("\n", " ") for tab in all_of(page, "#views button[role=tab]") if tab.is_displayed()]
    views = {view: title for view, title in VIEWS.items() if view != "concepts"}  # a page without pictures of its own
    assert titles == list(views.values())
    for view, title in views.items():
        open_tab(page, title)
        # The network of the tests is too small for AGF's layers, and the page says so.
        wait(page, lambda view=view: "No layer" in notice(page) if view == "layers" else lead(page, view))
    assert page.execute_script("return document.documentElement.scrollWidth - innerWidth") <= 0  # less: a scroll bar


@phone
def test_a_tap_on_a_class_brings_picture_and_map_into_sight_below_the_classes(page):
    click_class(page, 3)
    wait(page, lambda: abs(box(page, "#bars")[1]) < 1)  # it has scrolled, and the classes stay at the top
    picture, evidence = (box(page, f"#stage-one .panel:nth-child({i}) .frame") for i in (1, 2))
    bars = box(page, "#bars")
    assert bars[3] < picture[1] < picture[3] < evidence[1] < evidence[3] < PHONE[1]
    assert evidence[1] - picture[3] < 50  # only its caption between them
    chip = box(page, ".bar.chosen")
    assert 0 <= chip[0] < chip[2] <= PHONE[0]
    click_class(page, 0)  # the next one can be tapped at once
    assert abs(box(page, "#bars")[1]) < 1


@both
def test_legends_are_whole(page):
    open_tab(page, "Two classes")
    wait(page, lambda: len(shown(page, "two")) == 3)
    cut = (
        "return [...document.querySelectorAll('#stage-two .legend span')]"
        ".filter(text => text.scrollWidth > text.clientWidth + 1 || text.getBoundingClientRect().right > innerWidth)"
        ".map(text => text.innerText)"
    )
    assert page.execute_script(cut) == []
    heights = "return [...document.querySelectorAll('#stage-two .legends span')].map(text => text.offsetHeight)"
    assert max(page.execute_script(heights)) < 30  # one line each


@both
def test_the_old_map_is_never_shown_beside_the_classes_of_a_new_picture(page, tmp_path):
    old = shown(page)[0][1]
    page.execute_script(
        """
        window.frames_seen = [];
        const note = () => {
          const shares = [...document.querySelectorAll('.bar .share')].map(share => share.innerText).join();
          const map = document.querySelector('#stage-one .evidence')?.src || '';
          window.frames_seen.push([shares, map, document.body.classList.contains('arriving')]);
        };
        const look = () => { note(); requestAnimationFrame(look); };
        // A quick machine may draw no frame between the choice and the answer.
        new MutationObserver(note).observe(document.body, {attributeFilter: ['class']});
        look();
        """
    )
    (tmp_path / "mine.png").write_bytes(small.file(300, 200, seed=5))
    send(page, tmp_path / "mine.png")
    wait(page, lambda: [colours for _, colours in shown(page) if colours != old])
    seen = page.execute_script("return window.frames_seen")
    before, after = seen[0][0], seen[-1][0]
    assert before != after
    assert [frame for frame in seen if frame[0] == after and frame[1] == old] == []
    assert any(arriving for shares, _, arriving in seen if shares == before)  # from the moment it was chosen
    wait(page, lambda: not all_of(page, "body.arriving"))
    faint = "return Number(getComputedStyle(document.querySelector('#stage-one')).opacity) < 0.5"
    page.execute_script("classlens.dim(true)")
    wait(page, lambda: page.execute_script(faint))
    page.execute_script("classlens.dim(false)")


@both
def test_a_reload_keeps_a_sample_its_class_and_its_view(page, server):
    all_of(page, "[data-sample='1']")[0].click()
    wait(page, lambda: page.current_url.startswith(f"{server.address}/#sample=cat&"))
    click_class(page, 4)
    open_tab(page, "Two classes")
    wait(page, lambda: "class=4&view=two" in page.current_url and len(shown(page, "two")) == 3)
    before, link = shown(page, "two"), page.current_url
    come_back(page)
    wait(page, lambda: shown(page, "two") == before)
    assert (chosen(page), page.current_url) == ("4", link)
    page.get(server.address + "/#sample=espresso&class=1")  # another link in the same tab
    wait(page, lambda: "finds dog" in lead(page))
    page.get(link)
    wait(page, lambda: shown(page, "two") == before)


@both
def test_a_reload_keeps_your_own_picture_without_an_address_that_others_could_open(page, server, tmp_path):
    first = shown(page)
    (tmp_path / "mine.png").write_bytes(small.file(300, 200, seed=6))
    send(page, tmp_path / "mine.png")
    wait(page, lambda: [pair for pair in shown(page) if pair not in first])
    mine = click_class(page, 2)
    wait(page, lambda: page.current_url.rstrip("/#") == server.address)
    come_back(page)
    wait(page, lambda: mine in [colours for _, colours in shown(page)])
    assert chosen(page) == "2"
    stored = page.execute_script("return [sessionStorage.getItem('classlens').length, localStorage.length]")
    assert stored[0] < 200  # a fingerprint, not the picture
    assert stored[1] == 0


@phone
def test_a_link_that_leads_nowhere_says_so(page, server):
    page.get(server.address + "/#sample=cat&class=77")
    wait(page, lambda: "no such class" in notice(page))
    wait(page, lambda: shown(page))


@both
def test_tab_leaves_every_list_closed(page):
    page.execute_script("[...document.querySelectorAll('.bar')].at(-1).focus()")
    focused = "return document.activeElement.getAttribute('aria-label') || document.activeElement.innerText"
    visited = []
    for _ in range(10):
        ActionChains(page).send_keys(Keys.TAB).perform()
        visited.append(page.execute_script(focused))
        is_list = page.execute_script("return document.activeElement.getAttribute('role') === 'combobox'")
        wait(page, lambda is_list=is_list: len(all_of(page, "[role=listbox]")) <= is_list)
    expected = ["Or any other of its 5 classes", "Evidence for", "One class", "Method"]
    assert [name for name in visited if name in expected] == expected
    assert not all_of(page, "[role=listbox]")


@both
def test_a_screen_reader_has_a_name_for_all_that_can_be_used(page):
    nodes = page.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    usable = {"button", "combobox", "tab", "slider", "textbox", "checkbox", "spinbutton", "link"}
    found = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in nodes
        if not node["ignored"] and node["role"]["value"] in usable
    ]
    assert [kind for kind, name in found if not name.strip()] == []
    assert ("button", "Sample picture: cat and espresso") in found
    pictures = [node.get("name", {}).get("value") for node in nodes if node.get("role", {}).get("value") == "image"]
    assert {"the picture", f"evidence: {shown(page)[0][0]}"} <= set(pictures)
    live = page.execute_script("return document.querySelector('#stage-one [aria-live]')?.getAttribute('aria-live')")
    assert live == "polite"


@phone
def test_layer_by_layer_is_explained_in_two_sentences_and_its_figure_scrolls(page, server):
    page.get(server.address + "/#sample=cat&class=1&view=layers&method=agf-release")
    wait(page, lambda: all_of(page, "#stage-layers .drawn"))
    text = page.execute_script("return document.querySelector('#stage-layers .facts').innerText")
    assert text.count(".") == 2
    wide = "const figure = document.querySelector('.scroll'); return [figure.scrollWidth, figure.clientWidth]"
    inside, outside = page.execute_script(wide)
    assert inside >= 700 > outside


@both
def test_the_verdict_and_its_reasons_are_in_sight_and_keys_reach_the_tab(page):
    tabs = {tab.text.replace("\n", " "): tab for tab in all_of(page, "#views button[role=tab]")}
    tabs["Trust"].send_keys(Keys.ENTER)
    wait(page, lambda: all_of(page, "#stage-trust .tests li") and len(shown(page, "trust")) == 2)
    assert notice(page) == ""
    assert any(words in lead(page, "trust") for words in ("You can trust", "is doubtful", "Do not trust"))
    assert page.execute_script("return document.documentElement.scrollWidth - innerWidth") <= 0
    verdict, results, width = (box(page, "#stage-trust " + one) for one in (".verdict", ".tests ul", ".panels"))
    assert verdict[3] <= width[1] < width[3] <= results[1]
    assert 0 <= results[0] < results[2] <= page.execute_script("return innerWidth")
    before = lead(page, "trust")
    page.find_element("css selector", '.bar[data-index="3"]').click()
    wait(page, lambda: "cup" in lead(page, "trust") != before and all_of(page, "#stage-trust .tests"))
