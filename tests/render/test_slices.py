"""Volumes in figures: the slices with the strongest evidence, on one scale, in order."""

from __future__ import annotations

from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from PIL import Image

import classlens
from classlens import render
from classlens.render.colours import overlay
from classlens.render.slices import side_by_side, strip, strongest
from networks import build, volumes


def test_a_strip_has_the_strongest_slice_of_each_part() -> None:
    maps = torch.zeros(2, 12, 3, 3)
    maps[0, [1, 7], 0, 0] = torch.tensor([-5.0, 1.0])  # evidence against counts, too
    maps[1, [4, 10], 1, 1] = 1e-6  # a class with small numbers counts as much
    assert strip(maps, 3) == [1, 4, 10]
    assert strip(maps[:, :2], 3) == [0, 1]
    assert strip(torch.zeros(1, 6, 2, 2), 2) == [0, 3]


def test_the_strongest_slice_is_one_of_evidence_for_the_class() -> None:
    evidence = torch.zeros(5, 2, 2)
    assert strongest(evidence) == 2
    evidence[0], evidence[3] = -9.0, 1.0
    assert strongest(evidence) == 3


def test_slices_share_one_scale() -> None:
    picture, evidence = torch.full((3, 2, 4, 4), 0.5), torch.ones(2, 4, 4)
    evidence[1] = 0.1
    whole = overlay(picture, evidence)
    assert whole.shape == (2, 4, 4, 3)
    assert np.array_equal(whole[0], overlay(picture[:, 0], evidence[0]))
    assert not np.array_equal(whole[1], overlay(picture[:, 1], evidence[1]))  # alone, it would look as strong


def test_figures_and_files_of_a_volume(tmp_path: Path) -> None:
    e = classlens.explain(build("volume"), volumes(1, (8, 16, 24)), classlens.top(2))
    assert len(e.figure().axes) == 6 * 3 + 1  # six slices of the picture and of two classes, and the colour bar
    written = {path.name: path for path in e.save(tmp_path)}
    (name,) = [name for name in written if name.startswith(f"0-{int(e.targets[0, 0])}")]
    with Image.open(written[name]) as image:
        assert image.size == (6 * 24, 16)
        assert np.array_equal(np.asarray(image), side_by_side(e, 0, 0))
    with np.load(written["maps.npz"]) as arrays:
        assert arrays["maps"].shape == (1, 2, 8, 16, 24)
    compared = classlens.compare(build("volume"), volumes(1, (8, 16, 24)), 1, ["gradcam", "gradient"])
    assert compared.figure() is not None


def test_volumes_in_words() -> None:
    evidence = np.zeros((10, 6, 6))
    evidence[4, 0, 0], evidence[5, 5, 5], evidence[9, 0, 0] = 3.0, 2.0, -5.0
    text = render.where(evidence)
    assert "half of it in slices 5 to 5 of 10" in text
    assert "mostly top-left (60 %)" in text
    assert "50 % of all evidence is against" in text


MODULE = """
import torch
from torch import nn


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv3d(1, 4, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, 3))
"""


def test_the_command_saves_maps_on_the_scans_own_grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from classlens.cli.commands import app

    monkeypatch.chdir(tmp_path)
    (tmp_path / "scan_network.py").write_text(MODULE)
    (tmp_path / "card.json").write_text(
        '{"architecture": "scan_network:net", "weights": null, "labels": ["a", "b", "c"], '
        '"preprocess": {"channels": ["CT"], "orientation": "RAS", "size": [8, 8, 8]}}'
    )
    affine = np.diag([-2.0, 2.0, 3.0, 1.0])
    nibabel.save(nibabel.Nifti1Image(np.random.default_rng(0).random((6, 7, 9)), affine), tmp_path / "ct.nii.gz")
    done = CliRunner().invoke(app, ["explain", "ct.nii.gz", "--model", "card.json", "--class", "b", "--out", "out"])
    assert done.exit_code == 0, done.output
    saved = nibabel.load(tmp_path / "out" / "ct" / "0-1-b.nii.gz")
    assert saved.shape == (6, 7, 9)
    assert np.allclose(saved.affine, affine)
    assert (tmp_path / "out" / "ct" / "figure.png").exists()
