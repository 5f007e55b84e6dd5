from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from classlens.errors import MissingPackage
from classlens.evaluate import store as stored
from classlens.evaluate.registry import config_hash
from classlens.evaluate.store import Store, StoreError, arrow, finished, where

TIMING = {"model": "m", "kind": "pictures", "method": "agf", "images": 4, "seconds": {"method": 0.5}}


def row(image: str, method: str = "agf", share: float = 0.5) -> stored.Row:
    key = {
        "model": "m",
        "method": method,
        "test": "pointing",
        "data": "d",
        "image": image,
        "config": "c",
        "content": "x",
    }
    return key | {"grid": "g", "cell": 0, "explained": 1, "share": share, "hit": 1.0}


def test_rows_come_back_in_a_fixed_order(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.append([row("b"), row("a", "lrp")])
    store.append([row("a", share=0.25)])
    rows = Store(tmp_path).read("pointing").to_pylist()
    assert [(r["method"], r["image"], r["share"]) for r in rows] == [
        ("agf", "a", 0.25),
        ("agf", "b", 0.5),
        ("lrp", "a", 0.5),
    ]
    assert finished(store.read("pointing"))["m", "d", "agf", "c"] == {("a", "x"), ("b", "x")}
    assert len(where(store.read("pointing"), method="agf", image=["b", "z"])) == 1


def test_writing_the_same_rows_again_changes_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for _ in range(2):
        store.append([row("a"), row("b")])
    store.append([row("a")])  # another part, one key twice
    assert len(list((tmp_path / "rows" / "pointing").iterdir())) == 2
    assert len(store.read("pointing")) == 2


def test_a_part_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    store.append([row("a")])

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stored.os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        store.append([row("b")])
    assert len(store.read("pointing")) == 1


def test_a_part_cut_short_is_as_if_it_were_not_there(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.append([row("a")])
    store.append([row("b")])
    part = sorted((tmp_path / "rows" / "pointing").iterdir())[0]
    part.write_bytes(part.read_bytes()[:40])
    assert len(store.read("pointing")) == 1


def test_many_parts_become_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "_COMPACT_FROM", 5)
    store = Store(tmp_path)
    for i in range(6):
        store.append([row(str(i))])
    before = store.read("pointing")
    store.compact()
    assert len(list((tmp_path / "rows" / "pointing").iterdir())) == 1
    assert store.read("pointing").equals(before)


def test_half_a_line_of_timings_is_left_out(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add_timing(TIMING)
    with (tmp_path / "timings.jsonl").open("a") as file:
        file.write('{"method": "lr')
    assert store.timings() == [TIMING]


def test_the_hash_of_a_config_is_its_content() -> None:
    assert config_hash({"a": 1, "b": (1, 2)}) == config_hash({"b": [1, 2], "a": 1})
    assert config_hash({"a": 1}) != config_hash({"a": 2})


def test_without_pyarrow_an_evaluation_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    arrow.cache_clear()
    with pytest.raises(MissingPackage, match=r"rows in Parquet: pip install 'classlens\[evaluate\]'"):
        Store(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_all_but_evaluations_works_without_the_extras() -> None:
    """Explaining, reports, training and the page need neither pyarrow nor captum."""
    code = (
        "import sys; sys.modules |= {'pyarrow': None, 'captum': None}\n"
        "import classlens, classlens.report, classlens.training, classlens.selfsup, classlens.app.actions\n"
        "import classlens.cli, classlens.evaluate, classlens.selfsup.layers, classlens.render, classlens.demo"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("line", ["null", "[]", "{}", '{"model": "m", "seconds": 3}'])
def test_timings_of_another_version_are_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "timings.jsonl").write_text(line + "\n")
    with pytest.raises(StoreError, match=r"timings.jsonl was written by another version of classlens"):
        Store(tmp_path).timings()


@pytest.mark.parametrize("columns", [{"image": ["a"]}, {"share": ["much"]}])
def test_a_part_with_other_columns_is_named(tmp_path: Path, columns: dict[str, list[str]]) -> None:
    store = Store(tmp_path)
    store.append([row("a")])
    part = next((tmp_path / "rows" / "pointing").iterdir())
    whole = arrow().parquet.read_table(part)
    odd = arrow().table(columns if "image" in columns else {**whole.to_pydict(), **columns})
    arrow().parquet.write_table(odd, part.with_name("odd.parquet"))
    with pytest.raises(StoreError, match=r"odd.parquet was written by another version of classlens"):
        store.read("pointing")


def test_rows_put_together_by_another_process_while_they_are_read_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "_COMPACT_FROM", 2)
    store, listed = Store(tmp_path), Store._parts
    for name in "abc":
        store.append([row(name)])

    def parts(self: Store, test: str) -> list[Path]:
        found = listed(self, test)
        monkeypatch.setattr(Store, "_parts", listed)
        Store(tmp_path).compact()  # between the listing and the reading
        return found

    monkeypatch.setattr(Store, "_parts", parts)
    assert store.read("pointing")["image"].to_pylist() == ["a", "b", "c"]


def test_two_processes_may_put_parts_together_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "_COMPACT_FROM", 2)
    store, write = Store(tmp_path), Store._write
    for name in "abc":
        store.append([row(name)])

    def slow(self: Store, *arguments: Any) -> Path:
        monkeypatch.setattr(Store, "_write", write)
        Store(tmp_path).compact()  # the other one is faster
        return write(self, *arguments)

    monkeypatch.setattr(Store, "_write", slow)
    store.compact()
    assert store.read("pointing")["image"].to_pylist() == ["a", "b", "c"]


def test_a_part_that_cannot_be_read_now_outlives_the_putting_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An I/O error may pass: rows that were not read are not deleted."""
    monkeypatch.setattr(stored, "_COMPACT_FROM", 2)
    store = Store(tmp_path)
    for name in "abc":
        store.append([row(name)])
    hidden = sorted((tmp_path / "rows" / "pointing").iterdir())[0]
    content = hidden.read_bytes()
    hidden.write_bytes(content[:40])
    store.compact()
    hidden.write_bytes(content)
    assert store.read("pointing")["image"].to_pylist() == ["a", "b", "c"]
