"""Oxford-IIIT Pet as folders of cats and dogs: half A of the pictures to train with, half B to measure on.

    python tools/pets_folders.py oxford-pets species
    ls species/train species/val                              # cat dog, twice

The names of cats' breeds begin with a capital letter there, those of dogs' breeds do not.
"""

from __future__ import annotations

import sys
from pathlib import Path

from classlens.data.divide import half_of

SPLITS = {"A": "train", "B": "val"}


def main(data: str, out: str) -> None:
    """Link OUT/train/cat/NAME ... to the pictures of half A, and OUT/val/... to those of half B."""
    pictures = sorted(Path(data, "images").glob("*.jpg"))
    if not pictures:
        raise SystemExit(f"there are no pictures in {data}/images: give the folder of Oxford-IIIT Pet")
    for picture in pictures:
        species = "cat" if picture.name[0].isupper() else "dog"
        link = Path(out, SPLITS[half_of(picture.name)], species, picture.name)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(picture.resolve())


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("usage: python tools/pets_folders.py oxford-pets FOLDER")
    main(*sys.argv[1:])
