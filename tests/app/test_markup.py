import re

import torch
from PIL import Image

from app import small
from classlens.app import markup
from classlens.app.actions import Blank, Panel


def panel(title="cat", signed=True, index=0, **more):
    return Panel(title, "14 %", torch.randn(8, 8), signed, index, **more)


def test_bars_mark_the_chosen_class_and_are_as_long_as_it_is_likely():
    html = markup.bars([(7, "cat", 0.25, "25.0 %"), (3, "dog", 0.0001, "<0.1 %")], chosen=3)
    rows = re.findall(r"<button.*?</button>", html)
    assert ["chosen" in row for row in rows] == [False, True]
    assert ['data-index="7"' in rows[0], 'data-index="3"' in rows[1]] == [True, True]
    assert "width:25.00%" in rows[0]
    assert "&lt;0.1 %" in rows[1]


def test_names_are_text_and_never_html():
    nasty = "<script>alert(1)</script>"
    view = Image.new("RGB", (8, 8))
    for html in (
        markup.bars([(0, nasty, 0.5, nasty)], 0, nasty),
        markup.notice(nasty),
        markup.found(nasty, [panel(nasty)]),
        markup.stage("lead", view, [panel(nasty), Blank(nasty, nasty), panel(nasty, index=-1, ends=(nasty, nasty))]),
        markup.sample_row({nasty: small.file()}),
    ):
        assert "<script" not in html
        assert "&lt;script" in html


def test_a_stage_shows_each_panel_over_the_grey_picture():
    view = Image.new("RGB", (30, 20), "red")
    html = markup.stage("lead", view, [panel("cat"), panel("dog"), Blank("rap"), Blank("rise", "too slow")])
    assert html.count('class="evidence"') == 2
    assert html.count('class="waiting"') == 1
    assert "too slow" in html
    assert "--ratio:30/20" in html
    assert markup.stage("lead", view, [panel()], picture=True).count("<figure") == 2


def test_the_legend_says_what_each_kind_of_colour_means_once():
    both = markup.legend([panel(), panel("dog"), panel("cat", signed=False, ends=("nothing", "for it"))])
    assert both.count('<div class="legend') == 3  # the row and two legends
    assert "blue: against it" in both
    assert "red: for it" in both
    assert "yellow: for it" in both
    apart = markup.stage("lead", Image.new("RGB", (8, 8)), [panel("difference", index=-1, ends=("dog", "cat"))])
    assert "blue: dog" in apart
    assert "red: cat" in apart


def test_a_notice_is_one_line_with_a_capital():
    assert "This file\n".strip() in markup.notice("this file\nis  broken")
    assert "This file is broken" in markup.notice("this file\nis  broken")
    assert markup.notice("") == ""


def test_each_view_has_a_heading_of_its_own():
    for view, text in (
        ("layers", "How the evidence for <b>a&lt;b</b> builds up, from deep layers to the picture"),
        ("methods", "<b>a&lt;b</b> by several methods"),
        ("two", "<b>a&lt;b</b>, <b>c</b>, and where their maps differ"),
    ):
        assert markup.lead(view, "a<b", "c", []) == text
