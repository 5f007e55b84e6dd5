"""Layouts, views and what is wrong with data."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from odd import REFUSED, SHOWN, odd_files, rename_latin
from PIL import Image
from squares import LABELS, picture

from classlens.errors import DataError
from classlens.models import Preprocess
from classlens.training.data import open_data, random_view, skipped_text, whole_view

PREPROCESS = Preprocess(resize=20, crop=16)


def copy(voc: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(voc, tmp_path / "voc"))


def save(path: Path, seed: int = 0, classes: tuple[int, ...] = (1,)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture(classes, seed)[0]).save(path)


def test_voc_with_its_masks(voc: Path) -> None:
    data = open_data(voc, "voc")
    assert (data.labels, len(data.train), len(data.val), data.skipped) == (LABELS, 24, 12, ())
    assert data.train[3].classes == {"red", "green"}
    assert open_data(voc, "voc").hash == data.hash


def test_a_crop_has_the_labels_of_the_cropped_mask(voc: Path, tmp_path: Path) -> None:
    """A wide picture, red at its left end and blue at its right: a crop has the labels of what it shows, no others."""
    root = copy(voc, tmp_path)
    pixels, mask = np.full((24, 96, 3), 100, np.uint8), np.zeros((24, 96), np.uint8)
    pixels[4:20, 2:40], mask[4:20, 2:40] = (220, 40, 40), 1
    pixels[4:20, 56:94], mask[4:20, 56:94] = (40, 40, 220), 3
    Image.fromarray(pixels).save(root / "JPEGImages" / "train03.jpg", quality=95, subsampling=0)
    Image.fromarray(mask).save(root / "SegmentationClass" / "train03.png")
    data = open_data(root, "voc")
    example = data.train[3]
    assert example.classes == {"red", "blue"}
    seen = set()
    for seed in range(60):
        view, labels = random_view(example, data, PREPROCESS, np.random.default_rng(seed))
        assert view.shape == (3, 16, 16)
        red, _, blue = PREPROCESS.restore(view)
        shown = [float((red - blue > 0.6).any()), 0.0, float((blue - red > 0.6).any())]  # no paler: edges are blended
        assert all(label >= colour for label, colour in zip(labels.tolist(), shown, strict=True)), seed
        if labels.tolist() != shown:  # at most a sliver of an edge, paler than the square itself
            assert abs(red - blue).max() < 0.7 or sum(labels) == 2
        seen.add(tuple(labels.tolist()))
    assert {(1.0, 0.0, 0.0), (0.0, 0.0, 1.0)} <= seen


def test_views_depend_on_the_seed_alone(voc: Path) -> None:
    data = open_data(voc, "voc")
    first, again, other = (
        random_view(data.train[0], data, PREPROCESS, np.random.default_rng(seed))[0] for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_corrupt_mask_a_corrupt_picture_and_no_labels_are_counted(voc: Path, tmp_path: Path) -> None:
    root = copy(voc, tmp_path)
    (root / "SegmentationClass" / "train00.png").write_bytes(b"\x89PNG broken")
    (root / "JPEGImages" / "train01.jpg").write_bytes(b"no picture")
    Image.fromarray(np.full((24, 24), 255, np.uint8)).save(root / "SegmentationClass" / "train02.png")
    Image.fromarray(np.zeros((5, 5), np.uint8)).save(root / "SegmentationClass" / "train03.png")
    (root / "SegmentationClass" / "val00.png").unlink()
    data = open_data(root, "voc")
    assert (len(data.train), len(data.val)) == (20, 11)
    reasons = {s.name: s.reason for s in data.skipped}
    assert "mask train00.png is not a picture in a known format" in reasons["train00"]
    assert "train01.jpg is not a picture" in reasons["train01"]
    assert reasons["train02"] == "it has no label"
    assert reasons["train03"] == "its mask is 5x5, the picture 24x24"
    assert "does not exist" in reasons["val00"]
    assert skipped_text(data.skipped).startswith("5 images skipped: train00 (")


def test_a_label_that_no_training_picture_has(voc: Path, tmp_path: Path) -> None:
    root = copy(voc, tmp_path)
    (root / "labels.txt").write_text("red\ngreen\nblue\nyellow\n")
    with pytest.raises(DataError, match="no training image has the label 'yellow'"):
        open_data(root, "voc")


def test_csv(tmp_path: Path) -> None:
    for number in range(10):
        save(tmp_path / "pictures" / f"{number}.png", number)
    rows = [f"pictures/{n}.png,{'cat' if n % 2 else 'cat; a dog'},{'val' if n > 6 else 'train'}" for n in range(10)]
    (tmp_path / "labels.csv").write_text("image,labels,split\n" + "\n".join(rows) + "\n")
    data = open_data(tmp_path, "csv")
    assert (data.labels, len(data.train), len(data.val)) == (("a dog", "cat"), 7, 3)
    assert data.train[0].classes == {"a dog", "cat"}
    image, labels = whole_view(data.train[0], data, PREPROCESS)
    assert (image.shape, labels.tolist()) == ((3, 16, 16), [1.0, 1.0])
    (tmp_path / "labels.csv").write_text("image,labels\npictures/0.png,\n" + "\n".join(r[:-6] for r in rows[1:]) + "\n")
    divided = open_data(tmp_path, "csv", seed=5)
    assert [s.reason for s in divided.skipped] == ["it has no label"]
    assert len(divided.train) + len(divided.val) == 9
    assert open_data(tmp_path, "csv", seed=5).val == divided.val


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("picture,labels\n", "lacks the column image; it has picture, labels"),
        ("image,labels\na.png,x\na.png,y\n", "names a.png twice"),
        ("image,labels,split\na.png,x,test\n", "split must be train or val, not test"),
        ("image,labels\na.png,Cat\nb.png,cat\n", "'Cat' and 'cat' differ at most in case"),
        ("image,labels\n", "holds no pictures"),
        ("image,labels,split\na.png,x,val\n", "no image is left to train with"),
        ("image,labels,split\na.png,x,train\nb.png,y,val\na2.png,x,val\n", "no training image has the label 'y'"),
    ],
)
def test_csv_that_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    for name in ("a.png", "b.png", "a2.png"):
        save(tmp_path / name)
    (tmp_path / "labels.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        open_data(tmp_path, "csv")


def test_folders(tmp_path: Path) -> None:
    for split, count in (("train", 3), ("val", 1)):
        for name in ("cat", "dog", "cat+dog"):
            for number in range(count):
                save(tmp_path / split / name / f"{number}.png", number)
    data = open_data(tmp_path, "folders")
    assert (data.labels, len(data.train), len(data.val)) == (("cat", "dog"), 9, 3)
    assert {tuple(sorted(e.classes)) for e in data.train} == {("cat",), ("dog",), ("cat", "dog")}
    loose = open_data(tmp_path / "train", "folders")
    assert (len(loose.train), len(loose.val)) == (7, 2)
    shutil.copytree(tmp_path / "train" / "cat", tmp_path / "train" / "CAT ")
    with pytest.raises(DataError, match="differ at most in case"):
        open_data(tmp_path / "train", "folders")


def test_data_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no data at"):
        open_data(tmp_path / "nowhere", "voc")
    with pytest.raises(DataError, match=r"has no known layout \(expected csv: labels.csv with"):
        open_data(tmp_path, "csv")
    with pytest.raises(DataError, match=r"has no known layout \(expected folders: a folder of images for each class"):
        open_data(tmp_path, "folders")
    with pytest.raises(DataError, match="there is no layout 'coco'; choose one of voc, csv, folders"):
        open_data(tmp_path, "coco")


def test_files_that_are_no_pictures_are_counted(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        for number in range(10):
            save(tmp_path / name / f"{number}.png", number)
    rename_latin(tmp_path / "cat" / "3.png")
    with odd_files(tmp_path / "cat"):
        data = open_data(tmp_path, "folders")
    assert len(data.train) + len(data.val) == 20
    assert {s.name: s.reason for s in data.skipped}.keys() == {f"cat/{name}" for name in REFUSED}
    assert all(REFUSED[s.name.removeprefix("cat/")] in s.reason for s in data.skipped)
    assert f"cat/{SHOWN}" in {item.name for item in (*data.train, *data.val)}
    assert len(data.hash) == 16
