"""Which layer and number give the concepts that carry most of a class? Rows of several classes, and tables.

    python benchmarks/concepts.py run --model efficientnet-lite0 --data oxford-pets --half A --out concepts.jsonl
    python benchmarks/concepts.py table concepts.jsonl --half A      # choose on half A
    python benchmarks/concepts.py table concepts.jsonl --half B      # report on half B
    python benchmarks/concepts.py planted --data oxford-pets --classes 3      # a shortcut, on a real network

A half is a half of the classes, by the hash of their names. The pictures of a class are divided into three: one part
gives directions at every layer and in every number, one chooses among them, and the last says how much of the class's
score the concepts carry, kept alone and removed; and how much as many of another class carry that was measured before,
in pictures of its own. `run` resumes: classes that are in the file are not computed again.

`planted` pastes a sticker into every second picture of a class, and refits the last layer so that the sticker speaks
for the class too. Is there a concept whose reference pictures show the sticker, and is there none before the refit?
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import classlens
from classlens.concept.choose import Candidates, Carried, Key, carried_by, of_rival, rival_of, thirds
from classlens.concept.directions import ENOUGH, likeness, supporting
from classlens.concept.flow import METHOD
from classlens.concept.gather import LEAST, Gathered, Subject, gather
from classlens.concept.references import SHOWN
from classlens.data.divide import half_of
from classlens.data.images import to_image
from classlens.data.labels import label_index
from classlens.data.layouts import Dataset, open_dataset
from classlens.errors import DataError
from classlens.evaluate.tests import cue
from classlens.models import LoadedModel
from classlens.models.network import Network
from classlens.progress import silent

TRIED = (1, 2, 3, 5, 8)  # concepts
Row = dict[str, Any]


# -------------------------------------------------------------------------------------------------------- run


def classes_of(loaded: LoadedModel, dataset: Dataset, half: str) -> list[tuple[str, int]]:
    """The labels of the data set that the network knows, and their classes."""
    known = {label for item in dataset.items if (label := dataset.label(item)) is not None}
    labels = sorted(label for label in known if half_of(label) == half)
    network = Network(loaded)
    found = [(label, label_index(label, network.labels, network.classes)) for label in labels]
    return [(label, index) for label, index in found if index is not None]


def measured(
    subject: Subject, dataset: Dataset, gathered: Gathered, before: Candidates
) -> tuple[list[Row], Candidates]:
    """A row for each layer and number; `before` are the directions of another class."""
    relevance, target = gathered.relevance, subject.target
    find, select, judge = thirds(len(gathered.items))
    keys = [(layer, n) for layer in relevance for n in TRIED if n <= len(gathered.items)]
    rival = rival_of(gathered.logits[find], target)
    theirs = of_rival(subject, dataset, gathered, rival, find, silent)

    def carried(rows: Sequence[int], found: Candidates) -> dict[Key, Carried]:
        return carried_by(subject, dataset, gathered, found, rows, silent)

    chosen = carried(
        select,
        {(layer, n, target): supporting(relevance[layer][find], n) for layer, n in keys}
        | {(layer, n, rival): supporting(theirs[layer], n) for layer, n in keys},
    )
    own = {(layer, n, target): supporting(relevance[layer][sorted([*find, *select])], n) for layer, n in keys}
    foreign = {key: support for key, support in before.items() if key[:2] in keys}
    judged = carried(judge, own | foreign)
    other = {key[:2]: sum(judged[key]) / 2 for key in foreign}
    return [
        {
            "layer": layer, "depth": list(relevance).index(layer), "count": n, "pictures": len(gathered.items),
            "chosen": sum(chosen[layer, n, target]) / 2, "rival": sum(chosen[layer, n, rival]) / 2,
            "kept": judged[layer, n, target][0], "removed": judged[layer, n, target][1], "other": other.get((layer, n)),
            "likeness": likeness(supporting(relevance[layer][0::2], n), supporting(relevance[layer][1::2], n)),
        }
        for layer, n in keys
    ], own  # fmt: skip


def run(arguments: argparse.Namespace) -> None:
    loaded, dataset, out = classlens.load(arguments.model), open_dataset(arguments.data), Path(arguments.out)
    name = Path(arguments.model).name
    done = {(row["model"], row["class"]) for row in read([out])} if out.exists() else set()
    before: Candidates = {}
    for label, index in classes_of(loaded, dataset, arguments.half)[: arguments.classes]:
        if (name, label) in done:
            continue
        subject = Subject(loaded, index, METHOD, None, Path(arguments.index))
        try:
            items = [item for item in dataset.select(None, 0) if dataset.label(item) == label]
            gathered = gather(subject, dataset, items, 32, silent)
        except DataError as error:
            print(f"{label}: {error}", flush=True)
            continue
        rows, before = measured(subject, dataset, gathered, before)
        about = {"model": name, "class": label, "half": arguments.half}
        with out.open("a") as file:
            file.writelines(json.dumps(about | row) + "\n" for row in rows)
        print(name, label, len(gathered.items), flush=True)


def read(files: list[Path]) -> list[Row]:
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


# ------------------------------------------------------------------------------------------------------ table

Rule = Callable[[list[Row]], Row]  # the rows of the largest number, one for each layer -> that of a layer
CHOSEN = "carries most beyond the rival's"
LAYERS: dict[str, Rule] = {
    CHOSEN: lambda rows: max(rows, key=lambda row: row["chosen"] - row["rival"]),
    "carries most": lambda rows: max(rows, key=lambda row: row["chosen"]),
    "deepest": lambda rows: min(rows, key=lambda row: row["depth"]),
    "finest": lambda rows: max(rows, key=lambda row: row["depth"]),
}


def picked(rows: list[Row], layer: str, enough: float) -> Row:
    """The row that the rules choose for a class."""
    most = max(row["count"] for row in rows)
    best = LAYERS[layer]([row for row in rows if row["count"] == most])
    there = sorted((row for row in rows if row["layer"] == best["layer"]), key=lambda row: row["count"])
    return next(row for row in there if row["chosen"] >= enough * best["chosen"])


def groups(rows: list[Row]) -> Iterator[list[Row]]:
    """The rows of each class of each network."""
    found: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        found[row["model"], row["class"]].append(row)
    return iter(found.values())


def line(title: str, rows: list[Row]) -> str:
    """One line of a table: the means over classes, with the 95 % interval of what is carried."""
    mean = {name: np.mean([row[name] for row in rows]) for name in ("count", "kept", "removed", "likeness")}
    other = [row["other"] for row in rows if row["other"] is not None]
    carried = np.array([(row["kept"] + row["removed"]) / 2 for row in rows])
    random = np.random.default_rng(0)
    low, high = np.percentile(random.choice(carried, (2000, len(carried))).mean(1), [2.5, 97.5])
    return (
        f"| {title} | {mean['count']:.1f} | {100 * carried.mean():.0f} [{100 * low:.0f}, {100 * high:.0f}] | "
        f"{100 * mean['kept']:.0f} | {100 * mean['removed']:.0f} | {f'{100 * np.mean(other):.0f}' if other else '–'} | "
        f"{100 * mean['likeness']:.0f} | {len(rows)} |"
    )


def table(arguments: argparse.Namespace) -> None:
    rows = [row for row in read(arguments.files) if row["half"] == arguments.half]
    columns = "concepts | carried, % | kept | removed | by those of another class | likeness | classes"

    def head(what: str) -> None:
        print(f"\n| {what}, half {arguments.half} | {columns} |\n{'|---' * 8}|")

    head("layer")
    for layer in LAYERS:
        print(line(layer, [picked(one, layer, ENOUGH) for one in groups(rows)]))
    head("number: the smallest that carries")
    for enough in (0.8, 0.9, 0.95, 0.98, 1.0):
        print(line(f"{100 * enough:.0f} % of the most", [picked(one, CHOSEN, enough) for one in groups(rows)]))
    head("network")
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        print(line(model, [picked(one, CHOSEN, ENOUGH) for one in groups(mine)]))


# ---------------------------------------------------------------------------------------------------- planted


def with_sticker_for(loaded: LoadedModel, dataset: Dataset, index: int) -> LoadedModel:
    """The network with a class for which a sticker speaks too: with one, its logit is about ten higher."""
    items = dataset.select(cue.LEARNT, 1)
    plain = torch.stack([loaded.preprocess(dataset.picture(item)) for item in items])
    stickered = [
        cue.with_cue(image, "sticker", item.name, loaded.preprocess)[0]
        for item, image in zip(items, plain, strict=True)
    ]
    return replace(loaded, model=cue.refitted(loaded.model, plain, torch.stack(stickered), index, lift=10.0))


def draw_planted(loaded: LoadedModel, dataset: Dataset, label: str, root: Path) -> dict[str, tuple[float, float]]:
    """Write the pictures of a class, every second one with a sticker; returns the centre (y,x) of each sticker."""
    centres = {}
    for number, item in enumerate(item for item in dataset.select(None, 0) if dataset.label(item) == label):
        image, name = loaded.preprocess(dataset.picture(item)), f"{Path(item.name).stem}.png"
        if number % 2:
            image, place = cue.with_cue(image, "sticker", name, loaded.preprocess)
            rows, columns = np.nonzero(place)
            centres[name] = float(rows.mean()), float(columns.mean())
        to_image(loaded.preprocess.restore(image)).save(root / name)
    return centres


def sticker_concept(found: classlens.Concepts, centres: dict[str, tuple[float, float]]) -> str:
    """The concept whose references show most stickers: its name, share, how many do, and how many could."""

    def shows(reference: classlens.concept.Reference) -> bool:
        y, x = centres.get(reference.name, (-1.0, -1.0))
        top, left, bottom, right = reference.box
        return top <= y < bottom and left <= x < right

    there = {reference.name for one in found.concepts for reference in one.references} & set(centres)
    counts = [(sum(map(shows, one.references)), one) for one in found.concepts if one.sign > 0]
    most, best = max(counts, key=lambda pair: (pair[0], pair[1].share))
    return f"{best.name} | {100 * best.share:.0f} % | {most} of {min(SHOWN, len(there))}"


def planted(arguments: argparse.Namespace) -> None:
    loaded, dataset = classlens.load(arguments.model), open_dataset(arguments.data)
    print(
        "| class | network | concept with most stickers | its share | references that show one |\n|---|---|---|---|---|"
    )
    for label, index in classes_of(loaded, dataset, arguments.half)[: arguments.classes]:
        with tempfile.TemporaryDirectory() as folder:
            centres = draw_planted(loaded, dataset, label, Path(folder))
            for about, network in (("as it was", loaded), ("refitted", with_sticker_for(loaded, dataset, index))):
                side = tuple(network.preprocess(dataset.picture(dataset.items[0])).shape[1:])
                asked = replace(network, preprocess=replace(network.preprocess, resize=side, crop=None))
                try:
                    found = classlens.concepts(asked, None, index, folder)
                except DataError as error:
                    print(f"| {label} | {about} | {error} | | |", flush=True)
                    continue
                if arguments.out:
                    found.save(Path(arguments.out) / f"{label} {about}")
                print(f"| {label} | {about} | {sticker_concept(found, centres)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run")
    one.add_argument("--model", default="efficientnet-lite0")
    one.add_argument("--data", required=True)
    one.add_argument("--half", default="A")
    one.add_argument(
        "--classes", type=int, help=f"at most so many; those with fewer than {LEAST} pictures are left out"
    )
    one.add_argument("--out", default="concepts.jsonl")
    one.add_argument("--index", default="concepts-index")
    one.set_defaults(function=run)
    other = commands.add_parser("table")
    other.add_argument("files", nargs="+", type=Path)
    other.add_argument("--half", default="B")
    other.set_defaults(function=table)
    third = commands.add_parser("planted")
    third.add_argument("--model", default="efficientnet-lite0")
    third.add_argument("--data", required=True)
    third.add_argument("--half", default="B")
    third.add_argument("--classes", type=int, default=3)
    third.add_argument("--out", help="also save the figures in this folder")
    third.set_defaults(function=planted)
    arguments = parser.parse_args()
    arguments.function(arguments)


if __name__ == "__main__":
    main()
