"""Algorithm 2 of the paper: explain what distinguishes an image from its nearest neighbour.

    >>> e = explain(model, "photo.jpg", bank="bank")
    >>> e.figure().savefig("photo.png")         # image, neighbour, map without and with the neighbour

The head reads S = L_I - L_N instead of the image's latent L_I; the features are those of the image. The neighbour's
latent is a constant that is subtracted before the head, and a constant gets no relevance, so every method of
`classlens.METHODS` works unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from classlens import explanation as core
from classlens.core.capture import Picker, unwrap
from classlens.core.targets import Scalar, Targets
from classlens.errors import ClasslensError, MethodError, TargetError
from classlens.explanation import Explanation, Report
from classlens.models.loaded import LoadedModel
from classlens.progress import listener
from classlens.selfsup.bank import Bank, Neighbours, bank_of_folder, hashes_of
from classlens.selfsup.bank_files import BankError, is_bank
from classlens.selfsup.split import NO_HEAD, AtHead, Encoder, Head, Layer, split

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODES = ("difference", "sum", "none")
READINGS = {
    "literal": "S = L_I - L_N goes into the head, and the evidence starts from S (Algorithm 2)",
    "image": "S goes into the head, but the evidence starts from the image's latent L_I",
    "logits": "head(L_I) - head(L_N), as in the paper's text; the evidence starts from L_I",
}
"""The possible readings of Algorithm 2."""
PREDICTED = "predicted"  # as targets: the class that the network predicts for the image itself
COSINE = "cosine"  # as targets of a network without a head

BankLike = Bank | str | os.PathLike[str] | Tensor | Sequence[Any]


@dataclass(frozen=True, repr=False)
class Contrast(Explanation):
    """An explanation of an image in contrast with its neighbour.

    `maps`, `targets` and `logits` are those of the network that sees the difference (or the sum); `without` is the
    explanation of the same images that looks at no neighbour.
    """

    mode: str = "difference"
    reading: str = "literal"
    metric: str = "euclidean"
    neighbours: tuple[str, ...] = ()  # names
    indices: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))  # (B,) rows of the bank
    distances: Tensor = field(default_factory=lambda: torch.empty(0))  # (B,)
    neighbour_pictures: tuple[Tensor | None, ...] = ()  # each (3,H,W) in [0,1]; None: its file can no longer be read
    without: Explanation | None = None

    def __repr__(self) -> str:
        return f"<Contrast ({self.mode}) of {len(self.neighbours)} images with their neighbours: {super().__repr__()}>"

    def figure(self, scale: str | float = "own") -> Figure:
        """A row for each image: the image, its neighbour, the map without and with the neighbour."""
        from classlens.selfsup.figure import figure

        if scale != "own":
            raise MethodError(f"a contrast has no scale={scale!r}: each of its maps has its own")
        return figure(self)

    def save(self, folder: str | os.PathLike[str]) -> list[Path]:
        """What `Explanation.save` writes, and neighbours.png, the figure."""
        from classlens import render

        return [render.write_png(Path(folder) / "neighbours.png", self.figure()), *super().save(folder)]


@torch.inference_mode(False)  # methods need gradients, which the caller's inference mode would forbid
def explain(
    model: nn.Module | LoadedModel,
    images: Any,
    bank: BankLike,
    method: str = "agf",
    mode: str = "difference",
    *,
    targets: Targets = None,
    metric: str = "euclidean",
    reading: str = "literal",
    head: str | None = None,
    both: bool = True,
    output: Picker = None,
    trace: bool = False,
    **options: Any,
) -> Contrast:
    """Show what distinguishes an image from its nearest neighbour, for a self-supervised network.

    >>> m = classlens.load("selfsup:scan", weights="scan_imagenet_50.pth.tar")
    >>> e = explain(m, "photo.jpg", bank="bank", method="agf")
    >>> e.neighbours, e.targets

    `bank`: a `Bank`, its folder, a folder of images, a tensor of images or a list of files. `mode`: the head reads the
    "difference" from the neighbour's latent, their "sum", or ("none") the image's own latent. `targets`: None is the
    most likely class for this input of the head, "predicted" the class predicted for the image itself. `reading` is one
    of `READINGS`, `metric` "euclidean" or "cosine". `both=False` skips the map without the neighbour, which halves the
    time. `options` are those of the method, and `rather_than` of `classlens.explain`.

    `head`: None finds the last linear layer; a name selects a module. "none" is for a backbone whose output is its
    latent. Then the score is the projection of the latent on L_I - L_N (or on L_I + L_N, or on L_I), for every reading;
    with `targets="cosine"` it is the cosine similarity to the neighbour's latent.
    """
    _check(mode, reading)
    network, batch, loaded = core.prepare(model, images)
    encoder = split(network, batch[:1], head, output)
    _check_head(encoder.head, reading)
    opened = open_bank(bank, loaded, encoder)
    found = opened.nearest(encoder.latents(batch), hashes_of(batch), metric)
    ask = _Question(encoder, loaded, batch, targets, method, {"trace": trace, **options})
    contrasted = ask.about(found, mode, reading)
    without = ask.about(found, "none", reading) if both and mode != "none" and not ask.alike else None
    return Contrast(
        **{f.name: getattr(contrasted, f.name) for f in fields(contrasted)}, **_neighbours(opened, found, loaded),
        mode=mode, reading=reading, metric=metric, without=without,
    )  # fmt: skip


def open_bank(bank: BankLike, loaded: LoadedModel | None, encoder: Encoder) -> Bank:
    """Any of the forms in which a bank can be given, as a bank of this network's latents."""
    if isinstance(bank, Bank):
        if bank.network is encoder.model:
            return _same_head(bank, encoder)
        if bank.folder is None:
            raise BankError("the bank was made with another model; give the images themselves")
        bank = bank.folder
    if isinstance(bank, Tensor):
        return Bank.of_images(bank, encoder)
    if loaded is None:
        raise BankError("a bank of files needs a loaded model (classlens.load), which knows its preprocessing")
    if isinstance(bank, str | os.PathLike):
        if is_bank(bank):
            return _same_head(Bank.open(bank, loaded), encoder)
        return bank_of_folder(bank, loaded, encoder, listener())
    if not len(bank):
        raise BankError("the bank is empty; give at least one other picture")
    return Bank.of_images(torch.stack([loaded.preprocess(source) for source in bank]), encoder)


