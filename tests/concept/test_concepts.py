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
from classlens.concept import choose, evidence
from classlens.concept.directions import fitted
from classlens.concept.gather import Subject
from classlens.data.layouts import open_dataset


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
    assert [one.share for one in found.concepts] == sorted((one.share for one in found.concepts), reverse=True)
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


def test_an_index_of_other_weights_is_not_used(photos: Path, tmp_path: Path) -> None:
    first = classlens.concepts(make(), None, "thing", photos, index=tmp_path)
    refitted = make()
    with torch.no_grad():
        refitted.model.head.weight[0, 2] = 0.0  # the tag does not speak for the thing any more
    again = classlens.concepts(refitted, None, "thing", photos, index=tmp_path)
    assert again.forwards > 0
    assert {int(one.direction.argmax()) for one in first.concepts} == {0, 1, 2}
    assert {int(one.direction.argmax()) for one in again.concepts} == {0, 1}


def test_a_folder_that_changes_between_runs_is_read_again(tmp_path: Path) -> None:
    folder, index = draw_parts(tmp_path / "photos"), tmp_path / "index"
    before = classlens.concepts(make(), None, "thing", folder, index=index)
    Image.fromarray(picture(20)).save(folder / "thing20.png")
    (folder / "thing00.png").unlink()
    (folder / "thing02.png").unlink()
    after = classlens.concepts(make(), None, "thing", folder, index=index)
    assert (before.pictures, after.pictures) == (12, 11)
    names = {reference.name for one in after.concepts for reference in one.references}
    assert names.isdisjoint({"thing00.png", "thing02.png"})


def test_the_parts_and_the_rest_sum_to_the_map_of_the_class(photos: Path) -> None:
    subject = Subject(make(), 0, "lrp-epsilon-plus-flat")
    tape = subject.record(subject.read(open_dataset(photos), open_dataset(photos).items[5]))
    flow = subject.flow(tape, next(iter(subject.layers(tape).values())))
    relevance = flow.relevance.transpose(0, 1)
    every = fitted(relevance + 0.2 * relevance.roll(1, 2), 2).parts(relevance)
    rest = flow.relevance.sum(0) - every.sum(0)
    assert float(rest.abs().sum()) > 0.05 * float(flow.relevance.abs().sum())  # so that the rest matters
    whole, *parts = flow.through([flow.relevance.sum(0), *every, rest])
    torch.testing.assert_close(torch.stack(parts).sum(0), whole, atol=1e-5 * float(whole.abs().max()), rtol=1e-4)


def test_what_is_carried_is_measured_in_pictures_that_chose_nothing(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[list[int], int]] = []
    measured = choose.carried_by

    def noted(subject: Any, dataset: Any, gathered: Any, candidates: Any, rows: Any, progress: Any) -> Any:
        asked.append((list(rows), len(candidates)))
        return measured(subject, dataset, gathered, candidates, rows, progress)

    monkeypatch.setattr(choose, "carried_by", noted)
    classlens.concepts(make(), None, "thing", photos)
    find, select, judge = choose.thirds(12)
    assert sorted([*find, *select, *judge]) == list(range(12))
    *choosing, (rows, candidates) = asked
    assert (rows, candidates) == (judge, 2)  # of the class, and of its rival
    assert all(chosen == select for chosen, _ in choosing)


def test_evidence_that_does_not_come_near_the_logit_is_said(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert classlens.concepts(make(), photos / "thing01.png", "thing", photos).notes == ()
    monkeypatch.setattr(evidence, "NEAR", -1.0)
    (note,) = classlens.concepts(make(), photos / "thing01.png", "thing", photos).notes
    assert "may miss its logit" in note


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
