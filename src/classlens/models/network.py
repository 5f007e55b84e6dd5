"""A network in use: its forward, its recorded forward, and a name by which results of it are known again."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from classlens.core.capture import Tape, home, logits_of, placed, record, unwrap
from classlens.errors import ModelError
from classlens.models.loaded import LoadedModel
from classlens.models.preprocess import Preprocess
from classlens.models.scans import ScanPreprocess

# glibc takes blocks above 32 MB from the system anew each time, and every page is then touched for the first time:
# a forward of EfficientNet-Lite0 costs four times as much an image in a batch of 64 as in one of 4 (measured).
_REUSED_BLOCK = 32 * 2**20


class Network:
    """A loaded model as whoever runs it over many pictures uses it.

    >>> network = Network(load("efficientnet-lite0"))
    >>> network.id
    'efficientnet-lite0@5b1c3b1c5a'
    >>> tape = network.record(images)       # one forward serves every method
    """

    def __init__(self, loaded: LoadedModel, frame: str = "model") -> None:
        if isinstance(loaded.preprocess, ScanPreprocess):
            raise ModelError(f"{loaded.name} reads scans, not photos: only explain and compare work with it")
        self.module = unwrap(loaded.model)
        self.preprocess = framed(loaded.preprocess, frame)
        self.labels = loaded.labels
        self.loaded = loaded

    @cached_property
    def id(self) -> str:
        """The name in the rows: what it is called, and a fingerprint of weights and preprocessing."""
        return f"{short_name(self.loaded.name)}@{fingerprint(self.loaded)}"

    @cached_property
    def classes(self) -> int:
        """How many classes the network tells apart: the forward of an empty picture says so."""
        logits = self.forward(torch.zeros(1, 3, *input_size(self.preprocess)))
        if logits.dim() != 2:
            raise ModelError(f"the model's output has shape {tuple(logits.shape)}; an evaluation needs (B, classes)")
        return logits.shape[1]

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        device, dtype = home(self.module, images)
        return logits_of(self.module, images.to(device, dtype))

    def record(self, images: Tensor, module: nn.Module | None = None) -> Tape:
        """The tape of a forward, of this network or of an altered copy of it."""
        tape = record(module or self.module, self.placed(images))
        if not torch.isfinite(tape.logits).all():
            raise ModelError("the logits are NaN or infinite; check the weights")
        return tape

    def placed(self, images: Tensor) -> Tensor:
        """On the device and in the precision in which the network is explained."""
        return placed(self.module, images)


def framed(preprocess: Preprocess, frame: str) -> Preprocess:
    """`model`: the network's own resize and crop. `whole`: all of the picture, squashed to the input's size."""
    if frame == "model":
        return preprocess
    return replace(preprocess, resize=input_size(preprocess), crop=None, fit="squash")


def input_size(preprocess: Preprocess) -> tuple[int, int]:
    """(height, width) of what the preprocessing gives."""
    _, height, width = preprocess.shape
    return height, width


def fingerprint(loaded: LoadedModel, letters: int = 10) -> str:
    """Of everything that decides what the network computes, but its code: weights, buffers, preprocessing."""
    digest = hashlib.sha256(repr(sorted(loaded.preprocess.to_json().items())).encode())
    _add_weights(digest, loaded.model)
    return digest.hexdigest()[:letters]


def weights_hash(model: nn.Module) -> str:
    """The SHA-256 of the parameters and buffers of a network, by their names."""
    digest = hashlib.sha256()
    _add_weights(digest, model)
    return digest.hexdigest()


def _add_weights(digest: hashlib._Hash, model: nn.Module) -> None:
    for name, tensor in model.state_dict().items():
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)


def short_name(name: str) -> str:
    """A model's name for tables; of a path the part that says something, never where on the machine it lies.

    >>> short_name("/home/me/nets/resnet50/card.json"), short_name("torchvision:resnet50")
    ('resnet50', 'torchvision:resnet50')
    """
    if not (name.endswith(".json") or "/" in name or os.sep in name):
        return name
    path = Path(name).absolute()
    return path.parent.name if path.name == "card.json" else re.sub(r"\.json$", "", path.name)


def images_per_forward(tape: Tape, limit: float | None) -> int:
    """How many images go through the network together, judged by one recorded forward.

    With a limit in GB: as many as its activations allow. Without one: on a CPU as many as are fastest, on a GPU half
    of what is free.
    """
    batch, device = len(tape.logits), tape.logits.device
    if limit is None and device.type == "cuda":
        limit = torch.cuda.mem_get_info(device)[0] / 2 / 1e9
    if limit is None:
        largest = max(_bytes(value.tensor) for node in tape.nodes for value in node.outputs) / batch
        return max(1, int(_REUSED_BLOCK // largest))
    return max(1, int(limit * 1e9 // (2 * peak_bytes(tape) / batch)))  # twice: convolutions want room to work


def peak_bytes(tape: Tape) -> int:
    """The most memory that values take at any moment of a forward that lets go of what it no longer needs."""
    last_use = {value: position for position, node in enumerate(tape.nodes) for value in node.inputs}
    alive = peak = _bytes(tape.image.tensor)
    for position, node in enumerate(tape.nodes):
        alive += sum(_bytes(value.tensor) for value in node.outputs)
        peak = max(peak, alive)
        alive -= sum(_bytes(value.tensor) for value in dict.fromkeys(node.inputs) if last_use[value] == position)
    return peak


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
