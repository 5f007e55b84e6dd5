"""Heads in cards: described, built, put in place, read back."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from classlens.errors import ModelError
from classlens.models import Preprocess, load, write_card
from classlens.models.cards import read_card
from classlens.models.heads import Head, replace_head

NETWORK = """
from torch import nn

def convolutions():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 9))
"""
HEAD = Head("4", (16, 6, 3), 0.5)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder with `my_convolutions:convolutions` in it."""
    (tmp_path / "my_convolutions.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("my_convolutions", None)


def write(folder: Path) -> nn.Module:
    model = load("my_convolutions:convolutions").model
    replace_head(model, HEAD)
    write_card(
        folder / "run", model, architecture="my_convolutions:convolutions", preprocess=Preprocess(8, 8),
        labels=("a", "b", "c"), head=HEAD, multilabel=True,
    )  # fmt: skip
    return model


def test_a_card_with_a_head_of_its_own_gives_the_same_logits(folder: Path) -> None:
    model = write(folder)
    loaded = load("run")
    images = torch.rand(2, 3, 8, 8)
    with torch.no_grad():
        assert torch.equal(loaded.model(images), model(images))
    assert (loaded.labels, loaded.multilabel) == (("a", "b", "c"), True)
    assert not any(module.training for module in loaded.model.modules())
    other = load("run", weights=None)  # random ones, of the same shapes
    assert other.model(images).shape == (2, 3)
    assert not torch.equal(other.model(images), model(images))


def test_cards_with_heads_that_cannot_be(folder: Path) -> None:
    write(folder)
    card = json.loads((folder / "run" / "card.json").read_text())

    def broken(**changes: object) -> Path:
        (folder / "broken.json").write_text(json.dumps(card | changes))
        return folder / "broken.json"

    with pytest.raises(ModelError, match="needs a weight file"):
        load(broken(weights="default"))
    with pytest.raises(ModelError, match="no module 'fc'"):
        load(broken(head={"path": "fc", "sizes": [16, 3]}))
    with pytest.raises(ModelError, match="another shape"):
        load(broken(head={"path": "4", "sizes": [16, 5, 3]}, weights="run/model.safetensors"))
    with pytest.raises(ModelError, match="multilabel must be true or false"):
        read_card(broken(multilabel="yes"))
    with pytest.raises(ModelError, match="training must be an object"):
        read_card(broken(training=[]))


def test_layers_of_a_head() -> None:
    assert isinstance(Head("fc", (4, 2)).build(), nn.Linear)
    kinds = [type(layer).__name__ for layer in HEAD.build().children()]
    assert kinds == ["Linear", "ReLU", "Dropout", "Linear"]


def test_heads_that_make_no_sense() -> None:
    for bad in (
        {"sizes": (3,)},
        {"sizes": (3, 0)},
        {"sizes": (3, 10**30)},
        {"sizes": (99999, 99999, 2)},
        {"path": ""},
        {"dropout": 1.0},
    ):
        with pytest.raises(ModelError, match="head: "):
            Head(**{"path": "fc", "sizes": (3, 2)} | bad)  # type: ignore[arg-type]
    for bad in ([], {"path": "fc"}, {"path": 3, "sizes": [1, 2]}, {"path": "fc", "sizes": [1, 2], "more": 1}):
        with pytest.raises(ModelError, match="head must be"):
            Head.from_json(bad)
    with pytest.raises(ModelError, match="dropout must be a number"):
        Head.from_json({"path": "fc", "sizes": [1, 2], "dropout": "x"})
    with pytest.raises(ModelError, match="no module 'head'"):
        replace_head(nn.Sequential(nn.Linear(2, 2)), Head("head", (2, 2)))
