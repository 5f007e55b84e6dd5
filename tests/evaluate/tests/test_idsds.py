from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from classlens.errors import DataError
from classlens.evaluate import Settings, run
from classlens.evaluate.store import Store
from classlens.evaluate.tests import idsds
from classlens.models import load


def test_patches_divide_the_picture() -> None:
    for height, width in ((8, 8), (224, 224), (10, 7), (5, 48)):
        seen = torch.zeros(height, width)
        for number in range(16):
            seen[idsds.patch(number, height, width)] += 1
        assert bool((seen == 1).all())
    maps = torch.arange(2 * 10 * 7.0).view(2, 10, 7)
    torch.testing.assert_close(idsds.sums(maps).sum(1), maps.double().sum((1, 2)))
    assert idsds.patch(6, 224, 224) == (slice(56, 112), slice(112, 168))  # the second row, the third column


def test_one_patch_is_deleted() -> None:
    images = torch.rand(2, 3, 16, 16) + 1
    changed = idsds.without(images, 7)
    assert bool((changed[:, :, 4:8, 12:16] == 0).all())
    assert int((changed != images).sum()) == 2 * 3 * 16


def test_rows_are_spearmans_correlation_with_deletions_done_by_hand(labelled: Path, tmp_path: Path) -> None:
    settings = Settings(
        tests=("idsds",), data=(str(labelled),), methods=("gradient-x-input", "random"), model="world:make", limit=4
    )
    (table,) = run(settings, tmp_path).tables
    assert table.rows["gradient-x-input"][0].value > 0.5 > abs(table.rows["random"][0].value)
    loaded = load("world:make")
    for row in Store(tmp_path).read("idsds").to_pylist():
        image = loaded.preprocess(labelled / row["image"])
        label = ("red", "green", "blue").index(row["image"].split("/")[0])
        assert row["explained"] == label
        by_hand = []
        for top in range(0, 48, 12):
            for left in range(0, 48, 12):
                hidden = image.clone()
                hidden[:, top : top + 12, left : left + 12] = 0
                with torch.no_grad():
                    clean, changed = loaded.model(torch.stack([image, hidden]))[:, label]
                by_hand.append(float(clean - changed))
        np.testing.assert_allclose(row["falls"], by_hand, atol=1e-4)
        assert row["correlation"] == pytest.approx(spearmanr(row["sums"], row["falls"]).statistic, abs=1e-9)


def test_without_labels_it_is_refused(masked: Path, tmp_path: Path) -> None:
    asked = Settings(tests=("idsds",), data=(str(masked),), methods=("random",), model="world:make")
    with pytest.raises(DataError, match="idsds needs labels that are classes of the model, and masked has none"):
        run(asked, tmp_path)
