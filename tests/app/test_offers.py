"""What the page offers for each kind of network, and that a choice is explained as the library does."""

import base64
import io
from types import SimpleNamespace

import gradio as gr
import numpy as np
import pytest
import torch
from PIL import Image

import classlens
from app import small
from classlens.app import actions, offers
from classlens.app.actions import Wish
from classlens.app.choices import ITSELF, aims_of, bars_of
from classlens.app.layout import Parts, title
from classlens.app.links import LinkError, read, write
from classlens.app.markup import Aims
from classlens.app.offers import Given, with_text
from classlens.app.page import Handlers
from classlens.app.studio import FIRST_METHODS, NOTHING, Studio, samples
from classlens.app.turn import Turn
from classlens.core.targets import Box, Models, survey
from classlens.errors import ModelError, TargetError
from classlens.models import LoadedModel, Preprocess


@pytest.fixture(scope="module")
def studio():
    made = Studio({m.name: m for m in (small.loaded(), small.detector(), small.segmenter(), small.words())})
    yield made
    made.close()


@pytest.fixture(scope="module")
def picture(studio):
    return studio.open(small.file())


@pytest.fixture(scope="module")
def do(studio):
    with small.gradio_leaks(), gr.Blocks(analytics_enabled=False):
        return Handlers(studio, Parts(studio, samples(), Turn()), samples())


def event(**data):
    return SimpleNamespace(_data=data)


def last(studio, picture, *wish):
    *_, found = actions.panels(studio, picture, Wish(*wish))
    return found


def test_each_kind_of_network_offers_what_can_be_asked_of_it(studio, picture):
    kinds = {name: studio.offer(picture, name).kind for name in studio.models}
    assert kinds == {"small": "class", "spots": "box", "areas": "pixel", "words": "text"}
    boxes = studio.offer(picture, "spots")
    assert len(boxes.names) == len(boxes.boxes) == len(boxes.shares) > 1
    assert boxes.names[0] in ("cat (box 0)", "dog (box 0)")
    assert boxes.shares.tolist() == sorted(boxes.shares.tolist(), reverse=True)
    areas = studio.offer(picture, "areas")
    logits = studio.models["areas"].model(picture.inputs["areas"])[0]
    assert areas.names == ("sky", "road", "car")
    assert torch.equal(areas.found, logits.argmax(0))
    assert float(areas.shares.sum()) == pytest.approx(1)
    assert areas.at((31, 5), (32, 32)) == int(logits.argmax(0)[2, 15])
    with pytest.raises(TargetError, match="outside the picture"):
        areas.at((32, 5), (32, 32))
    with pytest.raises(TargetError, match="no output for each pixel"):
        boxes.at((1, 1), (32, 32))


def test_only_classes_that_are_found_are_in_sight_but_all_can_be_named(studio, picture):
    found = studio.offer(picture, "areas")
    absent = [i for i in range(3) if found.share(i) == 0]
    assert {i for i, _ in found.likeliest(8)} == set(range(3)) - set(absent)
    one = LoadedModel("one", torch.nn.Conv2d(3, 1, 1), Preprocess(resize=40, crop=32), ("road",))
    alone = Studio({"one": one})
    seen = alone.open(small.file())
    logits = one.model(seen.inputs["one"])[0, 0]
    assert alone.offer(seen, "one").share(0) == pytest.approx(float((logits > 0).double().mean()))


def test_texts_are_offered_with_their_cosine(studio, picture):
    found = studio.offer(picture, "words", Given(("a dog", "a cup")))
    model = studio.models["words"]
    vectors = [model.model(picture.inputs["words"]), model.embed_text(["a dog", "a cup"])]
    expected = torch.nn.functional.cosine_similarity(*vectors).detach()
    torch.testing.assert_close(found.shares, expected.double(), atol=1e-6, rtol=0)
    assert found.note(0) == f"{float(expected[0]):.3f}"


