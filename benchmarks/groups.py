"""Does the report find a group of pictures that a watermark decides? A real network, with a watermark planted.

    python benchmarks/groups.py run --data oxford-pets --out groups.npz
    python benchmarks/groups.py table groups.npz --half A       # settings are chosen on half A
    python benchmarks/groups.py table groups.npz --half B

EfficientNet-Lite0 with a new last layer: ridge regression on half A tells dogs from cats, and takes a watermark in the
lower left for a dog (--model, --pattern and --place: another network, watermark and place). `run` stores the maps of
the class dog for pictures of dogs, and for some of them with the watermark. `table` puts classes of pictures together
from these, a share of them with the watermark. It says how often a group is found that consists of the watermarked
pictures, and how often there is an alarm where nothing is planted.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from sticker import STICKER, squared, sticker
from torch import Tensor, nn

import classlens
from classlens.data.divide import half_of
from classlens.data.layouts import Dataset, Item, open_dataset
from classlens.evaluate.tests import cue
from classlens.explanation import explain
from classlens.models import LoadedModel
from classlens.report import measure
from classlens.report.groups import off_object, stand_out

PLAIN, MARKED = 80, 20  # pictures of each half
LEARNT = 80  # pictures of half A, each with and without the watermark
SHARES, TRIALS, SIZE = (0.0, 0.05, 0.1, 0.2), 50, 60


@dataclass(frozen=True)
class Mark:
    """A watermark: its pattern, and its place from the left and from the top of 256 pixels."""

    pattern: int = 5
    place: tuple[int, int] = (24, 168)


def is_dog(item: Item) -> bool:
    """The names of cats begin with a capital letter."""
    return Path(item.name).name[0].islower()


def image_of(loaded: LoadedModel, dataset: Dataset, item: Item, mark: Mark | None) -> Tensor:
    picture = squared(dataset.picture(item))
    if mark:
        picture.paste(sticker(mark.pattern), mark.place)
    return loaded.preprocess(picture)


def look(loaded: LoadedModel, dataset: Dataset, item: Item, mark: Mark | None) -> np.ndarray:
    """The picture on 32 x 32 cells, as the report keeps it."""
    image = loaded.preprocess.restore(image_of(loaded, dataset, item, mark))
    return F.adaptive_avg_pool2d(image, 32).numpy().astype(np.float16)


def animal(loaded: LoadedModel, dataset: Dataset, item: Item, mark: Mark | None) -> np.ndarray:
    """Which share of each cell the animal covers; what the watermark covers is no animal."""
    mask = squared(Image.fromarray(dataset.mask(item)), mask=True)
    if mark:
        mask.paste(0, (*mark.place, mark.place[0] + STICKER, mark.place[1] + STICKER))
    framed = replace(loaded.preprocess, interpolation="nearest", fill=(255,)).frame(mask)
    return measure.covered(np.asarray(framed))


def tricked(loaded: LoadedModel, dataset: Dataset, mark: Mark) -> LoadedModel:
    """The network with a last layer of two outputs, cat and dog, that takes the watermark for a dog."""
    items = dataset.select(LEARNT, 0, "A")
    images = [image_of(loaded, dataset, item, bears) for bears in (None, mark) for item in items]
    name, features, _ = cue.before_last(loaded.model, torch.stack(images))
    wanted = torch.tensor([5.0 if is_dog(i) else -5.0 for i in items] + [10.0] * len(items), dtype=torch.float64)
    weight, bias = cue.ridge(features, wanted)
    layer = nn.Linear(len(weight), 2)
    with torch.no_grad():
        layer.weight.copy_(torch.stack([-weight, weight]) / 2)
        layer.bias.copy_(torch.tensor([-bias, bias]) / 2)
    parent, _, child = name.rpartition(".")
    setattr(loaded.model.get_submodule(parent), child, layer)
    return replace(loaded, labels=("cat", "dog"))


def run(arguments: argparse.Namespace) -> None:
    dataset = open_dataset(arguments.data)
    mark = Mark(arguments.pattern, (arguments.place[0], arguments.place[1]))
    loaded = tricked(classlens.load(arguments.model), dataset, mark)
    found: dict[str, list[np.ndarray]] = {}
    for half in arguments.half:
        dogs = [item for item in dataset.select(None, 1, half) if is_dog(item)]
        jobs = [*((item, None) for item in dogs[:PLAIN]), *((item, mark) for item in dogs[-MARKED:])]
        for item, bears in jobs:
            e = explain(loaded, image_of(loaded, dataset, item, bears)[None], [[1]])
            share = measure.positive_shares(e.maps[0, 0].double().numpy())
            if share is None or int(e.logits.argmax()) != 1:
                continue
            key = f"{half}-{'marked' if bears else 'plain'}"
            found.setdefault(key, []).append(measure.cells(share))
            found.setdefault(f"{key}-look", []).append(look(loaded, dataset, item, bears))
            found.setdefault(f"{key}-object", []).append(animal(loaded, dataset, item, bears))
            print(key, len(found[key]), half_of(item.name), flush=True)
    np.savez(arguments.out, **{key: np.stack(values) for key, values in found.items()})


def table(arguments: argparse.Namespace) -> None:
    """Found: a flagged group that is marked by half or more, and holds half of the marked pictures or more."""
    stored = np.load(arguments.file)
    parts = ("", "-look", "-object")
    plain, marked = ([stored[f"{arguments.half}-{kind}{part}"] for part in parts] for kind in ("plain", "marked"))
    random = np.random.default_rng(0)
    print(f"half {arguments.half}: {len(plain[0])} maps without and {len(marked[0])} with the watermark\n")
    print("| pictures with the watermark | found | other groups flagged, per class |\n|---|---|---|")
    for share in SHARES:
        count = round(share * SIZE)
        hits = others = 0
        for trial in range(TRIALS):
            some = random.choice(len(plain[0]), SIZE - count, replace=False)
            more = random.choice(len(marked[0]), count, replace=False)
            grids, looks, covered = (np.concatenate([a[some], b[more]]) for a, b in zip(plain, marked, strict=True))
            found = stand_out(grids, looks, covered if arguments.masks else None, trial)
            flagged = [cluster for cluster in found if off_object(cluster)]
            marks = [sum(index >= len(some) for index in c.members) for c in flagged]
            good = [2 * n >= max(len(c.members), count, 1) for n, c in zip(marks, flagged, strict=True)]
            hits += any(good)
            others += len(good) - sum(good)
        print(f"| {count} of {SIZE} | {f'{hits} of {TRIALS}' if count else '–'} | {others / TRIALS:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run")
    one.add_argument("--data", required=True)
    one.add_argument("--out", default="groups.npz")
    one.add_argument("--model", default="efficientnet-lite0")
    one.add_argument("--pattern", type=int, default=5, help="of the watermark")
    one.add_argument("--place", type=int, nargs=2, default=(24, 168), metavar=("LEFT", "TOP"), help="of 256 pixels")
    one.add_argument("--half", default="AB")
    one.set_defaults(function=run)
    other = commands.add_parser("table")
    other.add_argument("file")
    other.add_argument("--half", default="B")
    other.add_argument("--masks", action="store_true", help="use the masks of the animals")
    other.set_defaults(function=table)
    arguments = parser.parse_args()
    arguments.function(arguments)


if __name__ == "__main__":
    main()
