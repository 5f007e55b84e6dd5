"""Concepts of a network that was set by hand: they are known, and a planted shortcut is one of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parts import CELL, SIDE, TAG, draw_parts, make, picture
from PIL import Image
from torch import nn
from typer.testing import CliRunner

import classlens
from classlens.cli import app
from classlens.cli.commands import main


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_parts(tmp_path_factory.mktemp("parts") / "photos")


@pytest.fixture(scope="module")
def found(photos: Path) -> classlens.Concepts:
    return classlens.concepts(make(), None, "thing", photos)


def test_the_known_concepts_are_found(found: classlens.Concepts) -> None:
    assert [one.name for one in found.concepts] == ["concept 1", "concept 2", "concept 3"]
    assert {int(one.direction.argmax()) for one in found.concepts} == {0, 1, 2}
    assert min(float(one.direction.max()) for one in found.concepts) > 0.95
    assert found.pictures == 12
    assert found.carried > 0.9
    assert found.stability > 0.95


def test_a_planted_shortcut_is_a_concept_of_its_own(found: classlens.Concepts) -> None:
    (tag,) = [one for one in found.concepts if int(one.direction.argmax()) == 2]
    row, column = TAG
    for reference in tag.references:
        top, left, bottom, right = reference.box
        assert top <= CELL * row + 2
        assert left <= CELL * column + 2
        assert (bottom, right) == (SIDE, SIDE)
        assert int(reference.name[5:7]) % 2 == 1
        assert reference.crop[-2, -2].argmax() == 2


def test_a_picture_has_the_concepts_that_are_in_it(photos: Path) -> None:
    untagged = classlens.concepts(make(), photos / "thing00.png", "thing", photos)
    tagged = classlens.concepts(make(), photos / "thing01.png", "thing", photos)
    assert sorted(int(one.direction.argmax()) for one in untagged.concepts if one.share > 0.05) == [0, 1]
    assert sorted(int(one.direction.argmax()) for one in tagged.concepts if one.share > 0.05) == [0, 1, 2]
    for one in tagged.concepts:
        assert "thing01.png" not in [reference.name for reference in one.references]
        where = divmod(int(one.map.abs().flatten().argmax()), SIDE)
        pixel = picture(1)[where].astype(int)
        assert pixel.argmax() == int(one.direction.argmax())
    total = torch.stack([one.map for one in tagged.concepts]).sum(0)
    torch.testing.assert_close(total, tagged.map, atol=0.1 * float(tagged.map.abs().max()), rtol=0)


def test_a_stopped_run_resumes_and_a_finished_one_costs_nothing(photos: Path, tmp_path: Path) -> None:
    index = tmp_path / "index"

    def stop(what: str, done: int, total: int) -> None:
        if what == "reference pictures":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        classlens.concepts(make(), None, "thing", photos, index=index, progress=stop)
    assert sorted(file.name.split("-")[0] for file in index.iterdir()) == ["predictions", "relevance"]
    resumed = classlens.concepts(make(), None, "thing", photos, index=index)
    again = classlens.concepts(make(), None, "thing", photos, index=index)
    fresh = classlens.concepts(make(), None, "thing", photos)
    assert again.forwards == again.sweeps == 0
    assert 0 < resumed.forwards < fresh.forwards
    for one, two in zip(again.concepts, fresh.concepts, strict=True):
        torch.testing.assert_close(one.direction, two.direction)
        assert [r.box for r in one.references] == [r.box for r in two.references]


def test_a_damaged_index_is_refused(photos: Path, tmp_path: Path) -> None:
    classlens.concepts(make(), None, "thing", photos, index=tmp_path)
    next(tmp_path.glob("concepts-*")).write_bytes(b"half")
    with pytest.raises(classlens.ClasslensError, match=r"^a file of the index .* is damaged"):
        classlens.concepts(make(), None, "thing", photos, index=tmp_path)


def test_what_is_saved(found: classlens.Concepts, tmp_path: Path) -> None:
    files = found.save(tmp_path)
    assert [path.name for path in files] == ["concepts.png", "concepts.npz", "concepts.json"]
    with Image.open(files[0]) as drawn:
        assert drawn.size[0] > 800
    with np.load(files[1]) as arrays:
        assert arrays["directions"].shape == (3, 4)


# ------------------------------------------------------------------------------------------------------- bad input


class Dense(nn.Module):
    """No layer has places."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3 * SIDE * SIDE, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.flatten(1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": "nothing"}, "takes only 2 of 14 pictures of photos for 'nothing'; concepts need at least 6"),
        ({"layer": "head"}, "is not a spatial feature map; name an earlier layer"),
        ({"layer": "heat"}, "no operation was recorded in a layer 'heat'"),
        ({"method": "agf"}, "the relevance of agf cannot be followed in parts"),
        ({"target": "thong"}, "thing"),
        ({"count": 0}, "count and limit are at least 1"),
    ],
)
def test_bad_input_is_one_line(photos: Path, change: dict[str, Any], message: str) -> None:
    given = {"target": "thing"} | change
    target = given.pop("target")
    with pytest.raises(classlens.ClasslensError, match=r"^[^\n]+$") as raised:
        classlens.concepts(make(), None, target, photos, **given)
    assert message in str(raised.value)


def test_a_class_that_never_occurs(tmp_path: Path) -> None:
    photos = draw_parts(tmp_path / "things", nothing=0)
    with pytest.raises(classlens.ClasslensError, match=r"^the network takes none of 12 pictures of things for"):
        classlens.concepts(make(), None, "nothing", photos)


def test_a_network_without_feature_maps(photos: Path) -> None:
    model = make()
    flat = classlens.LoadedModel("dense", Dense().eval(), model.preprocess, model.labels)
    with torch.no_grad():
        flat.model.head.bias.copy_(torch.tensor([1e4, 0.0]))  # every picture is taken for a thing
    with pytest.raises(classlens.ClasslensError, match="no feature map 8 times smaller"):
        classlens.concepts(flat, None, "thing", photos)


# ------------------------------------------------------------------------------------------------------ the command


def test_the_command(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "worlds"))
    words = [
        "concepts",
        str(photos / "thing01.png"),
        "--class",
        "thing",
        "--data",
        str(photos),
        "--model",
        "parts:make",
    ]
    result = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "out")], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "concept 1" in result.output
    assert "forward passes" in result.output
    assert (tmp_path / "out" / "concepts.png").is_file()


def test_the_command_says_in_one_line_what_is_wrong(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "worlds"))
    words = ["concepts", "--class", "nothing", "--data", str(photos), "--model", "parts:make", "--out", str(tmp_path)]
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert errors == [
        "error: the network takes only 2 of 14 pictures of photos for 'nothing'; concepts need at least 6"
    ]