@pytest.mark.parametrize(
    ("model", "given", "asked"),
    [
        ("spots", NOTHING, classlens.detection(1)),
        ("areas", Given(place=(9, 20)), classlens.region(1, pixel=(9, 20))),
        ("words", Given(("a dog", "a cup")), classlens.text("a cup")),
    ],
)
def test_a_choice_is_explained_as_the_library_does(studio, picture, model, given, asked):
    found = studio.explain(picture, model, 1, "lrp", None, given)
    expected = classlens.explain(studio.models[model], picture.inputs[model], asked, "lrp")
    assert torch.equal(found.maps, expected.maps)
    assert found.name() == expected.name()
    assert studio.explain(picture, model, 1, "lrp", None, given) is found


def test_other_texts_and_other_pixels_are_other_maps_even_at_the_same_position(studio, picture):
    a, b = (studio.explain(picture, "words", 0, "gradient", None, Given((words,))) for words in ("a dog", "a cup"))
    assert not torch.equal(a.maps, b.maps)
    c, d = (studio.explain(picture, "areas", 0, "gradient", None, Given(place=at)) for at in ((3, 3), (20, 20)))
    assert not torch.equal(c.maps, d.maps)


def test_a_text_rather_than_another_is_their_difference(studio, picture):
    given = Given(("a dog", "a cup"))
    [panel] = last(studio, picture, "words", "one", 0, 1, "agf", (), 1, given)
    difference = classlens.text("a dog") - classlens.text("a cup")
    expected = classlens.explain(studio.models["words"], picture.inputs["words"], difference, "agf")
    assert torch.equal(panel.evidence, expected.maps[0, 0])
    assert (panel.rivals, panel.ends) == ("rather than a cup", ("for its rivals", "for it"))
    for wrong in (0, 2, "rivals"):
        with pytest.raises(TargetError, match="another text"):
            last(studio, picture, "words", "one", 0, 1, "agf", (), wrong, given)


def test_the_box_or_the_pixel_is_drawn_on_the_map_and_in_the_saved_picture(studio, picture):
    [panel] = last(studio, picture, "spots", "one", 1, 0, "gradient", ())
    assert panel.outlines == (studio.offer(picture, "spots").boxes[1],)
    drawn = np.asarray(actions.lines(panel))
    assert drawn.shape == (32, 32, 4)
    assert set(drawn[..., 3].flatten()) == {0, 255}
    [pixel] = last(studio, picture, "areas", "one", 1, 0, "gradient", (), None, Given(place=(9, 20)))
    assert (pixel.title, pixel.place) == ("road", "at pixel (9, 20)")
    assert np.asarray(actions.lines(pixel))[20, 9 - 3, 3] == 255  # the frame around it
    view = picture.views["areas"]
    sheets = [
        np.asarray(Image.open(io.BytesIO(actions.sheet(view, [one], "areas", 0.0))))
        for one in (pixel, last(studio, picture, "areas", "one", 1, 0, "gradient", (), None, Given(place=(25, 5)))[0])
    ]
    assert not np.array_equal(*sheets)  # without colours, they differ in the frame alone


def test_boxes_are_shares_of_the_picture_and_the_smallest_lies_on_top():
    found = Aims(((0, "cat", Box(8, 4, 16, 12)), (1, "dog", Box(-5, 0, 40, 16))), 0, size=(16, 32)).frames()
    assert [box["index"] for box in found] == [1, 0]
    assert [found[1][side] for side in ("left", "top", "width", "height")] == ["25.00", "25.00", "25.00", "50.00"]
    assert [found[0][side] for side in ("left", "width")] == ["0.00", "100.00"]


