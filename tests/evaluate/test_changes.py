"""Data, networks and versions that change behind the name they had in an earlier run of the same folder."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import world
from PIL import Image

from classlens.data.layouts import Dataset, Item
from classlens.errors import DataError, ImageError
from classlens.evaluate import Settings, contents, manifest, options_of_tests, run
from classlens.evaluate.contents import Contents
from classlens.evaluate.store import Store, StoreError, arrow, schemas
from classlens.evaluate.worker import Worker


def settings(*data: Path, **changes: Any) -> Settings:
    values: dict[str, Any] = {
        "tests": ("perturbation",), "methods": ("gradcam",), "data": tuple(map(str, data)), "model": "world:make",
        "batch_size": 3, "threads": 1,
    }  # fmt: skip
    return Settings(**(values | changes), options=options_of_tests(shapes=("2x1",)))


def scores(out: Path, kind: str = "perturbation") -> list[dict[str, Any]]:
    """The rows, without what they were computed from."""
    return [{k: v for k, v in row.items() if k != "content"} for row in Store(out).read(kind).to_pylist()]


@pytest.fixture
def data(labelled: Path, tmp_path: Path) -> Path:
    """Six pictures that a test may change."""
    root = tmp_path / "pics"
    for name in ("red", "green", "blue"):
        (root / name).mkdir(parents=True)
        for number in range(2):
            shutil.copy(labelled / name / f"{number}.png", root / name)
    return root


def repaint(root: Path, name: str, other: str) -> None:
    shutil.copy(root / other, root / name)


# ------------------------------------------------------------------------------------------ data sets of the same name


def test_two_data_sets_of_the_same_name_keep_their_own_rows(data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "pics"
    shutil.copytree(data, other)
    repaint(other, "red/0.png", "blue/1.png")
    report = run(settings(data, other), tmp_path / "both")
    names = [f"{tmp_path.name}/pics", "other/pics"]
    assert [table.data for table in report.tables] == names
    rows = {(row["data"], row["image"]): row["predicted"] for row in scores(tmp_path / "both")}
    assert len(rows) == 12
    assert [rows[name, "red/0.png"] for name in names] == [0, 2]
    for mine, name in ((data, names[0]), (other, names[1])):
        run(settings(mine), tmp_path / name)
        alone = [row | {"data": name} for row in scores(tmp_path / name)]
        assert repr(alone) == repr([row for row in scores(tmp_path / "both") if row["data"] == name])


def test_one_after_the_other_they_do_so_too(data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "pics"
    shutil.copytree(data, other)
    repaint(other, "red/0.png", "blue/1.png")
    run(settings(data), tmp_path / "out")
    report = run(settings(other), tmp_path / "out")
    assert any("1 picture (red/0.png)" in note and "another data set of that name" in note for note in report.notes)
    run(settings(other), tmp_path / "fresh")
    assert (tmp_path / "out/table.csv").read_text() == (tmp_path / "fresh/table.csv").read_text()
    run(settings(data), tmp_path / "out")
    run(settings(data), tmp_path / "first")
    assert (tmp_path / "out/table.csv").read_text() == (tmp_path / "first/table.csv").read_text()


def test_a_data_set_is_given_once(data: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="pics is given twice"):
        run(settings(data, data / ".." / "pics"), tmp_path / "out")


# ------------------------------------------------------------------------------------------------- pictures that change


def test_a_picture_that_changed_is_computed_again_and_named(data: Path, tmp_path: Path) -> None:
    run(settings(data, tests=("perturbation", "pointing")), tmp_path / "out")
    repaint(data, "red/0.png", "blue/1.png")
    report = run(settings(data, tests=("perturbation", "pointing")), tmp_path / "out")
    assert any("1 picture (red/0.png) changed" in note for note in report.notes)
    assert "red/0.png) changed" in (tmp_path / "out/table.md").read_text()
    run(settings(data, tests=("perturbation", "pointing")), tmp_path / "fresh")
    assert (tmp_path / "out/table.csv").read_text() == (tmp_path / "fresh/table.csv").read_text()
    again = run(settings(data, tests=("perturbation", "pointing")), tmp_path / "out")
    assert not any("changed" in note for note in again.notes)
    seconds = json.loads((tmp_path / "out/manifest.json").read_text())["runs"][-1]["seconds"]
    assert "method" not in seconds


def test_a_mask_that_changed_counts(masked: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(masked, tmp_path / "pics"))
    chosen = settings(root, tests=("segmentation",))
    run(chosen, tmp_path / "out")
    shutil.copy(root / "masks" / "red0.png", root / "masks" / "blue1.png")
    report = run(chosen, tmp_path / "out")
    assert any("1 picture (blue1.png) changed" in note for note in report.notes)
    run(chosen, tmp_path / "fresh")
    assert (tmp_path / "out/table.csv").read_text() == (tmp_path / "fresh/table.csv").read_text()


def test_a_label_that_changed_counts(data: Path, tmp_path: Path) -> None:
    def write(label: str) -> None:
        (data / "labels.csv").write_text(f"image,labels\nred/0.png,{label}\nblue/0.png,blue\n")

    chosen = settings(Path(f"csv:{data}"))
    write("red")
    run(chosen, tmp_path / "out")
    write("green")
    run(chosen, tmp_path / "out")
    run(chosen, tmp_path / "fresh")
    assert (tmp_path / "out/table.csv").read_text() == (tmp_path / "fresh/table.csv").read_text()


def test_a_touched_file_has_not_changed(data: Path, tmp_path: Path) -> None:
    run(settings(data), tmp_path / "out")
    os.utime(data / "red" / "0.png")
    report = run(settings(data), tmp_path / "out")
    assert not any("changed" in note for note in report.notes)


def test_files_are_read_once_and_again_when_in_doubt(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(settings(data))
    (subject,) = worker.subjects
    file = tmp_path / "contents.json"

    def held() -> tuple[dict[str, str], int]:
        """The contents, and how many files were read for them."""
        reads = []
        digest = contents._digest
        with monkeypatch.context() as patch:
            patch.setattr(contents, "_digest", lambda stream: (reads.append(1), digest(stream))[1])
            known = Contents(file)
            found = {item.name: known.of(subject, item) for item in subject.dataset.items}
            known.save()
        return found, len(reads)

    first, count = held()
    assert count == 6
    assert held() == (first, 6)  # they were written just now, and may be written again within the same tick
    monkeypatch.setattr(contents, "_SETTLED", -1)
    assert held() == (first, 6)
    assert held() == (first, 0)
    size = (data / "red/0.png").stat()
    repaint(data, "red/0.png", "blue/1.png")
    os.utime(data / "red/0.png", ns=(size.st_atime_ns, size.st_mtime_ns))  # a copy that keeps the time of another file
    now, count = held()
    assert (count, {name for name in now if now[name] != first[name]}) == (1, {"red/0.png"})
    file.write_text("[]")
    assert held() == (now, 6)


# --------------------------------------------------------------------------------------------- pictures that are mended


def test_a_picture_that_was_mended_is_tried_again(data: Path, tmp_path: Path) -> None:
    whole = (data / "red/0.png").read_bytes()
    (data / "red/0.png").write_bytes(whole[:100])
    report = run(settings(data), tmp_path / "out")
    assert "### Skipped (1)" in (tmp_path / "out/table.md").read_text()
    run(settings(data), tmp_path / "out")  # still broken: still said
    assert "### Skipped (1)" in (tmp_path / "out/table.md").read_text()
    seconds = json.loads((tmp_path / "out/manifest.json").read_text())["runs"][-1]["seconds"]
    assert "method" not in seconds  # trying costs a reading, no maps
    (data / "red/0.png").write_bytes(whole)
    report = run(settings(data), tmp_path / "out")
    assert report.tables[0].rows["gradcam"][0].n == 6
    assert "Skipped" not in (tmp_path / "out/table.md").read_text()
    run(settings(data), tmp_path / "fresh")
    assert (tmp_path / "out/table.csv").read_text() == (tmp_path / "fresh/table.csv").read_text()


def test_one_whose_disk_failed_too(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes, which could not be read for a while."""
    read = Dataset.picture

    def fail(self: Dataset, item: Item) -> Image.Image:
        if item.name == "red/0.png":
            raise ImageError("Input/output error")
        return read(self, item)

    monkeypatch.setattr(Dataset, "picture", fail)
    report = run(settings(data), tmp_path / "out")
    assert report.tables[0].rows["gradcam"][0].n == 5
    monkeypatch.undo()
    report = run(settings(data), tmp_path / "out")
    assert report.tables[0].rows["gradcam"][0].n == 6
    assert "Skipped" not in (tmp_path / "out/table.md").read_text()


