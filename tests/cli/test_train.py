"""`classlens train`, `classlens data` and `classlens explain --multilabel`, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from classlens import cli
from classlens.cli.options import Layout
from classlens.training import LAYOUTS


def command(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stopped:
        cli.main([str(argument) for argument in arguments])
    return int(stopped.value.code or 0)


def test_from_data_to_maps(voc: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Train, explain every class that is found, score: with nothing but the command."""
    run, out = tmp_path / "run", tmp_path / "out"
    options = ("--backbone", "squares:net", "--epochs", 25, "--batch-size", 6, "--weight-decay", 0, "--device", "cpu")
    assert command("train", "multilabel", "--data", voc, "--out", run, *options, "--learning-rate", 1e-2) == 0
    said = capsys.readouterr()
    assert "validation mAP" in said.out
    assert "pictures: no images were skipped" in said.out
    assert "epoch 2 of 25, best mAP" in said.err
    picture = voc / "JPEGImages" / "val03.jpg"
    explain = ("explain", picture, "--model", run, "--method", "gradcam", "--device", "cpu", "--out", out)
    assert command(*explain, "--multilabel", "--threshold", 0.01, "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)["images"]
    assert sum(entry["probability"] for entry in found["classes"]) > 1.2  # two classes, each sure of itself
    assert str(out / "val03" / "segmentation.png") in found["files"]
    with Image.open(out / "val03" / "segmentation.png") as figure:
        assert figure.width > 1000
    assert command(*explain, "--multilabel", "--threshold", 0.999, "--out", tmp_path / "none") == 2
    assert "give a lower threshold" in capsys.readouterr().err
    assert command(*explain, "--multilabel", "--top", 2) == 2
    assert "give --multilabel, or questions such as --region" in capsys.readouterr().err


def test_multilabel_needs_such_a_network(voc: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = voc / "JPEGImages" / "val03.jpg"
    assert command("explain", picture, "--model", "squares:net", "--multilabel", "--device", "cpu") == 2
    assert "squares:net is not a multi-label network" in capsys.readouterr().err


def test_hidden_layers_are_numbers(voc: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("train", "multilabel", "--data", voc, "--out", tmp_path / "run", "--hidden", "many") == 2
    assert "--hidden must be written as 512" in capsys.readouterr().err


def test_compose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "annotations" / "trimaps").mkdir(parents=True)
    trimap = np.full((40, 40), 2, np.uint8)
    trimap[8:32, 8:32], trimap[10:30, 10:30] = 3, 1
    for breed in ("pug", "Sphynx", "boxer"):
        for number in range(2):
            Image.new("RGB", (40, 40), "grey").save(tmp_path / "images" / f"{breed}_{number}.jpg")
            Image.fromarray(trimap).save(tmp_path / "annotations" / "trimaps" / f"{breed}_{number}.png")
    two = tmp_path / "two"
    assert command("data", "compose", "--data", tmp_path, "--out", two, "--train", 3, "--val", 1, "--side", 64) == 0
    assert "3 + 1 scenes of 3 breeds, no images were skipped" in capsys.readouterr().out
    assert len(list((two / "JPEGImages").iterdir())) == 4
    assert command("data", "compose", "--data", tmp_path, "--out", two) == 2
    assert "exists: choose a new folder" in capsys.readouterr().err


def test_the_layouts_on_offer_are_those_that_can_train() -> None:
    assert [layout.value for layout in Layout] == list(LAYOUTS)
