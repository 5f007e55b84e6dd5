from __future__ import annotations

import csv
import json
import pickle
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from odd import LATIN, REFUSED, SHOWN, odd_files, rename_latin
from PIL import Image
from world import make

import classlens
from classlens.data.divide import half_of
from classlens.errors import MethodError
from classlens.evaluate import DataError, Settings, SettingsError, options_of_tests, run
from classlens.evaluate.plan import make_plan, work
from classlens.evaluate.store import Store, schemas
from classlens.evaluate.worker import Worker
from classlens.methods import registry
from classlens.methods.registry import Result

METHODS = ("agf-release", "gradcam", "random")


def settings(*data: Path, **changes: Any) -> Settings:
    values: dict[str, Any] = {
        "tests": ("perturbation", "segmentation", "pointing", "sanity"), "everything": True, "methods": METHODS,
        "data": tuple(map(str, data)), "model": "world:make", "batch_size": 3, "threads": 1, "limit": 7,
    }  # fmt: skip
    of_tests = {"sanity_images": 4, "shapes": ("2x1", "3x1")}
    of_tests |= {name: changes.pop(name) for name in list(changes) if name not in Settings.__dataclass_fields__}
    return Settings(**(values | changes), options=options_of_tests(**of_tests))


def rows(out: Path) -> dict[str, str]:
    """Everything that was found, as text: NaN is the same as NaN there."""
    return {test: repr(Store(out).read(test).to_pylist()) for test in schemas()}


