"""Does the map of a region say what the network reads there? A segmentation network on VOC.

    classlens train segmentation --data VOCdevkit/VOC2012 --out runs/voc-segmentation
    python benchmarks/regions.py --data VOCdevkit --model runs/voc-segmentation --out regions.jsonl
    python benchmarks/regions.py --data VOCdevkit --model runs/voc-segmentation --out regions.jsonl --table

The question is `region(class)`: the mean logit of a class where the network finds it. The region is fixed; then pixels
are blurred in the order of the map, either only inside of the region or only outside of it, in steps of 10 to 90 % of
these pixels. The score is the mean logit in the region, from 0 (everything is blurred) to 1 (nothing is). `inside` and
`outside` are the difference between removing the least and the most relevant pixels first: 0 for an order that says
nothing. A class of a picture counts if the network finds it on at least 3 % of the pixels, not on more than 60 %, and
half of this region is right.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rows import command, rows_of, table
from torch import Tensor, nn

import classlens
from classlens.core.targets import Models, survey
from classlens.data.layouts import open_dataset
from classlens.data.masks import IGNORE
from classlens.evaluate.tests.perturbation import blurred, ranks
from classlens.evaluate.worker import framed_mask

METHODS = ("agf", "agf-release", "lrp", "gradcam", "layercam", "gradient-x-input", "smoothgrad", "centre", "random")
FRACTIONS = (0.1, 0.3, 0.5, 0.7, 0.9)
LEAST, MOST, RIGHT = 0.03, 0.6, 0.5
COLUMNS = {"share": "evidence on the class", "inside": "order inside", "outside": "order outside"}


def found_regions(model: nn.Module, x: Tensor, mask: Tensor) -> dict[int, Tensor]:
    """The classes of a picture that the network finds, and where: (h,w) of its output."""
    maps = survey(model, x, Models()).maps
    assert maps is not None
    best = maps.argmax(0)
    large = F.interpolate(best[None, None].float(), size=mask.shape, mode="nearest")[0, 0].long()
    regions = {}
    for index in (int(i) for i in best.unique() if i > 0):
        there = large == index
        known = there & (mask != IGNORE)
        right = (mask[known] == index).double().mean() if known.any() else torch.zeros(())
        if LEAST <= there.double().mean() <= MOST and right >= RIGHT:
            regions[index] = best == index
    return regions


def order_scores(model: nn.Module, x: Tensor, evidence: Tensor, index: int, region: Tensor) -> dict[str, float]:
    """How much the order of a map matters inside and outside of the region."""
    weights = region.double() / region.sum()
    smooth = blurred(x, min(x.shape[2:]) / 8)

    def mean_logit(images: Tensor) -> Tensor:
        with torch.no_grad():
            return (model(images)[:, index].double() * weights).sum((1, 2))

    clean, nothing = mean_logit(torch.cat([x, smooth])).tolist()
    inside = F.interpolate(region[None, None].float(), size=x.shape[2:], mode="nearest")[0, 0] > 0
    place = ranks(evidence[None])[0]
    scores = {}
    for name, allowed in (("inside", inside), ("outside", ~inside)):
        order = place[allowed].argsort()  # positions among the allowed pixels, the least relevant first
        images = []
        for first in (order, order.flip(0)):
            for fraction in FRACTIONS:
                gone = torch.zeros(int(allowed.sum()), dtype=torch.bool)
                gone[first[: int(fraction * len(first))]] = True
                where = torch.zeros_like(allowed)
                where[allowed] = gone
                images.append(torch.where(where, smooth, x))
        shares = (mean_logit(torch.cat(images)) - nothing) / max(clean - nothing, 1e-6)
        least, most = shares.clamp(0, 1).view(2, -1).mean(1).tolist()
        scores |= {name: least - most, f"{name}_least": least, f"{name}_most": most}
    return scores


def on_class(evidence: Tensor, mask: Tensor, index: int) -> float:
    """The share of the positive evidence on the class's mask; unlabelled pixels do not count."""
    positive = evidence.double().clamp(min=0) * (mask != IGNORE)
    total = float(positive.sum())
    return float(positive[mask == index].sum()) / total if total else 0.0


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each class of a picture and method that is not there yet."""
    loaded, data = classlens.load(options.model), open_dataset(options.data)
    done = {(row["picture"], row["method"]) for row in rows_of(options.out)}
    pictures = 0
    for item in data.select(None, 0, half="B"):
        picture = data.picture(item)
        x = loaded.preprocess(picture)[None]
        mask = torch.from_numpy(framed_mask(data, item, picture, loaded.preprocess))
        regions = found_regions(loaded.model, x, mask)
        if not regions:
            continue
        pictures += 1
        if pictures > options.pictures:
            return
        for method in (name for name in options.methods if (item.name, name) not in done):
            for index, region in regions.items():
                evidence = classlens.explain(loaded, x, classlens.region(index), method).maps[0, 0]
                row = {"picture": item.name, "method": method, "class": index, "empty": float(not evidence.any())}
                row |= {"share": on_class(evidence, mask, index)}
                yield row | order_scores(loaded.model, x, evidence, index, region)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="VOC, with masks")
    parser.add_argument("--model", required=True, help="the folder of a segmentation network")
    parser.add_argument("--out", type=Path, required=True, help="rows, one for each class of a picture and method")
    parser.add_argument("--pictures", type=int, default=40)
    parser.add_argument("--methods", nargs="*", default=METHODS)
    command(parser, measure, lambda rows: table(rows, COLUMNS, "regions", "empty maps"))


if __name__ == "__main__":
    main()
