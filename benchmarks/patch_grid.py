"""Does the factorisation help on a transformer's patch grid? Measured on a small ViT that is trained here.

    python benchmarks/patch_grid.py --out benchmarks/patch_grid.md        # about ten minutes on one core

No ImageNet transformer comes as a file with a package, so a ViT (8 x 8 patches, 4 blocks) learns to name the two or
three handwritten digits in a picture of clutter (multi-label; scikit-learn's digits). Where each digit is, is known:
a map of a class must lie in that digit's box, not in the others'.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.metrics import average_precision_score
from torch import Tensor

import classlens
from classlens.methods.registry import METHODS
from classlens.models._torchvision import import_torchvision

SIZE, PATCH, DIGIT = 64, 8, 16


def scenes(count: int, seed: int, split: str) -> tuple[Tensor, Tensor, Tensor]:
    """(pictures (N,3,S,S), labels (N,10), boxes (N,10,S,S)): digits at patch corners, of different classes."""
    rng = np.random.default_rng(seed)
    data = load_digits()
    chosen = np.arange(len(data.target)) % 5 == 0  # held out
    pool = np.flatnonzero(chosen if split == "test" else ~chosen)
    pictures = torch.from_numpy(rng.uniform(0, 0.35, (count, 3, SIZE, SIZE))).float()
    labels, boxes = torch.zeros(count, 10), torch.zeros(count, 10, SIZE, SIZE, dtype=torch.bool)
    places = [(y, x) for y in range(0, SIZE - DIGIT + 1, DIGIT) for x in range(0, SIZE - DIGIT + 1, DIGIT)]
    for i in range(count):
        for c, at in zip(rng.permutation(10), rng.permutation(len(places))[: rng.integers(2, 4)], strict=False):
            index = rng.choice(pool[data.target[pool] == c])
            glyph = torch.from_numpy(data.images[index] / 16).float()[None, None]
            glyph = F.interpolate(glyph, size=DIGIT, mode="bilinear")[0]
            y, x = places[at]
            colour = torch.from_numpy(rng.uniform(0.5, 1, (3, 1, 1))).float()
            region = pictures[i, :, y : y + DIGIT, x : x + DIGIT]
            region.copy_(torch.maximum(region, glyph * colour))
            labels[i, c] = 1
            boxes[i, c, y : y + DIGIT, x : x + DIGIT] = True
    return (pictures - 0.3) / 0.3, labels, boxes


def build() -> Any:
    """A torchvision VisionTransformer with random weights."""
    torch.manual_seed(0)
    vit = import_torchvision().models.VisionTransformer(
        image_size=SIZE, patch_size=PATCH, num_layers=4, num_heads=4, hidden_dim=96, mlp_dim=192, num_classes=10
    )
    torch.nn.init.normal_(vit.heads.head.weight, std=0.02)  # it starts with zeros
    return vit.eval()


def train(vit: Any, steps: int) -> None:
    vit.train()
    adam = torch.optim.AdamW(vit.parameters(), 1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(adam, 2e-3, steps)
    for step in range(steps):
        pictures, labels, _ = scenes(64, 1000 + step, "train")
        loss = F.binary_cross_entropy_with_logits(vit(pictures), labels)
        adam.zero_grad()
        loss.backward()
        adam.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step} of {steps}: loss {loss.item():.3f}", file=sys.stderr, flush=True)
    vit.eval()


VARIANTS: dict[str, dict[str, Any]] = {
    "agf: relevance stream alone": {"only": "C"},
    "agf with the factorisation": {"without": "coarse"},
    "agf with coarse evidence from deep layers too": {},
}
OTHERS = ("lrp", "lrp-epsilon-plus-flat", "clrp", "gradient", "gradient-x-input", "gradcam", "integrated-gradients")


def measure(maps_of: Any, count: int) -> np.ndarray:
    """For each digit: share of positive evidence in its box, average precision, maximum in the box, in per cent."""
    pictures, labels, boxes = scenes(count, 7, "test")
    rows = []
    for i in range(count):
        classes = labels[i].nonzero()[:, 0].tolist()
        maps = maps_of(pictures[i : i + 1], classes)[0]
        for k, c in enumerate(classes):
            m, box = maps[k], boxes[i, c]
            positive = m.clamp(min=0)
            share = float(positive[box].sum() / positive.sum().clamp(min=1e-30))
            precision = average_precision_score(box.flatten(), m.flatten())
            rows.append((share, precision, float(box.flatten()[m.argmax()])))
    return 100 * np.array(rows)


def explained(vit: Any, name: str, **options: Any) -> Any:
    return lambda x, classes: classlens.explain(vit, x, [classes], name, multilabel=True, **options).maps


def difference(rows: np.ndarray, alone: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean of the paired differences, and half of its 95 % interval."""
    paired = rows - alone
    return paired.mean(0), 1.96 * paired.std(0, ddof=1) / np.sqrt(len(paired))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the table (Markdown)")
    parser.add_argument("--weights", type=Path, default=Path("patch_grid.pt"), help="trained weights, kept here")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--images", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    vit = build()
    if options.weights.exists():
        vit.load_state_dict(torch.load(options.weights, weights_only=True))
    else:
        train(vit, options.steps)
        torch.save(vit.state_dict(), options.weights)
    pictures, labels, _ = scenes(500, 11, "test")
    with torch.no_grad():
        score = average_precision_score(labels, vit(pictures).sigmoid(), average="macro")
    lines = [
        f"A ViT with 8 x 8 patches and 4 blocks, mean average precision {100 * score:.1f} on held-out digits; "
        f"{options.images} pictures of two or three digits. In brackets: paired difference from the first line, with "
        "its 95 % interval.", "",
        "| method | share in the box (chance 6) | average precision | maximum in the box |", "|---|---|---|---|",
    ]  # fmt: skip
    contenders = {name: explained(vit, "agf", **options) for name, options in VARIANTS.items()}
    contenders |= {name: explained(vit, name) for name in OTHERS if name in METHODS}
    alone = None
    for name, maps_of in contenders.items():
        rows = measure(maps_of, options.images)
        alone = rows if alone is None else alone
        cells = " | ".join(
            f"{m:.1f} ({d:+.1f} ± {e:.1f})" for m, d, e in zip(rows.mean(0), *difference(rows, alone), strict=True)
        )
        lines.append(f"| {name} | {cells} |")
        print(lines[-1], file=sys.stderr, flush=True)
    options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
