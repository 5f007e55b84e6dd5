"""Where a choice is stored, found, and refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tagged
import torch

import classlens
from classlens.errors import MethodError, ModelError
from classlens.models import Choice, LoadedModel, Preprocess
from classlens.models.choice import home_of, named, stored
from classlens.models.network import Network, weights_hash


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    monkeypatch.chdir(tmp_path)
    return replace(tagged.make_honest(), name="tagged:make_honest")


def choice_for(model: LoadedModel, method: str = "gradcam") -> Choice:
    return Choice(method, Network(model).id, weights_hash(model.model), "because", {"seed": 0})


def test_a_network_without_a_card_has_a_file_in_the_current_folder(model: LoadedModel) -> None:
    assert choice_for(model).save(model) == Path("tagged-make_honest.choice.json")
    assert stored(model) == choice_for(model)
    assert named("auto", model) == "gradcam"
    x = torch.rand(1, 3, tagged.SIDE, tagged.SIDE)
    e = classlens.explain(model, x, method="auto")
    assert e.method == "gradcam"
    assert torch.equal(e.maps, classlens.explain(model, x, method="gradcam").maps)


@pytest.mark.parametrize("name", ["torchvision:resnet50", "hf:google/vit-base", "efficientnet-lite0", "a.b:net"])
def test_every_name_has_a_file(name: str) -> None:
    file = home_of(name)
    assert file.name == str(file)
    assert file.name.endswith(".choice.json")


def test_without_a_choice_the_error_says_what_to_run(model: LoadedModel) -> None:
    with pytest.raises(MethodError, match="run `classlens choose --model tagged:make_honest --data photos/`") as caught:
        classlens.explain(model, torch.zeros(1, 3, 40, 40), method="auto")
    assert "looked in tagged-make_honest.choice.json" in str(caught.value)
    with pytest.raises(MethodError, match=r"give the result of classlens.choose\(model, data, preprocess=...\)"):
        classlens.explain(model.model, torch.zeros(1, 3, 40, 40), method="auto")


def test_other_weights_and_other_preprocessing_are_refused(model: LoadedModel) -> None:
    choice_for(model).save(model)
    smaller = replace(model, preprocess=Preprocess(resize=40, crop=40))
    with pytest.raises(MethodError, match="for tagged:make_honest was made for other preprocessing"):
        named("auto", smaller)
    with torch.no_grad():
        model.model.head.bias[0] += 1e-3
    with pytest.raises(MethodError, match="choice of gradcam for tagged:make_honest was made for other weights"):
        named("auto", model)
    with pytest.raises(MethodError, match="other weights"):
        choice_for(replace(tagged.make_cheat())).save(model)  # nor is it stored for the wrong network


def test_a_transform_of_ones_own_is_not_compared(model: LoadedModel) -> None:
    own = replace(model, preprocess=lambda picture: torch.zeros(3, 40, 40))
    assert named(choice_for(model), own) == "gradcam"


@pytest.mark.parametrize("content", ["{", "[]", '{"method": "agf"}'])
def test_a_file_that_is_no_choice_is_refused(content: str, model: LoadedModel) -> None:
    home_of(model.name).write_text(content)
    with pytest.raises(ModelError, match=r"tagged-make_honest.choice.json"):
        stored(model)


def test_an_unknown_method_in_a_file_is_refused(model: LoadedModel) -> None:
    choice_for(model, "gradcma").save(model)
    with pytest.raises(MethodError, match="there is no method 'gradcma'"):
        classlens.explain(model, torch.zeros(1, 3, 40, 40), method="auto")


def test_auto_is_refused_where_it_has_no_meaning(model: LoadedModel) -> None:
    with pytest.raises(MethodError, match="auto needs `classlens choose`, and serves explain, report and the page"):
        classlens.compare(model, torch.zeros(1, 3, 40, 40), methods=["auto", "agf"])


def test_a_choice_in_a_card_must_be_an_object(model: LoadedModel, tmp_path: Path) -> None:
    card = {"architecture": "tagged:make_honest", "weights": None, "labels": None, "preprocess": {}, "choice": "agf"}
    (tmp_path / "card.json").write_text(json.dumps(card))
    with pytest.raises(ModelError, match="choice must be an object"):
        classlens.load(tmp_path / "card.json")
