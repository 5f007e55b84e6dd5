"""The handlers behind the page, called as gradio calls them."""

import base64
import io
import logging
from types import SimpleNamespace

import gradio as gr
import numpy as np
import pytest
from PIL import Image

from app import small
from classlens.app import choices
from classlens.app.choices import ITSELF, questions
from classlens.app.layout import Parts
from classlens.app.page import Handlers
from classlens.app.studio import NOTHING, OutOfDate, samples
from classlens.app.turn import Turn


@pytest.fixture
def studio():
    made = small.studio()
    yield made
    made.close()


@pytest.fixture(scope="module")
def parts():
    with small.gradio_leaks(), gr.Blocks(analytics_enabled=False):
        return Parts(small.studio(), samples(), Turn())


@pytest.fixture
def do(studio, parts):
    return Handlers(studio, parts, samples())


def event(**data):
    return SimpleNamespace(_data=data)


def upload(content):
    return event(content=base64.b64encode(content).decode())


def drawn(
    do, picture, view="one", index=0, rival=1, method="agf", methods=("agf", "gradcam"), model="small", question=ITSELF
):
    """All that a drawing changes, the latest of each part."""
    found = {}
    for updates in do.draw(Turn(), picture, model, view, index, rival, question, method, list(methods)):
        found |= updates
    return found


def test_an_uploaded_picture_is_kept_and_its_likeliest_class_chosen(do, studio):
    updates = do.receive("small", "one", NOTHING, upload(small.file()))
    picture = updates[do.parts.picture]
    (first, _), (second, _) = studio.offer(picture, "small").likeliest(2)
    assert updates[do.parts.chosen] == first
    assert updates[do.parts.rival]["value"] == second
    assert [index for _, index in updates[do.parts.search]["choices"]] == list(range(5))
    assert updates[do.parts.notice] == ""


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"content": base64.b64encode(b"junk").decode()}, "This file is not a picture"),
        ({"content": "%%%"}, "arrived incomplete"),
        ({"content": {"path": "/etc/passwd"}}, "no picture arrived"),
        ({}, "no picture arrived"),
        ({"large": True}, "larger than 20 MB"),
    ],
)
def test_a_bad_upload_says_so_in_one_line_and_changes_nothing_else(do, data, words):
    updates = do.receive("small", "one", NOTHING, event(**data))
    assert list(updates) == [do.parts.notice]
    assert words.lower() in updates[do.parts.notice].lower()
    assert "\n" not in updates[do.parts.notice]


def test_a_bug_is_told_without_its_details(do, caplog, monkeypatch):
    monkeypatch.setattr(do.studio, "open", lambda content: 1 / 0)
    with caplog.at_level(logging.ERROR):
        updates = do.receive("small", "one", NOTHING, upload(small.file()))
    assert "division" not in updates[do.parts.notice]
    assert "went wrong" in updates[do.parts.notice]
    assert "ZeroDivisionError" in caplog.text


def test_a_new_picture_comes_with_its_classes_and_without_the_old_map(do):
    updates = do.receive("small", "two", NOTHING, upload(small.file()))
    stages = [updates[stage] for stage in do.parts.stages.values()]
    assert all("evidence" not in stage for stage in stages)
    waiting = ["waiting" in stage for stage in stages]
    assert waiting == [view == "two" for view in do.parts.stages]  # in the open tab
    assert updates[do.parts.bars].count("<button") == 5


def test_the_page_opens_with_the_view_of_a_link(do):
    updates = do.open_link("sample=cat&model=other&class=3&view=two&with=1&method=gradcam")
    assert updates[do.parts.notice] == ""
    assert updates[do.parts.picture].digest == do.studio.open(samples()["cat"]).digest
    assert (updates[do.parts.model], updates[do.parts.chosen]) == ("other", 3)
    assert updates[do.parts.rival]["value"] == 1
    assert len(updates[do.parts.rival]["choices"]) == 5  # a value without its choices would be refused
    assert updates[do.parts.method] == {
        **do.look("two")(updates[do.parts.picture], "other")[do.parts.method],
        "value": "gradcam",
    }
    assert updates[do.parts.question]["visible"] is False
    assert updates[do.parts.tab_row]["selected"] == updates[do.parts.view] == "two"
    assert 'class="bar chosen" aria-pressed="true" data-index="3"' in updates[do.parts.bars]


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("sample=cat&class=5", "no such class"),
        ("sample=cat&class=1&view=two&with=7", "no such class"),
        ("sample=dog", "which this page does not have"),
        ("picture=" + 64 * "0" + "&class=1", "no longer in memory: choose it again"),
    ],
)
def test_a_link_that_leads_nowhere_says_so_over_a_fresh_page(do, address, words):
    updates, fresh = do.open_link(address), do.open_link("")
    assert words in updates[do.parts.notice]
    assert updates[do.parts.chosen] == fresh[do.parts.chosen]
    assert updates[do.parts.picture].digest == fresh[do.parts.picture].digest
    assert set(updates) == set(fresh)


