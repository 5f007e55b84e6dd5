from __future__ import annotations

from pathlib import Path

import numpy as np

from classlens.data.find import VOC_CLASSES
from classlens.data.labels import imagenet
from classlens.data.layouts import Dataset, Item
from classlens.data.masks import IGNORE
from classlens.report.truth import Labels, Truth


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
