"""Class names: the ImageNet lists, and how a text finds its class or says why not."""

from __future__ import annotations

import pytest

from classlens.core.names import match
from classlens.data.labels import imagenet, imagenet_wnids
from classlens.errors import TargetError

PETS = ("cat", "tabby cat", "caterpillar", "Great_Dane", "mastiff", "mastiff", "bulldog", "bull snake", "C++ (bug)")


def test_the_imagenet_lists_are_in_step() -> None:
    assert len(imagenet()) == len(imagenet_wnids()) == 1000
    assert list(imagenet_wnids()) == sorted(set(imagenet_wnids()))
    known = {"n01440764": "tench", "n02099601": "golden retriever", "n07930864": "cup", "n15075141": "toilet tissue"}
    for wnid, name in known.items():
        assert imagenet()[imagenet_wnids().index(wnid)] == name


@pytest.mark.parametrize(
    ("text", "index"),
    [
        ("cat", 0),  # the whole name, though it is a word of another
        ("CAT", 0),
        (" tabby  cat ", 1),
        ("tabby", 1),  # a word
        ("bull", 7),  # a word of one name, only a part of another
        ("cater", 2),  # a part
        ("great dane", 3),
        ("Great_Dane", 3),
        ("c++", 8),  # no regular expression
        ("3", 3),
        ("007", 7),
    ],
)
def test_match(text: str, index: int) -> None:
    assert match(PETS, text) == index


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mastiff", "fits 2 classes.*: 4 mastiff, 5 mastiff"),
        ("at", "fits 4 classes.*: 0 cat, 1 tabby cat, 2 caterpillar, 3 Great_Dane"),
        ("caterpilar", "no class is named 'caterpilar'; nearest: 2 caterpillar"),
        ("submarine", "no class is named 'submarine'; give an index"),
        ("9", "no class 9: the model has 9 classes, 0 to 8"),
        ("9" * 5000, "no class 9+: the model has 9 classes"),
        ("  ", "empty"),
        ("-1", "no class is named '-1'"),
    ],
)
def test_match_says_what_to_do(text: str, message: str) -> None:
    with pytest.raises(TargetError, match=message) as error:
        match(PETS, text)
    assert "\n" not in str(error.value)


def test_at_most_eight_candidates_are_listed() -> None:
    with pytest.raises(TargetError, match=r"fits 30 classes.*: 0 dog 0, .*, 7 dog 7, \.\.\.$"):
        match([f"dog {i}" for i in range(30)], "dog")


def test_imagenet_names_that_differ_in_case_alone_are_ambiguous() -> None:
    with pytest.raises(TargetError, match="264 Cardigan, 474 cardigan"):
        match(imagenet(), "cardigan")
