"""Torchvision's detectors: a box is one candidate, and its map explains the candidate's class logit."""

from __future__ import annotations

import pytest
import torch

import classlens
from classlens.errors import MethodError, TargetError
from detectors import small_detector, torchvision_detector
from networks import pictures

SQUASHED = {  # how each makes a score of its class logit
    "retinanet_resnet50_fpn": lambda logit, score: logit.sigmoid() == pytest.approx(score, rel=1e-4),
    "fcos_resnet50_fpn": lambda logit, score: logit.sigmoid() >= score**2,  # times how centred the box is, and a root
    "ssdlite320_mobilenet_v3_large": lambda logit, score: True,  # a softmax over the classes
}


@pytest.mark.parametrize("name", SQUASHED)
def test_boxes_of_one_stage(name: str) -> None:
    model, x = torchvision_detector(name), pictures(1, (96, 128)).abs()
    with torch.no_grad():
        (plain,) = model(x)
    asked = [classlens.detection(0), classlens.detection(7)]
    e = classlens.explain(model, x, asked, "gradient-x-input")
    order = plain["scores"].argsort(descending=True)[[0, 7]]
    for k, i in enumerate(order.tolist()):
        assert SQUASHED[name](e.logits[0, k].double(), float(plain["scores"][i]))
        assert (
            e.name(0, k) == f"box {(0, 7)[k]}: class {int(plain['labels'][i])} {100 * float(plain['scores'][i]):.0f} %"
        )
        (at,) = e.target(0, k).found.outlines
        assert [at.left, at.top, at.right, at.bottom] == pytest.approx(plain["boxes"][i].tolist())
    a, b = e.maps[0].flatten(1)
    assert torch.nn.functional.cosine_similarity(a, b, dim=0).abs() < 0.99
    relevance = classlens.explain(model, x, asked, "lrp").report
    assert relevance.conservation.max() < 1e-4
    torch.testing.assert_close(relevance.started, e.logits[:, :2].double(), rtol=1e-4, atol=1e-12)


def test_boxes_of_proposals_are_explained_in_one_pass() -> None:
    """As in Faster R-CNN, each image has proposals of its own: other images have no counterpart of a box."""
    model, x = small_detector("proposals").double(), pictures(2, (48, 64)).double()
    with torch.no_grad():
        plain = model(x)[0]
    e = classlens.explain(model, x[:1], [classlens.detection(0), classlens.detection(2)], "lrp")
    chances = torch.stack([model.logits[i].softmax(0).max() for i in range(3)])  # of the last pass, in its order
    for k, number in enumerate((0, 2)):
        i = int(plain["scores"].argsort(descending=True)[number])
        assert e.name(0, k) == f"box {number}: class {int(plain['labels'][i])} {100 * float(plain['scores'][i]):.0f} %"
        assert float(e.report.started[0, k]) == pytest.approx(float(model.logits[i].max()), rel=1e-9)
        assert float(chances[i]) == pytest.approx(float(plain["scores"][i]))
    assert e.report.conservation.max() < 1e-6
    with pytest.raises(MethodError, match="chooses its candidates from the image"):
        classlens.explain(model, x[:1], classlens.detection(0), "integrated-gradients", steps=2)
    with pytest.raises(TargetError, match="ask about one image at a time"):
        classlens.explain(model, x, classlens.detection(0), "lrp")
