"""How often `classlens diff` finds a shortcut, and how often it reports one that is not there.

    python benchmarks/shortcuts.py run --data oxford-pets --model mobilenet-v2 --out shortcuts.jsonl
    python benchmarks/shortcuts.py table shortcuts.jsonl

A is the network, B the same network with one row of its last layer refitted: a cue (`classlens.evaluate.tests.cue`: a
sticker at another place in each picture, or a caption) adds to the logit of a class. They are compared on pictures that
the row was not fitted to, in four ways:

- cue: a third of the pictures bear it. A hit is a shortcut of this class that appeared; every other is a false alarm.
- gone: the same with A and B swapped; a hit is a shortcut of this class that went.
- plain: the same networks, and no picture bears the cue. Every shortcut is a false alarm.
- noise: no cue; B is A with noise in its last layer, as much as changes about a tenth of the predictions.

`run` resumes: rows that are in the file are not computed again.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sticker import BACKGROUND, SIDE, squared
from torch import Tensor

import classlens
from classlens.data.layouts import Dataset, Item, open_dataset
from classlens.diff import diff
from classlens.evaluate.tests import cue
from classlens.files import draw_key
from classlens.models import LoadedModel
from classlens.models.network import Network

SHIFT = 16  # pixels around what networks see of a picture of 256; the cue is planted inside
EVERY = 3  # every third picture bears the cue
WAYS = ("cue", "gone", "plain", "noise")
CHANGED = 0.1  # of the predictions, by noise
Planted = tuple[Image.Image, np.ndarray]  # a picture, and where the cue is


def planted(image: Image.Image, kind: str, name: str) -> Planted:
    """The picture with a cue in what networks see of it."""
    inner = SIDE - 2 * SHIFT
    pixels, place = cue.CUES[kind](inner, inner, np.random.default_rng(list(draw_key(0, name))))
    found, where = np.array(image), np.zeros((SIDE, SIDE), bool)
    where[SHIFT:-SHIFT, SHIFT:-SHIFT] = place
    found[where] = (255 * pixels.permute(1, 2, 0).numpy()[place]).astype(np.uint8)
    return Image.fromarray(found), where


def tricked(loaded: LoadedModel, dataset: Dataset, kind: str, index: int) -> LoadedModel:
    """The network with a class whose logit a cue raises by twice what the likeliest class has above the mean."""
    items = cue.learnt(dataset)
    pictures = {item.name: squared(dataset.picture(item)) for item in items}
    plain = torch.stack([loaded.preprocess(picture) for picture in pictures.values()])
    cued = torch.stack([loaded.preprocess(planted(one, kind, name)[0]) for name, one in pictures.items()])
    _, _, logits = cue.before_last(loaded.model, plain)
    lift = 2 * float((logits.amax(1) - logits.mean(1)).mean())
    return replace(loaded, name=f"{loaded.name} with a cue", model=cue.refitted(loaded.model, plain, cued, index, lift))


def noisy(loaded: LoadedModel, images: Tensor, seed: int) -> LoadedModel:
    """The network with noise in its last layer, the least of some amounts that changes a tenth of the predictions."""
    name, _, before = cue.before_last(loaded.model, images)
    generator = torch.Generator().manual_seed(seed)
    weight = loaded.model.get_submodule(name).weight
    noise = torch.randn(weight.shape, generator=generator) * weight.detach().std()
    for amount in np.geomspace(0.05, 2, 12):
        model = copy.deepcopy(loaded.model)
        with torch.no_grad():
            model.get_submodule(name).weight += amount * noise
        _, _, after = cue.before_last(model, images)
        if float((before.argmax(1) != after.argmax(1)).float().mean()) >= CHANGED:
            break
    return replace(loaded, name=f"{loaded.name} with noise", model=model)


def write(folder: Path, dataset: Dataset, items: Sequence[Item], kind: str) -> list[str]:
    """The pictures and masks in the layout of Oxford pets; the names of those that bear the cue. "" plants none."""
    for sub in ("images", "annotations/trimaps"):
        (folder / sub).mkdir(parents=True)
    bear = []
    for number, item in enumerate(items):
        image, mask = squared(dataset.picture(item)), np.array(squared(Image.open(item.mask), mask=True))
        if kind and number % EVERY == 0:
            image, where = planted(image, kind, item.name)
            mask[where] = BACKGROUND  # what it covers is no animal
            bear.append(item.name)
        stem = Path(item.name).stem
        image.save(folder / "images" / f"{stem}.png")
        Image.fromarray(mask).save(folder / "annotations" / "trimaps" / f"{stem}.png")
    return bear


def compared(a: LoadedModel, b: LoadedModel, dataset: Dataset, items: Sequence[Item], kind: str) -> dict[str, object]:
    """The shortcuts that a diff reports, and what B says of the pictures with the cue."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "pets"
        bear = write(folder, dataset, items, kind)
        made = diff(a, b, folder, Path(scratch) / "diff.html", top=1, limit=None)
    stems = {Path(name).stem for name in bear}
    said = [row.predicted for row in made.collected.rows if Path(row.item.name).stem in stems]
    shortcuts = [(place.name, place.appeared) for place in made.places if place.shortcut]
    return {"pictures": len(items), "cued": len(bear), "said": said, "shortcuts": shortcuts}


