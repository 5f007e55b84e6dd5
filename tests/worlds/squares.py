"""Pictures of coloured squares, their masks, and a tiny network."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from classlens.models import LoadedModel, Preprocess

SIDE = 24
LABELS = ("red", "green", "blue")
COLOURS = ((200, 60, 60), (60, 200, 60), (60, 60, 200))
CORNERS = ((2, 2), (2, 14), (14, 2), (14, 14))


def net() -> LoadedModel:
    """For load("squares:net"): two convolutions and a fully connected end, as VGG in small."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = nn.Sequential()
        model.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 12, 3, padding=1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        )  # fmt: skip
        model.classifier = nn.Sequential(nn.Linear(48, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 5))
    return LoadedModel("squares", model, Preprocess(resize=20, crop=16), None)


def stages() -> LoadedModel:
    """For load("squares:stages"): blocks whose outputs have 1/8, 1/16 and 1/32 of the input."""

    def block(inside: int, out: int, stride: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inside, out, stride, stride), nn.BatchNorm2d(out), nn.ReLU())

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = nn.Sequential()
        for name, layer in (("eighth", block(3, 12, 8)), ("sixteenth", block(12, 8, 2)), ("last", block(8, 8, 2))):
            model.add_module(name, layer)
        for layer in (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)):
            model.append(layer)
    return LoadedModel("stages", model, Preprocess(resize=64, crop=64), None)


class Transformer(nn.Module):
    """Patches, a class token and blocks; a module before the blocks is used again after them. It has no head."""

    def __init__(self, skips: bool = False, mean: bool = False) -> None:
        super().__init__()
        self.mean = mean  # of the patches, instead of the class token
        self.patches = nn.Sequential(nn.Conv2d(3, 8, 4, 4, bias=False), nn.BatchNorm2d(8))
        self.token, self.skips = nn.Parameter(torch.randn(1, 1, 8)), skips
        self.shared = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
        self.scale = nn.Embedding(1, 8)  # does not read the image
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.between, self.norm, self.head = nn.BatchNorm1d(8), nn.LayerNorm(8), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = first = self.patches(x).flatten(2).mT
        x = self.shared(torch.cat([self.token.expand(len(x), -1, -1), x], 1))
        scale = self.scale(torch.zeros(1, dtype=torch.long))
        for block in self.blocks:
            x = block(x, scale=scale)
        if self.skips:
            x = x + first.mean(1, keepdim=True)
        x = self.shared(self.between(x.mT).mT)
        x = self.norm(x)
        return self.head(x[:, 1:].mean(1) if self.mean else x[:, 0])


class Block(nn.Module):
    """Attention and a dense layer, both with skip connections."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.dense = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 8))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x) * scale).chunk(3, -1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v))
        return x + self.dense(x)


def transformer(mean: bool = False) -> LoadedModel:
    """For load("squares:transformer"): a backbone without a head."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = Transformer(mean=mean)
        for norm in (model.patches[1], model.between):
            nn.init.uniform_(norm.running_var, 0.5, 1.5)
    return LoadedModel("transformer", model.eval(), Preprocess(resize=20, crop=16), None)


def picture(classes: tuple[int, ...], seed: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """(H,W,3) and its mask: a square of each class in a corner of its own, with an unlabelled rim."""
    random = np.random.default_rng([seed, *classes])
    pixels = np.repeat(random.integers(90, 110, (SIDE, SIDE, 1)), 3, 2).astype(np.uint8)
    mask = np.zeros((SIDE, SIDE), np.uint8)
    for label, corner in zip(classes, random.permutation(4), strict=False):
        top, left = CORNERS[corner]
        mask[top - 1 : top + 9, left - 1 : left + 9] = 255
        mask[top : top + 8, left : left + 8] = label
        pixels[top : top + 8, left : left + 8] = COLOURS[label - 1]
    return pixels, mask


SHOWN = ((1,), (2,), (3,), (1, 2), (2, 3), (1, 3))


def draw_voc(root: Path, train: int = 24, val: int = 12) -> Path:
    for folder in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (root / folder).mkdir(parents=True)
    for split, count, first in (("train", train, 0), ("val", val, 1000)):
        for number in range(count):
            pixels, mask = picture(SHOWN[number % len(SHOWN)], first + number)
            Image.fromarray(pixels).save(root / "JPEGImages" / f"{split}{number:02d}.jpg", quality=95)
            Image.fromarray(mask).save(root / "SegmentationClass" / f"{split}{number:02d}.png")
        names = "".join(f"{split}{number:02d}\n" for number in range(count))
        (root / "ImageSets" / "Segmentation" / f"{split}.txt").write_text(names)
    (root / "labels.txt").write_text("".join(f"{label}\n" for label in LABELS))
    return root
