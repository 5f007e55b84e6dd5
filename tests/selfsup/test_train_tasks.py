import math

import numpy as np
import pytest
import torch

from classlens.selfsup.scores import chance_purity, mutual_information, purity
from classlens.selfsup.tasks import contrast_loss, nearest_others, scan_loss
from classlens.selfsup.views import TURNS, centre, crops, other_colours, quarter_turns


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


# --------------------------------------------------------------------------------------------------------- views


def test_quarter_turns_by_hand():
    image = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).expand(1, 3, 2, 2)
    turned, labels = quarter_turns(image)
    assert labels.tolist() == [0, 1, 2, 3]
    assert turned[:, 0].tolist() == [[[1, 2], [3, 4]], [[2, 4], [1, 3]], [[4, 3], [2, 1]], [[3, 1], [4, 2]]]
    # What was on top lies on the left after a turn to the left.
    assert TURNS[1] == "turned left"
    top = torch.zeros(1, 3, 4, 4)
    top[:, :, 0] = 1
    assert quarter_turns(top)[0][1, 0, :, 0].tolist() == [1, 1, 1, 1]


def test_labels_belong_to_the_turns_of_every_picture():
    images = torch.rand(3, 3, 4, 4, generator=generator())
    turned, labels = quarter_turns(images)
    for position, label in enumerate(labels.tolist()):
        assert torch.equal(turned[position], torch.rot90(images[position % 3], label, (1, 2)))


def test_a_crop_of_everything_is_the_picture_or_its_mirror_image():
    pixels = torch.randint(0, 256, (20, 3, 8, 8), generator=generator()).to(torch.uint8)
    views = crops(pixels, 8, (1.0, 1.0), generator(1))
    same = [torch.allclose(view, picture / 255, atol=1e-5) for view, picture in zip(views, pixels, strict=True)]
    mirrored = [
        torch.allclose(view, picture.flip(-1) / 255, atol=1e-5) for view, picture in zip(views, pixels, strict=True)
    ]
    assert all(a != b for a, b in zip(same, mirrored, strict=True))
    assert 0 < sum(same) < 20


def test_crops_stay_inside_and_differ():
    ramp = torch.arange(40).expand(1, 3, 40, 40).to(torch.uint8)
    views = crops(ramp.repeat(50, 1, 1, 1), 10, (0.5, 0.5), generator(2)) * 255
    widths = (views[:, 0, 0, -1] - views[:, 0, 0, 0]).abs()
    assert torch.allclose(widths, torch.full((50,), 18.0), atol=0.1)  # 10 samples of 2 pixels each
    assert views.min() >= 0
    assert views.max() <= 39
    assert len(views[:, 0, 0, 0].round().unique()) > 5


def test_other_colours_keep_the_range_and_are_sometimes_grey():
    images = torch.rand(200, 3, 4, 4, generator=generator())
    found = other_colours(images, generator(1))
    assert found.min() >= 0
    assert found.max() <= 1
    grey = ((found - found.mean(1, keepdim=True)).abs().amax((1, 2, 3)) < 1e-6).float().mean()
    assert 0.1 < grey < 0.3
    assert torch.equal(found, other_colours(images, generator(1)))


def test_the_centre_is_what_the_preprocessing_cuts_out():
    pixels = torch.arange(25, dtype=torch.uint8).view(1, 1, 5, 5).expand(1, 3, 5, 5)
    assert (centre(pixels, 3)[0, 0] * 255).round().tolist() == [[6, 7, 8], [11, 12, 13], [16, 17, 18]]


# -------------------------------------------------------------------------------------------------------- losses


def test_scan_loss_by_hand():
    p, q = [[0.9, 0.1], [0.2, 0.8]], [[0.5, 0.5], [0.4, 0.6]]
    agreement = (math.log(0.9 * 0.5 + 0.1 * 0.5) + math.log(0.2 * 0.4 + 0.8 * 0.6)) / 2
    entropy = -(0.55 * math.log(0.55) + 0.45 * math.log(0.45))
    found = scan_loss(torch.tensor(p).log() + 3, torch.tensor(q).log() - 1, entropy=5.0)
    assert float(found) == pytest.approx(-agreement - 5 * entropy, rel=1e-5)


def test_scan_loss_is_least_for_sure_agreeing_and_spread_pictures():
    good = 20 * torch.eye(4)
    for worse in (20 * torch.eye(4)[[1, 2, 3, 0]], torch.zeros(4, 4)):
        assert scan_loss(good, good, 5.0) < scan_loss(good, worse, 5.0)
    alone = 20 * torch.eye(4)[[0, 0, 0, 0]]
    assert scan_loss(good, good, 5.0) < scan_loss(alone, alone, 5.0)


def test_contrast_loss_by_hand():
    z = torch.randn(6, 4, generator=generator()).double()
    unit = [[float(x) for x in row / row.norm()] for row in z]
    total = 0.0
    for i in range(6):
        similarity = {j: math.exp(sum(a * b for a, b in zip(unit[i], unit[j], strict=True)) / 0.5) for j in range(6)}
        total -= math.log(similarity[(i + 3) % 6] / sum(value for j, value in similarity.items() if j != i))
    assert float(contrast_loss(z, 0.5)) == pytest.approx(total / 6)


def test_nearest_others_never_holds_a_row_itself_and_is_the_same_in_blocks():
    latents = torch.nn.functional.normalize(torch.randn(25, 5, generator=generator()))
    found = nearest_others(latents, 4, block=7)
    assert torch.equal(found, nearest_others(latents, 4))
    for row in range(25):
        others = sorted((j for j in range(25) if j != row), key=lambda j: -float(latents[row] @ latents[j]))
        assert found[row].tolist() == others[:4]


# -------------------------------------------------------------------------------------------------------- scores


def test_purity_and_information_by_hand():
    clusters, labels = np.array([0, 0, 0, 1, 1, 1]), np.array([0, 0, 1, 1, 1, 1])
    assert purity(clusters, labels) == pytest.approx(5 / 6)
    h = {n: -sum(p * math.log(p) for p in ps) for n, ps in {"c": (0.5, 0.5), "l": (1 / 3, 2 / 3)}.items()}
    joint = -(2 / 6 * math.log(2 / 6) + 1 / 6 * math.log(1 / 6) + 3 / 6 * math.log(3 / 6))
    assert mutual_information(clusters, labels) == pytest.approx((h["c"] + h["l"] - joint) / ((h["c"] + h["l"]) / 2))
    assert mutual_information(labels, labels) == pytest.approx(1)
    assert mutual_information(np.zeros(6, int), labels) == 0


def test_many_small_clusters_are_pure_by_chance():
    labels = np.arange(100) % 10
    assert chance_purity(np.arange(100), labels) == 1
    assert chance_purity(np.arange(100) % 2, labels) < 0.3
