"""Do maps of a detected box lie on the object, and not on its neighbour of the same class? YOLOv8n on VOC.

    python benchmarks/detection.py --data VOCdevkit --weights yolov8n.safetensors --out detection.jsonl
    python benchmarks/detection.py --data VOCdevkit --weights yolov8n.safetensors --out detection.jsonl --table

It needs `ultralytics` (AGPL-3.0) and `grad-cam`, and goes on where it was. VOC's masks are of classes. An object is a
connected region of its class's mask (VOC draws an unlabelled border around every object, so neighbours are apart) whose
bounding box overlaps a detected box of the same class by half or more. Unlabelled pixels count neither as object nor
as background. Pictures with two such objects of one class come first, since they also show whether the evidence for
one lies on the other.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rows import command, rows_of, table
from safetensors.torch import load_file
from skimage.measure import label, regionprops
from torch import Tensor, nn

import classlens
from classlens.core.targets.candidates import overlap
from classlens.data.layouts import Dataset, Item, open_dataset
from classlens.data.masks import IGNORE
from classlens.models import Preprocess
from classlens.models._torchvision import import_torchvision

COCO_NAMES = {"aeroplane": "airplane", "motorbike": "motorcycle", "diningtable": "dining table", "sofa": "couch",
              "pottedplant": "potted plant", "tvmonitor": "tv"}  # fmt: skip
COCO = {
    "person": 0, "bicycle": 1, "car": 2, "motorcycle": 3, "airplane": 4, "bus": 5, "train": 6, "boat": 8, "bird": 14,
    "cat": 15, "dog": 16, "horse": 17, "sheep": 18, "cow": 19, "bottle": 39, "chair": 56, "couch": 57,
    "potted plant": 58, "dining table": 60, "tv": 62,
}  # fmt: skip
LEVELS = {"0": "model.15", "1": "model.18", "2": "model.21"}  # the levels of the feature pyramid, by head
COLUMNS = {"share": "evidence on the object", "hit": "maximum on it", "other": "same class: on the other"}
SMALLEST = 0.01  # of the picture: an object's area


@dataclass(frozen=True, eq=False)
class Thing:
    """An object that the detector finds."""

    number: int  # of the box, by score
    category: str
    mask: Tensor  # (H,W)
    layer: str  # the level of the feature pyramid that produced the box
    pick: Any  # where its class logit is


def detector(weights: Path) -> nn.Module:
    """YOLOv8n with COCO's classes."""
    import_torchvision()
    from ultralytics.nn.tasks import DetectionModel

    model: nn.Module = DetectionModel("yolov8n.yaml", nc=80, verbose=False)
    model.load_state_dict({key: value.float() for key, value in load_file(weights).items()})
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model.eval()


def frame(size: int) -> Preprocess:
    """The whole picture in a grey square, as the detector was trained."""
    fill = (114, 114, 114)
    return Preprocess((size, size), (size, size), "bilinear", (0.0,) * 3, (1.0,) * 3, fit="contain", fill=fill)


def framed_mask(data: Dataset, item: Item, size: int) -> Tensor:
    """The mask where the picture lies in the square; around it is background."""
    from PIL import Image

    place = Preprocess((size, size), (size, size), "nearest", (0.0,) * 3, (1.0,) * 3, fit="contain", fill=(0,))
    return torch.from_numpy(np.array(place.frame(Image.fromarray(data.mask(item)))))


def things(model: nn.Module, x: Tensor, mask: Tensor, classes: tuple[str, ...]) -> list[Thing]:
    """The objects of the mask that the detector finds, each with its box."""
    regions = []
    for value in (int(v) for v in mask.unique() if v not in (0, IGNORE)):
        for region in regionprops(label((mask == value).numpy(), connectivity=1)):
            if region.area >= SMALLEST * mask.numel():
                top, left, bottom, right = region.bbox
                inside = torch.zeros_like(mask, dtype=torch.bool)
                inside[tuple(torch.from_numpy(region.coords).T)] = True
                regions.append((classes[value - 1], inside, (left, top, right, bottom)))
    found: list[Thing] = []
    for name, inside, box in regions:
        try:
            e = classlens.explain(model, x, classlens.box(*box, COCO[COCO_NAMES.get(name, name)]), "random")
        except classlens.ClasslensError:  # it finds no such object there
            continue
        asked: Any = e.target().found
        head = asked.picks[0].layer.split(".")[3]
        found.append(Thing(int(asked.text.split(":")[0][4:]), name, inside, LEVELS[head], asked.picks[0]))
    return [thing for thing in found if [other.number for other in found].count(thing.number) == 1]


