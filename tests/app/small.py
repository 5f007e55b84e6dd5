"""A small network behind a page, for the tests."""

import gc
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from PIL import Image
from torch import nn

from classlens.app.studio import Studio
from classlens.models import LoadedModel, Preprocess

LABELS = ("cat", "dog", "<b>bold</b>", "cup", "crane")


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 12, 3, 2, 1), nn.ReLU(),
        nn.Conv2d(12, 12, 3, 1, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, len(LABELS)),
    ).eval()  # fmt: skip


def loaded(name: str = "small", seed: int = 0, multilabel: bool = False) -> LoadedModel:
    return LoadedModel(name, network(seed), Preprocess(resize=40, crop=32), LABELS, multilabel)


class Spots(nn.Module):
    """A detector that answers as YOLO does: a box on each cell of an 8 x 8 grid, more likely where the cell is red."""

    def __init__(self, bias: float = -4.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1), nn.ReLU())
        self.classes = nn.Conv2d(8, 2, 1)
        nn.init.normal_(self.classes.weight, std=2.0)
        nn.init.constant_(self.classes.bias, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chances = self.classes(self.body(x)).sigmoid()
        rows, columns = torch.meshgrid(torch.arange(chances.shape[2]), torch.arange(chances.shape[3]), indexing="ij")
        centres = (torch.stack([columns, rows])[None] + 0.5).to(x) * 4
        boxes = torch.cat([centres, torch.full_like(centres, 10.0)], 1).expand(len(x), -1, -1, -1)
        return torch.cat([boxes, chances], 1).flatten(2)


def detector(bias: float = -4.0) -> LoadedModel:
    return LoadedModel("spots", Spots(bias).eval(), Preprocess(resize=40, crop=32), ("cat", "dog"))


def segmenter() -> LoadedModel:
    """Three classes at every second pixel."""
    torch.manual_seed(3)
    body = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1), nn.ReLU(), nn.Conv2d(8, 3, 1))
    nn.init.normal_(body[4].weight, std=2.0)
    return LoadedModel("areas", body.eval(), Preprocess(resize=40, crop=32), ("sky", "road", "car"))


def words() -> LoadedModel:
    """Images and texts in one space of 6 numbers: a text's place depends on its letters."""
    torch.manual_seed(1)
    tower = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 6))
    letters = torch.randn(128, 6)

    def embed(texts):
        return torch.stack([letters[[ord(letter) % 128 for letter in text]].mean(0) for text in texts])

    return LoadedModel("words", tower.eval(), Preprocess(resize=40, crop=32), None, embed_text=embed)


def studio() -> Studio:
    return Studio({"small": loaded(), "other": loaded("other", 1)})


def file(width: int = 120, height: int = 90, seed: int = 0, kind: str = "PNG") -> bytes:
    """A picture file of coloured patches."""
    patches = torch.randint(0, 256, (6, 8, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    buffer = io.BytesIO()
    Image.fromarray(patches.numpy()).resize((width, height)).save(buffer, kind)
    return buffer.getvalue()


@contextmanager
def gradio_leaks() -> Iterator[None]:
    """gradio makes event loops and forgets to close them; they are swept up before another test has to see them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        gc.collect()
