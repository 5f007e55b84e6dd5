"""Pictures of one coloured square on grey, with masks, and a small network that sorts them; for load("sorting:net")."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from classlens.models import LoadedModel, Preprocess

SIDE = 32


class Net(nn.Module):
    """conv-relu twice, a mean, a linear head."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 12, 3, padding=1), nn.ReLU()
        )
        self.head = nn.Linear(12, classes)

    def features(self, images: Tensor) -> Tensor:
        return self.body(images).mean((2, 3))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))


def seeded(seed: int = 0) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = Net().eval()
    with torch.no_grad():
        network.head.bias.mul_(0.02)  # else it would decide the class of every small difference
    return network


def net(seed: int = 0) -> LoadedModel:
    return LoadedModel("squares", seeded(seed), Preprocess(resize=(SIDE, SIDE), crop=None), None)


def draw(root: Path, count: int = 9) -> Path:
    """images/*.png and masks/*.png."""
    for folder in ("images", "masks"):
        (root / folder).mkdir(parents=True)
    random = np.random.default_rng(0)
    for i in range(count):
        pixels, mask = random.integers(90, 110, (SIDE, SIDE, 3)), np.zeros((SIDE, SIDE), bool)
        top, left = random.integers(1, SIDE - 13, 2)
        mask[top : top + 12, left : left + 12] = True
        pixels[mask] = random.integers(0, 256, 3)
        Image.fromarray(pixels.astype(np.uint8)).save(root / "images" / f"{i}.png")
        Image.fromarray((255 * mask).astype(np.uint8)).save(root / "masks" / f"{i}.png")
    return root