# ------------------------------------------------------------------------------------------------------------ methods


def ours(method: str, model: nn.Module, x: Tensor, objects: list[Thing]) -> Tensor:
    """Maps by a method of classlens; `{level}` stands for the level of the pyramid that produced the box."""
    maps = [
        classlens.explain(model, x, classlens.detection(o.number), method.format(level=o.layer)).maps[0, 0]
        for o in objects
    ]
    return torch.stack(maps)


class OfBox:
    """A target of pytorch-grad-cam: the class probability of the candidate that became the box."""

    def __init__(self, thing: Thing, size: int) -> None:
        channel, row, column = thing.pick.index
        strides = {"model.15": 8, "model.18": 16, "model.21": 32}
        before = sum((size // s) ** 2 for name, s in strides.items() if s < strides[thing.layer])
        self.channel, self.column = channel, before + row * (size // strides[thing.layer]) + column

    def __call__(self, output: Any) -> Tensor:
        rows = output[0] if isinstance(output, list | tuple) else output
        return rows[..., 4 + self.channel, self.column].sum()


class FirstOutput(nn.Module):
    """The detector as pytorch-grad-cam needs it: its first output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)[0]


def grad_cam_library(kind: str, level: bool, model: nn.Module, x: Tensor, objects: list[Thing]) -> Tensor:
    """Maps of pytorch-grad-cam, at the last layer before the heads or at the level that produced the box."""
    import pytorch_grad_cam

    modules = dict(model.named_modules())
    maps = []
    for one in objects:
        layer = modules[one.layer if level else "model.21"]
        with getattr(pytorch_grad_cam, kind)(FirstOutput(model), [layer]) as cam:
            maps.append(torch.from_numpy(cam(x.clone().requires_grad_(), [OfBox(one, x.shape[-1])])[0]))
    return torch.stack(maps)


def d_rise(masks: int, model: nn.Module, x: Tensor, objects: list[Thing], seed: int = 0) -> Tensor:
    """Masks, weighted by how much better than the average some candidate of the masked picture matches the box.

    A match is overlap x cosine of the class probabilities x the highest of them (this detector has no objectness of
    its own). Masks are 16 x 16 cells, half of them shown, enlarged and shifted.
    """
    generator = torch.Generator().manual_seed(seed)
    size = x.shape[-1]
    cell = -(-size // 16)
    with torch.no_grad():
        rows = model(x)[0][0]
        wanted = rows[:, [OfBox(one, size).column for one in objects]].T  # (objects,4+C)
        weighted, plain, weights = torch.zeros(len(objects), size, size), torch.zeros(size, size), 0.0
        for start in range(0, masks, 8):
            count = min(8, masks - start)
            coarse = (torch.rand(count, 1, 17, 17, generator=generator) < 0.5).float()
            large = F.interpolate(coarse, scale_factor=cell, mode="bilinear", align_corners=False)
            dy, dx = torch.randint(0, cell, (2,), generator=generator).tolist()
            shown = large[:, :, dy : dy + size, dx : dx + size]
            for mask, found in zip(shown, model(x * shown)[0], strict=True):
                match = matches(wanted, found.T)
                weighted += match[:, None, None] * mask
                plain += mask[0]
                weights = weights + match
    return weighted - (weights / masks)[:, None, None] * plain


def matches(wanted: Tensor, found: Tensor) -> Tensor:
    """(objects,): the best match of each wanted candidate (objects,4+C) among those found (N,4+C)."""
    a, b = corners(wanted[:, :4]), corners(found[:, :4])
    alike = F.normalize(wanted[:, 4:], dim=1) @ F.normalize(found[:, 4:], dim=1).T
    return (overlap(a, b) * alike * found[:, 4:].amax(1)).amax(1)


def corners(boxes: Tensor) -> Tensor:
    """Centre and size as left, top, right, bottom."""
    return torch.cat([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2], 1)


def methods(masks: int) -> dict[str, Callable[..., Tensor]]:
    """Every contender by the name it has in the table."""
    mine = ("agf", "agf-release", "gradcam", "layercam", "lrp", "odam(layer={level})", "centre")
    library = {
        "Grad-CAM of pytorch-grad-cam, last layer": partial(grad_cam_library, "GradCAM", False),
        "Grad-CAM of pytorch-grad-cam, level of the box": partial(grad_cam_library, "GradCAM", True),
        "EigenCAM of pytorch-grad-cam, last layer": partial(grad_cam_library, "EigenCAM", False),
        "EigenCAM of pytorch-grad-cam, level of the box": partial(grad_cam_library, "EigenCAM", True),
    }
    return {name: partial(ours, name) for name in mine} | library | {f"D-RISE, {masks} masks": partial(d_rise, masks)}


# ------------------------------------------------------------------------------------------------------------- scores


def scored(evidence: Tensor, own: Tensor, others: Tensor, void: Tensor) -> dict[str, float]:
    """The share of positive evidence on the object, whether the maximum lies on it, and the share on others."""
    if not torch.isfinite(evidence).all():
        return {"share": 0.0, "hit": 0.0, "other": float("nan"), "empty": 1.0}
    positive = evidence.double().clamp(min=0) * ~void
    total = positive.sum()
    if total == 0:
        return {"share": 0.0, "hit": 0.0, "other": float("nan"), "empty": 1.0}
    mine, theirs = positive[own].sum(), positive[others].sum()
    best = positive.flatten().argmax()
    other = float(theirs / (mine + theirs)) if others.any() and mine + theirs > 0 else float("nan")
    return {"share": float(mine / total), "hit": float(own.flatten()[best]), "other": other, "empty": 0.0}


def scenes(data: Dataset, model: nn.Module, size: int, cache: Path) -> list[Item]:
    """The pictures of half B with an object that is found; first those with two of one class."""
    known = json.loads(cache.read_text()) if cache.exists() else {}
    items = data.select(None, 0, half="B")
    for number, item in enumerate(items):
        if item.name not in known:
            objects = things(model, frame(size)(data.picture(item))[None], framed_mask(data, item, size), data.classes)
            names = [o.category for o in objects]
            known[item.name] = [len(names), max([names.count(name) for name in names], default=0)]
            print(f"looking: {number + 1}/{len(items)}", end="\r", file=sys.stderr)
    cache.write_text(json.dumps(known))
    twice = [item for item in items if known[item.name][1] > 1]
    return twice + [item for item in items if known[item.name][0] and known[item.name][1] < 2]


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each object and method that is not there yet."""
    model, data = detector(options.weights), open_dataset(options.data)
    done = {(row["picture"], row["method"]) for row in rows_of(options.out)}
    pictures = scenes(data, model, options.size, options.out.with_suffix(".scenes.json"))[: options.pictures]
    for item in pictures:
        asked = {
            name: of for name, of in methods(options.masks).items() if not options.methods or name in options.methods
        }
        missing = {name: of for name, of in asked.items() if (item.name, name) not in done}
        if not missing:
            continue
        x, mask = frame(options.size)(data.picture(item))[None], framed_mask(data, item, options.size)
        objects = things(model, x, mask, data.classes)
        for name, maps_of in missing.items():
            for one, evidence in zip(objects, maps_of(model, x, objects), strict=True):
                same = [o.mask for o in objects if o is not one and o.category == one.category]
                others = torch.stack(same).any(0) if same else torch.zeros_like(one.mask)
                row = {"picture": item.name, "method": name, "category": one.category, "box": one.number}
                yield row | scored(evidence, one.mask, others, mask == IGNORE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="VOC, with masks")
    parser.add_argument("--weights", type=Path, required=True, help="YOLOv8n's weights (safetensors)")
    parser.add_argument("--out", type=Path, required=True, help="rows, one for each object and method")
    parser.add_argument("--size", type=int, default=416, help="the edge of the input, a multiple of 32")
    parser.add_argument("--pictures", type=int, default=60)
    parser.add_argument("--masks", type=int, default=500, help="of D-RISE")
    parser.add_argument("--methods", nargs="*", help="names as in the table; by default all")
    command(parser, measure, lambda rows: table(rows, COLUMNS, "objects", "empty maps"))


if __name__ == "__main__":
    main()
