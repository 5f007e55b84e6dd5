"""The two tables: rows that are what they say, resumed, and compared picture by picture."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sorting import net

from classlens import selfsup
from classlens.data.layouts import open_dataset
from classlens.errors import ClasslensError, DataError, MethodError
from classlens.evaluate import SettingsError, options_of_tests
from classlens.evaluate.store import Store
from classlens.evaluate.tests import perturbation, segmentation
from classlens.evaluate.tests.planted import place, plant
from classlens.evaluate.worker import framed_mask
from classlens.selfsup import evaluation
from classlens.selfsup.bank import BankError
from classlens.selfsup.evaluation import Settings, run


@pytest.fixture(scope="session")
def made(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bank") / "bank"
    selfsup.build_bank(net(), pictures, folder)
    return folder


def settings(test: str, masked: Path, made: Path, **more: Any) -> Settings:
    return Settings(test, str(masked), str(made), model="sorting:net", **more)


def rows(out: Path, test: str) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["method"], row["image"]): row for row in Store(out).read(test).to_pylist()}


def test_segmentation_scores_the_map_of_the_contrast(masked: Path, made: Path, tmp_path: Path) -> None:
    outcome = run(settings("segmentation", masked, made, methods=("agf", "lrp")), tmp_path / "run")
    found = rows(tmp_path / "run", "segmentation")
    assert len(found) == 9 * 2 * 3
    assert list(outcome.tables[0].rows) == [f"{m}, {mode}" for m in ("agf", "lrp") for mode in selfsup.MODES]
    dataset = open_dataset(masked)
    item = dataset.items[2]
    e = selfsup.explain(net(), item.image, made, "agf", "sum", both=False)
    mask = framed_mask(dataset, item, dataset.picture(item), net().preprocess)
    expected = segmentation.foreground_scores(e.maps[0, 0].numpy(), mask, signed=True)
    row = found["agf, sum", item.name]
    assert row["ap_soft"] == pytest.approx(expected.ap_soft, abs=1e-3)
    assert row["explained"] == int(e.targets[0, 0])
    text = (tmp_path / "run" / "table.md").read_text()
    assert "| agf, difference |" in text
    assert "agf: difference − none" in text
    assert "among 9 images, reading literal" in text


def test_perturbation_asks_for_the_class_the_network_predicts(masked: Path, made: Path, tmp_path: Path) -> None:
    run(settings("perturbation", masked, made, methods=("rap",), limit=4), tmp_path / "run")
    found = rows(tmp_path / "run", "perturbation")
    assert len(found) == 4 * 3
    dataset = open_dataset(masked)
    for item in dataset.select(4, 0):
        image = net().preprocess(dataset.picture(item))[None]
        with torch.no_grad():
            logits = net().model(image)
        row = found["rap, difference", item.name]
        assert row["predicted"] == int(logits.argmax())
        assert row["label"] is None
        e = selfsup.explain(net(), image, made, "rap", both=False)
        fill = perturbation.replacement(image, "black", net().preprocess)
        curves = perturbation.measure(
            lambda x: net().model(x).detach(), image, e.maps[:, 0], fill, logits.argmax(1), at_once=18
        )
        np.testing.assert_allclose(row["negative_probability"], curves.probability[0, :, 0], atol=1e-3)


def test_which_class_is_explained(masked: Path, made: Path, tmp_path: Path) -> None:
    same = settings("segmentation", masked, made, methods=("lrp",), modes=("difference",))
    run(same, tmp_path / "run")
    run(replace(same, explain="predicted"), tmp_path / "run")
    with torch.no_grad():
        predicted = {
            path.name: int(net().model(net().preprocess(path)[None]).argmax()) for path in (masked / "images").iterdir()
        }
    table = Store(tmp_path / "run").read("segmentation").to_pylist()
    assert len(table) == 18  # two settings, one folder
    explained = [row["explained"] == predicted[row["image"]] for row in table]
    assert 9 <= sum(explained) < 18  # all of one setting; of the other not all


def test_done_work_is_not_done_again(masked: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = settings("segmentation", masked, made, methods=("lrp",))
    expected = run(whole, tmp_path / "whole").tables[0]
    asked: list[int] = []
    explain = selfsup.explain

    def counted(*arguments: Any, **options: Any) -> Any:
        asked.append(len(arguments[1]))
        if len(asked) == 5:
            raise KeyboardInterrupt
        return explain(*arguments, **options)

    monkeypatch.setattr(evaluation, "explain", counted)
    with pytest.raises(KeyboardInterrupt):
        run(whole, tmp_path / "run")
    resumed = run(whole, tmp_path / "run").tables[0]
    assert sum(asked) - asked[4] == 27  # nothing twice but the batch that was interrupted
    asked.clear()
    run(whole, tmp_path / "run")
    assert not asked
    assert resumed.rows == expected.rows


def test_paired_differences_are_those_of_the_same_pictures(masked: Path, made: Path, tmp_path: Path) -> None:
    outcome = run(settings("segmentation", masked, made, methods=("agf",)), tmp_path / "run")
    found = rows(tmp_path / "run", "segmentation")
    names = {image for _, image in found}
    gains = [found["agf, sum", n]["ap_soft"] - found["agf, none", n]["ap_soft"] for n in names]
    line = next(line for line in outcome.paired.splitlines() if line.startswith("| agf: sum"))
    shown = float(line.split("|")[-2].split("[")[0])
    assert shown == pytest.approx(100 * np.mean(gains), abs=0.06)
    alone = run(settings("segmentation", masked, made, methods=("agf",), modes=("sum",)), tmp_path / "alone")
    assert alone.paired == ""


def test_planted_scores_the_map_on_what_was_planted(masked: Path, pictures: Path, tmp_path: Path) -> None:
    asked = Settings("planted", str(pictures), model="sorting:net", methods=("lrp",), modes=("difference", "none"))
    outcome = run(asked, tmp_path / "run")
    found = rows(tmp_path / "run", "segmentation")
    assert len(found) == 9 * 2
    assert outcome.tables[0].title == "Planted disc"
    dataset = open_dataset(pictures)
    for item in dataset.items[:2]:
        random = place(0, item.name)
        others = [other for other in dataset.items if other.name != item.name]
        other = others[random.integers(len(others))]
        plain, from_other = (net().preprocess(path.image) for path in (item, other))
        image, mask = plant(plain, from_other, random)
        e = selfsup.explain(net(), image[None], plain[None], "lrp", both=False)
        expected = segmentation.foreground_scores(e.maps[0, 0].numpy(), mask, signed=True)
        assert found["lrp, difference", item.name]["ap_soft"] == pytest.approx(expected.ap_soft, abs=1e-3)


def test_planting_changes_the_disc_alone() -> None:
    image, other = torch.zeros(3, 40, 60), torch.ones(3, 20, 30)
    planted, mask = plant(image, other, place(0, "a.png"))
    assert torch.equal(planted[0], torch.from_numpy(mask).float())
    assert mask.sum() == pytest.approx(np.pi * (0.2 * 40) ** 2, rel=0.05)  # the whole disc fits
    assert not np.array_equal(mask, plant(image, other, place(0, "b.png"))[1])
    assert not np.array_equal(mask, plant(image, other, place(1, "a.png"))[1])
    assert np.array_equal(mask, plant(image, other, place(0, "a.png"))[1])


def test_nothing_to_see_of_what_was_planted_is_told(tmp_path: Path) -> None:
    """Pictures of one colour: a disc of another one is no difference."""
    for name in ("0.png", "1.png"):
        Image.new("RGB", (32, 32), "grey").save(tmp_path / name)
    outcome = run(Settings("planted", str(tmp_path), model="sorting:net", methods=("lrp",)), tmp_path / "run")
    assert len(outcome.notes) == 2 * 3
    assert "no image other than" in outcome.notes[0]


def test_a_broken_picture_is_told(masked: Path, made: Path, tmp_path: Path) -> None:
    shutil.copytree(masked, tmp_path / "data")
    (tmp_path / "data" / "images" / "3.png").write_bytes(b"no picture")
    outcome = run(
        settings("segmentation", tmp_path / "data", made, methods=("lrp",), modes=("none",)), tmp_path / "run"
    )
    assert len(outcome.notes) == 1
    assert outcome.notes[0].startswith("3.png: ")
    assert len(rows(tmp_path / "run", "segmentation")) == 8


def test_what_does_not_go_together(masked: Path, pictures: Path, made: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="segmentation needs masks"):
        run(settings("segmentation", pictures, made), tmp_path / "run")
    with pytest.raises(MethodError, match="predicts no class"):
        settings("perturbation", masked, made, head="none")
    for wrong in ({"modes": ("other",)}, {"reading": "x"}, {"metric": "x"}, {"explain": "x"}):
        with pytest.raises(ClasslensError, match=r"unknown .*; choose from"):
            settings("segmentation", masked, made, **wrong)
    with pytest.raises(SettingsError, match="unknown --fill 'x'; choose from"):
        settings("perturbation", masked, made, options=options_of_tests(fill=("x",)))
    with pytest.raises(ClasslensError, match="'pointing'; choose from perturbation, segmentation, planted"):
        settings("pointing", masked, made)
    with pytest.raises(BankError, match="segmentation needs a bank"):
        Settings("segmentation", str(masked))
    with pytest.raises(BankError, match="planted needs no bank"):
        settings("planted", masked, made)
    with pytest.raises(MethodError, match="at least one"):
        settings("segmentation", masked, made, modes=())
