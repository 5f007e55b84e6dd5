"""The preprocessing of scans: turned, resampled, scaled; maps come back onto the scan's own grid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from PIL import Image

import classlens
from classlens.data.scans import Scan
from classlens.errors import ImageError, ModelError
from classlens.models import Preprocess, ScanPreprocess
from classlens.models.cards import read_card
from classlens.models.network import Network
from classlens.models.scans import preprocess_from_json

# Axes of the file: to the left (2 mm), up (3 mm), to the front (1.5 mm).
AFFINE = np.array([[-2.0, 0, 0, 90], [0, 0, 1.5, -120], [0, 3.0, 0, -60], [0, 0, 0, 1]])


def scan(*shape: int) -> Scan:
    return Scan(np.random.default_rng(0).random((1, *shape)).astype(np.float32), AFFINE)


def plain(**settings: Any) -> ScanPreprocess:
    return ScanPreprocess(**{"channels": ("CT",), "window": (0, 1)} | settings)


def test_window_mean_and_std_of_each_channel() -> None:
    stored = np.stack([np.full((2, 2), 300.0), np.full((2, 2), 5.0)]).astype(np.float32)
    preprocess = ScanPreprocess(
        channels=("a", "b"), axes=2, window=((100, 500), (0, 4)), mean=(0.5, 0.25), std=(0.5, 0.25)
    )
    found = preprocess.prepared(Scan(stored))
    assert torch.equal(found[:, 0, 0], torch.tensor([0.0, 3.0]))  # (0.5 - 0.5) / 0.5; 5 is above the window: 1
    assert torch.allclose(preprocess.restore(found)[:, 0, 0], torch.tensor([0.5, 0.5, 0.5]))  # a, as grey


def test_without_a_window_each_channel_has_its_own_range() -> None:
    stored = np.array([[[1.0, 2.0, 5.0]], [[-4.0, 0.0, 4.0]], [[7.0, 7.0, 7.0]]], dtype=np.float32)
    found = ScanPreprocess(channels=("a", "b", "c"), axes=2).prepared(Scan(stored))
    assert torch.allclose(found, torch.tensor([[[0.0, 0.25, 1.0]], [[0.0, 0.5, 1.0]], [[0.0, 0.0, 0.0]]]))


def test_shown_channels_become_red_green_and_blue() -> None:
    preprocess = ScanPreprocess(channels=("B2", "B3", "B4", "B8"), axes=2, show=("B8", "B4", "B3"))
    x = torch.arange(4.0).reshape(1, 4, 1, 1).expand(2, 4, 3, 5) / 4
    assert torch.equal(preprocess.restore(x)[1, :, 0, 0], torch.tensor([0.75, 0.5, 0.25]))


def test_turned_to_the_orientation_of_the_card() -> None:
    original = scan(4, 5, 6)
    turned = plain(orientation="RAS").prepared(original)[0].numpy()
    # right = -axis 0, front = axis 2, up = axis 1
    assert np.array_equal(turned, original.values[0][::-1].transpose(0, 2, 1))


def test_resampled_to_the_spacing_of_the_card() -> None:
    assert plain(spacing=(1.0, 3.0, 3.0)).prepared(scan(4, 6, 8)).shape == (1, 8, 6, 4)
    assert plain(orientation="RAS", spacing=(2.0, 3.0, 3.0)).prepared(scan(4, 6, 8)).shape == (1, 4, 4, 6)


@pytest.mark.parametrize("orientation", [None, "RAS", "SPL", "LPI"])
def test_maps_return_to_the_grid_of_the_scan(orientation: str | None) -> None:
    original, preprocess = scan(4, 5, 6), plain(orientation=orientation)
    maps = torch.cat([preprocess.prepared(original)] * 2)  # as if the evidence were the scan itself
    assert np.allclose(preprocess.back(maps, original)[1].numpy(), original.values[0])
    larger = plain(orientation=orientation, size=(8, 10, 12))
    assert larger.back(larger.prepared(original), original).shape == (1, 4, 5, 6)


def test_geometry_that_a_file_lacks_is_not_guessed(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((3, 4, 5)))
    with pytest.raises(ImageError, match="does not say where its voxels lie"):
        plain(orientation="RAS")(tmp_path / "a.npy")
    assert plain()(tmp_path / "a.npy").shape == (1, 3, 4, 5)


def test_other_channels_than_the_card_names_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((3, 4, 5)))
    with pytest.raises(ImageError, match=r"a\.npy has 3 channels, but the network reads 2: red, nir"):
        ScanPreprocess(channels=("red", "nir"), axes=2)(tmp_path / "a.npy")
    with pytest.raises(ImageError, match="needs a file, not a Image"):
        plain()(Image.new("RGB", (4, 4)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("channels", ()), ("channels", ("a", "a")), ("axes", 4), ("mean", (1.0, 2.0)), ("std", (0.0,)),
        ("size", (3, 4)), ("size", (3, 4, 0)), ("spacing", (1.0, 2.0)), ("spacing", (1.0, 2.0, 0.0)),
        ("orientation", "RAL"), ("orientation", "RASS"), ("window", (3, 1)), ("window", ((0, 1), (0, 1))),
        ("show", ("b",)), ("show", ("CT", "CT")),
    ],
)  # fmt: skip
def test_wrong_settings_are_named(field: str, value: Any) -> None:
    with pytest.raises(ModelError, match=f"preprocess: {field} must be"):
        plain(**{field: value})


def test_a_volume_has_either_a_size_or_a_spacing() -> None:
    with pytest.raises(ModelError, match="spacing must be null if size is given"):
        plain(size=(3, 3, 3), spacing=(1.0, 1.0, 1.0))


def test_cards_with_channels() -> None:
    preprocess = ScanPreprocess(
        channels=("a", "b"), axes=3, orientation="RAS", size=(8, 9, 10), window=((0, 1), (-1, 5)), show=("b",)
    )
    assert preprocess_from_json(json.loads(json.dumps(preprocess.to_json()))) == preprocess
    assert preprocess_from_json({"crop": 100}) == Preprocess(crop=100)
    with pytest.raises(ModelError, match="unknown field crop"):
        preprocess_from_json({"channels": ["a"], "crop": 100})
    assert preprocess.shape == (2, 8, 9, 10)
    assert Preprocess(crop=(100, 120)).shape == (3, 100, 120)


def card(folder: Path, architecture: str, **preprocess: Any) -> Path:
    about = {"architecture": architecture, "weights": None, "labels": None, "preprocess": preprocess}
    path = folder / "card.json"
    path.write_text(json.dumps(about))
    return path


MODULE = """
import torch
from torch import nn
def of(conv, pool, channels):
    torch.manual_seed(0)
    return nn.Sequential(conv(channels, 4, 3, 2, 1), nn.ReLU(), conv(4, 4, 3, 2, 1), nn.ReLU(), pool(1), nn.Flatten(),
                         nn.Linear(4, 3))
