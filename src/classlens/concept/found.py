"""The entry point: `concepts(model, image, target, data)` returns what a class is made of.

pictures of the class -> relevance at several layers -> directions -> reference pictures -> the picture's own concepts
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from classlens.concept.choose import Choice, choose
from classlens.concept.directions import Directions
from classlens.concept.flow import METHOD, followed
from classlens.concept.gather import FORMAT, Gathered, Subject, gather, packed, stored, unpacked
from classlens.concept.references import SHOWN, Reference, as_arrays, from_arrays, references, shares_of
from classlens.core.targets.classes import class_index
from classlens.data.layouts import Dataset, data_hash, open_dataset
from classlens.errors import MethodError, ModelError
from classlens.explanation import pictures_of, prepare
from classlens.files import text_hash, write_bytes, write_json
from classlens.models.loaded import LoadedModel, described, probabilities
from classlens.models.network import short_name
from classlens.progress import Progress, silent
from classlens.render.words import percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOR, AGAINST = 4, 2  # concepts of a picture that are shown
_LEAST = 0.005  # of the evidence: a smaller share would be written as <1 %


@dataclass(frozen=True, eq=False)
class Concept:
    """One concept of a class."""

    number: int  # from 1, the strongest of the class first; those against the class are counted on their own
    sign: int  # +1: for the class, -1: against it
    share: float  # of all evidence: in the picture or, without one, on average over the pictures of the class
    direction: Tensor  # (C,): how much of each channel of the layer
    references: tuple[Reference, ...]
    map: Tensor | None = None  # (H,W): its relevance in the picture

    @property
    def name(self) -> str:
        """`concept 2`, or `counter-concept 1` if it is against the class."""
        return f"{'concept' if self.sign > 0 else 'counter-concept'} {self.number}"


@dataclass(frozen=True, eq=False, repr=False)
class Concepts:
    """What a class is made of, in one picture or as a whole. In a notebook it shows its figure.

    >>> found = concepts(load(), "photo.jpg", "Persian cat", data="photos")
    >>> [(one.name, round(one.share, 2)) for one in found.concepts]
    [('concept 1', 0.31), ('concept 3', 0.12), ('counter-concept 1', -0.05)]
    """

    target: int
    label: str
    model: str
    method: str
    layer: str
    grid: tuple[int, int]  # positions of the layer
    concepts: tuple[Concept, ...]  # the strongest first, those for the class before those against it
    rest: float  # share of the evidence that no concept explains
    carried: float  # share of the class's logit that concepts carry, kept or removed, in pictures that chose nothing
    rival: str | None  # the class that the network finds likeliest in these pictures besides
    by_rival: float  # share of the same logit that as many concepts of the rival carry: what the two have in common
    stability: float  # how alike the concepts of two halves of the pictures are: 0 to 1
    pictures: int  # of the class, in which the concepts were found
    forwards: int
    sweeps: int
    probability: float | None = None  # of the class in the picture
    picture: Tensor | None = None  # (3,H,W) in [0,1]
    map: Tensor | None = None  # (H,W): the evidence for the class in the picture
    notes: tuple[str, ...] = ()

    @property
    def beside(self) -> str:
        """What as many concepts of the likeliest other class carry, beside `carried`; empty without such a class."""
        return "" if self.rival is None else f" (as many of {self.rival}: {percent(self.by_rival)})"

    def figure(self) -> Figure:
        """The picture, the map of the class, and its concepts with their shares, maps and reference pictures."""
        from classlens.concept.figure import figure

        return figure(self)

    def save(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write the figure (PNG), directions and maps (npz) and the numbers (JSON) to a folder; returns the paths."""
        from classlens.render.save import write_png

        root = Path(folder)
        return [
            write_png(root / "concepts.png", self.figure()),
            write_bytes(root / "concepts.npz", packed(self.arrays())),
            write_json(root / "concepts.json", self.to_json()),
        ]

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The directions and, of a picture, the map of the class and those of the concepts."""
        arrays: dict[str, NDArray[Any]] = {"directions": torch.stack([one.direction for one in self.concepts]).numpy()}
        if self.map is not None:
            arrays["map"] = self.map.numpy()
            arrays["maps"] = np.stack([one.map.numpy() for one in self.concepts if one.map is not None])
        return arrays

    def to_json(self) -> dict[str, Any]:
        """The numbers, and the names of the reference pictures."""
        plain = ("target", "label", "model", "method", "layer", "grid", "rest", "carried", "rival", "by_rival",
                 "stability", "pictures",
                 "forwards", "sweeps", "probability", "notes")  # fmt: skip
        each = [
            {"name": one.name, "share": one.share,
             "references": [{"name": r.name, "box": r.box, "share": r.share} for r in one.references]}
            for one in self.concepts
        ]  # fmt: skip
        return {name: getattr(self, name) for name in plain} | {"concepts": each}

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        from classlens.render.save import notebook_png

        return notebook_png(self.figure())

    def __repr__(self) -> str:
        where = "in a picture" if self.picture is not None else f"over {self.pictures} pictures"
        return f"<Concepts of {self.label} {where}: {len(self.concepts)} at {self.layer} of {self.model}>"


def concepts(
    model: nn.Module | LoadedModel,
    image: Any,
    target: int | str,
    data: str | os.PathLike[str],
    *,
    method: str = METHOD,
    layer: str | None = None,
    count: int | None = None,
    limit: int = 32,
    seed: int = 0,
    index: str | os.PathLike[str] | None = None,
    preprocess: Callable[..., Any] | None = None,
    labels: Sequence[str] | None = None,
    progress: Progress = silent,
) -> Concepts:
    """Show what a network found, not only where: the concepts that the evidence for a class consists of.

    >>> classlens.concepts(m, "photo.jpg", "Persian cat", data="photos").figure().savefig("concepts.png")
    >>> classlens.concepts(m, None, "Persian cat", data="photos")       # the class as a whole

    `data` is a folder of pictures, or a data set in any layout that `classlens evaluate` knows. The concepts are found
    in at most `limit` of its pictures that the network takes for the class. `method` propagates relevance by rules that
    are linear in it. `layer` and `count` (how many concepts for the class) are chosen if they are not given. `index` is
    a folder that keeps what was computed for the pictures, so that the next call only computes what is new.
    """
    followed(method)
    loaded = described(model, preprocess, labels)
    if not isinstance(loaded, LoadedModel):
        raise ModelError("concepts are found in files: give preprocess=, or a model of classlens.load()")
    if (count is not None and count < 1) or limit < 1:
        raise MethodError("count and limit are at least 1")
    subject = Subject(loaded, -1, method, layer, None if index is None else Path(index))
    target = class_index(target, subject.network.classes, loaded.labels)
    subject = Subject(loaded, target, method, layer, subject.index, subject.cost)
    dataset = open_dataset(data)
    gathered = gather(subject, dataset, dataset.select(None, seed), limit, progress)
    if image is None:
        return of_class(subject, dataset, gathered, count, progress)
    return _in_picture(subject, gathered, _basis(subject, dataset, gathered, count, progress), image)


def of_class(
    subject: Subject, dataset: Dataset, gathered: Gathered, count: int | None = None, progress: Progress = silent
) -> Concepts:
    """The concepts of a class as a whole, from the relevance that was gathered for it."""
    return _in_class(subject, gathered, _basis(subject, dataset, gathered, count, progress))


@dataclass(frozen=True, eq=False)
class _Basis:
    """What is known of a class before a picture is asked about."""

    choice: Choice
    references: list[list[Reference]]
    shares: Tensor  # (M,n)

    def numbers(self) -> list[int]:
        """The number of each concept: from 1 for the strongest of the class, and again for those against it."""
        mean, signs = self.shares.mean(1).abs(), self.choice.directions.signs
        order = sorted(range(len(signs)), key=lambda m: -float(mean[m]))
        return [[k for k in order if signs[k] == signs[m]].index(m) + 1 for m in range(len(signs))]


def _basis(subject: Subject, dataset: Dataset, gathered: Gathered, count: int | None, progress: Progress) -> _Basis:
    """Directions and references, computed once for an index."""

    def compute() -> bytes:
        choice = choose(subject, dataset, gathered, count, progress)
        found, shares = references(subject, dataset, gathered, choice.layer, choice.directions, progress)
        return packed({
            "layer": np.array(choice.layer),
            "numbers": np.array([choice.carried, choice.by_rival, choice.stability]),
            "rival": np.array(-1 if choice.rival is None else choice.rival),
            "support": choice.directions.support.numpy(), "against": choice.directions.against.numpy(),
            "shares": shares.numpy(), **as_arrays(found),
        })  # fmt: skip

    decides = (
        FORMAT,
        subject.network.id,
        data_hash(dataset, gathered.items),
        subject.target,
        subject.method,
        subject.layer,
        count,
    )
    arrays = unpacked(stored(subject.index, f"concepts-{text_hash(repr(decides))}.npz", compute), subject.index)
    directions = Directions(torch.from_numpy(arrays["support"]), torch.from_numpy(arrays["against"]))
    carried, by_rival, stability = arrays["numbers"].tolist()
    rival = int(arrays["rival"])
    choice = Choice(str(arrays["layer"]), directions, carried, rival if rival >= 0 else None, by_rival, stability)
    return _Basis(choice, from_arrays(arrays, len(directions.signs)), torch.from_numpy(arrays["shares"]))


def _in_class(subject: Subject, gathered: Gathered, basis: _Basis) -> Concepts:
    mean = basis.shares.mean(1)
    order = _strongest(mean, basis.choice.directions.signs, len(mean))
    found = [_concept(basis, m, float(mean[m])) for m in order]
    return _packed(subject, gathered, basis, found, rest=1 - float(mean.abs().sum()))


def _in_picture(subject: Subject, gathered: Gathered, basis: _Basis, image: Any) -> Concepts:
    _, batch, _ = prepare(subject.model, image)
    if len(batch) != 1:
        raise MethodError(f"concepts are shown of one picture, not of {len(batch)}")
    tape = subject.record(batch)
    flow = subject.flow(tape, subject.layers(tape)[basis.choice.layer])
    relevance = flow.relevance.transpose(0, 1)  # (1,2,C,h,w)
    directions = Directions(
        *(one.to(relevance) for one in (basis.choice.directions.support, basis.choice.directions.against))
    )
    parts = directions.parts(relevance)
    shares = shares_of(parts, relevance)[:, 0].cpu()
    order = [m for sign, most in ((1, FOR), (-1, AGAINST)) for m in _strongest(shares, directions.signs, most, sign)]
    subject.cost.sweeps += 1 + len(order)
    whole, *maps = flow.through([flow.relevance.sum(0), *(parts[m] for m in order)])
    own = _name_of(image)
    found = [_concept(basis, m, float(shares[m]), one[0].cpu(), own) for m, one in zip(order, maps, strict=True)]
    chance = probabilities(tape.logits[0], subject.model.multilabel)[subject.target]
    return _packed(
        subject, gathered, basis, found, rest=1 - float(shares.abs().sum()), probability=float(chance),
        picture=pictures_of(batch, subject.model)[0].cpu(), map=whole[0].cpu(),
    )  # fmt: skip


def _strongest(shares: Tensor, signs: Sequence[int], most: int, only: int = 0) -> list[int]:
    """Concepts by share, those for the class first; none with hardly a share."""
    wanted = [m for m, sign in enumerate(signs) if only in (0, sign) and abs(float(shares[m])) >= _LEAST]
    return sorted(wanted, key=lambda m: (-signs[m], -abs(float(shares[m]))))[:most]


def _name_of(image: Any) -> str | None:
    """The name of a file, which should not be its own reference."""
    return Path(image).name if isinstance(image, str | os.PathLike) else None


def _concept(basis: _Basis, m: int, share: float, own: Tensor | None = None, name: str | None = None) -> Concept:
    directions = basis.choice.directions
    others = [one for one in basis.references[m] if name is None or Path(one.name).name != name][:SHOWN]
    direction = torch.cat([directions.support, directions.against])[m]
    return Concept(basis.numbers()[m], directions.signs[m], share, direction, tuple(others), own)


def _packed(subject: Subject, gathered: Gathered, basis: _Basis, found: Sequence[Concept], **more: Any) -> Concepts:
    relevance = gathered.relevance[basis.choice.layer]
    skipped = len(gathered.skipped)
    missed = f"the evidence at a layer took the most steps {subject.cost.missed} times and may miss its logit there"
    notes = (
        *((f"{skipped} pictures could not be read",) if skipped else ()),
        *((missed,) if subject.cost.missed else ()),
    )
    return Concepts(
        target=subject.target,
        label=subject.name(subject.target),
        model=short_name(subject.model.name),
        method=subject.method,
        layer=basis.choice.layer,
        grid=(relevance.shape[3], relevance.shape[4]),
        concepts=tuple(found),
        carried=basis.choice.carried,
        rival=None if basis.choice.rival is None else subject.name(basis.choice.rival),
        by_rival=basis.choice.by_rival,
        stability=basis.choice.stability,
        pictures=len(gathered.items),
        forwards=subject.cost.forwards,
        sweeps=subject.cost.sweeps,
        notes=notes,
        **more,
    )
