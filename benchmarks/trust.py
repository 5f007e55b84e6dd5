"""Is the verdict of `e.trust()` right? Maps that are known to be right or wrong, on several networks.

    python benchmarks/trust.py run --model efficientnet-lite0 --data oxford-pets --out trust.jsonl
    python benchmarks/trust.py choose trust.jsonl      # limits chosen on half A
    python benchmarks/trust.py table trust.jsonl       # the verdicts on half B, with the limits of the package

`run` resumes: rows that are in the file are not computed again. Scenes with a known answer:

- object: a picture that the network recognises, with the mask of the animal.
- mosaic: four pictures in a square; the evidence for a class lies in the quarter of its picture.
- shortcut: a sticker is pasted in, and the last layer of the network is refitted so that the sticker decides a class.

A map of this network, class and picture is right if the cells that hold half of its evidence and the known place
overlap by at least half of the smaller of the two, and more of its evidence lies there than of an even map. (`peak` in
the rows: whether its strongest cell does, which for a coarse map depends on a few pixels.) Maps that explain something
else are wrong wherever they lie: of a shuffled network, of edges, of the centre, of noise, of another class, moved, or
with the sign turned.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import classlens
from classlens.core.capture import record
from classlens.data.divide import half_of
from classlens.data.layouts import Dataset, Item, open_dataset
from classlens.evaluate.tests import cue
from classlens.evaluate.tests.sanity import cascade, layers
from classlens.evaluate.worker import framed_mask
from classlens.explanation import explain
from classlens.files import draw_key
from classlens.models import LoadedModel
from classlens.models.network import Network
from classlens.report import measure
from classlens.report.truth import Labels
from classlens.trust.measures import Measures, measured
from classlens.trust.subject import Subject, subject_of
from classlens.trust.verdict import CRITERIA, DOUBTFUL, NEVER, TRUST, VERDICTS, Limits

REAL = ("agf", "gradcam")  # methods whose maps may be right
CONTROLS = ("sobel", "centre", "random(cells=7)")
Place = np.ndarray  # (H,W) bool: where the evidence is known to be
Seen = tuple[str, Tensor, int, Place]  # name, image, predicted class, place of the object
Row = dict[str, Any]


# ----------------------------------------------------------------------------------------------------- scenes


def objects(loaded: LoadedModel, dataset: Dataset, items: list[Item]) -> Iterator[Seen]:
    """Pictures that the network recognises, with the place of their object."""
    labels, network = Labels(dataset, loaded.labels, 1000), Network(loaded)
    for item in items:
        truth = labels.truth(item, None).outputs
        picture = dataset.picture(item)
        image = loaded.preprocess(picture)
        predicted = int(network.forward(image[None]).argmax())
        if predicted in truth:
            mask = framed_mask(dataset, item, picture, loaded.preprocess)
            if mask is not None and 0.02 < (mask == 1).mean() < 0.8:
                yield item.name, image, predicted, mask == 1


def mosaics(loaded: LoadedModel, found: list[Seen]) -> Iterator[tuple[str, Tensor, list[int], Place]]:
    """Four pictures of different classes in a square, if the network predicts one of them."""
    network = Network(loaded)
    for number, (name, *_) in enumerate(found):  # of the pictures before, so that more pictures change no mosaic
        order = sorted(found[: number + 1], key=lambda scene: draw_key(1, name + scene[0]))
        four: list[Seen] = []
        for scene in order:
            if scene[2] not in [one[2] for one in four] and half_of(scene[0]) == half_of(name) and len(four) < 4:
                four.append(scene)
        if len(four) < 4:
            continue
        parts = [F.interpolate(one[1][None], scale_factor=0.5, mode="bilinear", antialias=True)[0] for one in four]
        image = torch.cat([torch.cat(parts[:2], 2), torch.cat(parts[2:], 2)], 1)
        logits, classes = network.forward(image[None])[0], [one[2] for one in four]
        predicted = int(logits.argmax())
        if predicted in classes:
            quarter, side = classes.index(predicted), image.shape[1] // 2
            place = np.zeros(image.shape[1:], bool)
            place[quarter // 2 * side :, quarter % 2 * side :][:side, :side] = True
            others = sorted((k for k in classes if k != predicted), key=lambda k: -float(logits[k]))
            yield name, image, [predicted, others[0]], place


def stuck(loaded: LoadedModel, image: Tensor, name: str) -> tuple[Tensor, Place]:
    """The image with a sticker at a place that depends on its name, and the place with a rim."""
    changed, place = cue.with_cue(image, "sticker", name, loaded.preprocess)
    return changed, cue.widened(place)


def with_shortcut(loaded: LoadedModel, images: list[tuple[str, Tensor]]) -> LoadedModel:
    """The network with a last class that the sticker decides."""
    plain = torch.stack([image for _, image in images])
    stickered = torch.stack([stuck(loaded, image, name)[0] for name, image in images])
    return replace(loaded, model=cue.refitted(loaded.model, plain, stickered))


# ------------------------------------------------------------------------------------------------------- maps

KINDS = {  # the maps of each scene; those of REAL may be right, all others are wrong
    "object": (*REAL, "moved", "sign turned", "control", "shuffled network"),
    "mosaic": (*REAL, "other class"),
    "shortcut": (*REAL, "moved"),
}


class Maps:
    """The maps of one scene; those of the real methods are made once and shared."""

    def __init__(self, loaded: LoadedModel, image: Tensor, classes: list[int]) -> None:
        self.loaded, self.image, self.classes = loaded, image[None], classes
        self.explained = {method: explain(loaded, self.image, [classes], method) for method in REAL}
        self.base = subject_of(self.explained["agf"])
        self.again: dict[tuple[bool, float], np.ndarray] = {}
        self.known = {method: e.maps[0, 0].double().numpy() for method, e in self.explained.items()}

    def other(self, name: str) -> np.ndarray:
        if name not in self.known:
            self.known[name] = self.base.other(name)
        return self.known[name]

    def subject(self, kind: str) -> Subject:
        if kind in REAL:
            found = subject_of(self.explained[kind])
            found = replace(found, explain=self._explain) if kind == "agf" else found
        elif kind == "moved":  # by half of each side
            found = self._altered(lambda maps: np.roll(maps, [n // 2 for n in maps.shape[-2:]], (-2, -1)))
        elif kind == "sign turned":
            found = self._altered(np.negative)
        elif kind == "other class":
            found = replace(subject_of(self.explained["agf"], 0, 1), scores=self.base.scores)
        elif kind == "shuffled network":
            found = self._shuffled()
        else:
            control = CONTROLS[self.classes[0] % len(CONTROLS)]
            found = subject_of(explain(self.loaded, self.image, [self.classes[:1]], control))
        return replace(found, other=self.other)

    def _altered(self, change: Callable[[np.ndarray], np.ndarray]) -> Subject:
        """The same map, changed, as if the method always did this."""
        return replace(
            self.base, evidence=change(self.base.evidence), explain=lambda net, x: change(self._explain(net, x))
        )

    def _explain(self, network: nn.Module, images: Tensor) -> np.ndarray:
        """Maps by agf; the shuffled networks of all subjects are the same."""
        key = (network is self.base.network, float(images.double().sum()))
        if key not in self.again:
            self.again[key] = self.base.explain(network, images)
        return self.again[key]

    def _shuffled(self) -> Subject:
        """The map of a shuffled network, shown as the map of this one."""
        module, index = self.loaded.model, self.classes[0]
        (network,) = cascade(module, layers(module, record(module, self.image)), 1, stages=(1.0,))
        honest = subject_of(self.explained[REAL[index % 2]])
        foreign = honest.explain(network, self.image)[0]
        return replace(
            honest, evidence=foreign,
            explain=lambda net, x: honest.explain(network if net is honest.network else net, x),
        )  # fmt: skip


def lies_on(evidence: np.ndarray, place: Place) -> dict[str, bool]:
    """Whether the map marks the place, or its strongest cell lies there; with more evidence than of an even map."""
    share = measure.positive_shares(evidence)
    if share is None:
        return {"right": False, "peak": False}
    grid = measure.cells(share)
    on = measure.cells(place.astype(float)) / measure.cells(np.ones(place.shape))
    half, more = measure.half_cells(grid), share[place].sum() > place.mean()
    overlap = on[half].sum() / min(half.sum(), on.sum())
    return {"right": bool(overlap >= 0.5 and more), "peak": bool(on.ravel()[grid.argmax()] >= 0.5 and more)}


# -------------------------------------------------------------------------------------------------------- run


def values(found: Measures) -> dict[str, float]:
    return {name: criterion.value(found) for name, criterion in CRITERIA.items()}


def scenes(
    loaded: LoadedModel, dataset: Dataset, arguments: argparse.Namespace
) -> Iterator[tuple[str, str, LoadedModel, Tensor, list[int], Place]]:
    learnt = cue.learnt(dataset)  # never among the scenes
    found: list[Seen] = []
    for half in arguments.half:
        items = [item for item in dataset.select(None, 0, half)[arguments.skip :] if item not in learnt]
        found += islice(objects(loaded, dataset, items), arguments.pictures)
    tricked = with_shortcut(loaded, [(i.name, loaded.preprocess(dataset.picture(i))) for i in learnt])
    mosaic = {scene[0]: scene for scene in mosaics(loaded, found)}
    for name, image, predicted, place in found:
        yield name, "object", loaded, image, [predicted], place
        if name in mosaic:
            yield name, "mosaic", loaded, *mosaic[name][1:]
        changed, place = stuck(loaded, image, name)
        if decides(tricked, image, changed):
            yield name, "shortcut", tricked, changed, [Network(tricked).classes - 1], place


def decides(tricked: LoadedModel, plain: Tensor, changed: Tensor) -> bool:
    """Whether the network predicts the last class with the sticker, and another one without it."""
    before, after = Network(tricked).forward(torch.stack([plain, changed])).argmax(1).tolist()
    return bool(after == Network(tricked).classes - 1 != before)


def run(arguments: argparse.Namespace) -> None:
    loaded, dataset, out = classlens.load(arguments.model), open_dataset(arguments.data), Path(arguments.out)
    rows = read([out]) if out.exists() else []
    done = {(row["model"], row["picture"], row["scene"], row["kind"]) for row in rows}
    model = Network(loaded).id.partition("@")[0]
    for picture, scene, network, image, classes, place in scenes(loaded, dataset, arguments):
        asked = [kind for kind in KINDS[scene] if not arguments.kinds or kind in arguments.kinds.split(",")]
        missing = [kind for kind in asked if (model, picture, scene, kind) not in done]
        if not missing:
            continue
        maps = Maps(network, image, classes)
        for kind in missing:
            subject = maps.subject(kind)
            row: Row = {"model": model, "picture": picture, "half": half_of(picture), "scene": scene, "kind": kind}
            row |= {name: kind in REAL and lies for name, lies in lies_on(subject.evidence, place).items()}
            row |= values(measured(subject))
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")
        print(model, picture, scene, len(missing), flush=True)


def read(files: list[Path]) -> list[Row]:
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


# ------------------------------------------------------------------------------------------------------ table


def judged(row: Row, limits: dict[str, Limits]) -> str:
    """The verdict on stored measures, as `classlens.trust.verdict` gives it."""
    if math.isnan(row["spread"]):
        return NEVER
    there = {name: row[name] for name in limits if name != "conservation" or not math.isnan(row[name])}
    found = [DOUBTFUL if math.isnan(value) else limits[name].judge(value) for name, value in there.items()]
    return max(found, key=VERDICTS.index)


LIMITS = {name: criterion.limits for name, criterion in CRITERIA.items()}


def table(arguments: argparse.Namespace) -> None:
    rows = [row for row in read(arguments.files) if row["half"] == arguments.half]
    print(f"| map, half {arguments.half} | maps | {' | '.join(VERDICTS)} |\n|---|---|---|---|---|")
    groups = {f"right: {kind}": [r for r in rows if r["right"] and r["kind"] == kind] for kind in REAL}
    for kind in REAL:
        groups[f"wrong: {kind}, off the known place"] = [r for r in rows if not r["right"] and r["kind"] == kind]
    for kind in dict.fromkeys(kind for kinds in KINDS.values() for kind in kinds if kind not in REAL):
        groups[f"wrong: {kind}"] = [r for r in rows if r["kind"] == kind]
    for name, group in groups.items():
        print(f"| {name} | {len(group)} | {' | '.join(share(group, word) for word in VERDICTS)} |")
    columns = "network | maps | trusted | right maps trusted | wrong maps trusted | wrong maps: do not trust"
    print(f"\n| {columns} |\n{'|---' * 6}|")
    for model in (*sorted({r["model"] for r in rows}), "all"):
        part = [r for r in rows if model in (r["model"], "all")]
        good, bad = ([r for r in part if r["right"] is right] for right in (True, False))
        trusted = [r for r in part if judged(r, LIMITS) == TRUST]
        right = f"{len(trusted)}, {sum(r['right'] for r in trusted)} of them right{interval(trusted)}"
        cells = (right, share(good, TRUST), share(bad, TRUST), share(bad, NEVER))
        print(f"| {model} | {len(part)} | {' | '.join(cells)} |")


def share(rows: list[Row], word: str) -> str:
    count = sum(judged(row, LIMITS) == word for row in rows)
    return f"{count} ({100 * count / len(rows):.0f} %)" if rows else "–"


def interval(rows: list[Row]) -> str:
    """The share that is right with the 95 % interval of Wilson, which is honest for few maps and for 100 %."""
    if not rows:
        return ""
    n, share, z = len(rows), sum(r["right"] for r in rows) / len(rows), 1.96
    middle, width = share + z * z / (2 * n), z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    low, high = ((middle - width) / (1 + z * z / n), (middle + width) / (1 + z * z / n))
    return f": {100 * share:.1f} % ({100 * low:.0f} to {100 * high:.0f})"


FIXED = ("signal", "conservation", "excess")  # limits that were set beforehand, by what they mean
SPARED = 0.05
EMPTY = {"shuffled": 1.0, "spread": 0.5}  # of a map that ignores the network, and of a constant one


def choose(arguments: argparse.Namespace) -> None:
    """Limits on half A. `good`: what 95 % of the right maps reach that pass the fixed limits. `bad`: a quarter of that.

    Where less is better, `bad` is halfway from `good` to the value of an empty map.
    """
    fixed = {name: LIMITS[name] for name in FIXED}
    mine = [row for row in read(arguments.files) if row["half"] == "A" and row["right"]]
    right = [row for row in mine if judged(row, fixed) == TRUST]
    for name in (name for name in CRITERIA if name not in FIXED):
        values = np.array([row[name] for row in right], float)
        if name in EMPTY:
            good = np.nanquantile(values, 1 - SPARED)
            bad = (good + EMPTY[name]) / 2
        else:
            good = np.nanquantile(values, SPARED)
            bad = good / 4
        print(
            f"{name:12} good={good:.2f} bad={bad:.2f}   right maps: {np.nanmin(values):.2f} to {np.nanmax(values):.2f}"
        )
    print(f"from {len(right)} right maps of half A")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run")
    one.add_argument("--model", default="efficientnet-lite0")
    one.add_argument("--data", required=True)
    one.add_argument("--out", default="trust.jsonl")
    one.add_argument("--pictures", type=int, default=12, help="that the network recognises, of each half")
    one.add_argument("--half", default="AB", choices=("A", "B", "AB"))
    one.add_argument("--skip", type=int, default=0, help="so many pictures of each half, recognised or not")
    one.add_argument("--kinds", default="", help="of maps, separated by commas: agf,gradcam; all of them by default")
    one.set_defaults(function=run)
    for name, function in (("choose", choose), ("table", table)):
        other = commands.add_parser(name)
        other.add_argument("files", nargs="+", type=Path)
        other.add_argument("--half", default="B")
        other.set_defaults(function=function)
    arguments = parser.parse_args()
    arguments.function(arguments)


if __name__ == "__main__":
    main()
