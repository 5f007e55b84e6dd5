from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from odd import LATIN, SHOWN
from PIL import Image

from classlens.data.divide import half_of
from classlens.data.find import VOC_CLASSES
from classlens.data.layouts import LAYOUTS, data_hash, open_dataset, open_divided
from classlens.errors import DataError, ImageError


def save(path: Path, values: np.ndarray, palette: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(values.astype(np.uint8), mode=None)
    if palette:
        image = image.convert("P")
        image.putpalette([0, 0, 0, 255, 0, 0] + [9, 9, 9] * 254)
        image.putdata(values.astype(np.uint8).ravel().tolist())
    image.save(path)


GREY = np.full((6, 8, 3), 100)


def test_a_folder_for_each_wnid(tmp_path: Path) -> None:
    save(tmp_path / "val" / "n02099601" / "a.png", GREY)
    save(tmp_path / "val" / "n01440764" / "b.jpg", GREY)
    (tmp_path / "val" / "n01440764" / "notes.txt").write_text("no picture")
    (tmp_path / "val" / "n01440764" / "._b.jpg").write_text("a note of the operating system")
    data = open_dataset(tmp_path)
    assert (data.layout, data.has_labels, data.has_masks) == ("imagenet", True, False)
    assert [(item.name, item.label) for item in data.items] == [
        ("n01440764/b.jpg", "n01440764"),
        ("n02099601/a.png", "n02099601"),
    ]
    assert data.picture(data.items[1]).size == (8, 6)


def test_a_folder_for_each_class_by_name(labelled: Path) -> None:
    data = open_dataset(labelled)
    assert data.layout == "imagenet"
    assert {item.label for item in data.items} == {"red", "green", "blue"}


def test_pets_trimaps(tmp_path: Path) -> None:
    trimap = np.array([[1, 2, 3], [2, 2, 1]])
    save(tmp_path / "images" / "cat_1.png", np.zeros((2, 3, 3)))
    save(tmp_path / "annotations" / "trimaps" / "cat_1.png", trimap)
    data = open_dataset(tmp_path)
    assert data.layout == "pets"
    assert data.mask(data.items[0]).tolist() == [[1, 0, 255], [0, 0, 1]]


def test_voc_palettes_are_read_as_indices(tmp_path: Path) -> None:
    root = tmp_path / "VOCdevkit" / "VOC2012"
    save(root / "JPEGImages" / "x.jpg", GREY)
    save(root / "SegmentationClass" / "x.png", np.array([[0, 15], [255, 1]]), palette=True)
    (root / "ImageSets" / "Segmentation").mkdir(parents=True)
    (root / "ImageSets" / "Segmentation" / "val.txt").write_text("x\ny\n")
    data = open_dataset(tmp_path)
    assert (data.layout, [item.name for item in data.items]) == ("voc", ["x", "y"])
    assert data.mask(data.items[0]).tolist() == [[0, 15], [255, 1]]
    with pytest.raises(ImageError, match="does not exist"):
        data.mask(data.items[1])
    with pytest.raises(DataError, match=r"no split 'test'.*available: val"):
        open_dataset(tmp_path, split="test")


def test_any_images_and_masks(tmp_path: Path) -> None:
    save(tmp_path / "images" / "deep" / "a.jpg", GREY)
    save(tmp_path / "images" / "alone.png", GREY)
    colours = np.zeros((6, 8, 3))
    colours[2, 3] = (0, 7, 0)
    save(tmp_path / "masks" / "deep" / "a.png", colours)
    data = open_dataset(tmp_path)
    assert (data.layout, [item.name for item in data.items]) == ("masks", ["alone.png", "deep/a.jpg"])
    assert np.argwhere(data.mask(data.items[1])).tolist() == [[2, 3]]
    with pytest.raises(ImageError, match=r"alone.png does not exist"):
        data.mask(data.items[0])


def test_imagenet_segmentation(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    pixels = np.random.default_rng(0).integers(0, 255, (5, 7, 3)).astype(np.uint8)
    mask = (pixels[..., 0] > 100).astype(np.uint8)
    with h5py.File(tmp_path / "gtsegs_ijcv.mat", "w") as file:
        cells = {
            "img": file.create_dataset("refs/a", data=pixels.T).ref,
            "id": file.create_dataset("refs/c", data=np.array([[ord(c)] for c in "n02099601_7"], np.uint16)).ref,
        }
        inner = file.create_dataset("refs/d", data=mask.T).ref
        cells["gt"] = file.create_dataset("refs/b", data=np.array([[inner]], h5py.ref_dtype), dtype=h5py.ref_dtype).ref
        for name, reference in cells.items():
            file.create_dataset(f"value/{name}", data=np.array([[reference]], h5py.ref_dtype), dtype=h5py.ref_dtype)
    data = open_dataset(tmp_path)
    (item,) = data.items
    assert (data.layout, data.name, item.name, item.label) == (
        "imagenet-segmentation",
        "gtsegs_ijcv",
        "00000-n02099601_7",
        "n02099601",
    )
    assert np.array_equal(np.asarray(data.picture(item)), pixels)
    assert np.array_equal(data.mask(item), mask)


def test_a_wrong_folder_says_what_was_expected_and_found(tmp_path: Path) -> None:
    (tmp_path / "stuff").mkdir()
    (tmp_path / "read.me").write_text("")
    with pytest.raises(DataError) as caught:
        open_dataset(tmp_path)
    text = str(caught.value)
    assert "annotations/trimaps" in text
    assert "wnid" in text
    assert "found 1 folders (stuff), 1 files (read.me)" in text
    with pytest.raises(DataError, match=r"\(expected pets: images/ and annotations/trimaps/") as caught:
        open_dataset(f"pets:{tmp_path}")
    assert "voc" not in str(caught.value)
    with pytest.raises(DataError, match="there is no data at"):
        open_dataset(tmp_path / "nowhere")


def test_a_larger_limit_only_adds(labelled: Path) -> None:
    data = open_dataset(labelled)
    few, more = data.select(5, seed=3), data.select(11, seed=3)
    assert more[:5] == few
    assert len(set(more)) == 11
    assert data.select(5, seed=4) != few
    assert sorted(data.select(None, 3), key=lambda item: item.name) == list(data.items)


def test_halves_depend_on_the_names_of_files_alone(labelled: Path) -> None:
    data = open_dataset(labelled)
    a, b = (set(data.select(None, 0, half)) for half in "AB")
    assert a | b == set(data.items)
    assert not a & b
    assert min(len(a), len(b)) > 2
    assert set(data.select(None, 7, "A")) == a
    assert data.select(2, 0, "A") == data.select(None, 0, "A")[:2]
    assert half_of("n01440764/tench.jpg") == half_of("elsewhere/tench.jpg")


def test_the_data_hash_sees_names_and_sizes(labelled: Path, masked: Path) -> None:
    data = open_dataset(labelled)
    assert data_hash(data, data.items) == data_hash(open_dataset(labelled), data.items)
    assert data_hash(data, data.items) != data_hash(data, data.items[1:])


def test_a_voc_layout_with_classes_of_its_own(tmp_path: Path) -> None:
    for folder in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "ImageSets" / "Segmentation" / "val.txt").write_text("a\n")
    Image.fromarray(np.full((4, 4), 3, np.uint8)).save(tmp_path / "SegmentationClass" / "a.png")
    assert open_dataset(tmp_path).classes == VOC_CLASSES
    (tmp_path / "labels.txt").write_text("cat\ndog\n")
    data = open_dataset(tmp_path)
    assert data.classes == ("cat", "dog")
    with pytest.raises(ImageError, match="holds class 3; the data set has 2"):
        data.mask(data.items[0])
    (tmp_path / "labels.txt").write_text("cat\nCat \n")
    with pytest.raises(DataError, match="differ at most"):
        open_dataset(tmp_path)
    (tmp_path / "labels.txt").write_text("\n")
    with pytest.raises(DataError, match="it has 0"):
        open_dataset(tmp_path)


def test_labels_in_a_table(tmp_path: Path) -> None:
    for name in "abcd":
        save(tmp_path / "pictures" / f"{name}.png", GREY)
    rows = ["d.png,cat; dog,val", "a.png,cat,train", "c.png,dog,val", "b.png,dog,"]
    (tmp_path / "labels.csv").write_text("\n".join(["image,labels,split", *(f"pictures/{row}" for row in rows)]))
    assert open_dataset(tmp_path).layout == "imagenet"  # a table is read when it is asked for, never by surprise
    data = open_dataset(f"csv:{tmp_path}")
    assert (data.name, data.root) == (tmp_path.name, tmp_path / "labels.csv")
    assert [(i.name, i.label, i.classes) for i in data.items] == [  # in the order of the table
        ("pictures/d.png", None, {"cat", "dog"}),
        ("pictures/c.png", "dog", {"dog"}),
    ]
    assert data.picture(data.items[0]).size == (8, 6)
    found = open_divided(f"csv:{tmp_path}")
    assert [[i.name[9] for i in part] for part in (*found.parts, found.neither)] == [["a"], ["d", "c"], ["b"]]
    with pytest.raises(DataError, match="holds no pictures in the split 'test'"):
        open_dataset(f"csv:{tmp_path}", "test")


def test_folders_named_by_several_classes(tmp_path: Path) -> None:
    for split in ("train", "val"):
        for name in ("cat", "cat+dog"):
            save(tmp_path / split / name / "a.png", GREY)
    data = open_dataset(f"folders:{tmp_path}")
    assert [(i.name, i.label) for i in data.items] == [("val/cat/a.png", "cat"), ("val/cat+dog/a.png", None)]
    with pytest.raises(DataError, match="folders: a folder of images for each class"):
        open_dataset(tmp_path)  # nor are they recognised


def test_what_divides_itself_and_what_is_divided(labelled: Path, tmp_path: Path) -> None:
    whole = open_dataset(labelled)
    train, val = open_divided(labelled, seed=3).parts
    assert set(val) == set(whole.select(None, 3)[::5])  # every fifth of the order that the seed decides
    assert set(train) == set(whole.items) - set(val)
    assert list(train) == [item for item in whole.items if item in train]
    assert open_divided(labelled, seed=4).parts[1] != val
    for part, name in (("train", "a.png"), ("val", "b.png")):
        save(tmp_path / part / name, GREY)
    own = open_divided(tmp_path)
    assert [[item.name for item in part] for part in own.parts] == [["a.png"], ["b.png"]]


def test_every_layout_says_what_it_expects() -> None:
    assert {name for name, layout in LAYOUTS.items() if layout.decode} == {
        "voc", "pets", "masks", "imagenet-segmentation",
    }  # fmt: skip
    assert {name for name, layout in LAYOUTS.items() if layout.names_all} == {"voc", "csv", "folders"}
    assert len({layout.expected for layout in LAYOUTS.values()}) == len(LAYOUTS)


def test_names_that_are_no_utf8_are_escaped_and_their_files_found(tmp_path: Path) -> None:
    for name in ("a.png", LATIN):
        save(tmp_path / "cats" / name, GREY)
    folder, label = Path(LATIN).stem, Path(SHOWN).stem
    (tmp_path / "cats").rename(tmp_path / folder)
    data = open_dataset(tmp_path)
    assert [(item.name, item.label) for item in data.items] == [(f"{label}/a.png", label), (f"{label}/{SHOWN}", label)]
    assert open_dataset(tmp_path / folder).name == label
    assert data.picture(data.items[1]).size == (8, 6)
    assert len(data_hash(data, data.items)) == 16
    assert {half_of(item.name) for item in data.items} <= {"A", "B"}
    (tmp_path / folder / "a.png").rename(tmp_path / folder / SHOWN)  # a backslash of its own, so two have one name
    with pytest.raises(DataError, match="files whose names are the same in UTF-8"):
        open_dataset(tmp_path)


def test_lists_that_are_no_utf8_are_named(tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_bytes(b"image,labels\na.png,caf\xe9\n")
    with pytest.raises(DataError, match=r"labels.csv is not UTF-8 text"):
        open_dataset(f"csv:{tmp_path}")


def test_a_folder_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Path) -> object:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refused)
    with pytest.raises(DataError, match=r"cannot be listed: .*Permission denied"):
        open_dataset(tmp_path)


def test_class_folders_are_read_recursively_without_hidden_files(tmp_path: Path) -> None:
    for name in ("cat/a.jpg", "cat/more/b.jpg", "cat/.trash/c.jpg", "dog/only/deep/d.jpg", "dog/._e.jpg"):
        save(tmp_path / name, GREY)
    data = open_dataset(tmp_path)
    found = {(item.name, item.label) for item in data.items}
    assert found == {("cat/a.jpg", "cat"), ("cat/more/b.jpg", "cat"), ("dog/only/deep/d.jpg", "dog")}
