"""`classlens selfsup ...` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from classlens import cli


def command(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main(["selfsup", *map(str, arguments)])
    return int(end.value.code or 0)


def test_bank_explain_evaluate(
    sortable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command("bank", sortable / "images", "--model", "sorting:net", "--out", "bank") == 0
    assert "9 latents of 12 numbers, read by head\n-> bank" in capsys.readouterr().out

    images = (sortable / "images" / "0.png", sortable / "images" / "1.png")
    assert command("explain", *images, "--model", "sorting:net", "--bank", "bank", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert [Path(entry["files"][0]) for entry in said["images"]] == [
        Path("out/0/neighbours.png"), Path("out/1/neighbours.png")
    ]  # fmt: skip
    assert all(Path(file).is_file() for entry in said["images"] for file in entry["files"])
    assert said["images"][0]["neighbour"] != "0.png"

    options = (
        "--data",
        sortable,
        "--model",
        "sorting:net",
        "--bank",
        "bank",
        "--methods",
        "agf,rap",
        "--out",
        "run",
    )
    assert command("evaluate", "segmentation", *options) == 0
    assert "agf, difference" in capsys.readouterr().out
    assert Path("run/table.md").is_file()


def test_a_broken_image_does_not_stop_the_others(
    sortable: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    arguments = (
        "--model",
        "sorting:net",
        "--bank",
        sortable / "images",
        "--out",
        tmp_path / "out",
        "--class",
        "predicted",
    )
    assert command("explain", broken, sortable / "images" / "0.png", *arguments) == 2
    said = capsys.readouterr()
    assert "broken.png is not a picture" in said.err
    assert "neighbour " in said.out
    assert (tmp_path / "out" / "0" / "neighbours.png").is_file()


def test_errors_are_one_line(sortable: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--model", "sorting:net", "--out", tmp_path / "bank")
    assert command("bank", tmp_path / "nothing", *arguments) == 2
    assert command("bank", sortable / "images", *arguments, "--head", "fc") == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("error: there is no data at")
    assert lines[1] == "error: the model has no linear layer in 'fc'; its linear layers: head"
    assert len(lines) == 2


def test_two_images_of_one_name(sortable: Path, tmp_path: Path) -> None:
    import shutil

    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        shutil.copy(sortable / "images" / "0.png", tmp_path / folder / "same.png")
    images = (tmp_path / "a" / "same.png", tmp_path / "b" / "same.png")
    assert (
        command("explain", *images, "--model", "sorting:net", "--bank", sortable / "images", "--out", tmp_path / "out")
        == 0
    )
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"same", "same-2"}