@pytest.fixture(scope="module")
def undisturbed(labelled: Path, masked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed")
    run(settings(labelled, masked), out, command=["classlens", "evaluate", "all"])
    return out


def test_each_data_set_serves_what_it_was_made_for(undisturbed: Path) -> None:
    store = Store(undisturbed)
    count = {test: rows for test in schemas() if (rows := len(store.read(test)))}  # the other tests have none
    assert count == {
        "prediction": 7 + 7, "perturbation": 3 * 7, "segmentation": 3 * 7, "pointing": 3 * (6 + 3), "sanity": 3 * 4,
    }  # fmt: skip
    assert set(store.read("perturbation")["data"].to_pylist()) == {"classes"}
    assert set(store.read("segmentation")["data"].to_pylist()) == {"masked"}


def test_what_the_rows_say_is_true(undisturbed: Path, labelled: Path) -> None:
    """One row, done again by hand."""
    found = Store(undisturbed).read("perturbation").to_pylist()
    row = next(r for r in found if r["method"] == "gradcam")
    loaded = make()
    image = loaded.preprocess(labelled / row["image"])[None]
    evidence = classlens.explain(loaded, image, torch.tensor([[row["explained"]]]), "gradcam").maps[0, 0]
    with torch.no_grad():
        for step, fraction in enumerate(np.arange(1, 10) / 10):
            count = int(evidence.numel() * fraction)
            threshold = evidence.flatten().kthvalue(count).values
            kept = image * (evidence > threshold)
            if int((evidence <= threshold).sum()) == count:  # no ties at this step
                probability = float(loaded.model(kept).double().softmax(1)[0, row["explained"]])
                assert row["negative_probability"][step] == pytest.approx(probability, rel=1e-5)
                assert row["negative_predicted"][step] == int(loaded.model(kept).argmax())
    assert row["label"] == row["predicted"] == row["explained"]


def test_the_tables_rank_a_method_above_chance(undisturbed: Path) -> None:
    with (undisturbed / "table.csv").open() as file:
        found = list(csv.DictReader(file))
    values = {(row["test"], row["method"], row["metric"]): float(row["value"]) for row in found if row["value"]}
    negative = {method: values["perturbation", method, "negative AUC, accuracy"] for method in METHODS}
    assert negative["gradcam"] > negative["random"] + 10
    assert values["segmentation", "gradcam", "AP (soft)"] > 80 > 30 > values["segmentation", "random", "AP (soft)"]
    assert values["pointing", "gradcam", "share in the right cell"] > 95
    assert 30 < values["pointing", "random", "share in the right cell"] < 55
    for what in ("random network", "other class"):  # noise knows of neither
        assert values["sanity", "random", f"{what}, rank"] == pytest.approx(1)
    assert values["sanity", "gradcam", "random network, rank"] < 0.9


def test_what_is_written(undisturbed: Path) -> None:
    page = (undisturbed / "report.html").read_text()
    assert "Where the methods disagree most" in page
    sources = re.findall(r"(?:src|href)=(.{12})", page)
    assert len(sources) > 10
    assert set(sources) == {"'data:image/"}  # everything is inside
    with Image.open(undisturbed / "curves.png") as curves:
        assert curves.width > 1000
    markdown = (undisturbed / "table.md").read_text()
    assert "### Pointing game 2x1: classes" in markdown
    assert "Chance is 50.0" in markdown
    assert re.search(r"\| \*\*\d+\.\d \[\d+\.\d, \d+\.\d\]\*\* \|", markdown)
    assert str(undisturbed) not in markdown
    (entry,) = json.loads((undisturbed / "manifest.json").read_text())["runs"]
    assert entry["command"] == ["classlens", "evaluate", "all"]
    assert entry["finished"] > entry["begun"]
    assert entry["versions"]["torch"] == torch.__version__
    assert entry["model"]["id"].startswith("world:make@")
    assert [(d["name"], d["pictures"], d["of"]) for d in entry["data"]] == [("classes", 7, 24), ("masked", 7, 24)]
    assert all(d["hash"] for d in entry["data"])
    assert entry["seconds"]["overhead"] > 0


def test_the_same_command_again_does_nothing(undisturbed: Path, labelled: Path, masked: Path, tmp_path: Path) -> None:
    out = tmp_path / "again"
    shutil.copytree(undisturbed, out)
    table = (out / "table.md").read_text()
    run(settings(labelled, masked), out)
    assert rows(out) == rows(undisturbed)
    assert (out / "table.md").read_text() == table
    seconds = json.loads((out / "manifest.json").read_text())["runs"][-1]["seconds"]
    assert "method" not in seconds


def test_a_larger_limit_and_another_method_add_rows(
    undisturbed: Path, labelled: Path, masked: Path, tmp_path: Path
) -> None:
    out = tmp_path / "more"
    shutil.copytree(undisturbed, out)
    run(settings(labelled, masked, limit=9, methods=(*METHODS, "lrp")), out)
    before, after = (Store(path).read("perturbation").to_pylist() for path in (undisturbed, out))
    assert len(after) == 4 * 9
    keep = [row for row in after if any(row["method"] == b["method"] and row["image"] == b["image"] for b in before)]
    assert repr(keep) == repr(before)
    # And a smaller one reports on fewer, without losing any.
    report = run(settings(labelled, masked, limit=4), out)
    assert report.tables[0].rows["gradcam"][0].n == 4
    assert len(Store(out).read("perturbation")) == 4 * 9


def test_the_batch_size_does_not_change_what_is_found(
    undisturbed: Path, labelled: Path, masked: Path, tmp_path: Path
) -> None:
    quiet = ("agf-release", "gradcam", "random")
    run(settings(labelled, masked, batch_size=7, methods=quiet), tmp_path)
    for test in ("perturbation", "segmentation", "pointing"):
        ours, theirs = (
            [r for r in Store(out).read(test).to_pylist() if r["method"] in quiet] for out in (tmp_path, undisturbed)
        )
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            for name, value in one.items():
                if isinstance(value, float):
                    assert value == pytest.approx(other[name], abs=1e-3)


def test_broken_pictures_are_counted_and_named(labelled: Path, masked: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(masked, data)
    names = sorted(path.name for path in (data / "images").iterdir())
    (data / "images" / names[0]).write_bytes(b"no picture")
    (data / "images" / names[1]).write_bytes(b"")
    (data / "masks" / names[2]).unlink()
    Image.new("L", (9, 9)).save(data / "masks" / names[3])
    out = tmp_path / "out"
    report = run(settings(data, tests=("segmentation",), everything=False, limit=None), out)
    assert report.tables[0].rows["gradcam"][0].n == 20
    assert "4 images could not be used; table.md names them." in report.notes
    skipped = {row["image"]: row["reason"] for row in Store(out).read("skipped").to_pylist()}
    assert sorted(skipped) == names[:4]
    assert "9x9" in skipped[names[3]]
    assert str(tmp_path) not in " ".join(skipped.values())
    text = (out / "table.md").read_text()
    assert "### Skipped (4)" in text
    assert all(name in text for name in names[:4])
    before = rows(out)
    run(settings(data, tests=("segmentation",), everything=False, limit=None), out)
    assert rows(out) == before


def test_a_method_that_fails_on_one_picture_costs_no_other(
    labelled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = registry.METHODS["gradcam"]

    def fragile(case: registry.Case) -> Result:
        if (case.tape.logits.argmax(1) == 2).any():  # blue
            raise MethodError("blue is too much")
        return entry.run(case)

    def lost(case: registry.Case) -> Result:
        result = entry.run(case)
        result.maps[case.tape.logits.argmax(1) == 1] = torch.nan  # green
        return result

    monkeypatch.setitem(registry.METHODS, "fragile", replace(entry, name="fragile", run=fragile))
    monkeypatch.setitem(registry.METHODS, "lost", replace(entry, name="lost", run=lost))
    chosen = settings(
        labelled, methods=("gradcam", "fragile", "lost"), tests=("perturbation", "sanity"), limit=None, sanity_images=99
    )
    report = run(chosen, tmp_path)
    assert {m: found[0].n for m, found in report.tables[0].rows.items()} == {"gradcam": 24, "fragile": 16, "lost": 16}
    assert {m: found[0].n for m, found in report.tables[1].rows.items()} == {"gradcam": 24, "fragile": 16, "lost": 16}
    assert any("fragile gave no map for 8 images: blue is too much" in note for note in report.notes)
    found = {r["image"]: r for r in Store(tmp_path).read("perturbation").to_pylist() if r["method"] == "fragile"}
    whole = {r["image"]: r for r in Store(tmp_path).read("perturbation").to_pylist() if r["method"] == "gradcam"}
    assert all(found[name]["negative_predicted"] == whole[name]["negative_predicted"] for name in found)


def test_the_labelled_class_can_be_explained(labelled: Path, tmp_path: Path) -> None:
    moved = tmp_path / "data"
    shutil.copytree(labelled, moved)
    (moved / "red" / "0.png").replace(moved / "blue" / "99.png")  # labelled blue, seen as red
    run(settings(moved, tests=("perturbation",), explain="target", limit=None, methods=("gradcam",)), tmp_path / "out")
    found = {r["image"]: r for r in Store(tmp_path / "out").read("perturbation").to_pylist()}
    wrong = found["blue/99.png"]
    assert (wrong["label"], wrong["predicted"], wrong["explained"]) == (2, 0, 2)


def test_three_fills_are_three_tables(labelled: Path, tmp_path: Path) -> None:
    report = run(settings(labelled, tests=("perturbation",), fill=("black", "blur", "mean"), limit=3), tmp_path)
    assert [table.config["fill"] for table in report.tables] == ["black", "blur", "mean"]
    assert len(Store(tmp_path).read("perturbation")) == 3 * 3 * 3


def test_methods_can_be_set_against_one_of_them(labelled: Path, masked: Path, tmp_path: Path) -> None:
    report = run(settings(labelled, masked, tests=("segmentation",), against="random", half="B", limit=None), tmp_path)
    table, differences = report.tables
    assert differences.title == "Segmentation (object against background), method − random"
    assert set(differences.rows) == set(METHODS) - {"random"}
    for method, found in differences.rows.items():
        expected = [
            mine.value - chance.value for mine, chance in zip(table.rows[method], table.rows["random"], strict=True)
        ]
        assert [value.value for value in found] == pytest.approx(expected)
    names = set(Store(tmp_path).read("segmentation")["image"].to_pylist())
    assert {half_of(name) for name in names} == {"B"}
    assert "half B" in (tmp_path / "table.md").read_text()
    assert "method − random" in (tmp_path / "report.html").read_text()


def test_what_does_not_go_together_is_said(labelled: Path, masked: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="segmentation needs masks, and classes"):
        run(settings(labelled, tests=("segmentation",), everything=False), tmp_path)
    with pytest.raises(DataError, match="--explain target needs labels"):
        run(settings(masked, tests=("perturbation",), everything=False, explain="target"), tmp_path)
    with pytest.raises(SettingsError, match="--fill 'pink'"):
        settings(labelled, fill=("pink",))
    with pytest.raises(SettingsError, match="columns x rows"):
        settings(labelled, shapes=("4",))
    with pytest.raises(MethodError, match="did you mean gradcam"):
        settings(labelled, methods=("gradcan",))
    assert not (tmp_path / "rows").exists()


def test_pictures_without_labels_have_agreement_alone(masked: Path, tmp_path: Path) -> None:
    report = run(settings(masked, tests=("perturbation",), everything=False), tmp_path)
    assert [metric.name for metric in report.tables[0].metrics] == [
        "negative AUC, agreement",
        "positive AUC, agreement",
    ]
    assert "no labels that are classes of the model" in report.notes[0]


def test_a_multi_label_classifier_is_read_by_classes(tmp_path: Path) -> None:
    """Two squares of two VOC classes; the network's maps of each are compared with the mask's classes."""
    root = tmp_path / "voc"
    for folder in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (root / folder).mkdir(parents=True)
    pixels, mask = np.full((48, 48, 3), 100, np.uint8), np.zeros((48, 48), np.uint8)
    pixels[6:20, 6:20], mask[6:20, 6:20] = (200, 60, 60), 3
    pixels[26:40, 26:40], mask[26:40, 26:40] = (60, 60, 200), 9
    mask[:, 47] = 255
    Image.fromarray(pixels).save(root / "JPEGImages" / "a.jpg", quality=100, subsampling=0)
    Image.fromarray(mask).save(root / "SegmentationClass" / "a.png")
    (root / "ImageSets" / "Segmentation" / "val.txt").write_text("a\n")
    chosen = settings(root, tests=("segmentation",), everything=False, model="world:make_voc", methods=("gradcam",))
    report = run(chosen, tmp_path / "out")
    (row,) = Store(tmp_path / "out").read("segmentation").to_pylist()
    assert len(row["intersection"]) == 21
    assert row["labelled"] == 47 * 48
    assert row["intersection"][3] > 150
    assert row["intersection"][9] > 150
    assert row["ap_soft"] > 0.9
    assert "scored by classes" in report.notes[0]
    stricter = run(replace(chosen, options=options_of_tests(threshold=1.0)), tmp_path / "out")
    background = 100 * (1 - 2 * 14**2 / (47 * 48))  # no class is predicted
    assert stricter.tables[0].rows["gradcam"][0].value == pytest.approx(background)
    assert report.tables[0].rows["gradcam"][0].value > background + 5


def test_killed_at_any_moment_it_finishes_with_the_same_rows(
    undisturbed: Path, labelled: Path, masked: Path, tmp_path: Path
) -> None:
    """SIGKILL at chosen writes, in the middle of writes and at random times, again and again, until it is done."""
    script = Path(__file__).with_name("killed.py")
    arguments = [sys.executable, str(script), str(labelled), str(masked), str(tmp_path / "out")]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    kills = json.loads(done.stdout.splitlines()[-1])
    assert kills["at a write"] >= 3
    assert kills["in a write"] >= 3
    assert kills["at random"] >= 1
    assert rows(tmp_path / "out") == rows(undisturbed)


def test_work_can_be_sent_elsewhere(labelled: Path, tmp_path: Path) -> None:
    """Settings and shards as a cluster sends them: pickled, with all options of the tests."""
    chosen = settings(labelled, tests=("perturbation", "sanity"), sanity_images=2, memory_limit=0.5)
    here = Worker(chosen)
    shards = work(make_plan(chosen, here), Store(tmp_path), 3, late=False)
    there = Worker(pickle.loads(pickle.dumps(chosen)))
    sent = pickle.loads(pickle.dumps(shards))
    assert [config.options for config in sent[0].tests] == [config.options for config in shards[0].tests]
    for mine, other in zip(shards, sent, strict=True):
        ours, theirs = ([row for found in w.run(s) for row in found.rows] for w, s in ((here, mine), (there, other)))
        assert len(ours) >= len(mine.units)
        assert repr(theirs) == repr(ours)


def test_workers_leave_the_model_as_it_was(labelled: Path, tmp_path: Path) -> None:
    worker = Worker(settings(labelled))
    before = {key: value.clone() for key, value in worker.network.module.state_dict().items()}
    run(settings(labelled, tests=("sanity", "perturbation")), tmp_path)
    assert all(torch.equal(before[key], value) for key, value in worker.network.module.state_dict().items())


def test_odd_files_are_skipped_and_odd_names_shown_escaped(masked: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(masked, tmp_path / LATIN))
    for folder in ("images", "masks"):
        rename_latin(root / folder / "red3.png")
    out = tmp_path / f"out-{LATIN}"
    chosen = settings(root, tests=("perturbation", "segmentation"), everything=False, limit=None, methods=("gradcam",))
    with odd_files(root / "images"):
        run(chosen, out, command=["classlens", "evaluate", "--data", str(root)])
        first = rows(out)
        run(chosen, out)  # goes on: nothing is left to do
    assert rows(out) == first
    found = Store(out).read("segmentation").to_pylist()
    assert (len(found), {row["data"] for row in found}) == (24, {SHOWN})
    assert SHOWN in {row["image"] for row in found}
    reasons = {row["image"]: row["reason"] for row in Store(out).read("skipped").to_pylist()}
    assert reasons.keys() == REFUSED.keys()
    assert all(text in reasons[name] for name, text in REFUSED.items())
    for file in ("table.md", "report.html", "table.csv"):
        assert SHOWN in (out / file).read_text(encoding="utf-8")
    assert json.loads((out / "manifest.json").read_text(encoding="utf-8"))["runs"][-1]["data"][0]["name"] == SHOWN