def test_a_box_a_pixel_and_a_text_are_chosen(do, studio, picture):
    boxes = do.pick(picture, "spots", 0, 1, NOTHING, event(index=1))
    assert (boxes[do.parts.chosen], boxes[do.parts.rival]) == (1, 0)
    pixel = do.pick(picture, "areas", 0, 1, NOTHING, event(x=0.5, y=0.25))
    assert pixel[do.parts.given].place == (16, 8)
    assert pixel[do.parts.chosen] == studio.offer(picture, "areas").at((16, 8), (32, 32))
    back = do.pick(picture, "areas", 0, 1, pixel[do.parts.given], event(index=2))
    assert back[do.parts.given].place is None
    for wrong in ({"x": 1.0, "y": 0}, {"x": -0.1, "y": 0}, {"x": "0", "y": 0}, {"x": 0.5}, {"index": 3}):
        assert list(do.pick(picture, "areas", 0, 1, NOTHING, event(**wrong))) == [do.parts.notice]
    text = do.add_text(picture, "words", NOTHING, "  a red\n car ")
    assert text[do.parts.given].texts == ("a red car", *NOTHING.texts)
    assert (text[do.parts.chosen], text[do.parts.text]) == (0, "")
    assert [value for _, value in text[do.parts.question]["choices"]] == [ITSELF, 0, 1, 2]
    assert "no text" in do.add_text(picture, "words", NOTHING, "  ")[do.parts.notice]


def test_the_texts_are_few_and_not_too_long():
    given = NOTHING
    for i in range(20):
        given = with_text(given, f"text {i}")
    assert given.texts == tuple(f"text {i}" for i in range(19, 19 - offers.MOST_TEXTS, -1))
    assert with_text(given, "text 15").texts[0] == "text 15"
    assert len(with_text(given, "text 15").texts) == offers.MOST_TEXTS
    with pytest.raises(TargetError, match="longer than 300"):
        with_text(given, "a" * 301)


def test_the_page_shows_only_what_a_kind_of_network_needs(do):
    content = base64.b64encode(small.file()).decode()
    shown = {}
    for name in do.studio.models:
        updates = do.receive(name, "one", Given(place=(3, 3)), event(content=content))
        assert updates[do.parts.given].place is None  # it was a pixel of the last picture
        parts = (do.parts.text, do.parts.search, do.parts.question)
        shown[name] = [updates[part]["visible"] for part in parts]
        assert updates[do.parts.tabs["two"]]["label"] == title(
            "two", do.studio.offer(updates[do.parts.picture], name).kind
        )
    assert shown == {
        "small": [False, True, True], "spots": [False, True, False], "areas": [False, True, False],
        "words": [True, False, True],
    }  # fmt: skip
    few = do.studio.offer(do.studio.open(samples()["cat"]), "spots")  # all in sight: nothing is left to search
    assert 0 < len(few.names) <= 8
    assert do._found_by_name(few)["visible"] is False
    titles = [title(view, kind) for kind in offers.KINDS for view in ("one", "two", "methods")]
    assert titles == [
        "One class", "Two classes", "Several methods", "One box", "Two boxes", "Several methods",
        "One class", "Two classes", "Several methods", "One text", "Two texts", "Several methods",
    ]  # fmt: skip


@pytest.mark.parametrize("view", ["one", "two", "methods"])
@pytest.mark.parametrize("model", ["spots", "areas", "words"])
def test_every_view_is_drawn_and_saved(do, picture, model, view):
    found = {}
    wanted = (picture, model, view, 0, 1, ITSELF, "lrp", ["lrp", "gradient"], NOTHING)
    if model == "areas":
        wanted = (*wanted[:-1], Given(place=(9, 20)))
    for updates in do.draw(Turn(), *wanted):
        found |= updates
    assert found[do.parts.stages[view]].count('class="evidence"') == {"one": 1, "two": 3, "methods": 2}[view]
    assert do.parts.notice not in found
    png = do.save_png(80, *wanted)[do.parts.parcel]["content"]
    assert Image.open(io.BytesIO(base64.b64decode(png))).format == "PNG"
    npz = np.load(io.BytesIO(base64.b64decode(do.save_npz(80, *wanted)[do.parts.parcel]["content"])))
    assert len(set(npz["names"].tolist())) == (2 if view == "two" else 1)


