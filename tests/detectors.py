"""Torchvision's detectors with random weights, and small ones that answer as other libraries' detectors do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from classlens.core.targets.candidates import overlap
from classlens.models._torchvision import import_torchvision

CLASSES = 5


def simple_nms(boxes: Tensor, scores: Tensor, most: float) -> Tensor:
    """For builds of torchvision without its compiled operations."""
    kept: list[int] = []
    for i in scores.argsort(descending=True, stable=True).tolist():
        if not kept or overlap(boxes[i : i + 1], boxes[kept]).max() <= most:
            kept.append(i)
    return torch.tensor(kept, dtype=torch.int64)


def torchvision_detector(name: str, seed: int = 0) -> nn.Module:
    """A detector on small pictures, with random weights that give scores of all sizes."""
    vision: Any = import_torchvision()
    _provide_nms(vision)
    build: Callable[..., nn.Module] = getattr(vision.models.detection, name)
    options: dict[str, Any] = {"weights": None, "weights_backbone": None, "num_classes": CLASSES}
    if "ssd" not in name:
        options |= {"min_size": 96, "max_size": 128}
    if "rcnn" in name:
        options |= {"rpn_pre_nms_top_n_test": 40, "rpn_post_nms_top_n_test": 8}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build(**options).eval()
        for part, module in model.named_modules():
            heads = ("cls_logits", "cls_score", "classification_head.module_list")
            if any(head in part for head in heads) and isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.normal_(module.weight, std=10 * float(module.weight.detach().std()))
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
    return model


_kept: list[Any] = []  # a library of operations goes when it is collected


def _provide_nms(vision: Any) -> None:
    """The build of torchvision for CUDA has no compiled operations with CPU torch; then nms is written in Python."""
    if not vision.extension._has_ops() and not _kept:
        library = torch.library.Library("torchvision", "IMPL")
        library.impl("nms", simple_nms, "CPU")
        _kept.append(library)
        vision.ops.boxes._assert_has_ops = lambda: None


class Queries(nn.Module):
    """Logits and boxes of queries that attend to a feature map; a last class means that there is no object."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.ReLU(), nn.Conv2d(8, 12, 3, 2, 1), nn.ReLU())
        self.queries = nn.Parameter(torch.randn(1, 6, 12))
        self.classes, self.boxes = nn.Linear(12, CLASSES + 1), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        places = self.body(x).flatten(2).mT
        found = nn.functional.scaled_dot_product_attention(self.queries.expand(len(x), -1, -1), places, places)
        return {"logits": self.classes(found + self.queries), "pred_boxes": self.boxes(found + self.queries).sigmoid()}


class OneTensor(nn.Module):
    """Boxes and probabilities of every cell of two feature maps in one tensor (B,4+C,N), and the raw maps beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.SiLU())
        self.b = nn.Sequential(nn.Conv2d(8, 12, 3, 2, 1), nn.SiLU())
        self.classes = nn.ModuleList([nn.Conv2d(8, CLASSES, 1), nn.Conv2d(12, CLASSES, 1)])
        self.sizes = nn.ModuleList([nn.Conv2d(8, 2, 1), nn.Conv2d(12, 2, 1)])

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        a = self.a(x)
        maps = [a, self.b(a)]
        logits = [head(y) for head, y in zip(self.classes, maps, strict=True)]
        boxes = []
        for head, y, stride in zip(self.sizes, maps, (4, 8), strict=True):
            rows, columns = torch.meshgrid(torch.arange(y.shape[2]), torch.arange(y.shape[3]), indexing="ij")
            centres = (torch.stack([columns, rows])[None] + 0.5).to(x) * stride
            boxes.append(torch.cat([centres.expand(len(x), -1, -1, -1), head(y).exp() * stride * 2], 1))
        flat = [torch.cat([b, y.sigmoid()], 1).flatten(2) for b, y in zip(boxes, logits, strict=True)]
        return torch.cat(flat, 2), logits


class Proposals(nn.Module):
    """Two stages: the three cells of a map that look most like an object are classified, for all images at once."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.ReLU(), nn.Conv2d(8, 12, 3, 2, 1), nn.ReLU())
        self.objects, self.classes = nn.Conv2d(12, 1, 1), nn.Linear(12, CLASSES)
        self.logits = torch.zeros(0)

    def forward(self, x: Tensor) -> list[dict[str, Tensor]]:
        y = self.body(x)
        best = self.objects(y).detach().flatten(1).topk(3).indices
        rows = torch.cat([one.flatten(1).T[chosen] for one, chosen in zip(y, best, strict=True)])
        logits = self.classes(rows)
        self.logits = logits.detach()
        scores, labels = logits.softmax(1).max(1)
        corners = torch.stack([best % y.shape[3] * 8, best // y.shape[3] * 8], 2).to(x)
        boxes = torch.cat([corners, corners + 8], 2)
        parts = zip(boxes, scores.split(3), labels.split(3), strict=True)
        return [{"boxes": b, "scores": s, "labels": n} for b, s, n in parts]


SMALL: dict[str, Callable[[], nn.Module]] = {"queries": Queries, "one tensor": OneTensor, "proposals": Proposals}


def small_detector(kind: str, seed: int = 0) -> nn.Module:
    """A small detector with random weights, in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = SMALL[kind]()
        for name, parameter in model.named_parameters():
            if name.startswith("classes") and name.endswith("weight"):
                nn.init.normal_(parameter, std=1.5)
    return model.eval()
