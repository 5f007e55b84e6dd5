"""The method that was chosen for a network: kept in its card, or in a small file, and used by `method="auto"`.

>>> stored(load("pets/card.json")).method            # "choice" in the card
'layercam'
>>> stored(load("torchvision:resnet50")).method      # torchvision-resnet50.choice.json in the current folder
'agf'

`classlens choose` measures and writes it. A choice holds for the weights that it was made for, and for no others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from classlens import files
from classlens.core.capture import unwrap
from classlens.core.method_text import AUTO
from classlens.errors import MethodError, ModelError
from classlens.models.cards import CARD
from classlens.models.loaded import LoadedModel
from classlens.models.loading import is_card
from classlens.models.network import fingerprint, short_name, weights_hash
from classlens.models.own import OwnPreprocess

_FIELD = "choice"  # of a card


@dataclass(frozen=True)
class Choice:
    """A method for one network, with the proof: tests, pictures, differences and their intervals, versions.

    >>> choice = classlens.choose(m, "photos/")
    >>> classlens.explain(m, "photo.jpg", method=choice)
    """

    method: str
    model: str  # the network's name, and a fingerprint of its weights and preprocessing
    weights: str  # the SHA-256 of its weights
    text: str  # the result in a few sentences
    proof: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """As it is stored."""
        return {**vars(self), "proof": dict(self.proof)}

    def save(self, model: LoadedModel) -> Path:
        """Store it for `method="auto"`: in the card of the network, or in a file in the current folder."""
        self.check(model)
        file = home_of(model.name)
        if not is_card(model.name):
            return files.write_json(file, self.to_json())
        return files.write_json(file, _read(file) | {_FIELD: self.to_json()})

    def check(self, model: nn.Module | LoadedModel) -> None:
        """Refuse a network with other weights, or with another preprocessing."""
        module = unwrap(model.model if isinstance(model, LoadedModel) else model)
        if weights_hash(module) != self.weights:
            raise _other(self, "weights")
        if not isinstance(model, LoadedModel) or isinstance(model.preprocess, OwnPreprocess):
            return  # what a function of one's own does cannot be compared
        made_with = self.model.rpartition("@")[2]
        if fingerprint(model, len(made_with)) != made_with:
            raise _other(self, "preprocessing")


def stored(model: LoadedModel) -> Choice:
    """The choice that is stored for a network."""
    file = home_of(model.name)
    found = _read(file) if file.exists() else {}
    if is_card(model.name):
        found = found.get(_FIELD, {})
    if not found:
        raise MethodError(
            f"no method has been chosen for {short_name(model.name)} (looked in {file}): run `classlens choose --model "
            f"{model.name} --data photos/`, or name a method"
        )
    try:
        choice = Choice(**found)
    except TypeError:
        raise ModelError(f"{file} holds no choice of a method: run `classlens choose` again") from None
    choice.check(model)
    return choice


def named(method: str | Choice, model: nn.Module | LoadedModel) -> str:
    """The name of the method that is meant: "auto" is the one that was chosen for this network, and only for it.

    >>> named("auto", load("pets/card.json"))
    'layercam'
    """
    if isinstance(method, Choice):
        method.check(model)
        return method.method
    if method != AUTO:
        return method
    if not isinstance(model, LoadedModel):
        raise MethodError(
            'method="auto" needs a network of classlens.load(); for one in memory, give the result of '
            "classlens.choose(model, data, preprocess=...) as the method"
        )
    return stored(model).method


def home_of(name: str) -> Path:
    """Where the choice for a network is stored.

    >>> home_of("torchvision:resnet50"), home_of("pets/")
    (PosixPath('torchvision-resnet50.choice.json'), PosixPath('pets/card.json'))
    """
    if not is_card(name):
        return Path(re.sub(r"[^\w.-]+", "-", short_name(name)) + ".choice.json")
    return Path(name) / CARD if Path(name).is_dir() else Path(name)


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {type(error).__name__}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{file} is not a JSON object")
    return found


def _other(choice: Choice, what: str) -> MethodError:
    name = choice.model.partition("@")[0]
    return MethodError(
        f"the choice of {choice.method} for {name} was made for other {what}: run `classlens choose` again for these, "
        "or name a method"
    )