def _same_head(bank: Bank, encoder: Encoder) -> Bank:
    if bank.head != encoder.head.name:
        raise BankError(f"the bank holds what the head {bank.head!r} reads, not {encoder.head.name!r}; make one of it")
    return bank


def _check(mode: str, reading: str) -> None:
    if mode not in MODES:
        raise ClasslensError(f"unknown mode {mode!r}; choose from {', '.join(MODES)}")
    if reading not in READINGS:
        raise ClasslensError(f"unknown reading {reading!r}; choose from {', '.join(READINGS)}")


def _check_head(head: Head, reading: str) -> None:
    if reading == "logits" and not head.last:
        raise ClasslensError(f"reading='logits' needs a head that is the last layer; behind {head.name} are more")


def _neighbours(bank: Bank, found: Neighbours, loaded: LoadedModel | None) -> dict[str, Any]:
    """The fields of a `Contrast` about the neighbours."""
    rows = [int(row) for row in found.indices]
    return {
        "neighbours": tuple(bank.names[row] for row in rows),
        "indices": found.indices,
        "distances": found.distances,
        "neighbour_pictures": tuple(_shown(bank, row, loaded) for row in rows),
    }


def _shown(bank: Bank, row: int, loaded: LoadedModel | None) -> Tensor | None:
    try:
        return core.pictures_of(bank.picture(row)[None], loaded)[0]
    except ClasslensError:  # its file was deleted after the bank was made
        return None


# ------------------------------------------------------------------------------------------- a network in contrast


class OtherPictures(Exception):
    """A method runs the network on other inputs, whose neighbours are unknown."""


class Contrasted(nn.Module):
    """A network whose head reads L - before and returns its output - after; both are constants, one row per image."""

    def __init__(self, encoder: Encoder, images: Tensor, before: Tensor | None, after: Tensor | None) -> None:
        super().__init__()
        self.network = encoder.network
        self.training = self.network.training
        self._head, self._images, self._before, self._after = encoder.head, images, before, after

    def forward(self, images: Tensor) -> Any:
        if len(self._images) > 1 and not torch.equal(images.detach(), self._images):
            raise OtherPictures
        with AtHead(self._head, self._read):
            return self.network(images)

    def _read(self, layer: Layer, latent: Tensor) -> Tensor:
        # Subtracted, not added: the released rules for a sum would give the constant relevance.
        logits = layer(latent if self._before is None else latent - self._before)
        return logits if self._after is None else logits - self._after