def run(arguments: argparse.Namespace) -> None:
    loaded, dataset, out = classlens.load(arguments.model), open_dataset(arguments.data), Path(arguments.out)
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    done = {(row["model"], row["cue"], row["class"], row["way"]) for row in rows}
    learnt, model = cue.learnt(dataset), Network(loaded).id.partition("@")[0]
    usable = [item for item in dataset.select(None, arguments.seed, "B") if item not in learnt and item.mask]
    jobs = [(kind, name, way) for name in arguments.classes.split(",") for kind in arguments.cues.split(",")
            for way in arguments.ways.split(",")]  # fmt: skip
    for number, (kind, name, way) in enumerate(jobs):
        if (model, kind, name, way) in done:
            continue
        start = number // len(WAYS) * arguments.pictures % len(usable)
        items = (usable * 2)[start : start + arguments.pictures]  # other pictures for each class and cue
        if way == "noise":
            images = torch.stack([loaded.preprocess(squared(dataset.picture(item))) for item in items])
            other = noisy(loaded, images, number)
        else:
            other = tricked(loaded, dataset, kind, loaded.labels.index(name))
        pair = (other, loaded) if way == "gone" else (loaded, other)
        found = compared(*pair, dataset, items, kind if way in ("cue", "gone") else "")
        row = {"model": model, "cue": kind, "class": name, "way": way} | found
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(model, kind, name, way, found["shortcuts"], flush=True)


def table(arguments: argparse.Namespace) -> None:
    rows = [json.loads(line) for file in arguments.files for line in file.read_text().splitlines()]
    print("| network | cue | runs | found | went, found | false alarms: cue, gone | plain | noise |\n|" + "---|" * 8)
    for model, kind in dict.fromkeys((row["model"], row["cue"]) for row in rows):
        part = [row for row in rows if (row["model"], row["cue"]) == (model, kind)]
        runs, hits, false = Counter(), Counter(), Counter()
        for row in part:
            wanted = {"cue": [row["class"], True], "gone": [row["class"], False]}.get(row["way"])
            runs[row["way"]] += 1
            hits[row["way"]] += wanted in row["shortcuts"]
            false[row["way"]] += sum(one != wanted for one in row["shortcuts"])
        cells = [f"{hits[way]} of {runs[way]}" for way in ("cue", "gone")]
        cells += [f"{false['cue'] + false['gone']} in {runs['cue'] + runs['gone']}"]
        cells += [f"{false[way]} in {runs[way]}" for way in ("plain", "noise")]
        print(f"| {model} | {kind} | {len(part)} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run")
    one.add_argument("--data", required=True)
    one.add_argument("--model", default="mobilenet-v2")
    one.add_argument("--out", default="shortcuts.jsonl")
    one.add_argument("--classes", default="pug,beagle,Egyptian cat,espresso")
    one.add_argument("--cues", default="sticker,caption")
    one.add_argument("--ways", default=",".join(WAYS))
    one.add_argument("--pictures", type=int, default=27)
    one.add_argument("--seed", type=int, default=0, help="of the order of the pictures")
    one.set_defaults(function=run)
    other = commands.add_parser("table")
    other.add_argument("files", nargs="+", type=Path)
    other.set_defaults(function=table)
    arguments = parser.parse_args()
    arguments.function(arguments)


if __name__ == "__main__":
    main()
