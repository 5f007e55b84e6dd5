"""A bank on disk: its card, its arrays, and its images.

bank/bank.json      model, preprocessing, head, data, the names of the images
bank/latents.npy    (N,D), memory-mapped
bank/rows.npy       which rows are done, and a hash of each network input
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from classlens.data.layouts import Dataset, Item, open_dataset
from classlens.errors import ClasslensError, ImageError
from classlens.files import write_json
from classlens.models import LoadedModel, Preprocess
from classlens.models.network import fingerprint
from classlens.selfsup.split import Encoder

ROW = np.dtype([("state", np.uint8), ("hash", np.uint8, 16)])
MISSING, DONE, BROKEN = 0, 1, 2
_CARD, _LATENTS, _ROWS = "bank.json", "latents.npy", "rows.npy"

Latents = NDArray[np.float32]  # (N,D)


class BankError(ClasslensError):
    """A bank that is missing, unfinished, or does not belong to the model."""


def is_bank(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a bank rather than images."""
    return (Path(folder) / _CARD).is_file()


def begin(root: Path, card: dict[str, Any]) -> None:
    """Create empty arrays and then the card; do nothing if the same bank was started before."""
    if is_bank(root):
        there = read_card(root)
        other = [key for key in card if key != "classlens" and there[key] != card[key]]
        if other:
            raise BankError(
                f"{root} holds a bank with other {', '.join(other)}; choose a new folder, or remove this one"
            )
        return
    if root.exists() and any(child.name not in (_LATENTS, _ROWS) for child in root.iterdir()):
        raise BankError(f"{root} holds other files than a bank; choose a new folder")
    root.mkdir(parents=True, exist_ok=True)
    for name, shape, kind in (
        (_LATENTS, (len(card["names"]), card["dimensions"]), np.dtype(np.float32)), (_ROWS, (len(card["names"]),), ROW)
    ):  # fmt: skip
        np.lib.format.open_memmap(root / name, "w+", kind, shape).flush()
        _take_room(root / name)
    write_json(root / _CARD, card, indent=1)


def _take_room(path: Path) -> None:
    """Take the disk space of a file now: if it is missing while a mapped array is filled, the system kills us."""
    if hasattr(os, "posix_fallocate"):
        with path.open("rb+") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def changed(root: Path, dataset: Dataset, items: Sequence[Item]) -> list[int]:
    """The images whose files changed after the bank was begun: their latents may be of what they held before."""
    begun = (root / _CARD).stat().st_mtime_ns

    def when(item: Item) -> int:
        try:
            about = (dataset.root if isinstance(item.image, int) else item.image).stat()
        except OSError:  # gone: reading it fails too, and says why
            return begun
        return max(about.st_mtime_ns, about.st_ctime_ns)

    return [row for row, item in enumerate(items) if when(item) >= begun]


def card_of(
    model: LoadedModel, encoder: Encoder, dataset: Dataset, items: Sequence[Item], split_name: str
) -> dict[str, Any]:
    """What determines the latents of a bank, as JSON."""
    return {
        "classlens": version("classlens"),
        "model": model.name,
        "weights": weights_hash(model),
        "preprocess": model.preprocess.to_json(),
        "head": encoder.head.name,
        "dimensions": encoder.head.weight.shape[1],
        "data": f"{dataset.layout}:{dataset.root.resolve()}",
        "split": split_name,
        "names": [item.name for item in items],
    }


def read_card(root: Path) -> dict[str, Any]:
    """The card of a bank, if its folder holds one."""
    keys = {"classlens", "model", "weights", "preprocess", "head", "dimensions", "data", "split", "names"}
    try:
        card = json.loads((root / _CARD).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BankError(f"{root} is not a bank; make one with `classlens selfsup bank PICTURES --out {root}`") from None
    except (OSError, ValueError, RecursionError) as error:
        raise BankError(f"{root / _CARD} cannot be read ({error}); make the bank again") from error
    if not isinstance(card, dict) or set(card) != keys:
        raise BankError(f"{root / _CARD} is not the card of a bank; make the bank again")
    return card


def check_card(card: dict[str, Any], model: LoadedModel, root: Path) -> None:
    """Refuse a bank that was made with another model or other preprocessing."""
    if card["preprocess"] != model.preprocess.to_json():
        raise BankError(f"the bank {root} was made with other preprocessing than the model's; make it again")
    if card["weights"] != weights_hash(model):
        raise BankError(f"the bank {root} was made with another model ({card['model']}, other weights); make it again")


def weights_hash(model: LoadedModel) -> str:
    """A hash of weights and buffers; preprocessing is compared separately, so that an error can say which differs."""
    return fingerprint(replace(model, preprocess=Preprocess()))


def open_arrays(root: Path, mode: Any, count: int, dimensions: int) -> tuple[Latents, NDArray[np.void]]:
    """Latents (N,D) and rows (N,) of a bank, memory-mapped."""
    try:
        latents, rows = (np.load(root / name, mmap_mode=mode) for name in (_LATENTS, _ROWS))
    except (OSError, ValueError, EOFError) as error:
        raise BankError(f"the bank {root} is broken ({error}); remove it and make it again") from error
    if latents.shape != (count, dimensions) or rows.shape != (count,) or rows.dtype != ROW:
        raise BankError(f"the files of the bank {root} do not match; remove it and make it again")
    return latents, rows


def reader(data: str, split_name: str, names: Sequence[str], preprocess: Preprocess) -> Callable[[int], Tensor]:
    """Read images of a bank on demand; a file may have been deleted since."""

    @functools.cache
    def items() -> tuple[Dataset, dict[str, Item]]:
        dataset = open_dataset(data, split_name)
        return dataset, {item.name: item for item in dataset.items}

    def read(row: int) -> Tensor:
        dataset, by_name = items()
        if names[row] not in by_name:
            raise ImageError(f"{names[row]} no longer exists")
        return preprocess(dataset.picture(by_name[names[row]]))

    return read
