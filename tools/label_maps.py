"""The figure of docs/multilabel.md: photographs with two classes, and which of the two each method finds where.

    python tools/label_maps.py --data VOCdevkit/VOC2012 --model runs/voc --out docs/images/multilabel.jpg

The photographs are those of `two_class_scenes.py`. Each pixel has the colour of the class with the strongest evidence.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from drawing import draw
from two_class_scenes import scenes, taken

import classlens
from classlens.data.layouts import open_dataset
from classlens.evaluate.tests.segmentation import label_map
from classlens.evaluate.worker import framed_mask
from classlens.render.colours import grey, pixels_of, to_bytes

METHODS = ("agf", "gradcam", "fullgrad", "lrp", "clrp")
COLOURS = np.array([[0.0, 0.0, 0.0], [0.84, 0.15, 0.19], [0.16, 0.44, 0.80]])  # no class, the first, the second


def painted(e: classlens.Explanation, labels: np.ndarray) -> np.ndarray:
    """The image in grey, with the colour of a class where there is one."""
    alpha = 0.65 * (labels > 0)[..., None]
    return np.asarray(to_bytes((1 - alpha) * grey(e.pictures[0])[..., None] + alpha * COLOURS[labels]))


def main() -> None:
    """Draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="VOC: pictures with masks")
    parser.add_argument("--model", required=True, help="a multi-label network of its classes")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=4)
    options = parser.parse_args()
    model, data = classlens.load(options.model), open_dataset(options.data)
    spaces = {"wspace": 0.05, "hspace": 0.16, "left": 0.004, "right": 0.996, "top": 0.965, "bottom": 0.035}
    figure, places = plt.subplots(
        options.count, 2 + len(METHODS), figsize=(14, 2.15 * options.count), squeeze=False, gridspec_kw=spaces
    )
    for row, (item, classes) in enumerate(taken(scenes(data, model), options.count, options.model)):
        picture = data.picture(item)
        for column, method in enumerate(METHODS, 2):
            e = classlens.explain(model, picture, [classes], method)
            draw(places[row, column], painted(e, label_map(e.maps[0].numpy(), e.signed)), method if row == 0 else "")
        mask = framed_mask(data, item, picture, model.preprocess)
        truth = sum((k + 1) * (mask == index + 1) for k, index in enumerate(classes))
        names = f"red: {e.label(classes[0])}, blue: {e.label(classes[1])}"
        draw(places[row, 0], pixels_of(e.pictures[0]), "image" if row == 0 else "", names)
        draw(places[row, 1], painted(e, np.asarray(truth)), "mask" if row == 0 else "")
    figure.savefig(options.out, dpi=110, pil_kwargs={"quality": 86})


if __name__ == "__main__":
    main()
