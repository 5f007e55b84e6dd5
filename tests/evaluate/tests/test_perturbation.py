from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from world import COLOURS, SIDE, make, picture

import goldens
from classlens.evaluate.tests import perturbation
from classlens.models import Preprocess


def test_ranks_count_from_the_lowest() -> None:
    maps = torch.tensor([[[3.0, -1.0], [0.0, 7.0]]])
    assert perturbation.ranks(maps).tolist() == [[[2, 0], [1, 3]]]


def test_equal_values_are_removed_in_no_particular_place() -> None:
    maps = torch.zeros(2, 40, 40)
    order = perturbation.ranks(maps, seed=1)
    assert torch.equal(order[0], order[1])  # the same for every method and picture
    assert sorted(order[0].flatten().tolist()) == list(range(1600))
    first = (order[0] < 160).double()
    assert 0.4 < first[:20].sum() / 160 < 0.6
    assert 0.4 < first[:, :20].sum() / 160 < 0.6


def test_the_area_by_hand() -> None:
    assert perturbation.auc([1] * 10) == pytest.approx(90)
    assert perturbation.auc([1, 0, 0, 0, 0, 0, 0, 0, 0, 0]) == pytest.approx(5)
    falling = np.linspace(1, 0.1, 10)
    assert perturbation.auc(falling) == pytest.approx(100 * 0.9 * 0.55)
    many = np.random.default_rng(0).random((4, 10))
    assert perturbation.areas(many) == pytest.approx([perturbation.auc(curve) for curve in many])


def test_what_removed_pixels_become() -> None:
    images = torch.rand(2, 3, 20, 24, dtype=torch.float64)
    preprocess = Preprocess()
    x = preprocess.normalise(images)
    black = preprocess.restore(perturbation.replacement(x, "black", preprocess))
    assert black.abs().max() < 1e-12
    mean = preprocess.restore(perturbation.replacement(x, "mean", preprocess))
    assert torch.allclose(mean, images.mean((2, 3), keepdim=True).expand_as(images))
    blur = preprocess.restore(perturbation.replacement(x, "blur", preprocess))
    assert torch.allclose(blur, perturbation.blurred(images, 1.0))


def test_the_blur_is_a_gaussian() -> None:
    dot = torch.zeros(1, 1, 41, 41, dtype=torch.float64)
    dot[0, 0, 20, 20] = 1
    spread = perturbation.blurred(dot, 2.0)[0, 0]
    place = torch.arange(41) - 20.0
    assert spread.sum() == pytest.approx(1)
    assert (spread.sum(0) * place**2).sum() == pytest.approx(4, rel=0.03)
    assert torch.allclose(perturbation.blurred(torch.full((1, 3, 9, 9), 0.7), 3.0), torch.tensor(0.7))


@pytest.mark.parametrize("at_once", [1, 7, 10_000])
def test_the_released_protocol(at_once: int) -> None:
    """Accuracies, probabilities and area of 24 pictures as the released script gives them."""
    model, _, _ = goldens.load("vgg_id")
    theirs = np.load(goldens.FOLDER / "metrics.npz")
    preprocess = Preprocess(resize=None, crop=None)
    images = preprocess.normalise(torch.from_numpy(theirs["pert_image_u8"]).double() / 255)
    labels, maps = torch.from_numpy(theirs["pert_label"]), torch.from_numpy(theirs["pert_map"])[:, 0]
    black = perturbation.replacement(images, "black", preprocess)
    with torch.no_grad():
        clean = model(images).argmax(1) == labels
        found = perturbation.measure(model, images, maps, black, labels, at_once)
    assert clean.tolist() == theirs["pert_clean_hit"].tolist()
    for d, direction in enumerate(("neg", "pos")):
        hits = found.predicted[d] == labels
        assert torch.equal(hits, torch.from_numpy(theirs[f"pert_{direction}_hits"]))
        np.testing.assert_allclose(found.probability[d], theirs[f"pert_{direction}_target_prob"], rtol=1e-9)
        curve = torch.cat([clean[None], hits]).double().mean(1)
        assert perturbation.auc(curve.numpy()) == pytest.approx(float(theirs[f"pert_{direction}_auc_0_to_0.9_x100"]))


def world(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Images (B,3,H,W), masks (B,H,W), classes (B,)."""
    drawn = [(picture(colour, seed), index) for index, colour in enumerate(COLOURS) for seed in range(count)]
    images = torch.stack([torch.from_numpy(p).permute(2, 0, 1) / 255 for (p, _), _ in drawn])
    masks = torch.stack([torch.from_numpy(m) for (_, m), _ in drawn])
    return images, masks, torch.tensor([index for _, index in drawn])


def test_an_oracle_that_keeps_the_object_beats_chance() -> None:
    loaded = make()
    images, masks, classes = world(8)
    noise = torch.rand(len(images), SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    black = perturbation.replacement(images, "black", loaded.preprocess)
    with torch.no_grad():
        assert torch.equal(loaded.model(images).argmax(1), classes)
        oracle = perturbation.measure(loaded.model, images, masks + 0.5 * noise, black, classes, 100)
        chance = perturbation.measure(loaded.model, images, noise, black, classes, 100)
    areas = {
        name: [perturbation.auc([1.0, *(c.predicted[d] == classes).double().mean(1).tolist()]) for d in (0, 1)]
        for name, c in (("oracle", oracle), ("chance", chance))
    }
    assert areas["oracle"][0] == pytest.approx(90, abs=1)  # the object is less than a tenth: it is never touched
    assert areas["oracle"][0] > areas["chance"][0] + 15
    assert areas["oracle"][1] == pytest.approx(5, abs=1)  # and gone at the first step
    assert areas["oracle"][1] < areas["chance"][1] - 15