def test_each_drawing_tells_how_to_come_back_to_it(do):
    files = (small.file(), samples()["espresso"])
    own, sample = (do.receive("small", "one", NOTHING, upload(content))[do.parts.picture] for content in files)
    assert drawn(do, sample, index=3)[do.parts.address] == "sample=espresso&model=small&class=3"
    address = drawn(do, own, "two", index=2, rival=4)[do.parts.address]
    assert address == f"picture={own.digest}&model=small&class=2&view=two&with=4"
    back = do.open_link(address)
    assert back[do.parts.picture] is own
    assert (back[do.parts.chosen], back[do.parts.rival]["value"]) == (2, 4)


def test_a_class_is_picked_by_its_bar_or_its_name(do):
    picture = do.receive("small", "one", NOTHING, upload(small.file()))[do.parts.picture]
    picked = do.pick(picture, "small", 0, 1, NOTHING, event(index=3))
    assert picked == {do.parts.notice: "", do.parts.chosen: 3, do.parts.given: NOTHING}
    assert do.pick_named(picture, "small", 0, 1, NOTHING, 4)[do.parts.chosen] == 4
    swapped = do.pick(picture, "small", 0, 3, NOTHING, event(index=3))
    assert (swapped[do.parts.chosen], swapped[do.parts.rival]) == (3, 0)
    for wrong in (-1, 5, "3", None, 2.5):
        assert list(do.pick(picture, "small", 0, 1, NOTHING, event(index=wrong))) == [do.parts.notice]
    assert "choose one" in do.pick(None, "small", 0, 1, NOTHING, event(index=3))[do.parts.notice]


def test_each_view_is_drawn_in_its_place(do):
    picture = do.receive("small", "one", NOTHING, upload(small.file()))[do.parts.picture]
    one = drawn(do, picture)
    assert one[do.parts.stages["one"]].count('class="evidence"') == 1
    assert 'data-index="0" title' in one[do.parts.bars]
    assert drawn(do, picture, "two")[do.parts.stages["two"]].count('class="evidence"') == 3
    assert drawn(do, picture, "methods")[do.parts.stages["methods"]].count('class="evidence"') == 2
    layers = drawn(do, picture, "layers", method="agf-release")[do.parts.stages["layers"]]
    assert "data:image/png" in layers
    assert "Each row is a layer of the network, the deepest first" in layers
    assert drawn(do, None) == {}


def test_the_page_asks_for_the_class_itself_or_for_it_rather_than_others(do):
    updates = do.receive("small", "one", NOTHING, upload(small.file()))
    picture, asked = updates[do.parts.picture], updates[do.parts.question]
    assert asked["value"] == ITSELF
    likely = [index for index, _ in do.studio.offer(picture, "small").likeliest(5)]
    assert [value for _, value in asked["choices"]] == [ITSELF, "rivals", *likely]
    assert asked["choices"][1][0] == "the class rather than its rivals"
    names = [("a", 0), ("b", 1), ("c", 2)]
    assert questions(names, [2])[2:] == [("rather than c", 2), ("rather than a", 0), ("rather than b", 1)]
    plain, rivals, named = (
        drawn(do, picture, question=question)[do.parts.stages["one"]] for question in (ITSELF, "rivals", 3)
    )
    assert "rather than" not in plain
    assert "against it" in plain
    assert "Relevance: " in plain
    assert "<b>cat</b> rather than its rivals (most likely: " in rivals
    assert "<b>cat</b> rather than cup (" in named
    assert "is for its rivals" in named
    assert "blue: for its rivals" in named
    assert rivals.split('class="evidence"')[1] != named.split('class="evidence"')[1]
    methods = drawn(do, picture, "methods", question=3)[do.parts.stages["methods"]]
    assert "<b>cat</b> rather than cup (" in methods
    layers = drawn(do, picture, "layers", method="agf-release", question=3)[do.parts.stages["layers"]]
    assert "<b>cat</b> rather than cup (" in layers
    assert layers != drawn(do, picture, "layers", method="agf-release")[do.parts.stages["layers"]]


