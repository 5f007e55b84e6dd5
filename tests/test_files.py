"""Files that are there whole or not at all, and orders that only a seed and names decide."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from classlens import files


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_written_with_its_folder_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = files.write_text(tmp_path / "new" / "table.md", "größer\r\n")
    assert path.read_bytes() == "größer\r\n".encode()
    files.write_json(tmp_path / "new" / "card.json", {"a": [1]})
    assert json.loads((tmp_path / "new" / "card.json").read_text()) == {"a": [1]}
    assert _names(path.parent) == ["card.json", "table.md"]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_what_stops_a_writer_leaves_the_old_file(tmp_path: Path, error: BaseException) -> None:
    path = files.write_text(tmp_path / "table.md", "old")
    with pytest.raises(type(error)), files.replacing(path) as draft:  # noqa: PT012
        draft.write_text("ne")
        raise error
    assert path.read_text() == "old"
    assert _names(tmp_path) == ["table.md"]


def test_the_content_is_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    sync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda number: (done.append("sync"), sync(number)))
    monkeypatch.setattr(Path, "replace", lambda self, to: (done.append("replace"), replace(self, to))[1])
    files.write_bytes(tmp_path / "a", b"1")
    assert done == ["sync", "replace"]


def test_a_killed_writer_leaves_the_old_file_and_a_draft_that_can_be_removed(tmp_path: Path) -> None:
    path = files.write_text(tmp_path / "table.md", "old")
    code = (
        "import os, signal, sys; from pathlib import Path; from classlens.files import replacing\n"
        "with replacing(Path(sys.argv[1])) as draft:\n"
        "    draft.write_text('ne'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == -signal.SIGKILL
    assert path.read_text() == "old"
    assert len(_names(tmp_path)) == 2
    files.remove_drafts(tmp_path, "other.md")
    files.remove_drafts(tmp_path, "table.md", seconds=60)  # it may still have a writer
    assert len(_names(tmp_path)) == 2
    draft = next(tmp_path.glob(".*"))
    os.utime(draft, (time.time() - 120,) * 2)
    files.remove_drafts(tmp_path, seconds=60)
    assert _names(tmp_path) == ["table.md"]


def test_a_folder_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="full"), files.creating(tmp_path / "pets") as draft:  # noqa: PT012
        (draft / "labels.txt").write_text("cat")
        raise OSError("disk full")
    assert _names(tmp_path) == []
    with files.creating(tmp_path / "pets") as draft:
        (draft / "labels.txt").write_text("cat")
        assert not (tmp_path / "pets").exists()
    assert _names(tmp_path) == ["pets"]
    assert _names(tmp_path / "pets") == ["labels.txt"]


def test_an_order_is_decided_by_seed_and_names_alone() -> None:
    """Stored runs were chosen in this order: it may never change."""
    names = [f"{i}.jpg" for i in range(50)]
    mixed = random.Random(0).sample(names, 50)

    def order(names: list[str], seed: int) -> list[str]:
        return sorted(names, key=lambda name: files.draw_key(seed, name))

    assert order(names, 7) == order(mixed, 7) != order(names, 8)
    some = set(mixed[:20])
    assert [name for name in order(names, 7) if name in some] == order(mixed[:20], 7)
    assert files.draw_key(7, "0.jpg") == hashlib.sha256(b"7:0.jpg").digest()
    assert files.text_hash("7:0.jpg", 9) == hashlib.sha256(b"7:0.jpg").hexdigest()[:9]
