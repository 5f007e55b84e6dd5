"""A view as text: what is written is read again, and what a page does not have is refused in one line."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from classlens.app.actions import VIEWS, Wish
from classlens.app.links import Link, LinkError, read, write
from classlens.app.studio import FIRST_METHODS
from classlens.methods import METHODS

MODELS, SAMPLES = ("lite0", "torchvision:resnet50"), ("cat and espresso", "cat")


def reads(text):
    return read(text, MODELS, SAMPLES)


def test_a_fresh_view_is_a_short_link():
    wish = Wish("lite0", "one", 285, 282, "agf", FIRST_METHODS)
    assert write("sample", "cat", wish) == "sample=cat&class=285"
    assert reads("") == Link()


@settings(deadline=None, derandomize=True, database=None)  # the same examples everywhere, however busy the machine is
@given(
    model=st.sampled_from(MODELS),
    view=st.sampled_from(list(VIEWS)),
    index=st.integers(0, 999),
    rival=st.integers(0, 999),
    method=st.sampled_from(list(METHODS)),
    methods=st.lists(st.sampled_from(list(METHODS)), min_size=1, max_size=12, unique=True),
    than=st.one_of(st.none(), st.just("rivals"), st.integers(0, 999)),
)
def test_what_is_written_is_read_again(model, view, index, rival, method, methods, than):
    wish = Wish(model, view, index, rival, method, tuple(methods), than)
    link = reads(write("sample", "cat and espresso", wish, model))
    assert (link.sample, link.picture, link.model, link.view) == ("cat and espresso", None, model, view)
    assert (link.index, link.method, link.rather_than) == (index, method, wish.rivals)
    if view == "two":
        assert link.rival == rival
    if view == "methods":
        assert link.methods == wish.methods


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sample=dog", "the sample 'dog', which this page does not have"),
        ("model=vgg16", "the network 'vgg16'"),
        ("sample=cat&view=three", "the view 'three'"),
        ("sample=cat&method=magic", "the method 'magic'"),
        ("sample=cat&view=methods&methods=agf,magic", "the method 'magic'"),
        ("sample=cat&class=tabby", "is not a number"),
        ("sample=cat&class=-1", "is not a number"),
        ("sample=cat&class=²", "is not a number"),
        ("sample=cat&class=1&than=self", "is not a number"),
        ("sample=cat&with=3", "a rival but no class"),
    ],
)
def test_a_link_that_the_page_cannot_follow_is_refused(text, words):
    with pytest.raises(LinkError, match="this link names") as error:
        reads(text)
    assert words in str(error.value)
