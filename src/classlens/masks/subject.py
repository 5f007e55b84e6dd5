"""The subject of pseudo-labels: which classes are asked for, and which of them a picture shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from classlens.core.names import match
from classlens.data.labels import class_outputs, label_index
from classlens.data.layouts import Dataset, Item
from classlens.data.masks import IGNORE, classes_in
from classlens.errors import DataError, TargetError
from classlens.models.network import Network

OBJECT = "object"  # the class of whatever the network finds likeliest
DATA, MODEL = "data", "model"  # who says what a picture shows
PRESENT = 0.5  # the least probability of a class that a multi-label network finds


@dataclass(frozen=True)
class Asked:
    """The classes of the masks 1, 2, ..., with the outputs of the network for them; none: the likeliest class."""

    network: Network
    dataset: Dataset
    names: tuple[str, ...]
    outputs: tuple[int, ...]
    shown_by: str

    def present(self, item: Item, logits: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The classes in a picture (1, 2, ...), and the outputs that are explained for them."""
        if not self.outputs:
            return (1,), (int(logits.argmax()),)
        found = self._by_data(item) if self.shown_by == DATA else self._by_model(logits)
        return tuple(sorted(found)), tuple(self.outputs[index - 1] for index in sorted(found))

    def _by_model(self, logits: Tensor) -> set[int]:
        if not self.network.loaded.multilabel:
            likeliest = int(logits.argmax())
            return {i + 1 for i, output in enumerate(self.outputs) if output == likeliest}
        shares = logits.detach().double().sigmoid()
        return {i + 1 for i, output in enumerate(self.outputs) if shares[output] > PRESENT}

    def _by_data(self, item: Item) -> set[int]:
        said = [*item.classes, *([item.label] if item.label else [])]
        if said:
            outputs = [label_index(name, self.network.labels, self.network.classes) for name in said]
            return {self.outputs.index(output) + 1 for output in outputs if output in self.outputs}
        mask = self.dataset.mask(item)  # an image-level label is all that is taken from it
        return {self._of_mask[value] for value in classes_in(mask) if value in self._of_mask}

    @cached_property
    def _of_mask(self) -> dict[int, int]:
        """The value of a class in the masks of the data -> its value here."""
        if not self.outputs or self.dataset.classes is None:
            return {}
        labels, count = self.network.labels, self.network.classes
        theirs: Sequence[int | None] | None = class_outputs(self.dataset.classes, labels, count)
        if theirs is None:  # the network has more classes than the masks, or fewer
            theirs = [label_index(name, labels, count) for name in self.dataset.classes]
        return {value + 1: self.outputs.index(o) + 1 for value, o in enumerate(theirs) if o in self.outputs}

    def truth(self, item: Item) -> NDArray[np.uint8]:
        """The drawn mask, with the values of the asked classes; other classes are background."""
        mask = self.dataset.mask(item)
        found = np.zeros_like(mask)
        if self.outputs:
            for theirs, mine in self._of_mask.items():
                found[mask == theirs] = mine
        else:
            found[(mask > 0) & (mask != IGNORE)] = 1
        found[mask == IGNORE] = IGNORE
        return found

    @property
    def measurable(self) -> bool:
        """Whether the drawn masks say where the asked classes are."""
        if not self.dataset.has_masks:
            return False
        return not self.outputs or len(set(self._of_mask.values())) == len(self.names)


def asked(network: Network, dataset: Dataset, classes: Sequence[str] | None, shown_by: str | None) -> Asked:
    """The classes by name; by default those of the masks, or else the object."""
    whole = class_outputs(dataset.classes, network.labels, network.classes)
    if classes is None and whole is not None and dataset.classes is not None:
        names, outputs = tuple(dataset.classes), tuple(whole)
    elif classes is None and not dataset.has_masks:
        raise TargetError(f"name the classes: --classes cat,dog, or --classes {OBJECT} for whatever the network sees")
    elif classes is None or tuple(classes) == (OBJECT,):
        names, outputs = (OBJECT,), ()
    else:
        names, outputs = tuple(classes), tuple(_output(network, name) for name in classes)
        if len(set(outputs)) < len(outputs):
            raise TargetError("a class is named twice; name each once")
    says = any(i.classes or i.label for i in dataset.items) or (dataset.has_masks and dataset.classes is not None)
    if shown_by == DATA and not says:
        raise DataError(f"{dataset.name} does not say what a picture shows; use --labels {MODEL}")
    return Asked(network, dataset, names, outputs, shown_by or (DATA if says else MODEL))


def _output(network: Network, name: str) -> int:
    if network.labels:
        return match(network.labels, name)
    if name.isdigit() and int(name) < network.classes:
        return int(name)
    raise TargetError(f"the network has no names for its {network.classes} classes; give numbers, not {name!r}")
