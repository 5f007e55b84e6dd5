"""Class names: the ImageNet lists, and how a text finds its class or says why not."""

from __future__ import annotations

import pytest

from classlens.core.names import match
from classlens.data.find import VOC_CLASSES
from classlens.data.labels import check_class_names, class_outputs, imagenet, imagenet_wnids, label_index
from classlens.errors import DataError, TargetError

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
        ("mastiff", "matches 2 classes.*: 4 mastiff, 5 mastiff"),
        ("at", "matches 4 classes.*: 0 cat, 1 tabby cat, 2 caterpillar, 3 Great_Dane"),
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
    with pytest.raises(TargetError, match=r"matches 30 classes.*: 0 dog 0, .*, 7 dog 7, \.\.\.$"):
        match([f"dog {i}" for i in range(30)], "dog")


def test_imagenet_names_that_differ_in_case_alone_are_ambiguous() -> None:
    with pytest.raises(TargetError, match="264 Cardigan, 474 cardigan"):
        match(imagenet(), "cardigan")


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("great_pyrenees", "Great Pyrenees"),
        ("staffordshire_bull_terrier", "Staffordshire bullterrier"),
        ("Siamese", "Siamese cat"),
        ("german_shorthaired", "German short-haired pointer"),
        ("n02099601", "golden retriever"),
        ("Sphynx", None),
        ("cat", None),
        ("n00000001", None),
    ],
)
def test_labels_match_but_for_spelling(label: str, name: str | None) -> None:
    index = label_index(label, imagenet(), 1000)
    assert (None if index is None else imagenet()[index]) == name


def test_a_name_of_several_outputs_means_none() -> None:
    assert label_index("crane", ("crane", "cat", "Crane"), 3) is None  # a bird and a machine
    assert label_index("cat", ("crane", "cat", "Crane"), 3) == 1


def test_without_names_only_numbers_match() -> None:
    assert label_index("3", None, 10) == 3
    assert label_index("three", None, 10) is None


def test_which_output_a_label_means() -> None:
    assert label_index("n02099601", imagenet(), 1000) == imagenet().index("golden retriever")
    assert label_index("n02099601", None, 1000) == imagenet().index("golden retriever")
    assert label_index("n02099601", ("cat", "dog"), 2) is None
    assert label_index("Dog", ("cat", "dog"), 2) == 1
    assert label_index("7", None, 10) == 7
    assert label_index("7", None, 5) is None
    assert label_index(None, None, 5) is None


def test_which_outputs_are_the_masks_classes() -> None:
    renamed = {"tvmonitor": "tv monitor", "pottedplant": "Potted plant", "diningtable": "dining-table"}
    names = tuple(renamed.get(name, name) for name in reversed(VOC_CLASSES))
    outputs = class_outputs(VOC_CLASSES, names, 20)
    assert outputs is not None
    assert [names[i] for i in outputs[:3]] == ["aeroplane", "bicycle", "bird"]
    assert names[outputs[19]] == "tv monitor"
    assert class_outputs(VOC_CLASSES, None, 20) == tuple(range(20))
    assert class_outputs(VOC_CLASSES, imagenet(), 1000) is None
    assert class_outputs(None, None, 20) is None
    assert class_outputs(("cat", "dog"), ("dog", "cow"), 2) is None


@pytest.mark.parametrize("names", [("cat", "Cat"), ("tv monitor", "dog", "tv_monitor"), ("a", "a")])
def test_class_names_that_nobody_can_tell_apart(names: tuple[str, ...]) -> None:
    with pytest.raises(DataError, match="differ at most in case or spaces"):
        check_class_names(names)
