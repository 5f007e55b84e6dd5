"""What a picture shows, as outputs of the model: a data set's labels and a model's seldom have the same spelling.

>>> match_label("staffordshire_bull_terrier", imagenet(), 1000) == imagenet().index("Staffordshire bullterrier")
True
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from classlens.data.labels import imagenet, imagenet_wnids
from classlens.data.layouts import IGNORE, Dataset, Item, Mask, class_outputs, folded, label_index

_WNID = re.compile(r"n\d{8}")
_PETS_NAME = re.compile(r"(.+)_\d+")  # great_pyrenees_12

# Breeds of Oxford-IIIT Pet that ImageNet's synsets hold under another name. Twelve breeds have none at all.
_OTHER_NAMES = {
    "american pit bull terrier": "American Staffordshire terrier",
    "basset hound": "basset",
    "egyptian mau": "Egyptian cat",
    "english cocker spaniel": "cocker spaniel",
    "german shorthaired": "German short-haired pointer",
    "japanese chin": "Japanese spaniel",
    "leonberger": "Leonberg",
    "persian": "Persian cat",
    "scottish terrier": "Scotch terrier",
    "siamese": "Siamese cat",
    "wheaten terrier": "soft-coated wheaten terrier",
}
_SAME = {folded(name): folded(other) for name, other in _OTHER_NAMES.items()}


@dataclass(frozen=True)
class Truth:
    """What a picture shows: in the data set's words, and which outputs of the model that is (none, if it has none)."""

    label: str | None
    outputs: tuple[int, ...] = ()


class Labels:
    """How a data set's labels and a model's belong together.

    >>> Labels(pets, lite.labels, 1000).truth(pets.items[0], None)
    Truth(label='Abyssinian', outputs=())
    """

    def __init__(self, dataset: Dataset, labels: Sequence[str] | None, classes: int) -> None:
        self._dataset, self._labels, self._classes = dataset, labels, classes
        self._masked = class_outputs(dataset.classes, labels, classes)

    def truth(self, item: Item, mask: Mask | None) -> Truth:
        label = self._label(item)
        if label is not None:
            index = match_label(label, self._labels, self._classes)
            return Truth(_in_words(label), () if index is None else (index,))
        if mask is None or self._dataset.classes is None:
            return Truth(None)
        known = range(1, len(self._dataset.classes) + 1)
        shown = [value for value in np.unique(mask).tolist() if value in known]
        outputs = () if self._masked is None else tuple(self._masked[value - 1] for value in shown)
        return Truth(", ".join(self._dataset.classes[value - 1] for value in shown) or None, outputs)

    def object_mask(self, mask: Mask, predicted: int) -> Mask:
        """1 where the predicted class is, if the mask tells its classes apart and shows it; else every object."""
        found = (mask > 0).astype(np.uint8)
        if self._masked is not None and predicted in self._masked:
            value = self._masked.index(predicted) + 1
            if (mask == value).any():
                found = (mask == value).astype(np.uint8)
        found[mask == IGNORE] = IGNORE
        return found

    def _label(self, item: Item) -> str | None:
        if item.label is None and self._dataset.layout == "pets":
            named = _PETS_NAME.fullmatch(item.name.rpartition("/")[2].rpartition(".")[0])
            return named[1] if named else None
        return item.label


def match_label(label: str, labels: Sequence[str] | None, classes: int) -> int | None:
    """Which output a data set's label means: the same name but for case, spaces and hyphens, or a known other name.

    A name that several outputs have (crane: a bird, a machine) means none of them.
    """
    if labels is None or _WNID.fullmatch(label):
        return label_index(label, labels, classes)
    names = [folded(name) for name in labels]
    for wanted in (folded(label), _SAME.get(folded(label))):
        if names.count(wanted or "") == 1:
            return names.index(wanted or "")
    return None


def _in_words(label: str) -> str:
    """A wnid by its name; other labels are words already."""
    if label not in imagenet_wnids():
        return label.replace("_", " ")
    return imagenet()[imagenet_wnids().index(label)]
