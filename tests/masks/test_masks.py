"""Pseudo-labels: seeds, labels, the choice of a setting, files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tagged
import torch
import torch.nn.functional as F
from PIL import Image

import classlens
from classlens.cli import main
from classlens.data.divide import half_of
from classlens.data.layouts import open_dataset, open_divided
from classlens.errors import ClasslensError, DataError, MethodError, ModelError, TargetError
from classlens.masks import make_masks
from classlens.masks.labels import Setting, certain, labels, thresholded
from classlens.masks.measure import measure
from classlens.masks.options import checked_labels, numbers
from classlens.masks.seeds import seeds
from classlens.masks.write import file_names, palette
from classlens.models import LoadedModel
from classlens.models.network import Network


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tagged.draw_world(tmp_path_factory.mktemp("masks"), 6)


# ------------------------------------------------------------------------------------------------------------- seeds


def any_size() -> LoadedModel:
    """A network that takes pictures of any size, and whose maps are not symmetric."""
    torch.manual_seed(0)
    body = [torch.nn.Conv2d(3, 6, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(6, 6, 3, padding=1), torch.nn.ReLU()]
    head = [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(6, 3)]
    torch.nn.init.uniform_(head[-1].weight)  # every class has positive evidence somewhere
    return replace(tagged.make_honest(), model=torch.nn.Sequential(*body, *head).eval(), labels=("a", "b", "c"))


def test_seeds_match_a_slow_derivation() -> None:
    model, x = any_size(), torch.rand(3, 12, 16)
    found = seeds(Network(model), x, [2, 0], "gradcam", scales=(1, 0.5), flip=True)
    for k, target in enumerate((2, 0)):
        total = torch.zeros(12, 16)
        for size in ((12, 16), (6, 8)):
            for mirrored in (False, True):
                shown = F.interpolate(x[None], size=size, mode="bilinear")
                shown = torch.flip(shown, [3]) if mirrored else shown
                one = classlens.explain(model.model, shown, target, method="gradcam").maps[0, 0]
                one = torch.flip(one, [1]) if mirrored else one
                total += F.interpolate(one.clamp(min=0)[None, None], size=(12, 16), mode="bilinear")[0, 0]
        assert torch.allclose(found[k], total / total.max(), atol=1e-5)
    assert not torch.allclose(found, seeds(Network(model), x, [2, 0], "gradcam", flip=False), atol=1e-3)


def test_a_network_of_one_size_refuses_scales() -> None:
    with pytest.raises(ModelError, match="takes pictures of one size only: leave out --scales"):
        seeds(Network(tagged.make_honest()), torch.rand(3, 40, 40), [0], "gradcam", scales=(0.5,))


# ------------------------------------------------------------------------------------------------------------ labels


def test_the_highest_score_above_the_threshold_wins() -> None:
    scores = np.array([[[0.9, 0.2, 0.4, 0.3]], [[0.1, 0.25, 0.6, 0.3]]])
    assert thresholded(scores, 0.3).tolist() == [[1, 0, 2, 0]]  # a tie with the threshold is background
    assert thresholded(scores, 0.22).tolist() == [[1, 2, 2, 1]]  # of equal classes the first
    assert certain(scores, 0.4).tolist() == [[2, 0, 0, 0]]
    assert certain(scores, 0.55).tolist() == [[2, 1, 0, 0]]


def test_a_random_walk_stops_at_the_edges_of_the_picture() -> None:
    """The seed covers the middle of a red square; the walk fills the square, and no threshold does."""
    truth = np.zeros((40, 40), np.uint8)
    truth[8:32, 8:32] = 1
    picture = Image.fromarray(np.where(truth[..., None] == 1, (200, 40, 40), (90, 90, 90)).astype(np.uint8))
    far = np.maximum(np.abs(np.arange(40) - 20)[:, None], np.abs(np.arange(40) - 17)[None])  # not its centre
    scores = np.clip(1 - far / 20, 0, 1)[None]
    walked = labels(scores, picture, Setting(0.3, "walk"))
    assert (walked != truth).mean() < 0.01
    assert min((labels(scores, picture, Setting(t)) != truth).mean() for t in np.arange(0.05, 1, 0.05)) > 0.05


@pytest.mark.parametrize("refine", ["none", "walk"])
def test_nothing_certain_and_no_class_at_all(refine: str) -> None:
    picture = Image.new("RGB", (6, 4))
    assert not labels(np.zeros((0, 4, 6)), picture, Setting(0.5, refine)).any()
    assert not labels(np.full((1, 4, 6), 0.45), picture, Setting(0.5, refine)).any()
    assert (labels(np.ones((2, 4, 6)), picture, Setting(0.5, refine)) == 1).all()


def test_two_classes_walk_to_their_own_halves() -> None:
    truth = np.ones((20, 40), np.uint8)
    truth[:, 20:] = 3  # class 2 of 3 is in the scores, but nowhere certain
    picture = Image.fromarray(np.where(truth[..., None] == 1, (200, 40, 40), (40, 40, 200)).astype(np.uint8))
    scores = np.full((3, 20, 40), 0.4)
    scores[0, :, :6], scores[2, :, 34:], scores[1] = 1.0, 1.0, 0.1
    found = labels(scores, picture, Setting(0.3, "walk"))
    assert (found == truth).mean() > 0.97


# ----------------------------------------------------------------------------------------------------------- measure


def test_half_a_chooses_and_half_b_measures() -> None:
    rng = np.random.default_rng(0)
    truth = {f"{i}": (rng.random((8, 8)) > 0.5).astype(np.uint8) for i in range(8)}
    names = list(truth)
    halves = names[:4], names[4:]
    best = {name: 0.2 if name in halves[0] else 0.6 for name in names}  # half B would choose another threshold

    def labelled(name: str, setting: Setting) -> np.ndarray:
        wrong = int(40 * abs(setting.threshold - best[name]))
        found = truth[name].copy()
        found.flat[:wrong] = 1 - found.flat[:wrong]
        return found

    made = measure(halves, truth, labelled, 1, 0)
    assert made.best == Setting(0.2)  # of equals, without the walk
    assert made.on_a == {"none": 100, "walk": 100}
    assert measure(halves, truth, labelled, 1, 0, Setting(0.4, "walk")).best == Setting(0.4, "walk")
    both = either = np.zeros(2)
    for name in halves[1]:
        guess = labelled(name, Setting(0.2))
        both = both + [((guess == k) & (truth[name] == k)).sum() for k in (0, 1)]
        either = either + [((guess == k) | (truth[name] == k)).sum() for k in (0, 1)]
    assert made.on_b["none"].value == pytest.approx(100 * (both / either).mean())
    assert made.on_b["none"].low < made.on_b["none"].value < made.on_b["none"].high < 100


# ------------------------------------------------------------------------------------------------------------- files


def test_the_files_are_read_back_as_they_were_made(pictures: Path, tmp_path: Path) -> None:
    made = make_masks(tagged.make_honest(), pictures / "masked", tmp_path, against="gradcam")
    assert made.classes == ("object",)
    assert made.measured["agf"].on_b["none"].value > 95
    back = open_dataset(tmp_path, None)
    assert (back.layout, back.classes, len(back.items)) == ("voc", ("object",), 18)
    assert [len(part) for part in open_divided(tmp_path).parts] == [15, 3]  # what `train segmentation` reads
    coco = json.loads((tmp_path / "labels.json").read_text())
    for number, item in enumerate(back.items, 1):
        mask = back.mask(item)
        (image,) = (image for image in coco["images"] if image["file_name"] == f"JPEGImages/{item.name}.jpg")
        (annotation,) = (a for a in coco["annotations"] if a["image_id"] == image["id"])
        counts, flat = annotation["segmentation"]["counts"], []
        for position, length in enumerate(counts):
            flat += [position % 2] * length
        assert np.array_equal(np.array(flat).reshape(mask.shape, order="F"), mask), number
        assert annotation["area"] == mask.sum() > 0
        assert back.picture(item).size == (tagged.SIDE, tagged.SIDE)
    document = json.loads((tmp_path / "masks.json").read_text())
    assert document["mIoU on half B"].keys() == {"agf", "gradcam"}
    assert {half_of(name) for name in document["pictures"]} == {"A", "B"}


def test_masks_show_where_the_network_looks_even_if_it_is_wrong(pictures: Path, tmp_path: Path) -> None:
    made = make_masks(tagged.make_cheat(), pictures / "masked", tmp_path)
    assert made.measured["agf"].on_b["none"].value < 50  # the tag, not the square: the measurement says so


def test_classes_by_name_and_by_the_labels_of_the_data(pictures: Path, tmp_path: Path) -> None:
    made = make_masks(tagged.make_honest(), pictures / "classes", tmp_path, classes=["blue", "red"])
    assert made.setting == Setting(0.05)
    assert made.notes == (
        "There are no drawn masks of these classes, so nothing was measured; the threshold is not chosen.",
        "6 of 18 pictures show none of the classes: their masks are empty.",
    )
    back = open_dataset(tmp_path, None)
    assert back.classes == ("blue", "red")
    found = {item.name: set(np.unique(back.mask(item)).tolist()) for item in back.items}
    wanted = {"blue": {0, 1}, "red": {0, 2}, "green": {0}}
    assert found == {f"{colour}-{k}": wanted[colour] for colour in wanted for k in range(6)}
    by_model = make_masks(
        tagged.make_mistaken(), pictures / "classes", tmp_path / "m", classes=["blue", "red"], shown_by="model", limit=9
    )
    back = open_dataset(by_model.folder, None)
    greens = [back.mask(item) for item in back.items if item.name.startswith("green")]
    assert greens
    assert all((mask == 2).any() for mask in greens)  # this network calls green red


def test_a_second_run_computes_nothing_and_a_changed_picture_is_computed_again(pictures: Path, tmp_path: Path) -> None:
    copies = tmp_path / "photos"
    copies.mkdir()
    for file in sorted((pictures / "plain").iterdir())[:3]:
        (copies / file.name).write_bytes(file.read_bytes())
    out, model = tmp_path / "out", tagged.make_honest()
    make_masks(model, copies, out, classes=["object"])
    before = {file.name: file.stat().st_mtime_ns for file in (out / "seeds").iterdir()}
    make_masks(model, copies, out, classes=["object"])
    assert {file.name: file.stat().st_mtime_ns for file in (out / "seeds").iterdir()} == before
    Image.effect_noise((40, 40), 90).convert("RGB").save(next(copies.iterdir()))
    make_masks(model, copies, out, classes=["object"])
    assert len(list((out / "seeds").iterdir())) == len(before) + 1


def test_what_cannot_be_read_is_skipped_by_name(pictures: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    for kind in ("images", "masks"):
        (folder / kind).mkdir(parents=True)
        for file in sorted((pictures / "masked" / kind).iterdir())[:4]:
            (folder / kind / file.name).write_bytes(file.read_bytes())
    first, second, *_ = sorted((folder / "images").iterdir())
    first.write_bytes(b"no picture")
    Image.new("L", (7, 7)).save(folder / "masks" / second.name)
    made = make_masks(tagged.make_honest(), folder, tmp_path / "out")
    assert set(made.skipped) == {first.name, second.name}
    assert "another size" in made.skipped[second.name]
    assert len(made.pictures) == 2
    assert made.notes == ("There are fewer than 4 pictures with drawn masks in a half, so nothing was measured.",)


def test_masks_without_any_class_are_refused(pictures: Path, tmp_path: Path) -> None:
    """As when the folders of the data have other names than the classes of the network."""
    with pytest.raises(DataError, match="none of 6 pictures shows a class of the masks, says the data"):
        make_masks(tagged.make_honest(), pictures / "classes", tmp_path, classes=["nothing"], limit=6)
    assert not (tmp_path / "SegmentationClass").exists()


@pytest.mark.parametrize(
    ("asked", "error", "says"),
    [
        ({}, TargetError, "name the classes: --classes cat,dog, or --classes object"),
        ({"classes": ["rde"]}, TargetError, "red"),
        ({"classes": ["red", "red"]}, TargetError, "named twice"),
        ({"classes": ["red"], "shown_by": "data"}, DataError, "does not say what a picture shows; use --labels model"),
        ({"classes": ["red"], "threshold": 0.0}, ClasslensError, "must lie between 0 and 1"),
        ({"classes": ["red"], "refine": "crf"}, ClasslensError, "choose from none, walk"),
        ({"classes": ["red"], "method": "gradcma"}, MethodError, "did you mean gradcam"),
        ({"classes": ["red"], "against": "gradcma"}, MethodError, "did you mean gradcam"),
    ],
)
def test_bad_input_is_one_line(
    asked: dict[str, object], error: type[Exception], says: str, pictures: Path, tmp_path: Path
) -> None:
    with pytest.raises(error, match=says):
        make_masks(tagged.make_honest(), pictures / "plain", tmp_path, **asked)
    assert not list(tmp_path.iterdir())


def test_options_and_names() -> None:
    assert numbers("0.5, 1,2") == (0.5, 1.0, 2.0)
    assert checked_labels(None) is None
    for text in ("a", "0", "9", ""):
        with pytest.raises(ClasslensError, match="--scales"):
            numbers(text)
    with pytest.raises(ClasslensError, match="choose data or model"):
        checked_labels("net")
    assert file_names(["a/cat.jpg", "b/cat.jpg", "dog.jpg", "dog.png"]) == ["a-cat", "b-cat", "dog-jpg", "dog-png"]
    colours = np.array(palette()).reshape(256, 3).tolist()  # as the development kit of VOC has them
    assert colours[:4] == [[0, 0, 0], [128, 0, 0], [0, 128, 0], [128, 128, 0]]
    assert (colours[15], colours[255]) == ([192, 128, 128], [224, 224, 192])


def test_the_command(pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["masks", "-d", str(pictures / "masked"), "-m", "tagged:make_honest", "-o", str(tmp_path / "o"),
              "--threshold", "0.3", "--refine", "none", "--limit", "12", "--no-flip"])  # fmt: skip
    assert done.value.code in (None, 0)
    out = capsys.readouterr().out
    assert "12 masks of 1 classes (threshold 0.3)" in out
    assert "mIoU" in out
