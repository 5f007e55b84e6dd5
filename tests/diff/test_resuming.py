"""A stopped diff goes on where it was, and writes the page that it would have written."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tagged

from classlens.diff import Diff, diff
from classlens.errors import DataError
from classlens.models import LoadedModel

COUNT = 3  # pictures of each colour


class Stopped(Exception):
    pass


def stop_at(count: int) -> Callable[[str, int, int], None]:
    def progress(what: str, done: int, total: int) -> None:
        if what == "pictures" and done >= count:
            raise Stopped

    return progress


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    tagged.draw_world(tmp_path / "world", COUNT)
    data = tmp_path / "world" / "masked"
    for folder in ("images", "masks"):
        (data / folder / "broken.png").write_bytes(b"no picture")
    return data


def run(data: Path, out: Path, b: LoadedModel | None = None, **options: Any) -> Diff:
    asked = {"top": 2, "batch_size": 2, "classes": ["red", "blue"]} | options
    return diff(tagged.make_honest(), b or tagged.make_cheat(), data, out, **asked)


def page(made: Diff) -> str:
    """Without the time that it took, and when."""
    return re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC, in \d+ s", "", made.path.read_text())


def read_pictures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the pictures that are compared, as it happens."""
    from classlens.diff import collect

    seen: list[str] = []
    true = collect._readable
    monkeypatch.setattr(collect, "_readable", lambda both, items, skipped: (
        seen.extend(item.name for item in items) or true(both, items, skipped)
    ))  # fmt: skip
    return seen


def stopped(data: Path, out: Path, at: int = 4) -> Path:
    with pytest.raises(Stopped):
        run(data, out, progress=stop_at(at))
    rows = out.with_name(f"{out.name}.rows")
    assert rows.exists()
    assert not out.exists()
    return rows


def test_the_same_command_goes_on_and_writes_the_same_page(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = page(run(pictures, tmp_path / "whole.html"))
    rows = stopped(pictures, tmp_path / "diff.html")
    seen = read_pictures(monkeypatch)
    made = run(pictures, tmp_path / "diff.html")
    assert len(seen) == len(set(seen)) == 3 * COUNT + 1 - 4
    assert page(made) == whole
    assert "broken.png" in made.collected.skipped
    assert not rows.exists()


def test_a_picture_that_changed_is_compared_again(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(pictures, tmp_path / "diff.html", at=10)
    known = sorted(path for path in (pictures / "images").iterdir() if path.name != "broken.png")
    shutil.copy(known[0], known[1])
    seen = read_pictures(monkeypatch)
    run(pictures, tmp_path / "diff.html")
    assert [Path(name).name for name in seen] == [known[1].name]


def test_other_networks_other_questions_and_other_methods_begin_anew(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for options in ({"b": tagged.make_honest()}, {"classes": ["red"]}, {"method": "gradcam"}, {"seed": 1}):
        stopped(pictures, tmp_path / "diff.html", at=10)
        seen = read_pictures(monkeypatch)
        run(pictures, tmp_path / "diff.html", **options)
        assert len(seen) == 3 * COUNT + 1
        (tmp_path / "diff.html").unlink()


def test_a_line_that_was_cut_short_is_computed_again(pictures: Path, tmp_path: Path) -> None:
    whole = page(run(pictures, tmp_path / "whole.html"))
    rows = stopped(pictures, tmp_path / "diff.html", at=6)
    rows.write_bytes(rows.read_bytes()[:-2000])
    with pytest.raises(Stopped):  # what comes next does not join the line
        run(pictures, tmp_path / "diff.html", progress=stop_at(8))
    made = run(pictures, tmp_path / "diff.html")
    assert page(made) == whole


def test_nothing_is_left_if_no_picture_could_be_compared(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "broken.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match="no picture could be compared"):
        run(tmp_path / "data", tmp_path / "diff.html")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
