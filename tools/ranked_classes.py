"""The figure of docs/results.md on ranked classes: one row for each image, the maps of three ranks for each method.

    python tools/ranked_classes.py --data oxford-pets --model efficientnet-lite0 --out docs/images/ranked-classes.jpg

The images are the first of half B, in the order of `classlens evaluate`, whose most likely class is a dog or a cat.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from textwrap import fill

import matplotlib.pyplot as plt
from drawing import draw
from PIL import Image

import classlens
from classlens import render
from classlens.data.layouts import Dataset, open_dataset
from classlens.evaluate.tests.ranked import RANKS, likeliest, members

METHODS = ("agf", "agf-release", "gradcam", "finer-cam", "fullgrad")


def images(data: Dataset, model: classlens.LoadedModel) -> Iterator[tuple[Image.Image, list[int]]]:
    """Images with their three most likely pets."""
    for item in data.select(None, seed=0, half="B"):
        picture = data.picture(item)
        logits = classlens.explain(model, picture, method="random").logits[0]
        pets = members("pets", model.labels and tuple(model.labels), len(logits))
        if int(logits.argmax()) in pets:
            yield picture, likeliest(logits, pets)


def main() -> None:
    """Draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="Oxford-IIIT Pet")
    parser.add_argument("--model", required=True, help="a network of ImageNet's classes")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=5)
    options = parser.parse_args()
    model = classlens.load(options.model)
    widths = [1.0] + ([0.15] + [1.0] * RANKS) * len(METHODS)
    spaces = {"wspace": 0.04, "hspace": 0.36, "left": 0.004, "right": 0.998, "top": 0.965, "bottom": 0.05}
    figure, places = plt.subplots(
        options.count, len(widths), figsize=(17.5, 1.32 * options.count), squeeze=False,
        gridspec_kw=spaces | {"width_ratios": widths},
    )  # fmt: skip
    for place in places.flat:
        place.axis("off")
    for row, (picture, classes) in enumerate(islice(images(open_dataset(options.data), model), options.count)):
        for m, method in enumerate(METHODS):
            e = classlens.explain(model, picture, [classes], method)
            for k in range(RANKS):
                head = f"{method}: {k + 1}" if row == 0 else ""
                below = fill(f"{k + 1} {e.label(classes[k])}", 18) if m == 0 else ""
                drawn = render.overlay(e.pictures[0], e.maps[0, k], e.signed)
                draw(places[row, 2 + m * (RANKS + 1) + k], drawn, head, below)
        draw(places[row, 0], (e.pictures[0].permute(1, 2, 0).clamp(0, 1) * 255).byte().numpy())
    figure.savefig(options.out, dpi=110, pil_kwargs={"quality": 86})


if __name__ == "__main__":
    main()
