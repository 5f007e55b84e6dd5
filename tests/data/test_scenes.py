"""Scenes of two animals: what is pasted where, and that the same seed gives the same files."""

from __future__ import annotations

import csv
import hashlib
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from classlens.data.layouts import open_dataset
from classlens.data.masks import IGNORE
from classlens.data.scenes import compose_scenes, filled, palette
from classlens.errors import DataError
from classlens.training import open_data

COLOURS = {"Abyssinian": (220, 40, 40), "shiba_inu": (40, 220, 40), "pug": (40, 40, 220), "Sphynx": (220, 220, 40)}


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four breeds of five animals: an ellipse of the breed's colour on grey, with a border of one pixel or so."""
    root = tmp_path_factory.mktemp("pets")
    (root / "images").mkdir()
    (root / "annotations" / "trimaps").mkdir(parents=True)
    y, x = np.mgrid[:60, :80]
    for breed, colour in COLOURS.items():
        for number in range(5):
            distance = ((y - 30) / (12 + 3 * number)) ** 2 + ((x - 40) / 20) ** 2
            trimap = np.where(distance < 0.8, 1, np.where(distance < 1, 3, 2)).astype(np.uint8)
            pixels = np.full((60, 80, 3), 100 + number, np.uint8)
            pixels[distance < 1] = colour
            Image.fromarray(pixels).save(root / "images" / f"{breed}_{number}.jpg", quality=98, subsampling=0)
            Image.fromarray(trimap).save(root / "annotations" / "trimaps" / f"{breed}_{number}.png")
    return root


@pytest.fixture(scope="module")
def scenes(pets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("scenes") / "two"
    made = compose_scenes(pets, out, train=12, val=6, side=96, seed=4)
    assert (made.train, made.val, made.classes, made.remark) == (12, 6, 4, "no images were skipped")
    return out


def digest(root: Path) -> dict[str, str]:
    files = (path for path in sorted(root.rglob("*")) if path.is_file())
    return {path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def placed(root: Path) -> list[dict[str, str]]:
    with (root / "scenes.csv").open() as stream:
        return list(csv.DictReader(stream))


def test_train_and_evaluate_read_them(scenes: Path) -> None:
    data = open_data(scenes, "voc")
    assert (data.labels, len(data.train), len(data.val), data.skipped) == (
        ("Abyssinian", "Sphynx", "pug", "shiba inu"),
        12,
        6,
        (),
    )
    assert all(len(example.classes) == 2 for example in (*data.train, *data.val))
    assert open_dataset(scenes, "train").classes == data.labels


def test_each_class_lies_where_its_mask_is(scenes: Path) -> None:
    labels = (scenes / "labels.txt").read_text().split("\n")[:-1]
    colours = {name.replace("_", " "): colour for name, colour in COLOURS.items()}
    for file in sorted((scenes / "SegmentationClass").iterdir()):
        mask, objects = (
            np.asarray(Image.open(scenes / f / file.name)) for f in (file.parent.name, "SegmentationObject")
        )
        pixels = np.asarray(Image.open(scenes / "JPEGImages" / f"{file.stem}.jpg"), float)
        classes = sorted(set(np.unique(mask)) - {0, IGNORE})
        assert len(classes) == 2
        for index in classes:
            assert np.abs(pixels[mask == index].mean(0) - colours[labels[index - 1]]).max() < 25
            assert len(np.unique(objects[mask == index])) == 1  # one animal of each class
        assert np.array_equal(mask == IGNORE, objects == IGNORE)
        assert np.ptp(pixels[mask == 0].mean(0)) < 12  # the third animal is gone from the backdrop


def test_scales_and_overlaps_differ_and_animals_are_not_shared(scenes: Path) -> None:
    rows = placed(scenes)
    pairs = list(zip(rows[::2], rows[1::2], strict=True))
    lengths = [sorted(max(int(row["height"]), int(row["width"])) for row in pair) for pair in pairs]
    assert all(low < 0.8 * high <= 0.8 * 96 for low, high in lengths)
    behind = [float(first["visible"]) for first, _ in pairs]
    assert all(0.45 < share <= 1 for share in behind)
    assert min(behind) < 0.95  # some overlap
    assert all(float(second["visible"]) == 1 for _, second in pairs)
    assert all(first["breed"] != second["breed"] for first, second in pairs)
    used = {split: {row["source"] for row in rows if row["scene"].startswith(split)} for split in ("train", "val")}
    assert not used["train"] & used["val"]


def test_the_seed_decides(pets: Path, scenes: Path, tmp_path: Path) -> None:
    compose_scenes(pets, tmp_path / "again", train=12, val=6, side=96, seed=4)
    assert digest(tmp_path / "again") == digest(scenes)
    compose_scenes(pets, tmp_path / "other", train=12, val=6, side=96, seed=5)
    assert placed(tmp_path / "other") != placed(scenes)


def test_what_cannot_be_used(pets: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="exists: choose a new folder"):
        compose_scenes(pets, pets)
    few = tmp_path / "few"
    for breed in ("pug", "Sphynx"):
        for folder, end in (("images", "jpg"), ("annotations/trimaps", "png")):
            (few / folder).mkdir(parents=True, exist_ok=True)
            for number in range(2):
                name = f"{breed}_{number}.{end}"
                (few / folder / name).write_bytes((pets / folder / name).read_bytes())
    with pytest.raises(DataError, match=r"three breeds, there are 2 \(Sphynx, pug\)"):
        compose_scenes(few, tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


def test_a_corrupt_mask_is_counted(pets: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(pets, tmp_path / "pets"))
    (root / "annotations" / "trimaps" / "pug_0.png").write_bytes(b"no mask")
    Image.fromarray(np.full((60, 80), 2, np.uint8)).save(root / "annotations" / "trimaps" / "pug_1.png")
    made = compose_scenes(root, tmp_path / "out", train=2, val=1, side=64)
    assert made.remark.startswith("2 images were skipped, such as pug_0.jpg (the mask pug_0.png is not a picture")
    for number in (2, 3):
        (root / "annotations" / "trimaps" / f"pug_{number}.png").write_bytes(b"no mask")
    with pytest.raises(DataError, match="'pug' has one usable image"):
        compose_scenes(root, tmp_path / "none", train=2, val=1, side=64)


def test_holes_are_filled_from_around_them() -> None:
    pixels = np.zeros((33, 50, 3), np.float32)
    pixels[:, 25:] = 200
    hole = np.zeros((33, 50), bool)
    hole[10:20, 5:15] = hole[10:20, 35:45] = True
    spoilt = pixels.copy()
    spoilt[hole] = 77
    found = filled(spoilt, hole)
    assert np.array_equal(found[~hole], pixels[~hole])
    assert np.abs(found - pixels).max() < 90
    assert np.abs(found - pixels)[12:18, 7:10].max() < 40
    assert np.array_equal(filled(spoilt, np.ones_like(hole)), spoilt)  # nothing is known


def test_the_palette_is_vocs() -> None:
    assert palette()[[0, 1, 2, 15, 20, 255]].tolist() == [
        [0, 0, 0], [128, 0, 0], [0, 128, 0], [192, 128, 128], [0, 64, 128], [224, 224, 192],
    ]  # fmt: skip
    assert len(np.unique(palette(), axis=0)) == 256
