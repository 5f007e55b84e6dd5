"""`classlens explain --trust`: what it prints and writes, and how it fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import world as squares
from PIL import Image

from classlens.cli import main


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return int(stopped.value.code or 0), out, err


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    Image.fromarray(squares.picture("red", 2)[0]).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def test_each_map_gets_a_card(photo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["explain", photo, "-m", "world:make", "-M", "lrp", "-c", "red", "-c", "nothing", "--out", tmp_path / "o"]
    code, out, _ = run(capsys, *asked, "--trust")
    assert code == 0
    assert "trust: evidence for red" in out
    assert "do not trust: evidence for nothing" in out
    stored = json.loads((tmp_path / "o" / "photo" / "report.json").read_text())["trust"]
    assert [card["verdict"] for card in stored] == ["trust", "do not trust"]
    assert (tmp_path / "o" / "photo" / "trust-0-0-red.png").exists()
    code, out, _ = run(capsys, *asked, "--trust", "--json")
    assert [card["verdict"] for card in json.loads(out)["images"][0]["trust"]] == ["trust", "do not trust"]
    _, out, _ = run(capsys, *asked, "--json")
    assert "trust" not in json.loads(out)["images"][0]
