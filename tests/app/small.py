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
