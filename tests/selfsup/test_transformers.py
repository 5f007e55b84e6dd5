"""Transformers without a head: the class token, or the mean of the patches, is the latent that is explained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from squares import transformer
from torch import Tensor, nn

import classlens
from classlens import selfsup

IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
BANK = torch.randn(5, 3, 16, 16, generator=torch.Generator().manual_seed(2))
# The others have a rule for the last layer, which the network by hand has and the backbone has not.
METHODS = ("agf", "gradcam", "fullgrad", "attention-rollout", "generic-attention", "libragrad", "legrad")


class Along(nn.Module):
    """The score as a network written by hand: the projection of the latent on a direction."""

    def __init__(self, network: nn.Module, direction: Tensor) -> None:
        super().__init__()
        self.network, self.along = network, nn.Linear(8, 1, bias=False)
        self.along.weight = nn.Parameter((direction / direction.norm())[None])

    def forward(self, x: Tensor) -> Tensor:
        return self.along(self.network(x))


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_the_latent_of_a_transformer_is_explained(method: str, mean: bool) -> None:
    """As by a network that is written by hand with the direction from the neighbour to the image as its head."""
    network = transformer(mean).model
    with torch.no_grad():
        latents, others = network(IMAGES), network(BANK)
    nearest = torch.cdist(latents, others).argmin(1)
    e = selfsup.explain(network, IMAGES, BANK, method, head="none", both=False)
    assert torch.equal(e.indices, nearest)
    for row, (latent, neighbour) in enumerate(zip(latents, others[nearest], strict=True)):
        by_hand = Along(network, latent - neighbour).eval()
        expected = classlens.explain(by_hand, IMAGES[row : row + 1], [[0]], method)
        scale = float(expected.maps.abs().max())
        assert scale > 0
        torch.testing.assert_close(e.maps[row], expected.maps[0], rtol=1e-3, atol=1e-4 * scale)


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("method", ["agf", "lrp"])
def test_the_relevance_of_a_latent_adds_up(method: str, mean: bool) -> None:
    network = transformer(mean).model
    with torch.no_grad():
        latents, others = network(IMAGES), network(BANK)
    neighbours = others[torch.cdist(latents, others).argmin(1)]
    e = selfsup.explain(network, IMAGES, BANK, method, head="none", both=False)
    expected = (latents * nn.functional.normalize(latents - neighbours)).sum(1)
    torch.testing.assert_close(e.report.started[:, 0], expected.double(), rtol=1e-4, atol=1e-6)
    assert float(e.report.conservation.max()) < 1e-3


@pytest.mark.parametrize("mean", [False, True])
def test_a_bank_of_latents_of_a_transformer(mean: bool, voc: Path, tmp_path: Path) -> None:
    loaded = transformer(mean)
    bank = selfsup.build_bank(loaded, voc / "JPEGImages", tmp_path / "bank", head="none")
    photo = voc / "JPEGImages" / "val03.jpg"
    e = selfsup.explain(loaded, photo, bank, head="none")
    with torch.no_grad():
        latent = loaded.model(loaded.preprocess(photo)[None])
    others = [path for path in (voc / "JPEGImages").iterdir() if path.name != photo.name]
    with torch.no_grad():
        distances = [float((latent - loaded.model(loaded.preprocess(path)[None])).norm()) for path in others]
    assert e.neighbours[0].endswith(others[distances.index(min(distances))].name)
    assert float(e.distances[0]) == pytest.approx(min(distances), rel=1e-3)
    assert (e.maps.shape, e.without.maps.shape) == ((1, 1, 16, 16), (1, 1, 16, 16))
