"""Removal of channels: the curve of a network set by hand, and a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from parts import draw_parts, make, picture

from classlens.concept.layers import candidates
from classlens.core.capture import record
from classlens.evaluate import Settings, run
from classlens.evaluate.tests import removal
from classlens.methods.tail import Tail


def test_the_curve_is_that_of_the_network_without_the_channels() -> None:
    """Slowly: the weights of the head that read a removed channel are set to 0."""
    model = make().model
    images = torch.stack([torch.from_numpy(picture(seed)).permute(2, 0, 1) / 255 for seed in (0, 1)])
    tape = record(model, images)
    (layer,) = candidates(tape)
    strength = torch.tensor([[3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0]])
    tail = Tail.after(tape, layer.value, "")
    found = removal.curve(tail, layer, strength, torch.tensor([0, 0]))
    assert found.shape == (2, 1 + len(removal.FRACTIONS))
    kept = model.head.weight.detach().clone()
    for row, gone in ((0, [0, 1]), (1, [3, 2])):  # half of the channels
        with torch.no_grad():
            model.head.weight.copy_(kept)
            model.head.weight[:, gone] = 0
            slow = model(images[row : row + 1]).double().softmax(1)[0, 0]
        assert float(found[row, -1]) == pytest.approx(float(slow), abs=1e-5)
    assert float(found[0, 0]) > float(found[0, -1])


def test_the_area_is_the_mean_height_beside_that_of_the_clean_image() -> None:
    """Curves that are straight over the removed fraction: their mean height is that in the middle."""
    at = (0.0, *removal.FRACTIONS)
    straight = [[0.5 for _ in at], [0.8 - 0.8 * fraction for fraction in at]]
    found = removal.area(pa.table({"relevance": straight}), "relevance")
    assert found.tolist() == pytest.approx([1.0, 0.75])  # (0.8 + 0.4) / 2 / 0.8


def test_a_run(tmp_path: Path) -> None:
    data = draw_parts(tmp_path / "photos")
    settings = Settings(tests=("removal",), data=(str(data),), model="parts:make", methods=("lrp", "gradcam"), limit=6)
    (table,) = run(settings, tmp_path / "run").tables
    at = {metric.name: i for i, metric in enumerate(table.metrics)}
    assert table.rows["lrp"][at["random less evidence"]].value > 1
    assert table.rows["lrp"][at["product less evidence"]].value == pytest.approx(0, abs=1e-6)
    assert table.rows["lrp"][at["relevance less evidence"]].value == pytest.approx(0, abs=1e-6)
    assert np.isnan(table.rows["gradcam"][at["AUC, relevance"]].value)
