"""Does relevance add up? captum's LRP, zennit and classlens on every torchvision classifier.

    python benchmarks/coverage_peers.py --out benchmarks/coverage_peers.jsonl      # goes on where it was
    python benchmarks/coverage_peers.py --out benchmarks/coverage_peers.jsonl --table

Networks get random weights, BatchNorm scales and *no biases* (class tokens and position embeddings count as such):
then nothing but the input contributes to a logit, and the relevance of all pixels must add up to it; within 1 % it is
"conserved". A network runs in a process of its own, and each library gets a copy of it, as a user would call it:
captum with its default rules, zennit with EpsilonPlus and the canonizer that it offers for the architecture (merging
BatchNorm where there is none).
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

LIBRARIES = ("classlens", "captum", "zennit")
CLASS = 1  # explained; where its logit is 0, the likeliest of the first image
ACCOUNTED = "classlens, with what the report says"


def network(name: str) -> tuple[Any, Any]:
    """The model without biases, and two images it takes."""
    import torch
    from torch import nn

    import classlens
    from classlens.evaluate.coverage import _give_statistics, _smallest_input

    torch.manual_seed(0)
    loaded = classlens.load(name, weights=None)
    model = loaded.model
    images = _smallest_input(model, loaded.preprocess.crop)
    _give_statistics(model, images)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.running_mean.zero_()
            for key, weight in module.named_parameters(recurse=False):
                if any(word in key for word in ("bias", "token", "pos_embed")):  # all that is added to the image's own
                    weight.zero_()
    return model, images


def ours(model: Any, images: Any, chosen: int) -> Any:
    import classlens

    found = classlens.explain(model, images, chosen, "lrp")
    sums = found.maps.sum((1, 2, 3))
    return sums, sums + found.report.absorbed[:, 0]  # what no input contributed to stays, and is written down


def captum(model: Any, images: Any, chosen: int) -> Any:
    from captum.attr import LRP

    return LRP(model).attribute(images.clone().requires_grad_(), chosen).sum((1, 2, 3))


def zennit(model: Any, images: Any, chosen: int) -> Any:
    import torch
    from zennit.attribution import Gradient
    from zennit.canonizers import SequentialMergeBatchNorm
    from zennit.composites import EpsilonPlus
    from zennit.torchvision import ResNetCanonizer, VGGCanonizer

    offered = {"ResNet": ResNetCanonizer, "VGG": VGGCanonizer}
    canonizer = offered.get(type(model).__name__, SequentialMergeBatchNorm)()
    outputs = torch.zeros(len(images), model(images).shape[1])
    with torch.no_grad():
        outputs[:, chosen] = model(images)[:, chosen]
    with Gradient(model=model, composite=EpsilonPlus(canonizers=[canonizer])) as attributor:
        return attributor(images.clone().requires_grad_(), outputs)[1].sum((1, 2, 3))


def examine(name: str) -> dict[str, Any]:
    """For each library: the largest |sum of relevance - logit| / |logit|, or the error."""
    import torch

    from classlens.models._torchvision import import_torchvision

    import_torchvision()
    warnings.filterwarnings("ignore")
    model, images = network(name)
    with torch.no_grad():
        every = model(images)
    chosen = CLASS if every[:, CLASS].all() else int(every[0].argmax())
    logits = every[:, chosen]
    found: dict[str, Any] = {"name": name, "logits": logits.tolist()}
    for library, attribute in zip(LIBRARIES, (ours, captum, zennit), strict=True):
        try:
            sums = attribute(copy.deepcopy(model), images, chosen)
            if library == "classlens":
                sums, accounted = sums
                found[ACCOUNTED] = float(((accounted - logits) / logits).abs().max())
            found[library] = float(((sums.detach() - logits) / logits).abs().max())
        except Exception as error:
            found[library] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:120]
    return found


def verdict(row: dict[str, Any], library: str) -> str:
    if not isinstance(row[library], float):
        return "raises"
    if row[library] <= 0.01:
        return "conserved"
    return "told" if library == "classlens" and row.get(ACCOUNTED, 1.0) <= 0.001 else "wrong"


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: counts, then a line for each network."""
    from importlib.metadata import version

    names = [f"{library} {version(library)}" for library in LIBRARIES]
    kinds = {
        "conserved": "relevance adds up to the logit (within 1 %)",
        "told": "it does not, and the report says how much stayed in units to which no input contributes",
        "wrong": "silently wrong",
        "raises": "raises an error",
    }
    counts = [[sum(verdict(r, lib) == kind for r in rows) for lib in LIBRARIES] for kind in kinds]
    lines = ["| of " + str(len(rows)) + " networks | " + " | ".join(names) + " |", "|---" * 4 + "|"]
    pairs = zip(kinds.values(), counts, strict=True)
    lines += [f"| {word} | " + " | ".join(map(str, line)) + " |" for word, line in pairs]
    lines += ["", "| network | " + " | ".join(names) + " |", "|---" * 4 + "|"]
    for r in rows:
        cells = [f"{r[lib]:.0e}" if isinstance(r[lib], float) else r[lib].split(":")[0] for lib in LIBRARIES]
        marked = [c if verdict(r, lib) == "conserved" else f"**{c}**" for c, lib in zip(cells, LIBRARIES, strict=True)]
        lines.append(f"| {r['name'].removeprefix('torchvision:')} | " + " | ".join(marked) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="rows, one for each network; what is there is kept")
    parser.add_argument("--timeout", type=float, default=400, help="seconds for a network")
    parser.add_argument("--table", action="store_true", help="print the rows as Markdown")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(examine(options.only)))
        return
    rows = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    if options.table:
        print(table(rows))
        return
    from classlens.evaluate.coverage import network_names

    names = network_names("torchvision")
    for i, name in enumerate(names, start=1):
        if name in {r["name"] for r in rows}:
            continue
        command = [sys.executable, __file__, "--out", str(options.out), "--only", name]
        row = {"name": name} | dict.fromkeys(LIBRARIES, "TimeoutExpired: too slow")
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(command, capture_output=True, text=True, timeout=options.timeout, check=False)
            last = (done.stdout.splitlines() or [""])[-1]
            row = json.loads(last) if last.startswith("{") else row | dict.fromkeys(LIBRARIES, done.stderr[-120:])
        with options.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{i}/{len(names)} {name}", *(f"{lib}: {row[lib]}" for lib in LIBRARIES), sep="  ", file=sys.stderr)


if __name__ == "__main__":
    main()