def test_two_classes_are_compared_by_the_evidence_for_each_never_by_a_contrast(do):
    picture = do.receive("small", "one", NOTHING, upload(small.file()))[do.parts.picture]
    plain, asked = (drawn(do, picture, "two", question=q)[do.parts.stages["two"]] for q in (ITSELF, "rivals"))
    assert plain == asked
    assert do.look("two")(picture, "small")[do.parts.question]["visible"] is False
    assert do.look("one")(picture, "small")[do.parts.question]["visible"] is True


def test_a_rival_that_is_the_class_itself_is_told_on_the_page(do):
    picture = do.receive("small", "one", NOTHING, upload(small.file()))[do.parts.picture]
    for question, words in ((0, "Cat cannot be explained rather than itself"), (9, "out of range"), (1.5, "not 1.5")):
        assert words in drawn(do, picture, question=question)[do.parts.notice]


def test_two_classes_have_different_pictures(do):
    picture = do.receive("small", "one", NOTHING, upload(small.file()))[do.parts.picture]
    cat, dog = (drawn(do, picture, index=index)[do.parts.stages["one"]] for index in (0, 1))
    assert cat.split('class="evidence"')[1] != dog.split('class="evidence"')[1]


def test_a_class_that_is_not_among_the_likeliest_gets_a_bar_of_its_own(do, monkeypatch):
    monkeypatch.setattr(choices, "ROWS", 2)
    picture = do.receive("small", "one", NOTHING, upload(small.file()))[do.parts.picture]
    rare = do.studio.offer(picture, "small").likeliest(5)[-1][0]
    assert drawn(do, picture, index=rare)[do.parts.bars].count("<button") == 3


def test_another_network_has_its_own_classes(do, studio):
    picture = do.receive("small", "one", NOTHING, upload(small.file()))[do.parts.picture]
    assert (
        do.change_model(picture, "other", "one", NOTHING)[do.parts.chosen]
        == studio.offer(picture, "other").likeliest(1)[0][0]
    )


def test_an_error_while_drawing_is_told_on_the_page(do):
    picture = do.receive("small", "one", NOTHING, upload(small.file()))[do.parts.picture]
    updates = drawn(do, picture, "two", index=1, rival=1)
    assert "Both classes are the same" in updates[do.parts.notice]
    assert do.parts.stages["two"] not in updates


def test_a_drawing_ends_when_another_begins(do):
    picture = do.receive("small", "one", NOTHING, upload(small.file()))[do.parts.picture]
    turn = Turn()
    slow = do.draw(turn, picture, "small", "methods", 0, 1, ITSELF, "agf", ["agf", "gradcam", "lrp"])
    next(slow), next(slow)
    turn.take()
    assert list(slow) == []


def test_a_slow_method_stops_in_the_middle_when_nobody_waits(do, studio):
    picture = do.receive("small", "one", NOTHING, upload(small.file()))[do.parts.picture]
    studio.close()
    updates = drawn(do, picture, method="rise")  # it reports its steps, and is told that the page is closed
    assert do.parts.stages["one"] not in updates
    with pytest.raises(OutOfDate):
        studio.check_open()


@pytest.mark.parametrize("view", ["one", "two", "methods", "layers"])
def test_downloads_are_what_is_on_the_page(do, view):
    picture = do.receive("small", "one", NOTHING, upload(small.file()))[do.parts.picture]
    wanted = (picture, "small", view, 0, 1, ITSELF, "agf-release", ["agf", "gradcam"])
    png, npz = do.save_png(80, *wanted)[do.parts.parcel], do.save_npz(80, *wanted)[do.parts.parcel]
    assert (png["name"], npz["name"]) == ("classlens.png", "classlens.npz")
    assert Image.open(io.BytesIO(base64.b64decode(png["content"]))).format == "PNG"
    maps = np.load(io.BytesIO(base64.b64decode(npz["content"])))["maps"]
    assert len(maps) == (1 if view in ("one", "layers") else 2)


def test_a_download_without_a_picture_is_a_friendly_line(do):
    updates = do.save_png(80, None, "small", "one", 0, 1, ITSELF, "agf", [])
    assert list(updates) == [do.parts.notice]