def _constants(head: Head, neighbours: Tensor, mode: str, reading: str) -> tuple[Tensor | None, Tensor | None]:
    """The constants that are subtracted before and after the head."""
    signed = neighbours if mode == "difference" else -neighbours
    if reading == "literal":
        return signed, None
    with torch.no_grad():
        after = signed @ head.weight.T  # head(S) = head(L_I) - W L_N
        if reading == "logits" and head.bias is not None:
            after = after + (head.bias if mode == "difference" else -head.bias)
    return None, after


@dataclass(frozen=True)
class _Question:
    """The targets and the method for some images, independent of the neighbours."""

    encoder: Encoder
    loaded: LoadedModel | None
    images: Tensor
    targets: Targets
    method: str
    options: dict[str, Any]

    @property
    def alike(self) -> bool:
        """Whether the target is the similarity to the neighbour, for a network without a head."""
        return self.encoder.head.name == NO_HEAD and isinstance(self.targets, str) and self.targets == COSINE

    def about(self, found: Neighbours, mode: str, reading: str) -> Explanation:
        """The explanation in one mode: all images at once, or one by one if the method requires it."""
        neighbours = found.latents.to(self.encoder.head.weight)
        try:
            return self._ask(slice(None), neighbours, mode, reading)
        except OtherPictures:
            rows = range(len(self.images))
            return _joined([self._ask(slice(i, i + 1), neighbours, mode, reading) for i in rows])

    def _ask(self, rows: slice, neighbours: Tensor, mode: str, reading: str) -> Explanation:
        images, targets, network = self.images[rows], self._targets(rows), self.encoder.network
        if self.encoder.head.name == NO_HEAD:
            targets = self._along(images, neighbours[rows], mode)
        elif mode != "none":
            network = Contrasted(
                self.encoder, images, *_constants(self.encoder.head, neighbours[rows], mode, reading)
            )  # fmt: skip
        asked: nn.Module | LoadedModel = network
        if self.loaded is not None:
            labels = None if self.encoder.head.name == NO_HEAD else self.loaded.labels
            asked = replace(self.loaded, model=network, labels=labels)
        found = core.explain(asked, images, targets, self.method, output=self.encoder.output, **self.options)
        return replace(found, model=self.loaded.name if self.loaded else type(unwrap(self.encoder.model)).__name__)

    def _targets(self, rows: slice) -> Targets:
        """The targets of some images, if each has its own."""
        given = self.targets
        if isinstance(given, str) and given == PREDICTED and self.encoder.head.name != NO_HEAD:
            return self.encoder.logits(self.images[rows]).argmax(1)
        if isinstance(given, Tensor | list | tuple) and len(given) == len(self.images) > 1:
            return given[rows]
        return given

    def _along(self, images: Tensor, neighbours: Tensor, mode: str) -> list[list[Scalar]]:
        """For a network without a head: a number computed from each image's latent."""
        if not (self.targets is None or self.alike):
            raise TargetError("a network without a head has no classes; omit targets, or give 'cosine'")
        if self.alike:
            return [[_cosine(neighbour)] for neighbour in neighbours]
        own = self.encoder.latents(images).to(neighbours)
        sign = {"difference": -1.0, "sum": 1.0, "none": 0.0}[mode]
        return [[_length_along(direction)] for direction in own + sign * neighbours]


def _length_along(direction: Tensor) -> Scalar:
    unit = direction / direction.norm()

    def latent(found: Tensor) -> Tensor:  # figures and reports show the name of the function
        return torch.dot(found, unit)

    return latent


def _cosine(neighbour: Tensor) -> Scalar:
    def cosine(latent: Tensor) -> Tensor:
        return torch.dot(latent / latent.norm(), neighbour / neighbour.norm())

    return cosine


def _joined(parts: Sequence[Explanation]) -> Explanation:
    """Join the explanations of single images."""
    first = parts[0]
    joined: dict[str, Any] = {
        name: torch.cat([getattr(part, name) for part in parts]) for name in ("maps", "targets", "logits", "pictures")
    }
    reports = [part.report for part in parts]
    balance = {
        name: torch.cat([getattr(report, name) for report in reports])
        for name in ("conservation", "started", "arrived", "absorbed")
    }
    notes = tuple(dict.fromkeys(note for report in reports for note in report.notes))
    report = Report(**balance, ops=first.report.ops, seconds=sum(r.seconds for r in reports), notes=notes)
    asked = tuple(row for part in parts for row in part.asked)
    return replace(first, **joined, asked=asked, report=report, trace=())
