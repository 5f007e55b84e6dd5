"""The tab with the concepts of a class, as the page calls it."""

import base64
import io
import shutil

import gradio as gr
import numpy as np
import parts as world
import pytest
from PIL import Image

from app import small
from classlens.app.choices import ITSELF
from classlens.app.layout import Parts
from classlens.app.links import LinkError, read
from classlens.app.page import Handlers
from classlens.app.studio import NOTHING, Studio, samples
from classlens.app.turn import Turn
from classlens.errors import DataError, MethodError

upload = world.file


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return world.draw_parts(tmp_path_factory.mktemp("parts") / "photos")


@pytest.fixture(scope="module")
def studio(photos, tmp_path_factory):
    models = {"parts": world.make(), "spots": small.detector()}
    made = Studio(models, {"photos": str(photos)}, tmp_path_factory.mktemp("index"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def do(studio):
    with small.gradio_leaks(), gr.Blocks(analytics_enabled=False):
        return Handlers(studio, Parts(studio, samples(), Turn()), samples())


def drawn(do, picture, index=0, model="parts", folder="photos"):
    found = {}
    wish = (model, "concepts", index, 1, ITSELF, "agf", ["agf"])
    for updates in do.draw(Turn(), picture, *wish, NOTHING, folder):
        found |= updates
    return found


def test_the_figure_and_the_table_of_shares(do, studio):
    picture = studio.open(upload(1))
    page = drawn(do, picture)[do.parts.stages["concepts"]]
    assert page.count('scope="row">concept ') == 3
    assert page.count('class="drawn"') == 1
    assert "What parts found for <b>thing</b>" in page
    assert "found in 12 pictures" in page
    shares = [one.share for one in studio.concepts(picture, "parts", 0, "photos").concepts]
    assert [f"<td>{100 * share:.0f} %</td>" in page for share in shares] == [True] * 3


def test_the_second_picture_takes_what_the_server_knows(studio):
    studio.concepts(studio.open(upload(1)), "parts", 0, "photos")
    # One forward pass, and five of the network above the layer.
    assert studio.concepts(studio.open(upload(3)), "parts", 0, "photos").forwards == 1 + 5


def test_downloads_are_those_of_the_concepts(do, studio):
    wanted = (studio.open(upload(1)), "parts", "concepts", 0, 1, ITSELF, "agf", ["agf"], NOTHING, "photos")
    png, npz = (base64.b64decode(save(80, *wanted)[do.parts.parcel]["content"]) for save in (do.save_png, do.save_npz))
    assert Image.open(io.BytesIO(png)).width > 800
    with np.load(io.BytesIO(npz)) as arrays:
        assert arrays["maps"].shape == (3, world.SIDE, world.SIDE)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"index": 1}, "takes only 2 of 14 pictures of photos for 'nothing'; concepts need at least 6"),
        ({"folder": "/etc"}, "here is no such folder; pick one from the list"),
        ({"folder": ""}, "here is no such folder; pick one from the list"),
    ],
)
def test_what_cannot_be_shown_is_said_in_one_line(do, studio, change, words):
    found = drawn(do, studio.open(upload(1)), **change)
    assert words in str(found[do.parts.notice]).replace("&#39;", "'")
    assert do.parts.stages["concepts"] not in found


def test_a_request_cannot_name_a_folder_of_the_server(studio, photos):
    with pytest.raises(DataError, match="no such folder"):
        studio.concepts(studio.open(upload(1)), "parts", 0, str(photos))


def test_a_folder_that_is_gone_is_named_without_its_place(tmp_path):
    gone = world.draw_parts(tmp_path / "gone", count=1)
    studio = Studio({"parts": world.make()}, {"gone": str(gone)})
    shutil.rmtree(gone)
    with pytest.raises(DataError, match=r"^there is no data at gone: check the path$"):
        studio.concepts(studio.open(upload(1)), "parts", 0, "gone")


def test_a_detector_has_no_classes_to_divide(studio):
    picture = studio.open(upload(1))
    with pytest.raises(MethodError, match="concepts are of classes, and this network finds boxes"):
        studio.concepts(picture, "spots", 0, "photos")


def test_a_page_without_pictures_of_its_own_has_no_such_tab():
    with small.gradio_leaks(), gr.Blocks(analytics_enabled=False):
        parts = Parts(small.studio(), samples(), Turn())
    assert "concepts" not in parts.tabs
    with pytest.raises(LinkError, match="the view 'concepts', which this page does not have"):
        read("sample=cat&class=1&view=concepts", ["small"], ["cat"], parts.tabs)
    with pytest.raises(LinkError, match="the folder 'mine', which this page does not have"):
        read("sample=cat&class=1&view=concepts&pictures=mine", ["small"], ["cat"], ["concepts"], ["photos"])
