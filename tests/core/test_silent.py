"""Answers that were wrong without a word, each with the network that showed it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import classlens
from classlens.errors import MethodError, ModelError, TargetError
from dense import dense
from detectors import CLASSES, OneTensor, Proposals, Queries, small_detector
from networks import pictures

X = pictures(1, (48, 64))


def number(e: classlens.Explanation, k: int = 0) -> float:
    return float(e.target(0, k).value(e.logits[0]))


class FewClasses(OneTensor):
    """Boxes also depend on the feature map itself, which has more channels than there are classes (YOLOv8)."""

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        found, logits = super().forward(x)
        shift = self.a(x).mean((1, 2, 3))[:, None, None]
        return torch.cat([found[:, :2] + shift, found[:, 2:]], 1), logits


class WithObjectness(OneTensor):
    """(B,N,5+C): one layer gives boxes, objectness and classes (YOLOv5)."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(12, 5 + CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(self.b(self.a(x)))
        boxes = torch.cat([y[:, :2].sigmoid() * 40, y[:, 2:4].exp() * 8], 1)
        return torch.cat([boxes, y[:, 4:].sigmoid()], 1).flatten(2).mT


@pytest.mark.parametrize("kind", [FewClasses, WithObjectness])
def test_the_class_logit_is_that_of_the_score(kind: Any) -> None:
    torch.manual_seed(0)
    model = kind().eval()
    e = classlens.explain(model, X, classlens.detection(0), "gradient-x-input")
    with torch.no_grad():
        result = model(X)
    if kind is WithObjectness:
        rows = result[0]
        best = int((rows[:, 5:].amax(1) * rows[:, 4]).argmax())
        expected = rows[best, 5:].max().logit()
    else:
        expected = result[0][0, 4:].max().logit()
    assert number(e) == pytest.approx(float(expected), rel=1e-4)


class BestQueries(Queries):
    """The places that look most like an object become the queries (RT-DETR): other images have other ones."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        places = self.body(x).flatten(2).mT
        best = places.sum(2).topk(3).indices
        found = places.gather(1, best[..., None].expand(-1, -1, 12))
        return {"logits": self.classes(found), "pred_boxes": self.boxes(found).sigmoid()}


def test_chosen_queries_mean_something_on_this_image_alone() -> None:
    torch.manual_seed(0)
    names = [f"thing {i}" for i in range(CLASSES)]
    plain, chosen = Queries().eval(), BestQueries().eval()
    assert classlens.explain(plain, X, classlens.detection(0), "rise(n_masks=2)", labels=names).maps.any()
    assert classlens.explain(chosen, X, classlens.detection(0), "lrp", labels=names).maps.any()
    with pytest.raises(MethodError, match="chooses its candidates from the image"):
        classlens.explain(chosen, X, classlens.detection(0), "rise(n_masks=2)", labels=names)


class Pooled(Proposals):
    """Each proposal has a small map of its own (RoI pooling), which is not a map of the image."""

    def __init__(self, proposals: int) -> None:
        super().__init__()
        self.proposals, self.deeper = proposals, nn.Conv2d(12, 12, 3, padding=1)

    def forward(self, x: Tensor) -> list[dict[str, Tensor]]:
        y = self.body(x)
        best = self.objects(y).flatten(1).topk(self.proposals).indices[0]
        cut = nn.functional.unfold(y, 3, padding=1)[0].T[best].unflatten(1, (12, 3, 3))
        logits = self.classes(self.deeper(cut).relu().mean((2, 3)))
        scores, labels = logits.softmax(1).max(1)
        corners = torch.stack([best % y.shape[3] * 8, best // y.shape[3] * 8], 1).to(x)
        return [{"boxes": torch.cat([corners, corners + 8], 1), "scores": scores, "labels": labels}]


@pytest.mark.parametrize("method", ["gradcam", "layercam", "odam"])
@pytest.mark.parametrize("proposals", [1, 3])
def test_maps_of_proposals_are_not_maps_of_the_image(proposals: int, method: str) -> None:
    torch.manual_seed(0)
    model = Pooled(proposals).eval()
    e = classlens.explain(model, X, classlens.detection(0), method)
    assert e.maps.shape == (1, 1, 48, 64)
    box = e.target().found.outlines[0]
    read = e.maps[0, 0].nonzero()
    if len(read):  # only around the proposal, which a map of its own 3 x 3 positions would not be
        assert read[:, 0].min() >= box.top - 24
        assert read[:, 0].max() <= box.bottom + 24
    with pytest.raises(MethodError, match="chooses its candidates from the image"):
        classlens.explain(model, X, classlens.detection(0), "integrated-gradients(steps=2)")


class Masks(nn.Module):
    """Classes and masks of queries, as Mask2Former returns them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.masks = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
        self.classes = nn.Linear(8, 4 * 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.body(x).relu()
        return {
            "class_queries_logits": self.classes(y.mean((2, 3))).unflatten(1, (4, 4)),
            "masks_queries_logits": self.masks(y),
        }


def test_masks_of_queries_are_not_taken_for_classes() -> None:
    torch.manual_seed(0)
    model = Masks().eval()
    e = classlens.explain(model, X, classlens.region(2, pixel=(10, 20)), "gradient-x-input")
    x = X.clone().requires_grad_()
    result = model(x)
    chances = result["class_queries_logits"].softmax(2)[0, :, 2]
    value = (chances * result["masks_queries_logits"][0, :, 20, 10].sigmoid()).sum()
    assert number(e) == pytest.approx(float(value.detach()), rel=1e-5)
    (gradient,) = torch.autograd.grad(value, x)
    torch.testing.assert_close(e.maps[0, 0], (gradient * x).sum(1)[0].detach(), atol=1e-6, rtol=1e-4)
    with pytest.raises(TargetError, match=r"classes 0\.\.2"):  # the last class means that there is no object
        classlens.explain(model, X, classlens.region(3, pixel=(10, 20)), "lrp")


def test_a_network_with_one_class_finds_it_where_its_logit_is_positive() -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 1, 3, padding=1).eval()
    with torch.no_grad():
        logits = model(X)[0, 0]
    e = classlens.explain(model, X, classlens.region(0), "lrp")
    assert 0 < (logits > 0).double().mean() < 1
    assert number(e) == pytest.approx(float(logits[logits > 0].mean()), rel=1e-4)


