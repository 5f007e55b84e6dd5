from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from classlens.data.labels import imagenet
from classlens.data.layouts import IGNORE, VOC_CLASSES, Dataset, Item
from classlens.report.truth import Labels, Truth, match_label


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
    index = match_label(label, imagenet(), 1000)
    assert (None if index is None else imagenet()[index]) == name


def test_a_name_of_several_outputs_means_none() -> None:
    assert match_label("crane", ("crane", "cat", "Crane"), 3) is None  # a bird and a machine
    assert match_label("cat", ("crane", "cat", "Crane"), 3) == 1


def test_without_names_only_numbers_match() -> None:
    assert match_label("3", None, 10) == 3
    assert match_label("three", None, 10) is None


def test_the_breed_is_in_a_pets_file_name() -> None:
    pets = Dataset("pets", "pets", Path("."), ())
    labels = Labels(pets, imagenet(), 1000)
    pyrenees = labels.truth(Item("great_pyrenees_12.jpg", Path("x")), None)
    assert pyrenees == Truth("great pyrenees", (imagenet().index("Great Pyrenees"),))
    assert labels.truth(Item("Maine_Coon_7.jpg", Path("x")), None) == Truth("Maine Coon", ())
    assert labels.truth(Item("photo.jpg", Path("x")), None) == Truth(None)
    # In other layouts a name says nothing.
    other = Labels(Dataset("some", "masks", Path("."), ()), imagenet(), 1000)
    assert other.truth(Item("beagle_12.jpg", Path("x")), None) == Truth(None)


def test_a_wnid_is_shown_by_its_name() -> None:
    data = Dataset("some", "imagenet", Path("."), ())
    assert Labels(data, ("cat", "dog"), 2).truth(Item("a", Path("a"), label="n02099601"), None) == Truth(
        "golden retriever"
    )


def test_masks_of_classes_say_what_is_there() -> None:
    voc = Dataset("voc", "voc", Path("."), (), VOC_CLASSES)
    mask = np.array([[0, 15, 13], [13, IGNORE, 0]], np.uint8)  # a person on a horse
    labels = Labels(voc, None, 20)
    assert labels.truth(Item("a", Path("a"), Path("b")), mask) == Truth("horse, person", (12, 14))
    assert labels.object_mask(mask, 12).tolist() == [[0, 0, 1], [1, IGNORE, 0]]
    assert labels.object_mask(mask, 3).tolist() == [[0, 1, 1], [1, IGNORE, 0]]  # no boat: every object
    strange = Labels(voc, imagenet(), 1000)
    assert strange.truth(Item("a", Path("a"), Path("b")), mask) == Truth("horse, person", ())
    assert strange.object_mask(mask, 12).tolist() == [[0, 1, 1], [1, IGNORE, 0]]
