"""A small world: pictures of one coloured square on grey, and a network that knows the colours."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from classlens.models import LoadedModel, Preprocess

SIDE = 48
COLOURS = {"red": (200, 60, 60), "green": (60, 200, 60), "blue": (60, 60, 200)}


class Colours(nn.Module):
    """How much of each colour there is, against "nothing", which wins once most of a square is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.edge = nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.colour = nn.Conv2d(3, 3, 1, bias=False)
        self.head = nn.Linear(3, 4)
        with torch.no_grad():
            self.edge.weight.zero_()[range(3), range(3)] = torch.tensor([[0.5, 1, 0.5], [1, 2, 1], [0.5, 1, 0.5]]) / 8
            # One colour against the mean of the others: grey gives nothing.
            self.colour.weight.copy_((1.5 * torch.eye(3) - 0.5)[:, :, None, None])
            self.head.weight.copy_(torch.cat([400 * torch.eye(3), torch.zeros(1, 3)]))
            self.head.bias.copy_(torch.tensor([0.0, 0.0, 0.0, 8.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.colour(torch.relu(self.edge(x)))).mean((2, 3)))


def make() -> LoadedModel:
    """For load("world:make")."""
    preprocess = Preprocess(resize=(SIDE, SIDE), crop=None, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    return LoadedModel("colours", Colours().eval(), preprocess, (*COLOURS, "nothing"))


def picture(colour: str, seed: int) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """(H,W,3) with one square of 14x14 on noisy grey, and the square's mask."""
    random = np.random.default_rng([seed, *COLOURS[colour]])
    pixels = np.repeat(random.integers(90, 110, (SIDE, SIDE, 1)), 3, 2)
    top, left = random.integers(2, SIDE - 16, 2)
    mask = np.zeros((SIDE, SIDE), bool)
    mask[top : top + 14, left : left + 14] = True
    pixels[mask] = COLOURS[colour]
    return pixels.astype(np.uint8), mask


def draw_world(root: Path, count: int = 8) -> Path:
    """classes/COLOUR/*.png, and masked/{images,masks}/*.png."""
    for folder in ("masked/images", "masked/masks", *(f"classes/{colour}" for colour in COLOURS)):
        (root / folder).mkdir(parents=True)
    for colour in COLOURS:
        for seed in range(count):
            pixels, mask = picture(colour, seed)
            Image.fromarray(pixels).save(root / "classes" / colour / f"{seed}.png")
            Image.fromarray(pixels).save(root / "masked" / "images" / f"{colour}{seed}.png")
            Image.fromarray((255 * mask).astype(np.uint8)).save(root / "masked" / "masks" / f"{colour}{seed}.png")
    return root


def make_voc() -> LoadedModel:
    """A multi-label classifier of the 20 VOC classes: red is a bird (3), green a boat (4), blue a chair (9)."""
    model = Colours().eval()
    head = nn.Linear(3, 20)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.fill_(-4.0)
        for output, colour in ((2, 0), (3, 1), (8, 2)):
            head.weight[output, colour] = 400.0
    model.head = head
    return LoadedModel("colours", model.eval(), make().preprocess, None)


def make_breeds() -> LoadedModel:
    """Three similar pets: a red square is most of all a beagle, less a basset, still less a Siamese cat."""
    loaded = make()
    with torch.no_grad():
        likeness = torch.tensor([[1.0, 0.4, 0.7], [0.7, 1.0, 0.4], [0.4, 0.7, 1.0]])
        loaded.model.head.weight[:3] = 400 * likeness
    return LoadedModel("breeds", loaded.model, loaded.preprocess, ("beagle", "basset", "Siamese cat", "nothing"))


def make_nothing() -> LoadedModel:
    """The same breeds, but every picture shows nothing."""
    loaded = make_breeds()
    with torch.no_grad():
        loaded.model.head.bias[3] = 1e4
    return loaded
