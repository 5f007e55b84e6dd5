"""The figure of docs/agf.md: photographs with two classes, each class explained by several methods.

    python tools/two_class_scenes.py --data VOCdevkit/VOC2012 --model runs/voc --out docs/images/two-classes.jpg

Taken are the first pictures of half B, in the order of `classlens evaluate`, whose mask holds two classes that are, by
the model's own probabilities, the two that it finds.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from drawing import draw

import classlens
from classlens import render
from classlens.data.layouts import Dataset, Item, open_dataset
from classlens.data.masks import IGNORE
from classlens.errors import TargetError

METHODS = ("agf", "gradcam", "lrp", "clrp", "agf-release")


def scenes(data: Dataset, model: classlens.LoadedModel) -> Iterator[tuple[Item, list[int]]]:
    """The pictures, with their two classes."""
    for item in data.select(None, seed=0, half="B"):
        there = [int(value) - 1 for value in np.unique(data.mask(item)) if value not in (0, IGNORE)]
        if len(there) != 2:
            continue
        try:
            found = classlens.explain(model, data.picture(item), classlens.above(0.5), "random").targets[0].tolist()
        except TargetError:  # no class is above the threshold
            continue
        if sorted(found) == sorted(there):
            yield item, there


def taken(found: Iterator[tuple[Item, list[int]]], count: int, model: str) -> list[tuple[Item, list[int]]]:
    """The first of them."""
    first = list(islice(found, count))
    if len(first) < count:
        raise SystemExit(f"only {len(first)} pictures show two classes that {model} finds; give a smaller --count")
    return first


def main() -> None:
    """Draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="VOC: pictures with masks")
    parser.add_argument("--model", required=True, help="a multi-label network of its classes")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=8)
    options = parser.parse_args()
    model, data = classlens.load(options.model), open_dataset(options.data)
    chosen = taken(scenes(data, model), options.count, options.model)
    rows, width = -(-options.count // 2) * 2, len(METHODS) + 2  # two scenes side by side with a gap, a row a class
    spaces = {"wspace": 0.04, "hspace": 0.06, "left": 0.02, "right": 0.998, "top": 0.965, "bottom": 0.004}
    columns = ([1.0] * (width - 1) + [0.18]) * 2
    figure, places = plt.subplots(
        rows, len(columns) - 1, figsize=(12.2, rows * 1.06), squeeze=False,
        gridspec_kw=spaces | {"width_ratios": columns[:-1]},
    )  # fmt: skip
    for place in places.flat:
        place.axis("off")
    for index, (item, classes) in enumerate(chosen):
        picture = data.picture(item)
        top, left = 2 * (index // 2), width * (index % 2)
        for column, method in enumerate(METHODS, 1):
            e = classlens.explain(model, picture, [classes], method)
            for k in range(2):
                head = method if top + k == 0 else ""
                draw(places[top + k, left + column], render.overlay(e.pictures[0], e.maps[0, k], e.signed), head)
        shown = (e.pictures[0].permute(1, 2, 0).clamp(0, 1) * 255).byte().numpy()
        for k in range(2):
            draw(places[top + k, left], shown, side=e.label(classes[k]))
    figure.savefig(options.out, dpi=130, pil_kwargs={"quality": 88})


if __name__ == "__main__":
    main()
