"""A segmentation head: learns, goes on after an interruption, and leaves a model that can be asked about regions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import accuracy_score, jaccard_score
from squares import LABELS, stages
from torch import nn

import classlens
from classlens.errors import DataError, ModelError
from classlens.models import load
from classlens.models.pyramid import Pyramid, Segmenter, cut, find_pyramid
from classlens.training import DenseChoices, Recipe, TrainingError, open_data, train_segmentation
from classlens.training.segmentation import confusion, masked_view, mean_iou, pixel_loss

RECIPE = Recipe(epochs=3, batch_size=8, learning_rate=1e-2, patience=3)


def choices(voc: Path) -> DenseChoices:
    return DenseChoices(str(voc), backbone="squares:stages")


@pytest.fixture(scope="module")
def trained(voc: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "dense"
    result = train_segmentation(choices(voc), out, replace(RECIPE, epochs=25, patience=25))
    assert result.best.val_miou > 0.6
    assert result.best.val_accuracy > 0.85
    return out


def test_a_run_is_a_model_with_the_scores_of_its_best_epoch(trained: Path, voc: Path) -> None:
    card = json.loads((trained / "card.json").read_text())
    assert card["pyramid"] == {"layers": ["eighth", "sixteenth", "last"], "channels": [12, 8, 8], "classes": 4}
    loaded = load(str(trained))
    assert loaded.labels == ("background", *LABELS)
    data = open_data(voc, "voc")
    images, masks = (
        torch.stack(t)
        for t in zip(*(masked_view(item, data, loaded.preprocess, False) for item in data.val), strict=True)
    )
    with torch.no_grad():
        large = F.interpolate(loaded.model(images), size=(64, 64), mode="bilinear")
    known = (masks != 255).numpy()
    truth, found = masks.numpy()[known], large.argmax(1).numpy()[known]
    best = card["training"]["best"]
    # The features of the training were stored in half precision.
    assert best["val_miou"] == pytest.approx(jaccard_score(truth, found, average="macro"), abs=0.01)
    assert best["val_accuracy"] == pytest.approx(accuracy_score(truth, found), abs=0.01)
    assert (trained / "metrics.csv").read_text().splitlines()[0].endswith("val_loss,val_miou,val_accuracy")
    assert (trained / "metrics.png").stat().st_size > 5000


def test_a_run_can_be_asked_about_regions(trained: Path, voc: Path) -> None:
    picture = voc / "JPEGImages" / "val00.jpg"
    e = classlens.explain(load(str(trained)), str(picture), classlens.region("red"), "lrp")
    assert e.name() == "red where the network finds it"
    assert e.maps.shape == (1, 1, 64, 64)


def test_an_interrupted_run_ends_with_the_same_files(voc: Path, tmp_path: Path) -> None:
    train_segmentation(choices(voc), tmp_path / "calm", RECIPE)
    for epoch in (2, 3):

        def stop(label: str, done: int, total: int, epoch: int = epoch) -> None:
            if label.startswith(f"epoch {epoch} of"):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            train_segmentation(choices(voc), tmp_path / "broken", RECIPE, stop)
    train_segmentation(choices(voc), tmp_path / "broken", RECIPE)
    for name in ("metrics.csv", "card.json", "model.safetensors"):
        assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "calm" / name).read_bytes(), name
    with pytest.raises(TrainingError, match="flip was True, not False"):
        train_segmentation(replace(choices(voc), flip=False), tmp_path / "broken", RECIPE)


def test_the_body_is_not_trained(trained: Path) -> None:
    body, kept = stages().model.state_dict(), load(str(trained)).model.state_dict()
    for name in ("eighth.0.weight", "eighth.1.running_mean", "last.0.bias"):
        assert torch.equal(kept[f"body.{name}"], body[name])
    assert not [name for name in kept if name.startswith("body.5")]  # its own classifier is gone


def test_a_mirror_image_has_a_mirrored_mask(voc: Path) -> None:
    data, preprocess = open_data(voc, "voc"), stages().preprocess
    (image, mask), (turned, back) = (masked_view(data.train[0], data, preprocess, m) for m in (False, True))
    assert torch.equal(turned.flip(-1), image)
    assert torch.equal(back.flip(-1), mask)
    assert not torch.equal(back, mask)


def test_data_without_masks_are_refused(tmp_path: Path) -> None:
    from PIL import Image

    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            Image.new("RGB", (24, 24), (name == "cat" and "red") or "blue").save(tmp_path / split / name / "a.png")
    with pytest.raises(DataError, match="a segmentation needs a mask for every picture"):
        train_segmentation(DenseChoices(str(tmp_path), "folders", "squares:stages"), tmp_path / "run", RECIPE)


def test_scores_are_those_of_a_slow_second_derivation() -> None:
    random = np.random.default_rng(0)
    found, masks = random.integers(0, 4, (3, 9, 9)), random.integers(0, 4, (3, 9, 9))
    masks[:, :2] = 255
    counts = confusion(torch.from_numpy(found), torch.from_numpy(masks), 5)
    known = masks != 255
    for i in range(5):
        for j in range(5):
            assert counts[i, j] == ((masks == i) & (found == j) & known).sum()
    assert mean_iou(counts) == pytest.approx(jaccard_score(masks[known], found[known], average="macro"))


def test_the_loss_is_the_mean_over_labelled_pixels() -> None:
    torch.manual_seed(0)
    logits, masks = torch.randn(2, 3, 4, 4), torch.randint(0, 3, (2, 16, 16))
    masks[0, :8] = 255
    total, count = 0.0, 0
    for image in range(2):
        for row in range(4):  # every fourth pixel, from the third on, is one of the output here
            for column in range(4):
                label = int(masks[image, 4 * row + 2, 4 * column + 2])
                if label != 255:
                    total -= float(logits[image, :, row, column].log_softmax(0)[label])
                    count += 1
    assert float(pixel_loss(logits, masks)) == pytest.approx(total / count, rel=1e-5)
    assert float(pixel_loss(logits, torch.full((2, 16, 16), 255))) == 0


def test_the_body_is_cut_at_its_layers_and_gives_what_they_give() -> None:
    model = stages().model.eval()
    x = torch.rand(2, 3, 64, 64)
    a, b = cut(model, ("sixteenth", "last"))(x)
    assert torch.equal(a, model.sixteenth(model.eighth(x)))
    assert torch.equal(b, model.last(a))
    made = Segmenter(model, Pyramid(("eighth", "last"), (12, 8), 3)).eval()
    maps = made.body(x)
    mixed = made.head.lateral[0](maps[0]) + F.interpolate(
        made.head.lateral[1](maps[1]), size=(8, 8), mode="bilinear", align_corners=False
    )
    assert torch.equal(made(x), made.head.classify(made.head.mix(mixed)))


@pytest.mark.parametrize(
    ("layers", "channels", "words"),
    [
        (("eighth", "nowhere"), (12, 8), "no layer 'nowhere' that is called once"),
        (("eighth", "eighth"), (12, 12), "different layers"),
        (("eighth",), (12, 8), "channels of each"),
        (("eighth", "last"), (12, 0), "positive integers"),
    ],
)
def test_a_pyramid_that_does_not_fit_is_refused(layers: tuple[str, ...], channels: tuple[int, ...], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        Segmenter(stages().model, Pyramid(layers, channels, 3))


def test_a_backbone_without_such_feature_maps_is_refused() -> None:
    flat = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), nn.Flatten(), nn.LazyLinear(3))
    flat(torch.zeros(1, 3, 64, 64))
    with pytest.raises(ModelError, match="no feature maps of 1/8, 1/16 and 1/32"):
        find_pyramid(flat, (64, 64), 3)


@pytest.mark.parametrize(
    "wrong", [[], {"layers": "a", "channels": [1], "classes": 2}, {"layers": [1], "channels": [1], "classes": 2}, {}]
)
def test_a_card_with_a_wrong_pyramid_is_refused(wrong: object) -> None:
    with pytest.raises(ModelError, match="pyramid must be"):
        Pyramid.from_json(wrong)
