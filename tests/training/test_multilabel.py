"""Training: learns, stops, goes on after being killed, and leaves a model that every command takes."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.metrics import average_precision_score
from squares import LABELS

import classlens
from classlens.core.targets import resolve_targets
from classlens.errors import ClasslensError, TargetError
from classlens.evaluate import Settings, run
from classlens.evaluate.tests import idsds
from classlens.models import load
from classlens.training import Choices, Recipe, TrainingError, open_data, train_multilabel
from classlens.training.data import whole_view
from classlens.training.loop import SCHEDULES, Epoch, best_of, is_finished, mean_average_precision
from classlens.training.sources import Features, Pictures

RECIPE = Recipe(epochs=4, batch_size=8, learning_rate=3e-3, patience=4)  # the same in killed.py


def choices(voc: Path, freeze: bool) -> Choices:
    return Choices(data=str(voc), layout="voc", backbone="squares:net", freeze=freeze, hidden=(10,))


@pytest.fixture(scope="module")
def trained(voc: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learnt the colours."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    recipe = Recipe(epochs=25, batch_size=6, learning_rate=1e-2, weight_decay=0, patience=25)
    result = train_multilabel(replace(choices(voc, False), hidden=()), out, recipe)
    assert result.best.val_map > 0.95
    return out


def test_the_folder_of_a_run(trained: Path) -> None:
    card = json.loads((trained / "card.json").read_text())
    assert card["labels"] == list(LABELS)
    assert card["multilabel"] is True
    assert card["head"] == {"path": "classifier.3", "sizes": [16, 3], "dropout": 0.0}
    assert card["architecture"] == card["training"]["backbone"] == "squares:net"
    assert len(card["training"]["data_hash"]) == 16
    with (trained / "metrics.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 25
    assert max(float(row["val_map"]) for row in rows) == card["training"]["best"]["val_map"]
    assert (trained / "metrics.png").stat().st_size > 5000
    assert not list(trained.glob(".*"))  # no drafts are left


def test_a_run_is_a_model(trained: Path, voc: Path) -> None:
    """Its logits are those of its best epoch, whichever way they are computed."""
    loaded = load(str(trained))
    assert (loaded.labels, loaded.multilabel) == (LABELS, True)
    data = open_data(voc, "voc")
    views = [whole_view(example, data, loaded.preprocess) for example in data.val]
    images, targets = (torch.stack(t) for t in zip(*views, strict=True))
    state = load_file(trained / "model.safetensors")
    other = load("squares:net").model
    other.classifier[3] = torch.nn.Linear(16, 3)
    other.load_state_dict(state)
    with torch.no_grad():
        logits = loaded.model(images)
        assert torch.equal(logits, other.eval()(images))
    best = json.loads((trained / "card.json").read_text())["training"]["best"]
    assert mean_average_precision(logits.numpy(), targets.numpy() > 0) == best["val_map"]


def test_every_class_above_the_threshold_is_explained(trained: Path, voc: Path) -> None:
    loaded = load(str(trained))
    two = voc / "JPEGImages" / "val03.jpg"  # red and green
    sure = classlens.explain(loaded, two, classlens.top(3), "gradcam")
    chances = [sure.probability(0, k) for k in range(3)]
    threshold = (chances[1] + chances[2]) / 2
    e = classlens.explain(loaded, two, classlens.above(threshold), "gradcam")
    assert {e.label(index) for index in e.targets[0].tolist()} == {"red", "green"}
    torch.testing.assert_close(e.maps, sure.maps[:, :2], rtol=1e-4, atol=1e-5 * float(e.maps.abs().max()))
    assert chances == pytest.approx(e.logits[0].double().sigmoid().sort(descending=True).values.tolist())


def test_classes_above_a_threshold() -> None:
    logits = torch.tensor([[1.0, -1.0, 2.0], [3.0, -2.0, 0.1]])
    found, scalars = resolve_targets(classlens.above(0.5), logits)
    assert (found.tolist(), scalars) == ([[2, 0], [0, 2]], ())
    with pytest.raises(TargetError, match=r"1 to 2 classes above 0\.6: explain them one by one"):
        resolve_targets(classlens.above(0.6), logits)
    with pytest.raises(
        TargetError, match=r"no class of image 0 .* above 0\.9, the most likely has 0\.88: give a lower"
    ):
        resolve_targets(classlens.above(0.9), logits)
    with pytest.raises(TargetError, match="between 0 and 1"):
        classlens.above(1)


def test_a_run_is_scored_by_classes(trained: Path, voc: Path, tmp_path: Path) -> None:
    settings = Settings(
        tests=("segmentation",), data=(f"voc:{voc}",), methods=("gradcam", "random"), model=str(trained), threads=1
    )
    report = run(settings, tmp_path / "seg")
    assert "scored by classes" in report.notes[0]
    values = {method: [cell.value for cell in cells] for method, cells in report.tables[0].rows.items()}
    assert values["gradcam"][0] > values["random"][0]
    assert all(0 <= value <= 100 for cells in values.values() for value in cells)


@pytest.mark.parametrize("how", ["whole", "freeze"])
def test_killed_over_and_over_it_ends_with_the_same_numbers(voc: Path, tmp_path: Path, how: str) -> None:
    undisturbed = train_multilabel(choices(voc, how == "freeze"), tmp_path / "calm", RECIPE)
    assert len(undisturbed.history) == 4
    script = Path(__file__).with_name("killed.py")
    arguments = [sys.executable, str(script), str(voc), str(tmp_path / "killed"), how]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) >= 2
    for name in ("metrics.csv", "card.json", "model.safetensors"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "calm" / name).read_bytes(), name


def test_a_finished_run_stays_and_another_one_is_refused(voc: Path, tmp_path: Path) -> None:
    short = replace(RECIPE, epochs=1)
    first = train_multilabel(choices(voc, True), tmp_path / "run", short)
    written = (tmp_path / "run" / "state.pt").stat().st_mtime_ns
    assert train_multilabel(choices(voc, True), tmp_path / "run", short) == first
    assert (tmp_path / "run" / "state.pt").stat().st_mtime_ns == written
    with pytest.raises(TrainingError, match="epochs was 1, not 4"):
        train_multilabel(choices(voc, True), tmp_path / "run", RECIPE)
    (tmp_path / "run" / "state.pt").write_bytes(b"rubbish")
    with pytest.raises(TrainingError, match="is not a training state"):
        train_multilabel(choices(voc, True), tmp_path / "run", short)
    (tmp_path / "run" / "state.pt").unlink()
    with pytest.raises(TrainingError, match="holds a model from elsewhere"):
        train_multilabel(choices(voc, True), tmp_path / "run", short)


def test_frozen_training_leaves_the_body_alone(voc: Path, tmp_path: Path) -> None:
    train_multilabel(choices(voc, True), tmp_path / "run", replace(RECIPE, epochs=2))
    before, after = load("squares:net").model.state_dict(), load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.equal(after[key], before[key]) for key in before if key.startswith("features"))
    cached = sorted((tmp_path / "run" / "features").iterdir())
    assert len(cached) == 3  # validation, training, mirror images
    stamps = [file.stat().st_mtime_ns for file in cached]
    (tmp_path / "run" / "state.pt").unlink()
    (tmp_path / "run" / "card.json").unlink()
    train_multilabel(choices(voc, True), tmp_path / "run", replace(RECIPE, epochs=2))
    assert [file.stat().st_mtime_ns for file in cached] == stamps  # read, not computed again


def test_deleted_patches(voc: Path, tmp_path: Path) -> None:
    """Half of the training images lack one patch; validation images lack none; other settings do not resume the run."""
    data, preprocess = open_data(voc, "voc"), load("squares:net").preprocess
    plain, deleted = (Pictures(data, data.train, preprocess, 8, 0, delete_patches=on) for on in (False, True))
    changed = 0
    for epoch in range(4):
        for (before, _), (after, _) in zip(plain.batches(epoch), deleted.batches(epoch), strict=True):
            for one, other in zip(before, after, strict=True):
                same = [torch.equal(idsds.without(one, number), other) for number in range(16)]
                assert torch.equal(one, other) or any(same)
                changed += not torch.equal(one, other)
    assert 0.35 < changed / (4 * len(data.train)) < 0.65
    for (one, _), (other, _) in zip(plain.batches(None), deleted.batches(None), strict=True):
        assert torch.equal(one, other)
    asked = replace(choices(voc, False), delete_patches=True)
    train_multilabel(asked, tmp_path / "run", replace(RECIPE, epochs=1))
    with pytest.raises(TrainingError, match="delete_patches was True, not None"):
        train_multilabel(replace(asked, delete_patches=False), tmp_path / "run", replace(RECIPE, epochs=1))
    for part in ({"freeze": True}, {"train_from": "features"}):
        with pytest.raises(TrainingError, match="--delete-patches trains the whole network: leave out --freeze"):
            replace(asked, **part)


def test_a_loss_that_is_no_number(voc: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="use a smaller learning rate"):
        train_multilabel(choices(voc, False), tmp_path / "run", replace(RECIPE, learning_rate=1e30))


def test_recipes_that_make_no_sense() -> None:
    for bad in ({"schedule": "linear"}, {"epochs": 0}, {"learning_rate": 0.0}, {"weight_decay": -1.0}):
        with pytest.raises(ClasslensError):
            Recipe(**bad)  # type: ignore[arg-type]


def test_schedules() -> None:
    assert [SCHEDULES["cosine"](epoch, 10) for epoch in (0, 5)] == pytest.approx([1.0, 0.5])
    assert [SCHEDULES["step"](epoch, 100) for epoch in (0, 19, 20, 40)] == pytest.approx([1.0, 1.0, 0.2, 0.04])


def test_early_stopping() -> None:
    scores = [0.1, 0.5, 0.5, 0.4]
    history = [Epoch(i, 0.1, 1.0, 1.0, score, 0.0) for i, score in enumerate(scores)]
    assert best_of(history).epoch == 1  # the first of equals
    assert is_finished(history, Recipe(epochs=9, patience=2))
    assert not is_finished(history, Recipe(epochs=9, patience=3))
    assert is_finished(history, Recipe(epochs=4, patience=3))
    assert not is_finished([], Recipe())


def test_mean_average_precision_is_sklearns() -> None:
    random = np.random.default_rng(0)
    scores, truth = random.normal(size=(30, 5)).round(1), random.random((30, 5)) < 0.3  # with ties
    truth[:, 4] = False
    theirs = np.mean([average_precision_score(truth[:, k], scores[:, k]) for k in range(4)])
    assert mean_average_precision(scores, truth) == pytest.approx(theirs)


def test_batches(voc: Path) -> None:
    features = Features(torch.arange(7.0)[:, None], torch.zeros(7, 2), batch_size=3, seed=1)
    first, again, other = ([x[:, 0].tolist() for x, _ in features.batches(epoch)] for epoch in (0, 0, 1))
    assert first == again != other
    assert [len(batch) for batch in first] == [3, 3]  # a batch of one is left out: BatchNorm cannot take it
    assert len(features) == 2
    assert [x[:, 0].tolist() for x, _ in features.batches(None)] == [[0, 1, 2], [3, 4, 5], [6]]
    data = open_data(voc, "voc")
    pictures = Pictures(data, data.train, load("squares:net").preprocess, batch_size=10, seed=0)
    one, two = ([x for x, _ in pictures.batches(2)] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert [len(x) for x in one] == [10, 10, 4]
