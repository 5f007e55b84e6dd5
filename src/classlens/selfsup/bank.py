"""The bank: latents of many images, for nearest-neighbour search.

    >>> bank = build_bank(model, "data/pictures", "bank")       # once; call it again to resume
    >>> bank = Bank.open("bank", model)                         # refused if it was made with another model
    >>> bank.nearest(latents, hashes).indices
    tensor([17, 203])

A folder holds `latents.npy` (N,D), which is memory-mapped; `rows.npy`, the finished rows with a hash of each network
input; and `bank.json`, the model and the data of the bank.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from classlens.core.capture import unwrap
from classlens.data.images import check_batch
from classlens.data.layouts import Dataset, Item, open_dataset
from classlens.errors import ImageError
from classlens.files import replacing
from classlens.models import LoadedModel, Preprocess
from classlens.models.network import input_size
from classlens.progress import Progress, silent
from classlens.selfsup.bank_files import (
    BROKEN,
    DONE,
    MISSING,
    ROW,
    BankError,
    Latents,
    begin,
    card_of,
    changed,
    check_card,
    open_arrays,
    read_card,
    reader,
)  # fmt: skip
from classlens.selfsup.split import Encoder, split

METRICS = ("euclidean", "cosine")
EXACT_UP_TO = 100_000  # images; above, an index proposes candidates, which are then compared exactly
SAME = 1e-5  # a distance below this share of the latent's length means the same image

_BLOCK = 4096  # latents that are compared at once
_CANDIDATES = 64


@dataclass(frozen=True)
class Neighbours:
    """The nearest other image of each image."""

    indices: Tensor  # (B,) rows of the bank
    distances: Tensor  # (B,) float64
    latents: Tensor  # (B,D)


@dataclass(frozen=True, eq=False)
class Bank:
    """Latents with the names of their images.

    >>> Bank.open("bank", model)                # from a folder made by `build_bank` or `classlens selfsup bank`
    >>> Bank.of_images(images, encoder)         # from a tensor of images
    """

    latents: Latents
    rows: NDArray[np.void]
    names: tuple[str, ...]
    picture: Callable[[int], Tensor]  # row -> (C,H,W), the network input
    network: nn.Module  # the network that computed the latents
    head: str
    folder: Path | None = None

    def __len__(self) -> int:
        return int((self.rows["state"] == DONE).sum())

    @classmethod
    def open(cls, folder: str | os.PathLike[str], model: LoadedModel) -> Bank:
        """Open a finished bank that was made with this model and this preprocessing."""
        root = Path(folder)
        card = read_card(root)
        check_card(card, model, root)
        latents, rows = open_arrays(root, "r", len(card["names"]), card["dimensions"])
        missing = int((rows["state"] == MISSING).sum())
        if missing:
            raise BankError(f"the bank {root} lacks {missing} of {len(rows)} images; rerun the same command to resume")
        read = reader(card["data"], card["split"], card["names"], model.preprocess)
        return _readable(cls(latents, rows, tuple(card["names"]), read, unwrap(model.model), card["head"], root))

    @classmethod
    def of_images(cls, images: Tensor, encoder: Encoder, batch_size: int = 8) -> Bank:
        """A bank of network inputs (N,C,H,W), in memory."""
        if isinstance(images, Tensor) and images.dim() == 4 and not len(images):
            raise BankError("the bank is empty; give at least one other image")
        weight = encoder.head.weight
        images = check_batch(images).to(weight.device, weight.dtype)
        latents = torch.cat([encoder.latents(part) for part in images.split(batch_size)]).numpy()
        rows = np.zeros(len(images), ROW)
        rows["state"], rows["hash"] = DONE, hashes_of(images)
        names = tuple(f"image {i}" for i in range(len(images)))
        return cls(latents, rows, names, images.__getitem__, encoder.model, encoder.head.name)

    def nearest(self, latents: Tensor, hashes: NDArray[np.uint8], metric: str = "euclidean") -> Neighbours:
        """The nearest image of each latent (B,D), excluding the image itself.

        An image with the same hash (the same pixels after preprocessing) or the same latent is the image itself.
        """
        if metric not in METRICS:
            raise BankError(f"unknown metric {metric!r}; choose from {', '.join(METRICS)}")
        if latents.shape[1] != self.latents.shape[1]:
            raise BankError(f"the bank's latents have {self.latents.shape[1]} numbers, the model's {latents.shape[1]}")
        if len(self.latents) <= EXACT_UP_TO:
            found = self._closest(latents, hashes, self._blocks(), metric)
        else:
            found = self._closest_of_candidates(latents, hashes, metric)
        distances, indices = found
        if torch.isinf(distances).any():
            row = int(torch.isinf(distances).nonzero()[0])
            raise BankError(f"the bank holds no image other than image {row} itself; add more images")
        return Neighbours(indices, distances, torch.from_numpy(self.latents[indices.numpy()].copy()))

    def _blocks(self) -> Iterator[NDArray[np.int64]]:
        """All rows, in blocks."""
        return (np.arange(i, min(i + _BLOCK, len(self.rows))) for i in range(0, len(self.rows), _BLOCK))

    def _closest(
        self, latents: Tensor, hashes: NDArray[np.uint8], blocks: Iterator[NDArray[np.int64]], metric: str
    ) -> tuple[Tensor, Tensor]:
        """Distances and rows (B,) of the nearest among blocks of rows."""
        best = torch.full((len(latents),), torch.inf, dtype=torch.float64)
        index = torch.zeros(len(latents), dtype=torch.int64)
        for block in blocks:
            rows = self.rows[block]
            others = torch.from_numpy(np.array(self.latents[block])).double()
            distances, same = compare(latents.double(), others, metric)
            known = (hashes[:, None] == rows["hash"][None]).all(2) | (rows["state"] != DONE)
            distances = distances.masked_fill(same | torch.from_numpy(known), torch.inf)
            nearest, place = distances.min(1)
            index = torch.where(nearest < best, torch.from_numpy(block)[place], index)
            best = torch.minimum(best, nearest)
        return best, index

    def _closest_of_candidates(self, latents: Tensor, hashes: NDArray[np.uint8], metric: str) -> tuple[Tensor, Tensor]:
        """Like `_closest`, but only over the candidates that an index proposes."""
        _, candidates = self._index(metric).search(_scaled(latents.float(), metric).numpy(), _CANDIDATES)
        found = []
        for i, rows in enumerate(candidates):
            one, block = (latents[i : i + 1], hashes[i : i + 1]), np.unique(rows[rows >= 0]).astype(np.int64)
            nearest = self._closest(*one, iter([block]), metric)
            if torch.isinf(nearest[0]).any():  # all candidates are the image itself
                nearest = self._closest(*one, self._blocks(), metric)
            found.append(nearest)
        distances, indices = (torch.cat(parts) for parts in zip(*found, strict=True))
        return distances, indices

    def _index(self, metric: str) -> Any:
        """The faiss index over all latents: built once, stored in the folder of the bank."""
        faiss = _import_faiss(len(self.rows))
        file = None if self.folder is None else self.folder / f"index-{metric}.faiss"
        if file is not None and file.exists():
            return faiss.read_index(str(file))
        lists = max(1, min(int(4 * len(self.rows) ** 0.5), len(self.rows) // 40))
        index = faiss.index_factory(self.latents.shape[1], f"IVF{lists},SQ8")
        random = np.random.default_rng(0)
        sample = np.sort(random.choice(len(self.rows), min(len(self.rows), 40 * lists), replace=False))
        index.train(_scaled(torch.from_numpy(np.array(self.latents[sample])), metric).numpy())
        for start in range(0, len(self.rows), _BLOCK):
            block = torch.from_numpy(np.array(self.latents[start : start + _BLOCK]))
            index.add(_scaled(block, metric).numpy())
        index.nprobe = max(8, lists // 20)
        if file is not None:
            with replacing(file) as draft:
                faiss.write_index(index, str(draft))
        return index


def compare(latents: Tensor, others: Tensor, metric: str) -> tuple[Tensor, Tensor]:
    """Distances (B,n) of latents in float64, and whether two are the same.

    >>> compare(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 0.0]]), "euclidean")[0]
    tensor([[5.]])
    """
    length, other_length = latents.norm(dim=1)[:, None], others.norm(dim=1)[None]
    product = latents @ others.T
    euclidean = (length**2 + other_length**2 - 2 * product).clamp(min=0).sqrt()
    same = euclidean <= SAME * length
    if metric == "euclidean":
        return euclidean, same
    return 1 - product / (length * other_length).clamp(min=1e-300), same


def hashes_of(images: Tensor) -> NDArray[np.uint8]:
    """(B,16): a hash of each network input, to recognise an image in a bank."""
    pixels = images.detach().float().cpu().contiguous().numpy()
    digests = [hashlib.sha256(image.tobytes()).digest()[:16] for image in pixels]
    return np.frombuffer(b"".join(digests), np.uint8).reshape(len(images), 16)


def _scaled(latents: Tensor, metric: str) -> Tensor:
    """For cosine, vectors of length 1: their order by Euclidean distance is the same."""
    return latents if metric == "euclidean" else torch.nn.functional.normalize(latents)


def _import_faiss(pictures: int) -> Any:
    try:
        import faiss
    except ImportError:
        raise BankError(
            f"searching a bank of {pictures} images needs faiss: pip install 'classlens[selfsup]'"
        ) from None
    return faiss


# ------------------------------------------------------------------------------------------------------- making one


def build_bank(
    model: LoadedModel,
    data: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    head: str | None = None,
    split_name: str = "val",
    limit: int | None = None,
    seed: int = 0,
    batch_size: int = 8,
    progress: Progress = silent,
) -> Bank:
    """Compute the latents of all images of a data set and store them in a folder; existing latents are kept.

    Images that could not be read, or that changed since the bank was begun, are tried again.

    `data` is a folder of images or any layout that `classlens evaluate` knows.
    """
    dataset = open_dataset(data, split_name)
    items = dataset.items if limit is None else dataset.select(limit, seed)
    encoder = encoder_of(model, head)
    root, card = Path(out), card_of(model, encoder, dataset, items, split_name)
    begin(root, card)
    latents, rows = open_arrays(root, "r+", len(items), card["dimensions"])
    rows["state"][changed(root, dataset, items)] = MISSING
    fill(latents, rows, dataset, items, encoder, model.preprocess, batch_size, progress)
    del latents, rows  # flushed; opened again read-only
    return Bank.open(root, model)


def bank_of_folder(
    data: str | os.PathLike[str], model: LoadedModel, encoder: Encoder, progress: Progress = silent
) -> Bank:
    """A bank in memory, for a few images."""
    dataset = open_dataset(data)
    latents = np.zeros((len(dataset.items), encoder.head.weight.shape[1]), np.float32)
    rows = np.zeros(len(dataset.items), ROW)
    fill(latents, rows, dataset, dataset.items, encoder, model.preprocess, 8, progress)
    names = tuple(item.name for item in dataset.items)

    def read(row: int) -> Tensor:
        return model.preprocess(dataset.picture(dataset.items[row]))

    return _readable(Bank(latents, rows, names, read, encoder.model, encoder.head.name))


def encoder_of(model: LoadedModel, head: str | None = None) -> Encoder:
    """The encoder and head of a loaded network, found with an empty image."""
    weight = next(model.model.parameters())
    return split(model.model, torch.zeros(1, 3, *input_size(model.preprocess)).to(weight), head)


def fill(
    latents: Latents,
    rows: NDArray[np.void],
    dataset: Dataset,
    items: Sequence[Item],
    encoder: Encoder,
    preprocess: Preprocess,
    batch_size: int,
    progress: Progress = silent,
) -> None:
    """Compute the missing rows, and try broken images again. A row is marked as done after its latent is written."""
    todo = np.flatnonzero(rows["state"] != DONE)
    done = len(rows) - len(todo)
    for start in range(0, len(todo), batch_size):
        progress("latents", done + start, len(rows))
        read: dict[int, Tensor] = {}
        for row in todo[start : start + batch_size].tolist():
            try:
                read[row] = preprocess(dataset.picture(items[row]))
            except ImageError:
                rows["state"][row] = BROKEN
        for places, images in _same_size(read):
            batch = images.to(encoder.head.weight)
            latents[places] = encoder.latents(batch).numpy()
            _flush(latents)
            rows["hash"][places], rows["state"][places] = hashes_of(batch), DONE
        _flush(rows)
    progress("latents", len(rows), len(rows))


def _same_size(read: dict[int, Tensor]) -> Iterator[tuple[list[int], Tensor]]:
    """Batches of images of the same size."""
    for shape in dict.fromkeys(image.shape for image in read.values()):
        places = [row for row, image in read.items() if image.shape == shape]
        yield places, torch.stack([read[row] for row in places])


def _readable(bank: Bank) -> Bank:
    if not len(bank):
        raise BankError(f"none of the {len(bank.rows)} images of the bank could be read; give others")
    return bank


def _flush(array: NDArray[Any]) -> None:
    if isinstance(array, np.memmap):
        array.flush()
