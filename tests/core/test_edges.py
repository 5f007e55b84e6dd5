"""Edges of detected boxes: their evidence is that of the coordinate itself, which a second derivation computes."""

import pytest
import torch

import classlens
from classlens.core.targets.detections import EDGES
from classlens.errors import TargetError
from detectors import CLASSES, small_detector

LABELS = [f"thing {i}" for i in range(CLASSES)]


def coordinate(kind, result, number, edge, size):
    """A coordinate of the n-th box, straight from what the network returns."""
    side, (height, width) = EDGES.index(edge), size
    if kind == "queries":
        centre = result["pred_boxes"][0] * torch.tensor([width, height, width, height])
        scores = result["logits"][0].softmax(1)[:, :-1].max(1).values
    else:
        centre = result[0][0][:4].T
        scores = result[0][0][4:].T.max(1).values
    row = centre[scores.argsort(descending=True)[number]]
    return row[side % 2] + (-0.5 if side < 2 else 0.5) * row[2 + side % 2]


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("kind", ["queries", "one tensor"])
def test_the_gradient_of_an_edge_is_that_of_its_coordinate_outwards(kind, edge):
    model = small_detector(kind)
    x = torch.rand(1, 3, 64, 96, generator=torch.Generator().manual_seed(1))
    asked = classlens.detection(0, edge=edge)
    e = classlens.explain(model, x, asked, "gradient-x-input", labels=LABELS)
    assert e.name().startswith(f"{edge} edge of box 0: thing ")
    leaf = x.clone().requires_grad_()
    value = coordinate(kind, model(leaf), 0, edge, (64, 96))
    (gradient,) = torch.autograd.grad(value, leaf)
    outwards = -1 if edge in ("left", "top") else 1
    torch.testing.assert_close(e.maps[0, 0], outwards * (gradient * x)[0].sum(0), rtol=1e-4, atol=1e-5)
    box = e.target().found.outlines[0]
    assert getattr(box, edge) == pytest.approx(float(value.detach()), rel=1e-4)


def test_an_edge_of_a_box_at_a_place_and_opposite_edges_differ():
    model, x = small_detector("one tensor"), torch.rand(1, 3, 64, 96, generator=torch.Generator().manual_seed(1))
    first = classlens.explain(model, x, classlens.detection(0), "gradient", labels=LABELS).target().found.outlines[0]
    place = (first.left, first.top, first.right, first.bottom)
    left, top, same = (
        classlens.explain(model, x, asked, "gradient-x-input", labels=LABELS).maps
        for asked in (
            classlens.box(*place, edge="left"),
            classlens.box(*place, edge="top"),
            classlens.detection(0, edge="left"),
        )
    )
    assert torch.equal(left, same)
    assert not torch.allclose(left, top)
    mixed = classlens.explain(
        model, x, classlens.detection(0, edge="right") + classlens.detection(0, edge="left"), "lrp", labels=LABELS
    )
    assert mixed.name().count("edge of box 0") == 2


def test_an_edge_that_does_not_exist_or_has_no_gradient_is_refused():
    with pytest.raises(TargetError, match="no edge 'middle'; choose one of left, top, right, bottom"):
        classlens.detection(0, edge="middle")
    with pytest.raises(TargetError, match="no edge 'up'"):
        classlens.box(0, 0, 4, 4, edge="up")
    x = torch.rand(1, 3, 64, 96)
    with pytest.raises(TargetError, match="no gradient there"):  # its boxes are cells of a grid
        classlens.explain(small_detector("proposals"), x, classlens.detection(0, edge="left"), labels=LABELS)


class Cut(torch.nn.Module):
    """A detector that cuts its boxes off at the border of the picture, as torchvision's do."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        found, _ = self.model(x)
        centre, size, chances = found[:, :2], found[:, 2:4], found[:, 4:]
        low, high = (centre - 500 * size).clamp(min=0), (centre + size / 2).clamp(max=64)
        scores, labels = chances[0].max(0)
        boxes = torch.cat([low, high], 1)[0].T
        return [{"boxes": boxes, "scores": scores, "labels": labels}]


def test_an_edge_at_the_border_of_the_picture_is_refused_in_words():
    model, x = Cut(small_detector("one tensor")).eval(), torch.rand(1, 3, 64, 96)
    with pytest.raises(TargetError, match="left edge of box 0 cannot be explained: it is cut off at the border"):
        classlens.explain(model, x, classlens.detection(0, edge="left"))
