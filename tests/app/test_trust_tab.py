"""The tab that tests a map, as the page calls it."""

import base64
import io
import re

import gradio as gr
import numpy as np
import pytest
import world as squares
from PIL import Image

from app import small
from classlens.app.choices import ITSELF
from classlens.app.layout import Parts
from classlens.app.page import Handlers
from classlens.app.studio import Studio, samples
from classlens.app.turn import Turn
from classlens.core.targets import RIVALS

RED = 0


def red(seed=2):
    buffer = io.BytesIO()
    Image.fromarray(squares.picture("red", seed)[0]).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def do():
    studio = Studio({"colours": squares.make(), "spots": small.detector()})
    with small.gradio_leaks(), gr.Blocks(analytics_enabled=False):
        yield Handlers(studio, Parts(studio, samples(), Turn()), samples())
    studio.close()


def drawn(do, index=RED, method="lrp", question=ITSELF, model="colours", seed=2):
    """Every state of the tab; nothing went wrong."""
    picture = do.studio.open(red(seed))
    updates = list(do.draw(Turn(), picture, model, "trust", index, 1, question, method, [method]))
    stage = do.parts.stages["trust"]
    assert not any(each.get(do.parts.notice) for each in updates)
    return [str(each[stage]) for each in updates if stage in each]


def test_the_map_comes_first_and_then_its_card(do):
    first, last = drawn(do)
    assert "Testing the map of <b>red</b> on the network" in first
    assert first.count('class="evidence"') == 1
    assert "waiting" in first
    card = do.studio.explain(do.studio.open(red()), "colours", RED, "lrp").trust()
    assert card.verdict == "trust"
    assert "You can trust this map of <b>red</b>" in last
    assert last.count('class="evidence"') == 2
    assert last.count('<li class="good">') == len(card.reasons)
    for reason in card.reasons:
        assert reason.text[1:] in last
    assert card.where in last


def test_a_bad_map_is_called_bad_with_the_reasons_that_decided(do):
    _, last = drawn(do, method="sobel")
    assert "Do not trust this map of <b>red</b>" in last
    because = re.search(r'class="because">([^<]*)', last)[1]
    assert "shuffled weights" in because
    assert 'aria-label="failed"' in last


def test_a_class_rather_than_its_rivals(do):
    _, last = drawn(do, question=RIVALS)
    assert "<b>red</b> rather than its rivals" in last


def test_faded_colours_are_never_stronger_than_those_of_the_map(do):
    _, last = drawn(do)
    found = re.findall(r'class="evidence" src="data:image/png;base64,([^"]+)', last)
    plain, faded = (np.asarray(Image.open(io.BytesIO(base64.b64decode(one))))[..., 3].astype(int) for one in found)
    assert (faded <= plain + 1).all()
    assert faded.sum() < plain.sum()


def test_a_second_look_takes_no_second_test(do, monkeypatch):
    drawn(do)
    monkeypatch.setattr("classlens.trust.card.measured", lambda *_: 1 / 0)
    _, last = drawn(do)
    assert "You can trust" in last


def test_a_map_without_uncertain_places_is_shown_alone(do, monkeypatch):
    monkeypatch.setattr("classlens.trust.measures.stability", lambda *_: ({}, None, {}))
    _, last = drawn(do, method="gradcam")
    assert last.count("<figure") == 1
    assert "stability could not be measured" in last.lower()


def test_a_box_is_refused_in_one_line(do):
    _, last = drawn(do, model="spots", index=0, seed=0)
    assert "cannot be tested" in last
    assert "trust judges maps of classes" in re.search(r'class="failed">([^<]*)', last)[1]
    assert "waiting" not in last


def test_downloads(do):
    wanted = (do.studio.open(red()), "colours", "trust", RED, 1, ITSELF, "lrp", ["lrp"])
    png, npz = (base64.b64decode(save(80, *wanted)[do.parts.parcel]["content"]) for save in (do.save_png, do.save_npz))
    assert Image.open(io.BytesIO(png)).width > 1000
    with np.load(io.BytesIO(npz)) as arrays:  # the raw map alone
        assert arrays["maps"].shape == (1, squares.SIDE, squares.SIDE)
