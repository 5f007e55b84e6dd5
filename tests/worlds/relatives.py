"""Two kinds of things that share a part, and a network whose concepts were set by hand.

A pie is a red and a green cell, a tart a red and a blue one; red speaks for both. Every fourth tart lacks its blue cell
and has a faint green one, so that the network takes it for a pie.
"""

from __future__ import annotations

from pathlib import Path

import torch
from parts import COLOURS, SIDE, Parts, picture_of
from PIL import Image
from torch import nn

from classlens.models import LoadedModel, Preprocess

LABELS = ("pie", "tart", "nothing")


def make() -> LoadedModel:
    """For load("relatives:make")."""
    network = Parts()
    network.head = nn.Linear(4, 3)
    with torch.no_grad():
        network.head.weight.copy_(
            torch.tensor([[90.0, 120.0, 0.0, 0.0], [90.0, 0.0, 120.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
        )
        network.head.bias.copy_(torch.tensor([0.0, 0.0, 0.5]))
    preprocess = Preprocess(resize=(SIDE, SIDE), crop=None, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    return LoadedModel("relatives", network.eval(), preprocess, LABELS)


def draw_relatives(root: Path, pies: int = 8, tarts: int = 8, mistaken: int = 2) -> Path:
    """A folder for each class; the last tarts are taken for pies."""
    red, green, blue = COLOURS
    kinds = {
        "pie": [(red, green)] * pies,
        "tart": [(red, blue)] * tarts + [(red, tuple(n * 2 // 3 for n in green))] * mistaken,
    }
    for kind, pictures in kinds.items():
        (root / kind).mkdir(parents=True)
        for seed, colours in enumerate(pictures):
            Image.fromarray(picture_of(seed, colours)).save(root / kind / f"{kind}{seed:02}.png")
    return root
