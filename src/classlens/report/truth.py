"""The true classes of an image: the data set's label and the model's outputs.

>>> Labels(pets, lite.labels, 1000).truth(item, None)
Truth(label='great pyrenees', outputs=(257,))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from classlens.data.labels import class_outputs, in_words, label_index
from classlens.data.layouts import Dataset, Item
from classlens.data.masks import IGNORE, Mask


@dataclass(frozen=True)
class Truth:
    """The label of an image, and the matching outputs of the model (none if the model has no such class)."""

    label: str | None
    outputs: tuple[int, ...] = ()


class Labels:
    """Matches the labels of a data set with those of a model.

    >>> Labels(pets, lite.labels, 1000).truth(pets.items[0], None)
    Truth(label='Abyssinian', outputs=())
    """

    def __init__(self, dataset: Dataset, labels: Sequence[str] | None, classes: int) -> None:
        self._dataset, self._labels, self._classes = dataset, labels, classes
        self._masked = class_outputs(dataset.classes, labels, classes)

    def truth(self, item: Item, mask: Mask | None) -> Truth:
        label = self._dataset.label(item)
        if label is not None:
            index = label_index(label, self._labels, self._classes)
            return Truth(in_words(label), () if index is None else (index,))
        if mask is None or self._dataset.classes is None:
            return Truth(None)
        known = range(1, len(self._dataset.classes) + 1)
        shown = [value for value in np.unique(mask).tolist() if value in known]
        outputs = () if self._masked is None else tuple(self._masked[value - 1] for value in shown)
        return Truth(", ".join(self._dataset.classes[value - 1] for value in shown) or None, outputs)

    def object_mask(self, mask: Mask, predicted: int) -> Mask:
        """1 where the predicted class is, if the mask has classes and contains it; otherwise every object."""
        found = (mask > 0).astype(np.uint8)
        if self._masked is not None and predicted in self._masked:
            value = self._masked.index(predicted) + 1
            if (mask == value).any():
                found = (mask == value).astype(np.uint8)
        found[mask == IGNORE] = IGNORE
        return found
