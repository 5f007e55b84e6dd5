"""Does the map of a likeness lie on what two pictures share? Discs planted into VOC pictures.

    python benchmarks/likeness.py --data VOCdevkit --out likeness.jsonl
    python benchmarks/likeness.py --data VOCdevkit --out likeness.jsonl --table

A disc of picture Q is pasted into picture P (as in `classlens evaluate planted`). Asked is what makes the result like
Q, `like(Q)`, and what makes it like Q rather than like P, `like(Q) - like(P)`. In both cases the answer is the disc, an
eighth of the picture. The embedding is what the last linear layer of EfficientNet-Lite0 gets, 1280 numbers.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rows import command, rows_of, table
from torch import Tensor, nn

import classlens
from classlens.data.layouts import open_dataset
from classlens.evaluate.tests.planted import place, plant
from classlens.evaluate.tests.segmentation import average_precision

METHODS = ("agf", "agf-release", "lrp", "gradcam", "layercam", "gradient-x-input", "smoothgrad", "centre", "random")
COLUMNS = {"share": "evidence on the disc", "hit": "maximum on it", "ap": "average precision"}


def encoder() -> classlens.LoadedModel:
    """EfficientNet-Lite0 without its classifier."""
    loaded = classlens.load("efficientnet-lite0")
    loaded.model.get_submodule("")._fc = nn.Identity()
    return classlens.LoadedModel("efficientnet-lite0 embedding", loaded.model.eval(), loaded.preprocess, None)


def scored(evidence: Tensor, disc: Tensor) -> dict[str, float]:
    """The share of positive evidence on the disc, whether the maximum lies on it, and average precision."""
    positive = evidence.double().clamp(min=0)
    total = float(positive.sum())
    found = average_precision(evidence.double().flatten().numpy(), disc.flatten().numpy())
    return {
        "share": float(positive[disc].sum()) / total if total else 0.0,
        "hit": float(disc.flatten()[positive.flatten().argmax()]) if total else 0.0,
        "ap": float("nan") if found is None else found,
        "empty": float(total == 0),
    }


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each picture, question and method that is not there yet."""
    loaded, data = encoder(), open_dataset(options.data)
    done = {(row["picture"], row["method"]) for row in rows_of(options.out)}
    items = data.select(None, 0, half="B")
    for item in items[: options.pictures]:
        random = place(0, item.name)
        others = [other for other in items if other.name != item.name]
        other = others[random.integers(len(others))]
        p, q = (loaded.preprocess(data.picture(one)) for one in (item, other))
        planted, mask = plant(p, q, random)
        disc = torch.from_numpy(mask) > 0
        questions = {
            "like Q": classlens.like(q[None]),
            "like Q, not P": classlens.like(q[None]) - classlens.like(p[None]),
        }
        for method in options.methods:
            for name, question in questions.items():
                if (item.name, f"`{method}`, {name}") not in done:
                    evidence = classlens.explain(loaded, planted[None], question, method).maps[0, 0]
                    yield {"picture": item.name, "method": f"`{method}`, {name}"} | scored(evidence, disc)


def question_of(row: dict[str, Any]) -> str:
    """The question of a row, by which the table is ordered."""
    return str(row["method"].split(", ", 1)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="VOC, or any data set")
    parser.add_argument("--out", type=Path, required=True, help="rows, one for each picture, question and method")
    parser.add_argument("--pictures", type=int, default=60)
    parser.add_argument("--methods", nargs="*", default=METHODS)
    command(parser, measure, lambda rows: table(sorted(rows, key=question_of), COLUMNS, "maps", "empty maps"))


if __name__ == "__main__":
    main()
