"""COCO's format, as its definition says; tests/outside/test_loggers.py reads it with pycocotools."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import classlens
from classlens.errors import ClasslensError
from classlens.interop.coco import run_lengths, strongest_part, write_coco


@pytest.fixture(scope="module")
def explained():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    )
    return classlens.explain(model.eval(), torch.rand(2, 3, 24, 32), [[3, 1], [0, 3]])


def decoded(rle):
    """The mask of uncompressed run lengths, by hand."""
    height, width = rle["size"]
    flat = np.concatenate([np.full(count, i % 2, bool) for i, count in enumerate(rle["counts"])])
    return flat.reshape(width, height).T


@pytest.mark.parametrize("seed", range(5))
def test_run_lengths_hold_the_mask(seed):
    mask = np.random.default_rng(seed).random((7, 5)) < 0.4 + 0.1 * seed
    assert (decoded(run_lengths(mask)) == mask).all()
    assert (decoded(run_lengths(~mask)) == ~mask).all()
    assert run_lengths(np.ones((2, 3), bool))["counts"] == [0, 6]
    assert run_lengths(np.zeros((2, 3), bool))["counts"] == [6]


def test_a_mask_is_the_smallest_part_that_holds_the_share():
    values = torch.randn(12, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for share in (0.1, 0.5, 0.9, 1.0):
        mask = strongest_part(values, share)
        positive = values.clamp(min=0).numpy()
        kept = positive[mask].sum() / positive.sum()
        assert kept >= share - 1e-9
        weakest = positive[mask].min()
        assert kept - weakest / positive.sum() < share  # without its weakest pixel it would hold less
        assert weakest >= positive[~mask].max()
    assert not strongest_part(-torch.ones(4, 4)).any()
    assert not (strongest_part(values, 1.0) & (values.numpy() <= 0)).any()


def test_the_folder_holds_pictures_masks_and_maps_that_fit_each_other(explained, tmp_path):
    path = write_coco(tmp_path / "export", explained, share=0.6)
    labels = json.loads(path.read_text())
    assert [image["file_name"] for image in labels["images"]] == ["000001.png", "000002.png"]
    assert {category["name"] for category in labels["categories"]} == {"class 3", "class 1", "class 0"}
    maps = np.load(tmp_path / "export" / "maps.npz")
    for about in labels["annotations"]:
        row = about["image_id"] - 1
        name = labels["categories"][about["category_id"] - 1]["name"]
        k = [explained.name(row, k) for k in range(2)].index(name)
        evidence = explained.maps[row, k]
        mask = decoded(about["segmentation"])
        assert (mask == strongest_part(evidence, 0.6)).all()
        assert about["area"] == mask.sum()
        left, top, width, height = (int(value) for value in about["bbox"])
        assert mask[top : top + height, left : left + width].sum() == mask.sum()
        edges = (mask[top], mask[top + height - 1], mask[:, left], mask[:, left + width - 1])
        assert all(edge.any() for edge in edges)
        assert about["score"] == pytest.approx(explained.probability(row, k))
        assert np.allclose(maps[f"{about['image_id']:06d}-{about['category_id']}"], evidence)
        picture = np.asarray(Image.open(tmp_path / "export" / "data" / f"{about['image_id']:06d}.png"))
        assert picture.shape == (24, 32, 3)


def test_what_cannot_be_exported_is_one_line(explained, tmp_path):
    with pytest.raises(ClasslensError, match="no explanation to export"):
        write_coco(tmp_path, [])
    with pytest.raises(ClasslensError, match="share=2"):
        write_coco(tmp_path, explained, share=2)
    with pytest.raises(ClasslensError, match="NaN"):
        strongest_part(torch.tensor([[float("nan")]]))
