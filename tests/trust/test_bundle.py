"""The audit bundle: what is in it, and that nothing in it, nor what it is about, can change unnoticed."""

from __future__ import annotations

import io
import json
import shutil
import zipfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import tagged
import torch

from classlens.cli import main
from classlens.errors import ClasslensError
from classlens.report import report
from classlens.trust.bundle import read, read_rows, write
from classlens.trust.verify import verify

SETTINGS = {"method": "gradient-x-input", "limit": 5, "seed": 0, "batch_size": 4}


@pytest.fixture(scope="module")
def photos(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("photos") / "masked"
    shutil.copytree(world / "masked", copy)
    return copy


@pytest.fixture(scope="module")
def bundle(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    made = report(tagged.make_honest(), photos, folder / "r.html", method="gradient-x-input", limit=5)
    return write(made, tagged.make_honest(), photos, folder / "audit", settings=SETTINGS)


def refusal(bundle: Path, photos: Path, **more: object) -> str:
    with pytest.raises(ClasslensError) as error:
        verify(bundle, more.get("model", tagged.make_honest()), photos)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
    return str(error.value)


def test_it_holds_all_and_verifies(bundle: Path, photos: Path) -> None:
    names = {path.name for path in bundle.iterdir()}
    assert names == {"report.html", "rows.parquet", "settings.json", "protocol.md", "limitations.md", "manifest.json"}
    rows = pq.read_table(bundle / "rows.parquet").to_pylist()
    assert len(rows) == 5
    assert all(len(row["image_sha256"]) == len(row["mask_sha256"]) == 64 and row["inside"] > 0.9 for row in rows)
    settings = json.loads((bundle / "settings.json").read_text())
    assert len(settings["weights"]) == 64
    assert settings["versions"]["torch"]
    found = verify(bundle, tagged.make_honest(), photos, sample=3)
    assert (found.rows, found.of, found.versions) == (3, 5, ())
    assert found.difference < 1e-5
    assert str(found).startswith("the bundle holds")


def test_the_limitations_say_what_was_found(bundle: Path) -> None:
    text = (bundle / "limitations.md").read_text()
    assert "these 5 pictures" in text
    assert "Hiding the" in text  # the report's own test
    assert "{" not in text + (bundle / "protocol.md").read_text()


@pytest.mark.parametrize(
    "name", ["report.html", "rows.parquet", "settings.json", "protocol.md", "limitations.md", "manifest.json"]
)
@pytest.mark.parametrize("place", [0.0, 0.5, 0.999])
def test_one_changed_byte_is_refused_by_name(
    bundle: Path, photos: Path, tmp_path: Path, name: str, place: float
) -> None:
    shutil.copytree(bundle, tmp_path / "b")
    content = bytearray((tmp_path / "b" / name).read_bytes())
    content[int(place * len(content))] ^= 1
    (tmp_path / "b" / name).write_bytes(content)
    assert f"{name} has changed" in refusal(tmp_path / "b", photos)


def test_added_missing_and_foreign_files(bundle: Path, photos: Path, tmp_path: Path) -> None:
    shutil.copytree(bundle, tmp_path / "b")
    (tmp_path / "b" / "note.txt").write_text("x")
    assert "note.txt was added" in refusal(tmp_path / "b", photos)
    (tmp_path / "b" / "note.txt").unlink()
    (tmp_path / "b" / "protocol.md").unlink()
    assert "protocol.md is missing" in refusal(tmp_path / "b", photos)
    (tmp_path / "b" / "manifest.json").unlink()
    assert "is not a bundle" in refusal(tmp_path / "b", photos)
    assert "does not exist" in refusal(tmp_path / "none", photos)


def test_other_weights_pictures_and_numbers(bundle: Path, photos: Path, tmp_path: Path) -> None:
    other = tagged.make_honest()
    with torch.no_grad():
        other.model.head.bias[0] += 1e-6
    assert "other weights" in refusal(bundle, photos, model=other)
    shutil.copytree(photos, tmp_path / "p")
    row = read_rows(read(bundle))[0]["image"]
    for kind in ("masks", "images"):
        file = next((tmp_path / "p" / kind).glob(f"{Path(row).stem}*"))
        kept = file.read_bytes()
        file.write_bytes(kept + b"\0")
        assert f"the {kind[:-1]} of {row} has changed" in refusal(bundle, tmp_path / "p")
        file.write_bytes(kept)
    file.unlink()
    assert "is not in" in refusal(bundle, tmp_path / "p")


def test_a_number_that_is_no_longer_found(photos: Path, tmp_path: Path) -> None:
    """A bundle whose hashes are right and whose rows are not: only computing them again finds it."""
    made = report(tagged.make_honest(), photos, tmp_path / "r.html", method="gradient-x-input", limit=2)
    write(made, tagged.make_honest(), photos, tmp_path / "b", settings=SETTINGS | {"method": "sobel"})
    assert "the bundle does not hold: border of" in refusal(tmp_path / "b", photos)


def test_a_zip_file(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the commands, from end to end."""
    common = ["--data", str(photos), "-m", "tagged:make_honest", "-M", "gradient-x-input", "--limit", "3"]

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            main([str(argument) for argument in arguments])
        return int(stopped.value.code or 0), *capsys.readouterr()

    page, packed = tmp_path / "r.html", tmp_path / "audit.zip"
    assert run("report", *common, "--out", page, "--bundle", packed)[0] == 0
    assert "exists already" in run("report", *common, "--out", page, "--bundle", packed)[2]
    code, out, _ = run("verify", packed, "--sample", 2)
    assert (code, out[:16]) == (0, "the bundle holds")
    content = packed.read_bytes()
    with zipfile.ZipFile(io.BytesIO(content)) as opened:
        inside = opened.getinfo("rows.parquet").header_offset + 60
    packed.write_bytes(content[:inside] + bytes([content[inside] ^ 1]) + content[inside + 1 :])
    code, _, err = run("verify", packed)
    assert code == 2
    assert "rows.parquet has changed" in err
    packed.write_bytes(b"no zip")
    assert "is not a bundle" in run("verify", packed)[2]
