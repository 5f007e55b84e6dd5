"""Batches for training: images, augmented anew each epoch, or features of a frozen body, computed once.

>>> for inputs, targets in source.batches(epoch=0):     # the same for the same seed and epoch
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from classlens.data.layouts import Item
from classlens.evaluate.tests import idsds
from classlens.files import text_hash
from classlens.models import LoadedModel, Preprocess
from classlens.models.cards import write_weights
from classlens.training.data import Data, fingerprint, order, pieces, random_view, whole_view

Batch = tuple[Tensor, Tensor]  # inputs (B,...), targets (B,classes)

_AT_ONCE = 4  # on a CPU larger batches are slower
_PART = 32  # images per feature file: a killed run recomputes at most this many


class Source(Protocol):
    """Yields the batches of an epoch; None means all images in order, without augmentation."""

    def __len__(self) -> int: ...

    def batches(self, epoch: int | None) -> Iterator[Batch]: ...


@dataclass(frozen=True)
class Pictures:
    """Images from files, with random crops and flips for training."""

    data: Data
    examples: Sequence[Item]
    preprocess: Preprocess
    batch_size: int
    seed: int
    flip: bool = True
    delete_patches: bool = False  # of half of the training images, one of sixteen patches is set to the mean colour
    readers: int = 2

    def __len__(self) -> int:
        return len(self._positions(0))

    def batches(self, epoch: int | None) -> Iterator[Batch]:
        """The batches; the next two are read while one is used."""
        with ThreadPoolExecutor(self.readers) as pool:
            waiting: list[list[Future[Batch]]] = []
            for positions in self._positions(epoch):
                waiting.append([pool.submit(self._view, position, epoch) for position in positions])
                if len(waiting) > 2:
                    yield _stacked(waiting.pop(0))
            for futures in waiting:
                yield _stacked(futures)

    def _positions(self, epoch: int | None) -> list[list[int]]:
        count = len(self.examples)
        return _training_pieces(count, self.batch_size, self.seed, epoch)

    def _view(self, position: int, epoch: int | None) -> Batch:
        example = self.examples[position]
        if epoch is None:
            return whole_view(example, self.data, self.preprocess)
        random = np.random.default_rng([self.seed, epoch, position])
        image, labels = random_view(example, self.data, self.preprocess, random, self.flip)
        if self.delete_patches and random.random() < 0.5:
            image = idsds.without(image, int(random.integers(idsds.SIDE**2)))
        return image, labels


@dataclass(frozen=True)
class Features:
    """Features (N,D) and targets (N,classes) held in memory."""

    features: Tensor
    targets: Tensor
    batch_size: int
    seed: int

    def __len__(self) -> int:
        return len(_training_pieces(len(self.features), self.batch_size, self.seed, 0))

    def batches(self, epoch: int | None) -> Iterator[Batch]:
        for positions in _training_pieces(len(self.features), self.batch_size, self.seed, epoch):
            yield self.features[positions], self.targets[positions]


def _training_pieces(count: int, size: int, seed: int, epoch: int | None) -> list[list[int]]:
    """Positions of each batch. In training, a last batch of one image is dropped: BatchNorm cannot use it."""
    if epoch is None:
        return pieces(range(count), size)
    found = pieces(order(count, seed, epoch), size)
    return found[:-1] if len(found) > 1 and len(found[-1]) == 1 else found


def _stacked(futures: Sequence[Future[Batch]]) -> Batch:
    inputs, targets = zip(*(future.result() for future in futures), strict=True)
    return torch.stack(inputs), torch.stack(targets)


# ------------------------------------------------------------------------------------------------ cached features


class Body(Protocol):
    """A network whose last module, or last part from a module on, is trained; what precedes it stays as it is."""

    @property
    def loaded(self) -> LoadedModel: ...

    @property
    def model(self) -> nn.Module: ...

    @property
    def head_path(self) -> str: ...

    def features(self, images: Tensor) -> Tensor:
        """(B,...): what that module reads."""
        ...


View = Callable[[Item, Data, Preprocess, bool], Batch]  # ..., mirrored -> an image and its target


def plain_view(item: Item, data: Data, preprocess: Preprocess, mirrored: bool) -> Batch:
    """An image as at evaluation, or its mirror image, and its labels."""
    image, labels = whole_view(item, data, preprocess)
    return image.flip(-1) if mirrored else image, labels


def cached_features(
    backbone: Body,
    data: Data,
    examples: Sequence[Item],
    folder: Path,
    mirrored: bool,
    device: str,
    say: Callable[[int, int], None],
    view: View = plain_view,
) -> Batch:
    """The features of each image, or of its mirror image, from the frozen body; cached on disk."""
    key = _key(backbone, data.labels)
    found: list[Batch] = []
    for number, positions in enumerate(pieces(range(len(examples)), _PART)):
        chosen = [examples[position] for position in positions]
        digest = text_hash(f"{key}\n{mirrored}\n{fingerprint(chosen)}")
        file = folder / f"{number:05d}-{digest}.safetensors"
        if not file.is_file():
            features, targets = _compute(backbone, data, chosen, mirrored, device, view)
            folder.mkdir(parents=True, exist_ok=True)
            write_weights(file, {"features": features, "targets": targets})
        part = load_file(file)
        found.append((part["features"], part["targets"]))
        say(positions[-1] + 1, len(examples))
    all_features, all_targets = zip(*found, strict=True)
    return torch.cat(all_features), torch.cat(all_targets)


def _compute(backbone: Body, data: Data, examples: Sequence[Item], mirrored: bool, device: str, view: View) -> Batch:
    features: list[Tensor] = []
    targets: list[Tensor] = []
    for positions in pieces(range(len(examples)), _AT_ONCE):
        views = [view(examples[position], data, backbone.loaded.preprocess, mirrored) for position in positions]
        images = torch.stack([image for image, _ in views])
        features.append(backbone.features(images.to(device)).cpu())
        targets.append(torch.stack([target for _, target in views]))
    return torch.cat(features), torch.cat(targets)


def _key(backbone: Body, labels: Sequence[str]) -> str:
    """A hash of what determines features and targets besides the images: body weights, preprocessing, labels."""
    digest = hashlib.sha256(f"{backbone.loaded.preprocess.to_json()}{backbone.head_path}{labels}".encode())
    for name, tensor in body_state(backbone.model.state_dict(), backbone.head_path).items():
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def body_state(state: dict[str, Tensor], head_path: str) -> dict[str, Tensor]:
    """The weights outside the head."""
    return {key: value for key, value in state.items() if not key.startswith(f"{head_path}.")}
