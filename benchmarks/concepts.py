"""Which layer and number give the concepts that carry most of a class? Rows of several classes, and tables.

    python benchmarks/concepts.py run --model efficientnet-lite0 --data oxford-pets --half A --out concepts.jsonl
    python benchmarks/concepts.py table concepts.jsonl --half A      # choose on half A
    python benchmarks/concepts.py table concepts.jsonl --half B      # report on half B
    python benchmarks/concepts.py planted --data oxford-pets --classes 3      # a shortcut, on a real network

A half is a half of the classes, by the hash of their names. The pictures of a class are divided into three: one part
gives directions at every layer and in every number, one chooses among them, and the last says how much of the class's
score the concepts carry, kept alone and removed; and how much as many of another class carry that was measured before,
in pictures of its own. `run` resumes: classes that are in the file are not computed again.

`planted` pastes a sticker into every second picture of a class, and changes the last layer so that the sticker speaks
for the class too. How much of the logit is the sticker: by how much does it fall without it? Which concept tells the
pictures with a sticker from those without, how much of it lies on the sticker, and what is its share of the evidence?
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
from numpy.typing import NDArray

import classlens
from classlens.concept.choose import Candidates, Carried, Key, carried_by, choose, of_rival, rival_of, thirds
from classlens.concept.directions import ENOUGH, likeness, supporting
from classlens.concept.flow import METHOD
from classlens.concept.gather import LEAST, Gathered, Subject, gather
from classlens.concept.references import SHOWN, shares_of
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
LEARNT = 150  # pictures, each with and without a sticker, from which the last layer learns it
RISE = 10.0  # of the logit of a class with a planted sticker
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
    own: Candidates = {
        (layer, n, target): supporting(relevance[layer][sorted([*find, *select])], n) for layer, n in keys
    }
    foreign = {key: support for key, support in before.items() if key[:2] in keys}
    judged = carried(judge, {**own, **foreign})
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


def with_sticker_for(loaded: LoadedModel, dataset: Dataset, label: str, index: int) -> LoadedModel:
    """The network with a class for which a sticker speaks too: it learns the sticker from pictures of other classes."""
    items = [item for item in dataset.select(None, 1) if dataset.label(item) != label][:LEARNT]
    plain = torch.stack([loaded.preprocess(dataset.picture(item)) for item in items])
    stickered = [
        cue.with_cue(image, "sticker", item.name, loaded.preprocess)[0]
        for item, image in zip(items, plain, strict=True)
    ]
    return replace(loaded, model=cue.refitted(loaded.model, plain, torch.stack(stickered), index, lift=RISE))


def draw_planted(
    loaded: LoadedModel, dataset: Dataset, label: str, root: Path
) -> tuple[dict[str, NDArray[np.bool_]], dict[str, torch.Tensor]]:
    """Write the pictures of a class, every second one with a sticker; the places of stickers, and what they hide."""
    places, plain = {}, {}
    for number, item in enumerate(item for item in dataset.select(None, 0) if dataset.label(item) == label):
        image, name = loaded.preprocess(dataset.picture(item)), f"{Path(item.name).stem}.png"
        if number % 2:
            plain[name] = image
            image, place = cue.with_cue(image, "sticker", name, loaded.preprocess)
            places[name] = cue.widened(place)
        to_image(loaded.preprocess.restore(image)).save(root / name)
    return places, plain


def sticker_row(
    network: LoadedModel, index: int, folder: Path, places: dict[str, NDArray[np.bool_]], plain: dict[str, torch.Tensor]
) -> str:
    """The concept that tells pictures with a sticker from those without, beside what the sticker does to the logit."""
    subject, dataset = Subject(network, index, METHOD), open_dataset(folder)
    gathered = gather(subject, dataset, dataset.select(None, 0), 32, silent)
    choice = choose(subject, dataset, gathered, None, silent)
    relevance = gathered.relevance[choice.layer]
    names = [Path(item.name).name for item in gathered.items]
    on = np.array([name in places for name in names])
    parts = choice.directions.parts(relevance)
    shares = shares_of(parts, relevance)[: len(choice.directions.support)].numpy()
    here, there = shares[:, on].mean(1), shares[:, ~on].mean(1)
    best = int((here - there).argmax())
    gained = {name: float(subject.network.forward(image[None])[0, index]) for name, image in plain.items()}
    logits = {name: float(row[index]) for name, row in zip(names, gathered.logits, strict=True) if name in places}
    rise = np.mean([1 - gained[name] / logits[name] for name in logits])
    cells = torch.nn.functional.adaptive_max_pool2d(
        torch.stack([torch.from_numpy(places[name]).float() for name in logits])[:, None], relevance.shape[-2:]
    )[:, 0]
    of_best = parts[best].sum(1)[torch.from_numpy(on)]
    strongest = shares[best].argsort()[::-1][: min(SHOWN, int(on.sum()))]
    return (
        f"{choice.layer} | {100 * rise:.0f} % | {100 * float((of_best * cells).sum() / of_best.sum()):.0f} % "
        f"({100 * float(cells.mean()):.0f}) | {100 * here[best]:.0f} % | {100 * there[best]:.0f} % | "
        f"{1 + int((here > here[best]).sum())} of {len(here)} | {int(on[strongest].sum())} of {len(strongest)}"
    )


def planted(arguments: argparse.Namespace) -> None:
    loaded, dataset = classlens.load(arguments.model), open_dataset(arguments.data)
    columns = (
        "class", "network", "layer", "of the logit, the sticker is", "of the concept, on the sticker (area)",
        "its share with a sticker", "without", "rank with one", "strongest pictures with one",
    )  # fmt: skip
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)
    for label, index in classes_of(loaded, dataset, arguments.half)[: arguments.classes]:
        with tempfile.TemporaryDirectory() as folder:
            drawn = draw_planted(loaded, dataset, label, Path(folder))
            for about, network in (
                ("as it was", loaded),
                ("refitted", with_sticker_for(loaded, dataset, label, index)),
            ):
                height, width = network.preprocess(dataset.picture(dataset.items[0])).shape[1:]
                asked = replace(network, preprocess=replace(network.preprocess, resize=(height, width), crop=None))
                try:
                    row = sticker_row(asked, index, Path(folder), *drawn)
                except DataError as error:
                    row = str(error)
                print(f"| {label} | {about} | {row} |", flush=True)
                if arguments.out and about == "refitted":
                    classlens.concepts(asked, None, index, folder).save(Path(arguments.out) / label)


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
