from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from classlens.evaluate import Settings, run
from classlens.evaluate.tests import road


def slowly_imputed(image: np.ndarray, gone: np.ndarray) -> np.ndarray:
    """One channel (H,W), by a dense linear system, pixel by pixel."""
    places = [tuple(place) for place in np.argwhere(gone)]
    index = {place: i for i, place in enumerate(places)}
    system, right = np.zeros((len(places), len(places))), np.zeros(len(places))
    for (y, x), i in index.items():
        for dy in (-1, 0, 1):
            for dx in (-1, 0, 1):
                place = (y + dy, x + dx)
                if (dy, dx) == (0, 0) or not (0 <= place[0] < image.shape[0] and 0 <= place[1] < image.shape[1]):
                    continue
                weight = 1 / 6 if 0 in (dy, dx) else 1 / 12
                system[i, i] += weight
                if place in index:
                    system[i, index[place]] -= weight
                else:
                    right[i] += weight * image[place]
    filled = image.copy()
    filled[gone] = np.linalg.solve(system, right)
    return filled


@pytest.mark.parametrize("share", [0.2, 0.8, 0.97])
def test_imputation_solves_the_linear_system(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(road, "NOISE", 0.0)
    generator = torch.Generator().manual_seed(1)
    images, gone = torch.rand(2, 3, 12, 15, generator=generator), torch.rand(2, 12, 15, generator=generator) < share
    found = road.imputed(images, gone)
    for row in range(2):
        for channel in range(3):
            slow = slowly_imputed(images[row, channel].numpy().astype(float), gone[row].numpy())
            np.testing.assert_allclose(found[row, channel].numpy(), slow, atol=5e-3)
    assert torch.equal(found[~gone[:, None].expand_as(found)], images[~gone[:, None].expand_as(images)])


def test_noise_is_added_to_removed_pixels_alone() -> None:
    images, gone = torch.full((1, 3, 20, 20), 0.5), torch.zeros(1, 20, 20, dtype=torch.bool)
    gone[:, 5:15, 5:15] = True
    found = road.imputed(images, gone)
    assert torch.equal(found[..., :5, :], images[..., :5, :])
    assert float(found[..., 5:15, 5:15].std()) == pytest.approx(road.NOISE, rel=0.2)
    assert torch.equal(road.imputed(images, torch.zeros_like(gone)), images)


def test_a_perfect_map_deletes_at_once_and_inserts_at_once() -> None:
    """The logit is the brightness of one square: with it gone, or alone, nothing else matters."""
    images = torch.rand(1, 3, 28, 28) * 0.01
    images[..., 4:12, 4:12] += 1  # a tenth of the pixels
    truth = torch.zeros(1, 28, 28)
    truth[:, 4:12, 4:12] = 1

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x[..., 4:12, 4:12].mean((1, 2, 3))[:, None]

    zero = torch.zeros(1, dtype=torch.int64)
    right, wrong = (road.curves(forward, images, m, zero, 4, fractions=(0.1, 0.5)) for m in (truth, -truth))
    assert right[0].max() < 0.2
    assert right[1].min() > 0.9
    assert wrong[0, 0] > 0.9


def test_a_run(labelled: Path, tmp_path: Path) -> None:
    settings = Settings(
        tests=("road",), data=(str(labelled),), methods=("gradient-x-input", "random"), model="world:make", limit=3
    )
    (table,) = run(settings, tmp_path).tables
    good, chance = table.rows["gradient-x-input"], table.rows["random"]
    assert good[0].value < chance[0].value
    assert good[1].value > chance[1].value
