"""Real networks for video: a map for each frame, or one line. (torchvision's, with random weights and small clips.)"""

from __future__ import annotations

import pytest
import torch

import classlens
from classlens.methods import METHODS
from classlens.models._torchvision import import_torchvision
from quick import QUICK


@pytest.mark.parametrize("method", ["agf", "lrp", "gradcam"])
@pytest.mark.parametrize("name", ["mvit_v1_b", "mvit_v2_s", "s3d"])
def test_networks_of_one_size_only(name: str, method: str) -> None:
    """These need 16 frames of 224 pixels."""
    torch.manual_seed(0)
    model, clip = import_torchvision().models.get_model(name, weights=None).eval(), torch.randn(1, 3, 16, 224, 224)
    e = classlens.explain(model, clip, 1, method)
    assert e.maps.shape == (1, 1, 16, 224, 224)
    assert e.maps.isfinite().all()
    assert e.maps.abs().max() > 0 or any("0 everywhere" in note for note in e.report.notes)
    assert method == "gradcam" or e.report.conservation.abs().max() < 1e-6


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("name", ["r3d_18", "swin3d_t"])
def test_a_map_for_each_frame_or_one_line(name: str, method: str) -> None:
    torch.manual_seed(0)
    model, clip = import_torchvision().models.get_model(name, weights=None).eval(), torch.randn(1, 3, 4, 32, 32)
    if METHODS[method].attention and (name, method) != ("swin3d_t", "libragrad"):  # none, or blocks of other tokens
        with pytest.raises(classlens.ClasslensError, match=r"^[^\n]+$"):
            classlens.explain(model, clip, 1, method)
        return
    e = classlens.explain(model, clip, 1, method, **QUICK.get(method, {}))
    assert e.maps.shape == (1, 1, 4, 32, 32)
    assert e.maps.isfinite().all()
    assert e.maps.abs().max() > 0 or any("0 everywhere" in note for note in e.report.notes)


@pytest.mark.parametrize("method", ["agf", "lrp"])
@pytest.mark.parametrize("name", ["DenseNet121", "ResNet-10"])
def test_volumes_of_monai(name: str, method: str) -> None:
    from monai.networks.nets import DenseNet121, resnet10

    torch.manual_seed(0)
    model = (
        DenseNet121(spatial_dims=3, in_channels=1, out_channels=4)
        if name == "DenseNet121"
        else resnet10(spatial_dims=3, n_input_channels=1, num_classes=4)
    ).eval()
    e = classlens.explain(model, torch.randn(1, 1, 32, 32, 32), 1, method)
    assert e.maps.shape == (1, 1, 32, 32, 32)
    assert e.maps.abs().max() > 0
    assert e.report.conservation.abs().max() < 1e-6
