"""Choosing on drawn pictures: a network that looks at the square, and its masks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tagged
import torch

import classlens
from classlens.choice import Chosen, measure
from classlens.choice.contest import CANDIDATES, DEFAULT, wanted_methods
from classlens.cli import main
from classlens.data.divide import half_of
from classlens.errors import DataError, MethodError, ModelError
from classlens.evaluate import TESTS, SettingsError
from classlens.methods import METHODS

LIMIT, FEW = 14, 10  # enough for grids; as few as are allowed


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tagged.draw_world(tmp_path_factory.mktemp("choice"), 12)


@pytest.fixture(scope="module")
def chosen(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Chosen:
    out = tmp_path_factory.mktemp("run")
    return measure(tagged.make_honest(), pictures / "masked", out, methods="gradcam", limit=LIMIT)


def test_the_ranking_and_the_proof_use_different_pictures(chosen: Chosen) -> None:
    assert len(chosen.a.pictures) == len(chosen.b.pictures) == LIMIT
    assert {half_of(name) for name in chosen.a.pictures} == {"A"}
    assert {half_of(name) for name in chosen.b.pictures} == {"B"}
    for half in (chosen.a, chosen.b):
        for found in half.scores.values():
            for rows in found.rows.values():
                assert set(rows["image"].to_pylist()) <= set(half.pictures)


def test_the_masks_decide_if_there_are_any(chosen: Chosen) -> None:
    assert set(chosen.a.scores) == {"segmentation", "pointing", "repeatability"}
    assert chosen.choice.method == "agf"
    assert chosen.ranks["agf"] < chosen.ranks["gradcam"]
    assert "agf, the default, stays" in chosen.choice.text


def test_a_difference_is_the_mean_of_the_differences_of_the_pictures(chosen: Chosen) -> None:
    (duel,) = chosen.duels
    for test, found in duel.differences.items():
        rows, score = chosen.b.scores[test].rows, TESTS[test].picture_score
        by_name = [
            dict(zip(rows[method]["image"].to_pylist(), score(rows[method]), strict=True))
            for method in (duel.method, duel.against)
        ]
        assert by_name[0].keys() == by_name[1].keys()
        slow = np.mean([by_name[0][name] - by_name[1][name] for name in by_name[0]])
        assert found.value == pytest.approx(100 * slow)
        assert found.low - 1e-9 <= found.value <= found.high + 1e-9


def test_page_and_json_say_the_same(chosen: Chosen) -> None:
    page, document = chosen.files
    stored = json.loads(document.read_text())
    assert stored["method"] == chosen.choice.method
    assert stored["proof"]["half B"]["differences"][0]["against"] == "gradcam"
    assert stored["proof"]["data"]["half A"]["pictures"] == LIMIT
    text = page.read_text()
    assert chosen.choice.weights in text
    assert "Half B: paired differences" in text
    assert "http" not in text.partition("<body>")[2]


def test_a_second_run_resumes_and_gives_the_same(chosen: Chosen, pictures: Path) -> None:
    out = chosen.files[0].parent
    before = (out / "timings.jsonl").read_text()
    again = measure(tagged.make_honest(), pictures / "masked", out, methods="gradcam", limit=LIMIT)
    assert again.choice.to_json() == chosen.choice.to_json()
    assert (out / "timings.jsonl").read_text() == before  # nothing was computed


def test_a_method_that_half_b_confirms_takes_the_place_of_the_default(pictures: Path, tmp_path: Path) -> None:
    made = measure(tagged.make_cheat(), pictures / "plain", tmp_path, methods="gradcam", tests=["stability"], limit=FEW)
    assert made.choice.method == "gradcam"
    assert made.duels[0].ahead == ("repeatability",)
    assert "gradcam is chosen" in made.choice.text


def test_a_network_in_memory(pictures: Path) -> None:
    model = tagged.make_cheat()
    asked = {"methods": ["gradcam"], "tests": ["stability"], "limit": FEW, "preprocess": model.preprocess}
    choice = classlens.choose(model.model, pictures / "plain", **asked)
    x = torch.rand(1, 3, tagged.SIDE, tagged.SIDE)
    e = classlens.explain(model.model, x, method=choice)
    assert e.method == "gradcam"
    assert torch.equal(e.maps, classlens.explain(model.model, x, method="gradcam").maps)
    with pytest.raises(MethodError, match="made for other weights: run `classlens choose` again"):
        classlens.explain(tagged.make_honest().model, x, method=choice)
    with pytest.raises(ModelError, match="give preprocess="):
        classlens.choose(model.model, pictures / "plain")


# ---------------------------------------------------------------------------------------------------------- refused


def unsure() -> classlens.LoadedModel:
    """Finds every class equally likely in every picture."""
    model = tagged.make_honest()
    with torch.no_grad():
        model.model.head.weight.zero_()
        model.model.head.bias.zero_()
    return model


@pytest.mark.parametrize(
    ("asked", "error", "says"),
    [
        ({"methods": "gradcma"}, MethodError, "did you mean gradcam"),
        ({"methods": "centre,gradcam"}, MethodError, "centre is a control"),
        ({"methods": "gradcam(shalower=2)"}, MethodError, "no option 'shalower'"),
        ({"methods": "agf"}, MethodError, "nothing to choose from"),
        ({"methods": "legrad"}, MethodError, "nothing to choose from: legrad"),
        ({"tests": ["beauty"]}, SettingsError, "choose from deletion, masks, grids, stability"),
        ({"tests": []}, SettingsError, "no test was given"),
        ({"tests": ["masks"]}, DataError, "has no masks"),
        ({"limit": 5}, DataError, "has 5 pictures for half A; a choice needs at least 10 in each half"),
    ],
)
def test_bad_input_is_one_line(
    asked: dict[str, object], error: type[Exception], says: str, pictures: Path, tmp_path: Path
) -> None:
    with pytest.raises(error, match=says) as caught:
        measure(tagged.make_honest(), pictures / "plain", tmp_path, **{"limit": FEW, **asked})
    assert "\n" not in str(caught.value)


def test_pictures_without_the_classes_of_the_network(pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"recognises a class in 0 of 10 pictures of plain .*: give pictures of its"):
        measure(unsure(), pictures / "plain", tmp_path, limit=FEW)


def test_too_few_pictures_that_can_be_read(pictures: Path, tmp_path: Path) -> None:
    for file in sorted((pictures / "plain").iterdir()):
        (tmp_path / file.name).write_bytes(b"" if half_of(file.name) == "A" else file.read_bytes())
    with pytest.raises(DataError, match=r"only 0 of \d+ pictures of half A in .* can be read"):
        measure(tagged.make_honest(), tmp_path, tmp_path / "run", limit=FEW)


def test_grids_need_pictures_of_different_classes(pictures: Path, tmp_path: Path) -> None:
    """Red squares alone: the ranking does without pointing, and says so."""
    for k in range(4):  # enough of them, under other names
        for file in (pictures / "classes" / "red").iterdir():
            (tmp_path / f"{k}{file.name}").write_bytes(file.read_bytes())
    made = measure(
        tagged.make_honest(),
        tmp_path,
        tmp_path / "run",
        methods="gradcam",
        tests=["grids", "stability"],
        limit=FEW,
    )
    assert set(made.a.scores) == {"repeatability"}
    assert made.notes == (
        "the test grids is left out: half A has 0 of the 5 grids of confidently recognised pictures that it needs",
    )


def test_the_candidates_answer_every_question() -> None:
    """A method for `auto` must serve regions, boxes and contrasts too, or explain would refuse them."""
    assert all(METHODS[name].scalars and METHODS[name].family != "controls" for name in CANDIDATES)
    assert wanted_methods("gradcam, layercam") == (DEFAULT, "gradcam", "layercam")
    deciding = [test for test in TESTS.values() if test.chooses]
    assert [test.chooses for test in deciding] == ["deletion", "masks", "grids", "stability"]
    assert all(test.picture_score and test.picture_score_name for test in deciding)


# ----------------------------------------------------------------------------------------------------------- stored


@pytest.fixture
def card(tmp_path: Path) -> Path:
    model = tagged.make_cheat()
    document = {"architecture": "tagged:make_cheat", "weights": None, "labels": list(model.labels),
                "preprocess": model.preprocess.to_json(), "about": "a test"}  # fmt: skip
    (tmp_path / "card.json").write_text(json.dumps(document))
    return tmp_path / "card.json"


def test_the_command_writes_the_card_and_explain_uses_it(
    card: Path, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["choose", "-m", str(card.parent), "-d", str(pictures / "plain"), "-o", str(card.parent / "run")]
    main_ok([*command, "--methods", "gradcam", "--tests", "stability", "--limit", str(FEW)])
    assert "gradcam is chosen" in " ".join(capsys.readouterr().out.split())
    stored = json.loads(card.read_text())
    assert (stored["about"], stored["choice"]["method"]) == ("a test", "gradcam")
    model = classlens.load(card)
    picture = next((pictures / "plain").iterdir())
    assert classlens.explain(model, picture, method="auto").method == "gradcam"
    main_ok(["explain", str(picture), "-m", str(card), "-M", "auto", "-o", str(card.parent / "out"), "--json"])
    assert json.loads(capsys.readouterr().out)["method"] == "gradcam"
    main_ok(["report", "-d", str(pictures / "plain"), "-m", str(card), "-M", "auto", "--limit", "2",
             "-o", str(card.parent / "r.html")])  # fmt: skip
    assert "gradcam" in (card.parent / "r.html").read_text()
    with torch.no_grad():
        model.model.head.bias.add_(1)
    with pytest.raises(MethodError, match=r"the choice of gradcam for .* was made for other weights"):
        classlens.explain(model, picture, method="auto")


def main_ok(arguments: list[str]) -> None:
    """The command succeeds."""
    with pytest.raises(SystemExit) as done:
        main(arguments)
    assert done.value.code in (None, 0)