def volume():
    return of(nn.Conv3d, nn.AdaptiveAvgPool3d, 1)
def satellite():
    return of(nn.Conv2d, nn.AdaptiveAvgPool2d, 6)
"""


def test_a_volume_from_a_file_with_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "volume_networks.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    nibabel.save(nibabel.Nifti1Image(scan(9, 10, 11).values[0], AFFINE), tmp_path / "scan.nii.gz")
    loaded = classlens.load(
        card(tmp_path, "volume_networks:volume", channels=["CT"], orientation="RAS", size=[8, 16, 16])
    )
    e = classlens.explain(loaded, tmp_path / "scan.nii.gz", torch.tensor([[0, 2]]))
    assert e.maps.shape == (1, 2, 8, 16, 16)
    assert e.pictures.shape == (1, 3, 8, 16, 16)
    both = classlens.explain(loaded, [tmp_path / "scan.nii.gz"] * 2, 1)
    assert both.maps.shape == (2, 1, 8, 16, 16)
    with pytest.raises(ModelError, match="reads scans, not photos"):
        Network(loaded)
    with pytest.raises(ModelError, match="only explain and compare"):
        loaded.preprocess.frame(Image.new("RGB", (4, 4)))


def test_six_channels_from_a_file_with_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "volume_networks.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    np.save(tmp_path / "field.npy", np.random.default_rng(0).random((6, 32, 40)))
    names = ["B2", "B3", "B4", "B8", "B11", "B12"]
    path = card(tmp_path, "volume_networks:satellite", channels=names, axes=2, show=["B4", "B3", "B2"])
    assert read_card(path).preprocess == ScanPreprocess(channels=tuple(names), axes=2, show=("B4", "B3", "B2"))
    e = classlens.explain(classlens.load(path), str(tmp_path / "field.npy"), 1)
    assert e.maps.shape == (1, 1, 32, 40)
    assert e.figure() is not None