def test_boxes_that_were_selected_already_are_refused() -> None:
    class Selected(OneTensor):
        def forward(self, x: Tensor) -> Tensor:
            rows = super().forward(x)[0]
            best, number = rows[:, 4:].max(1)
            return torch.cat([rows[:, :4], best[:, None], number[:, None].to(x)], 1).mT[:, :20]

    torch.manual_seed(0)
    with pytest.raises(TargetError, match="boxes that were selected already"):
        classlens.explain(Selected().eval(), X, classlens.detection(0), "lrp")


def test_an_empty_map_is_said() -> None:
    model = dense("unet")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.abs())
    against = -1 * classlens.region(1, pixel=(5, 5))
    x = X.abs()
    e = classlens.explain(model, x, against, "gradcam")
    assert not e.maps.any()
    assert any("0 everywhere: gradcam finds no evidence" in note for note in e.report.notes)
    assert not any("0 everywhere" in note for note in classlens.explain(model, x, against, "lrp").report.notes)


def test_gradcam_says_that_it_averages_places() -> None:
    e = classlens.explain(dense("unet"), X, classlens.region(1, pixel=(5, 5)), "gradcam")
    assert any("maps of two places can be alike" in note for note in e.report.notes)
    other = classlens.explain(dense("unet"), X, classlens.region(1, pixel=(5, 5)), "layercam")
    assert not any("can be alike" in note for note in other.report.notes)


def test_a_picker_with_the_wrong_number_of_rows_is_refused_by_name() -> None:
    def first_half(result: Any) -> Tensor:
        return result[0][:, 4:, :3].flatten(1)[:1]

    with pytest.raises(ModelError, match=r"shape \(1, 15\), expected \(2, classes\).*output="):
        classlens.explain(small_detector("one tensor"), pictures(2, (48, 64)), 1, "lrp", output=first_half)
