"""The figure of docs/results-transformers.md: photographs, and the evidence for their class by six methods.

    python tools/transformer_maps.py --data VOCdevkit/VOC2012 --model runs/voc-vit --out docs/images/transformers.jpg

The photographs are the first of half B, in the order of `classlens evaluate`, whose most likely class is in the mask.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import matplotlib.pyplot as plt
from drawing import draw
from PIL import Image

import classlens
from classlens import render
from classlens.data.layouts import Dataset, open_dataset
from classlens.data.masks import classes_in
from classlens.evaluate.worker import framed_mask

METHODS = ("agf", "generic-attention", "libragrad", "fullgrad", "attnlrp", "gradcam")
BESIDE = 2  # scenes in a row


def scenes(data: Dataset, model: classlens.LoadedModel) -> Iterator[tuple[Image.Image, int]]:
    """Pictures, and their most likely class."""
    for item in data.select(None, seed=0, half="B"):
        picture = data.picture(item)
        likeliest = int(classlens.explain(model, picture, method="random").logits[0].argmax())
        if likeliest + 1 in classes_in(framed_mask(data, item, picture, model.preprocess)):
            yield picture, likeliest


def main() -> None:
    """Draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="VOC: pictures with masks")
    parser.add_argument("--model", required=True, help="a multi-label network of its classes")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=8)
    options = parser.parse_args()
    model, data = classlens.load(options.model), open_dataset(options.data)
    widths = (([1.0] * (1 + len(METHODS)) + [0.12]) * BESIDE)[:-1]
    spaces = {"wspace": 0.04, "hspace": 0.16, "left": 0.004, "right": 0.998, "top": 0.955, "bottom": 0.035}
    rows = -(-options.count // BESIDE)
    figure, places = plt.subplots(
        rows, len(widths), figsize=(18, 1.42 * rows), squeeze=False, gridspec_kw=spaces | {"width_ratios": widths}
    )
    for place in places.flat:
        place.axis("off")
    for number, (picture, target) in enumerate(islice(scenes(data, model), options.count)):
        row, first = divmod(number, BESIDE)
        first *= 2 + len(METHODS)
        for column, method in enumerate(METHODS, first + 1):
            e = classlens.explain(model, picture, [[target]], method)
            drawn = render.overlay(e.pictures[0], e.maps[0, 0], e.signed)
            draw(places[row, column], drawn, method if row == 0 else "")
        shown = (e.pictures[0].permute(1, 2, 0).clamp(0, 1) * 255).byte().numpy()
        draw(places[row, first], shown, "", e.label(target))
    figure.savefig(options.out, dpi=110, pil_kwargs={"quality": 86})


if __name__ == "__main__":
    main()
