"""What is stored in a FiftyOne sample, by stand-ins for its classes; tests/outside/test_fiftyone.py has the real ones.

The stand-ins keep what they are given, as FiftyOne does, and need no MongoDB.
"""

import sys
import types

import numpy as np
import pytest
import torch
from torch import nn

import classlens
from classlens.errors import ClasslensError, ModelError
from classlens.interop.coco import strongest_part
from classlens.interop.fiftyone import add_maps
from classlens.models import LoadedModel, Preprocess


class Sample(dict):
    def __init__(self, filepath, dataset):
        super().__init__()
        self.filepath, self.dataset = str(filepath), dataset


class Samples(list):
    def __init__(self):
        self.mask_targets, self.declared = {"ground_truth": {1: "cat"}, "evidence_1_mask": {9: "owl"}}, []

    def iter_samples(self, *, progress, autosave):
        assert progress
        assert autosave
        return iter(self)

    def add_dynamic_sample_fields(self, fields):
        self.declared += fields


@pytest.fixture
def photos(tmp_path, monkeypatch):
    labels = dict.fromkeys(("Heatmap", "Segmentation"), types.SimpleNamespace)
    monkeypatch.setitem(sys.modules, "fiftyone", types.SimpleNamespace(**labels))
    noise = np.random.default_rng(3).integers(0, 255, (45, 90, 3), np.uint8)
    found = Samples()
    found.append(Sample(classlens.render.write_png(tmp_path / "wide.png", noise), found))
    return found


@pytest.fixture(scope="module")
def loaded():
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 300)
    )
    return LoadedModel("small", network.eval(), Preprocess(resize=40, crop=32), None)


def test_maps_are_raw_and_lie_where_the_network_looked(photos, loaded):
    add_maps(photos, loaded, [[7, 280]], share=0.6)
    e = classlens.explain(loaded, photos[0].filepath, [[7, 280]])
    seen = np.s_[4:36, 24:56]
    for k, (index, dtype) in enumerate(((7, np.uint8), (280, np.uint16))):
        heat, mask = photos[0][f"evidence_{k + 1}"], photos[0][f"evidence_{k + 1}_mask"]
        assert heat.map.shape == mask.mask.shape == (40, 80)
        assert np.array_equal(heat.map[seen], e.maps[0, k].numpy())
        assert np.count_nonzero(heat.map) == np.count_nonzero(heat.map[seen])
        assert heat.range == [-np.abs(heat.map).max(), np.abs(heat.map).max()]
        assert heat.label == mask.label == f"class {index}"
        assert heat.confidence == e.probability(0, k)
        assert mask.mask.dtype == dtype
        assert np.array_equal(mask.mask[seen], (index + 1) * strongest_part(e.maps[0, k], 0.6))
    assert photos.mask_targets == {
        "ground_truth": {1: "cat"},
        "evidence_1_mask": {9: "owl", 8: "class 7"},
        "evidence_2_mask": {281: "class 280"},
    }
    assert set(photos.declared) == set(photos[0])


def test_a_map_without_signs_begins_at_0_and_a_callable_is_no_class(photos, loaded):
    add_maps(photos, loaded, lambda y: y[3] + y[4], field="cam", method="gradcam")
    heat = photos[0]["cam_1"]
    assert heat.range[0] == (-heat.range[1] if classlens.METHODS["gradcam"].signed else 0)
    assert not hasattr(heat, "confidence")
    assert set(np.unique(photos[0]["cam_1_mask"].mask)) <= {0, 301}
    add_maps(photos, loaded, 3, field="edges", method="sobel")
    assert photos[0]["edges_1"].range[0] == 0


def test_what_cannot_be_stored_is_one_line(photos, loaded, monkeypatch):
    with pytest.raises(ClasslensError, match="the preprocessing must be known"):
        add_maps(photos, loaded.model)
    with pytest.raises(ModelError, match="place maps on the whole image"):
        add_maps(photos, LoadedModel("own", loaded.model, loaded.preprocess.__call__, None))
    with pytest.raises(ClasslensError, match="the data set or view is empty"):
        add_maps(Samples(), loaded)
    monkeypatch.setitem(sys.modules, "fiftyone", None)
    with pytest.raises(ClasslensError, match="pip install fiftyone"):
        add_maps(photos, loaded)
