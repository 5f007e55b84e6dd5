"""The figure of docs/masks.md: photographs beside their pseudo-labels, in the order of the run.

python tools/mask_sheet.py pseudo-pets pseudo-voc --count 6 --out docs/images/masks.jpg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from PIL import Image

WIDTH, HEIGHT, COLUMNS = 470, 190, 3
ALPHA = 0.55  # of the colour of a class


def tile(folder: Path, name: str) -> Image.Image:
    """A photograph, and the same with the colours of its classes."""
    photo = np.asarray(Image.open(folder / "JPEGImages" / f"{name}.jpg").convert("RGB"), float)
    mask = Image.open(folder / "SegmentationClass" / f"{name}.png")
    shown = (np.asarray(mask) > 0)[..., None] * ALPHA
    painted = (1 - shown) * photo + shown * np.asarray(mask.convert("RGB"), float)
    pair = Image.fromarray(np.concatenate([photo, painted], 1).round().astype(np.uint8))
    pair.thumbnail((WIDTH - 10, HEIGHT - 10))
    found = Image.new("RGB", (WIDTH, HEIGHT), "white")
    found.paste(pair, ((WIDTH - pair.width) // 2, (HEIGHT - pair.height) // 2))
    return found


def main() -> None:
    """Draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="what `classlens masks` wrote")
    parser.add_argument("--count", type=int, default=6, help="photographs of each folder")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    tiles = []
    for folder in options.folders:
        names = [Path(image["file_name"]).stem for image in json.loads((folder / "labels.json").read_text())["images"]]
        tiles += [tile(folder, name) for name in names[: options.count]]
    sheet = Image.new("RGB", (WIDTH * COLUMNS, HEIGHT * -(-len(tiles) // COLUMNS)), "white")
    for i, one in enumerate(tiles):
        sheet.paste(one, (WIDTH * (i % COLUMNS), HEIGHT * (i // COLUMNS)))
    sheet.save(options.out, quality=85)


if __name__ == "__main__":
    main()
