"""FiftyOne itself reads what is written: `pip install fiftyone` brings the MongoDB server that it starts.

`make outside` does not install it, since the server is downloaded while pip builds a package. Where that is not
possible, FIFTYONE_DATABASE_URI names a server that runs already.
"""

import json
import os

import numpy as np
import pytest
import torch
from torch import nn

import classlens
from classlens.interop.coco import strongest_part, write_coco
from classlens.models import LoadedModel, Preprocess

fiftyone = pytest.importorskip("fiftyone")


@pytest.fixture(scope="module")
def loaded():
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )
    return LoadedModel("small", network.eval(), Preprocess(resize=40, crop=32), ("ape", "bee", "cat", "dog"))


@pytest.fixture
def photos(tmp_path):
    for name, size in (("tall", (30, 60)), ("wide", (90, 45))):
        noise = np.random.default_rng(3).integers(0, 255, (size[1], size[0], 3), np.uint8)
        classlens.render.write_png(tmp_path / "photos" / f"{name}.png", noise)
    found = fiftyone.Dataset.from_images_dir(str(tmp_path / "photos"))
    yield found
    found.delete()


def test_maps_and_masks_are_fields_of_the_samples(loaded, photos):
    from classlens.interop.fiftyone import add_maps

    add_maps(photos, loaded, ["dog", "bee"], share=0.6)
    photos.reload()
    assert photos.count_values("evidence_1.label") == {"dog": 2}
    assert photos.mask_targets == {"evidence_1_mask": {4: "dog"}, "evidence_2_mask": {2: "bee"}}
    for sample in photos:
        e = classlens.explain(loaded, sample.filepath, ["dog", "bee"])
        tall = "tall" in sample.filepath
        assert sample.evidence_2.map.shape == ((80, 40) if tall else (40, 80))
        rows, columns = (slice(24, 56), slice(4, 36)) if tall else (slice(4, 36), slice(24, 56))
        seen = sample.evidence_2.map[rows, columns]
        assert np.array_equal(seen, e.maps[0, 1].numpy())
        assert np.abs(sample.evidence_2.map).sum() == pytest.approx(np.abs(seen).sum())
        assert sample.evidence_2.range == [-np.abs(seen).max(), np.abs(seen).max()]
        assert sample.evidence_2.confidence == pytest.approx(e.probability(0, 1))
        assert np.array_equal(sample.evidence_2_mask.mask[rows, columns], 2 * strongest_part(seen, 0.6))


def test_a_view_goes_on_where_an_interrupted_run_stopped(loaded, photos):
    from classlens.interop.fiftyone import add_maps

    add_maps(photos.limit(1), loaded, classlens.top(2))
    before = photos.first().evidence_1.id
    add_maps(photos.exists("evidence_1", False), loaded, classlens.top(2))
    assert photos.count("evidence_1") == photos.count("evidence_2_mask") == 2
    assert photos.first().evidence_1.id == before
    assert len(photos.match(fiftyone.ViewField("evidence_1.confidence") > 0)) == 2


def test_the_coco_export_is_read(loaded, tmp_path):
    images = torch.rand(2, 3, 24, 32, generator=torch.Generator().manual_seed(1))
    path = write_coco(tmp_path / "export", classlens.explain(loaded.model, images, [[1, 2], [0, 2]]))
    kind = fiftyone.types.COCODetectionDataset
    found = fiftyone.Dataset.from_dir(
        str(path.parent), dataset_type=kind, label_types="segmentations", label_field="evidence"
    )
    assert len(found) == 2
    assert os.path.exists(found.first().filepath)
    assert found.count("evidence.detections") == len(json.loads(path.read_text())["annotations"])
    found.delete()