def test_what_can_be_clicked_is_in_the_picture(studio, picture):
    aims = aims_of(studio, picture, "spots", 1, NOTHING)
    assert not aims.pixels
    assert [index for index, *_ in aims.boxes] == list(range(min(8, len(studio.offer(picture, "spots").names))))
    assert aims_of(studio, picture, "areas", 0, NOTHING).pixels
    assert aims_of(studio, picture, "small", 0, NOTHING) == Aims((), 0, False, (32, 32))
    assert bars_of(studio, picture, "words", 1, NOTHING).count("<button") == 2


def test_a_picture_in_which_nothing_is_found_is_shown_and_the_page_says_so():
    studio = Studio({"blind": small.detector(bias=-90.0)})
    with small.gradio_leaks(), gr.Blocks(analytics_enabled=False):
        do = Handlers(studio, Parts(studio, samples(), Turn()), samples())
    content = base64.b64encode(small.file()).decode()
    updates = do.receive("blind", "one", NOTHING, event(content=content))
    assert 'alt="the picture"' in updates[do.parts.stages["one"]]
    assert "waiting" not in updates[do.parts.stages["one"]]
    drawn = list(do.draw(Turn(), updates[do.parts.picture], "blind", "one", 0, None, ITSELF, "agf", []))
    assert "finds nothing in this picture" in drawn[-1][do.parts.notice]
    studio.close()


def test_a_link_keeps_the_texts_and_the_pixel():
    wish = Wish("words", "one", 1, 0, "agf", FIRST_METHODS, None, Given(("a & b", "c=d"), (9, 20)))
    link = read(write("sample", "cat", wish), ["words"], ["cat"])
    assert (link.given, link.index) == (wish.given, 1)
    for wrong in ("at=9", "at=9,x", "at=9,-2", "at=1,2,3", "texts=%0A", "texts=" + "a" * 301, "texts=" + "a%0A" * 9):
        with pytest.raises(LinkError, match="this link names"):
            read(f"sample=cat&class=1&{wrong}", ["words"], ["cat"])


def test_a_link_opens_a_pixel_and_texts_of_its_own(do):
    pixel = do.open_link("sample=cat&model=areas&class=1&at=9,20")
    assert pixel[do.parts.given].place == (9, 20)
    texts = do.open_link("sample=cat&model=words&class=2&texts=a%0Ab%0Ac")
    assert texts[do.parts.given].texts == ("a", "b", "c")
    assert texts[do.parts.bars].count("<button") == 3
    assert "no such text" in do.open_link("sample=cat&model=words&class=2")[do.parts.notice]


class Gives(torch.nn.Module):
    def __init__(self, give):
        super().__init__()
        self.give, self.weight = give, torch.nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.give(x)


def test_a_survey_tells_kinds_apart_and_repeats_the_library_s_errors():
    x = torch.rand(1, 3, 8, 8)

    def found(give, labels=None):
        seen = survey(Gives(give).eval(), x, Models(labels))
        return next(name for name in ("logits", "detections", "maps", "vector") if getattr(seen, name) is not None)

    dense, flat = torch.zeros(1, 4, 8, 8), torch.zeros(1, 4)
    assert found(lambda x: flat) == "logits"
    assert found(lambda x: {"logits": flat, "features": dense}) == "logits"
    assert found(lambda x: {"out": dense, "aux": dense}) == "maps"
    assert found(lambda x: dense) == "maps"
    assert found(lambda x: [{"boxes": torch.zeros(0, 4), "labels": torch.zeros(0), "scores": torch.zeros(0)}]) == (
        "detections"
    )
    with pytest.raises(ModelError, match="expected"):
        found(lambda x: torch.zeros(4))
    with pytest.raises(ModelError, match="4 classes but 2 labels"):
        found(lambda x: flat, ("a", "b"))
    with pytest.raises(ModelError, match="select the logits"):
        found(lambda x: (flat, flat))
    with pytest.raises(TargetError, match="give its labels"):
        found(lambda x: {"logits": torch.zeros(1, 5, 3), "pred_boxes": torch.zeros(1, 5, 4)})
    with pytest.raises(ModelError, match="NaN"):
        found(lambda x: flat + torch.nan)