# ------------------------------------------------------------------------------------ networks and versions that change


def test_other_weights_behind_the_same_name_are_said(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(settings(data), tmp_path / "out")
    make = world.make

    def other() -> Any:
        loaded = make()
        next(loaded.model.parameters()).data.mul_(1.5)
        return loaded

    monkeypatch.setattr(world, "make", other)
    report = run(settings(data), tmp_path / "out")
    assert any("world:make has other weights or preprocessing" in note for note in report.notes)
    assert len(scores(tmp_path / "out")) == 12


def test_another_version_is_said(data: Path, tmp_path: Path) -> None:
    run(settings(data), tmp_path / "out")
    file = tmp_path / "out" / "manifest.json"
    known = json.loads(file.read_text())
    known["runs"][0]["versions"]["classlens"] = "0.0.1"
    file.write_text(json.dumps(known))
    report = run(settings(data), tmp_path / "out")
    assert any("rows may be of classlens 0.0.1" in note for note in report.notes)


# ----------------------------------------------------------------------------------------------- runs of older versions


def make_old(out: Path) -> None:
    """A run's folder as classlens wrote it before rows knew their content."""
    for part in (out / "rows").rglob("*.parquet"):
        arrow().parquet.write_table(arrow().parquet.read_table(part, partitioning=None).drop_columns(["content"]), part)
    file = out / "manifest.json"
    runs = [{k: v for k, v in entry.items() if k != "id"} for entry in json.loads(file.read_text())["runs"]]
    file.write_text(json.dumps({"runs": runs}))
    (out / "contents.json").unlink()


def age(data: Path) -> None:
    """Files that were there long before the run."""
    for file in data.rglob("*.png"):
        os.utime(file, (time.time() - 9999,) * 2)


TESTS = ("perturbation", "pointing")


def test_an_old_run_goes_on_where_nothing_changed(data: Path, tmp_path: Path) -> None:
    age(data)
    out = tmp_path / "out"
    run(settings(data, tests=TESTS), out)
    before = {kind: Store(out).read(kind) for kind in schemas()}
    make_old(out)
    report = run(settings(data, tests=TESTS), out)
    assert any("6 pictures (blue/0.png, " in note and "the rows are used" in note for note in report.notes)
    assert "method" not in json.loads((out / "manifest.json").read_text())["runs"][-1]["seconds"]
    for kind, rows in before.items():
        known = [row for row in Store(out).read(kind).to_pylist() if row["content"]]
        assert repr(known) == repr(rows.to_pylist())
    again = run(settings(data, tests=TESTS), out)
    assert not any("rows are used" in note for note in again.notes)


@pytest.mark.parametrize("how", ["another size", "a later time", "two of that name"])
def test_an_old_run_is_computed_again_where_it_is_in_doubt(data: Path, tmp_path: Path, how: str) -> None:
    age(data)
    out = tmp_path / "out"
    run(settings(data), out)
    make_old(out)
    if how == "two of that name":
        file = out / "manifest.json"
        known = json.loads(file.read_text())
        known["runs"][0]["data"] *= 2
        file.write_text(json.dumps(known))
    elif how == "a later time":
        os.utime(data / "red/0.png")
    else:
        repaint(data, "red/0.png", "blue/1.png")
        age(data)
    report = run(settings(data), out)
    count = 1 if how == "a later time" else 6
    assert any(f"the rows of {count} picture" in note and "computed again" in note for note in report.notes)
    run(settings(data), tmp_path / "fresh")
    assert (out / "table.csv").read_text() == (tmp_path / "fresh/table.csv").read_text()


# --------------------------------------------------------------------------------------------- what others wrote there


@pytest.mark.parametrize(
    "text", ["[]", "null", "{}", '{"runs": {}}', '{"runs": [3]}', '{"runs": [{}]}', "[" * 99999, "x"]
)
def test_a_foreign_manifest_is_refused_before_any_work(data: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/manifest.json").write_text(text)
    with pytest.raises(StoreError, match=r"manifest.json was written by another version of classlens, or not by it"):
        run(settings(data), tmp_path / "out")
    assert not (tmp_path / "out/rows").exists()
    assert (tmp_path / "out/manifest.json").read_text() == text


def test_foreign_operations_are_measured_again(data: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/ops.json").write_text("[]")
    run(settings(data), tmp_path / "out")
    assert json.loads((tmp_path / "out/ops.json").read_text())


def test_two_processes_leave_one_entry_each_in_the_manifest(data: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "out")
    entries = [
        {"id": str(i), "begun": "", "versions": {}, "model": {}, "data": [], "settings": {}, "finished": None}
        for i in range(4)
    ]

    def one(entry: manifest.Entry) -> None:
        for step in range(10):
            manifest.write(store, entry | {"finished": step})

    threads = [threading.Thread(target=one, args=(entry,)) for entry in entries]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted((run["id"], run["finished"]) for run in manifest.read(store)) == [(str(i), 9) for i in range(4)]


def test_names_stay_names_in_the_tables(data: Path, tmp_path: Path) -> None:
    root = data.rename(tmp_path / "<img src=x onerror=alert(1)>&|")
    (root / "red" / "<b>|.png").write_bytes(b"no picture")
    run(settings(root), tmp_path / "out")
    text = (tmp_path / "out/table.md").read_text()
    assert "&lt;img src=x onerror=alert(1)&gt;&amp;\\|" in text
    assert "red/&lt;b&gt;\\|.png" in text
    assert "<img" not in text
    assert "<b>" not in text
