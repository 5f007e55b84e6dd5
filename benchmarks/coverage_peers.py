"""Does relevance add up? classlens and its peers on every classifier of torchvision, or of Hugging Face transformers.

    python benchmarks/coverage_peers.py --out benchmarks/coverage_peers.jsonl      # goes on where it was
    python benchmarks/coverage_peers.py --out benchmarks/coverage_peers.jsonl --table

With `--library transformers`, the peers are captum's LRP, LXT and pytorch-grad-cam.

Networks get random weights, BatchNorm scales and *no biases* (class tokens and position embeddings count as such):
then nothing but the input contributes to a logit, and the relevance of all pixels must add up to it; within 1 % it is
"conserved". A network runs in a process of its own, and each library gets a copy of it, as a user would call it:
captum with its default rules, zennit with EpsilonPlus and the canonizer that it offers for the architecture (merging
BatchNorm where there is none), LXT with the patches that it has for the module, and grad-cam at the last layer that
gives a map which is not constant (of maps, or of tokens in a square). Grad-CAM need not add up.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import subprocess
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

CLASS = 1  # explained; where its logit is 0, the likeliest of the first image
ADDED = "bias", "token", "pos_embed", "position_embedding"  # in the names of all that is added to the image's own
A_MAP = "a map"
ACCOUNTED = "classlens, with what the report says"


def network(name: str) -> tuple[Any, Any]:
    """The model without biases, and two images it takes."""
    import torch
    from torch import nn

    from classlens.evaluate import coverage

    model, images = coverage.network(name)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.running_mean.zero_()
            for key, weight in module.named_parameters(recurse=False):
                if any(word in key for word in ADDED):
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


def lxt(model: Any, images: Any, chosen: int) -> Any:
    from lxt.efficient import monkey_patch

    monkey_patch(sys.modules[type(getattr(model, "plain", model)).__module__])
    pixels = images.clone().requires_grad_()
    model(pixels)[:, chosen].sum().backward()
    return (pixels * pixels.grad).sum((1, 2, 3))


def gradcam(model: Any, images: Any, chosen: int) -> Any:
    import numpy as np
    from pytorch_grad_cam import GradCAM
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    targets = [ClassifierOutputTarget(chosen)] * len(images)
    for layer, arranged in reversed(_layers(model, images)):
        found = GradCAM(model=model, target_layers=[layer], reshape_transform=arranged)(images, targets)
        if np.isfinite(found).all() and (found.max((1, 2)) > found.min((1, 2))).all():
            return None
    raise ValueError("no layer gives a finite map that is not constant")


def _layers(model: Any, images: Any) -> list[tuple[Any, Any]]:
    """The modules whose output is a map, or tokens in a square, and what makes a map of it; at most the last 20."""
    import torch

    seen: list[tuple[Any, Any]] = []

    def note(module: Any, _: Any, output: Any) -> None:
        shape = output.shape if isinstance(output, torch.Tensor) else ()
        if len(shape) == 4 and shape[2] == shape[3] > 1:
            seen.append((module, None))
        if len(shape) == 3 and shape[1] > 2:
            side = int(shape[1] ** 0.5)
            extra = shape[1] - side * side  # class token, registers
            if extra <= 5:
                seen.append((module, lambda t, n=side, e=extra: t[:, e:].mT.unflatten(2, (n, n))))

    hooks = [module.register_forward_hook(note) for module in model.modules() if module is not model]
    with torch.no_grad():
        model(images)
    for hook in hooks:
        hook.remove()
    return seen[-20:]


PEERS = {
    "torchvision": {"classlens": ours, "captum": captum, "zennit": zennit},
    "transformers": {"classlens": ours, "captum": captum, "lxt": lxt, "grad-cam": gradcam},
}


def logits_alone(model: Any) -> Any:
    """The network as the peers need it: it returns a tensor."""
    from torch import nn

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = model

        def forward(self, images: Any) -> Any:
            return self.plain(images).logits

    return Logits().eval()


def examine(library: str, name: str) -> dict[str, Any]:
    """For each peer: the largest |sum of relevance - logit| / |logit|, "a map", or the error."""
    import torch

    from classlens.core.capture import pick_output
    from classlens.models._torchvision import import_torchvision

    import_torchvision()
    warnings.filterwarnings("ignore")
    model, images = network(name)
    with torch.no_grad():
        made = model(images)
        every = pick_output(made, None)
    for_peers = model if isinstance(made, torch.Tensor) else logits_alone(model)
    chosen = CLASS if every[:, CLASS].all() else int(every[0].argmax())
    logits = every[:, chosen]
    found: dict[str, Any] = {"name": name, "logits": logits.tolist()}
    for peer, attribute in PEERS[library].items():
        try:
            sums = attribute(copy.deepcopy(model if peer == "classlens" else for_peers), images, chosen)
            if peer == "classlens":
                sums, accounted = sums
                found[ACCOUNTED] = float(((accounted - logits) / logits).abs().max())
            found[peer] = A_MAP if sums is None else float(((sums.detach() - logits) / logits).abs().max())
        except Exception as error:
            found[peer] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:120]
    return found


def verdict(row: dict[str, Any], library: str) -> str:
    if row[library] == A_MAP:
        return A_MAP
    if not isinstance(row[library], float):
        return "raises"
    if row[library] <= 0.01:
        return "conserved"
    return "told" if library == "classlens" and row.get(ACCOUNTED, 1.0) <= 0.001 else "wrong"


def table(rows: list[dict[str, Any]], peers: Iterable[str]) -> str:
    """Markdown: counts, then a line for each network."""
    from importlib.metadata import version

    names = {peer: f"{peer} {version(peer)}" for peer in peers}
    kinds = {
        "conserved": "relevance adds up to the logit (within 1 %)",
        "told": "it does not, and the report says how much stayed in units to which no input contributes",
        A_MAP: "a map that is finite and not constant, and need not add up",
        "wrong": "silently wrong",
        "raises": "raises an error",
    }
    lines = [f"| of {len(rows)} networks | " + " | ".join(names.values()) + " |", "|---" * (len(names) + 1) + "|"]
    for kind, word in kinds.items():
        counts = [sum(verdict(row, peer) == kind for row in rows) for peer in names]
        if any(counts):
            lines.append(f"| {word} | " + " | ".join(map(str, counts)) + " |")
    lines += ["", "| network | " + " | ".join(names.values()) + " |", "|---" * (len(names) + 1) + "|"]
    for row in rows:
        cells = [f"{row[peer]:.0e}" if isinstance(row[peer], float) else row[peer].split(":")[0] for peer in names]
        good = [verdict(row, peer) in ("conserved", A_MAP) for peer in names]
        marked = [cell if fine else f"**{cell}**" for cell, fine in zip(cells, good, strict=True)]
        lines.append(f"| {row['name'].partition(':')[2]} | " + " | ".join(marked) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="rows, one for each network; what is there is kept")
    parser.add_argument("--library", choices=PEERS, default="torchvision")
    parser.add_argument("--timeout", type=float, default=400, help="seconds for a network")
    parser.add_argument("--table", action="store_true", help="print the rows as Markdown")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(examine(options.library, options.only)))
        return
    peers = tuple(PEERS[options.library])
    rows = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    if options.table:
        print(table(rows, peers))
        return
    from classlens.evaluate.coverage import network_names

    names = network_names(options.library)
    for i, name in enumerate(names, start=1):
        if name in {r["name"] for r in rows}:
            continue
        command = [sys.executable, __file__, "--out", str(options.out), "--library", options.library, "--only", name]
        row = {"name": name} | dict.fromkeys(peers, "TimeoutExpired: too slow")
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(command, capture_output=True, text=True, timeout=options.timeout, check=False)
            last = (done.stdout.splitlines() or [""])[-1]
            row = json.loads(last) if last.startswith("{") else row | dict.fromkeys(peers, done.stderr[-120:])
        with options.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{i}/{len(names)} {name}", *(f"{lib}: {row[lib]}" for lib in peers), sep="  ", file=sys.stderr)


if __name__ == "__main__":
    main()
