"""What a visitor can choose about a picture: classes, the boxes of a detector, classes of pixels, or texts.

>>> found = offer(load("efficientnet-lite0"), x)            # (1,3,224,224)
>>> found.kind, found.names[967], float(found.shares[967])
('class', 'espresso', 0.18)

A choice has a position in `names`, on every kind of network. `ask` turns it into the target that the library explains.
Uses no gradio, no HTML and no files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from classlens import render
from classlens.core.targets import Box, Models, Survey, Targets, detection, region, survey, text
from classlens.errors import TargetError
from classlens.explanation import prepare
from classlens.models import LoadedModel
from classlens.models.loaded import probabilities

FIRST_TEXTS = ("a photo of a cat", "a cup of coffee")  # they fit the samples
MOST_TEXTS, LONGEST_TEXT = 8, 300

Rivals = int | str | None  # a rival's position, "rivals" for all others, or None
Place = tuple[int, int]  # (x,y), in pixels of the network's input


@dataclass(frozen=True)
class Given:
    """What a visitor gave besides the picture."""

    texts: tuple[str, ...] = FIRST_TEXTS
    place: Place | None = None  # the pixel that was clicked


@dataclass(frozen=True)
class Words:
    """What the page calls the choices of a kind of network."""

    one: str
    several: str
    heading: str
    hint: str
    rivals: bool = False  # whether a choice can be asked for rather than another
    searched: bool = True  # whether more choices than those in sight can be found by name


KINDS = {
    "class": Words(
        "class", "classes", "Predictions of the network", "Choose a class to see where the network finds it.",
        rivals=True,
    ),
    "box": Words("box", "boxes", "Objects that the network finds", "Choose one, here or in the picture."),
    "pixel": Words(
        "class", "classes", "Classes in the picture", "Shares of the pixels. Choose one, or click a pixel."
    ),
    "text": Words(
        "text", "texts", "Texts and how well they fit", "Choose one, or type your own.", rivals=True, searched=False
    ),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Offer:
    """The choices of a network about a picture."""

    kind: str  # a key of KINDS
    names: tuple[str, ...]
    shares: Tensor  # of each choice: probability, score, share of the pixels, or cosine
    ask: Callable[[int, Rivals, Place | None], tuple[Targets, Rivals]] = field(repr=False)  # -> targets, rather_than
    boxes: tuple[Box, ...] = ()
    found: Tensor | None = None  # (h,w): the class of each pixel

    @property
    def words(self) -> Words:
        """What the page calls them."""
        return KINDS[self.kind]

    def likeliest(self, count: int) -> list[tuple[int, float]]:
        """The choices with the largest shares, and these; of pixels, only classes that are found."""
        top = self.shares.topk(min(count, len(self.names)))
        pairs = list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        return [pair for pair in pairs if pair[1] > 0] if self.kind == "pixel" else pairs

    def share(self, index: int) -> float:
        """The share of a choice."""
        self.check(index)
        return float(self.shares[index])

    def note(self, index: int) -> str:
        """The share of a choice in words."""
        share = self.share(index)
        return f"{share:.3f}" if self.kind == "text" else render.probability_text(share)

    def check(self, index: object) -> None:
        """Refuse what is not offered; a request may hold anything."""
        if not self.names:
            raise TargetError("the network finds nothing in this picture; try another one")
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(self.names):
            raise TargetError(f"there is no such {self.words.one}; pick one from the list")

    def at(self, place: Place, size: tuple[int, int]) -> int:
        """The class of a pixel (x,y) of an input (H,W)."""
        if self.found is None:
            raise TargetError("this network has no output for each pixel; pick something from the list")
        (x, y), (height, width), (rows, columns) = place, size, self.found.shape
        if not (0 <= x < width and 0 <= y < height):
            raise TargetError("this pixel lies outside the picture; click inside it")
        return int(self.found[y * rows // height, x * columns // width])


def offer(model: LoadedModel, x: Tensor) -> Callable[[tuple[str, ...]], Offer]:
    """The choices of a network about its input (1,3,H,W), for any texts; only a model of texts needs these."""
    network, batch, _ = prepare(model, x)
    found = survey(network, batch, Models(model.labels, embed_text=model.embed_text))
    if found.vector is not None:
        return partial(_of_texts, model, found.vector)
    made = _of(model, found)
    return lambda _: made


def _of(model: LoadedModel, found: Survey) -> Offer:
    def name(index: int) -> str:
        return model.labels[index] if model.labels and index < len(model.labels) else f"class {index}"

    if found.detections is not None:
        names = tuple(f"{name(one.label)} (box {i})" for i, one in enumerate(found.detections))
        scores = torch.tensor([one.score for one in found.detections], dtype=torch.float64)
        boxes = tuple(one.box for one in found.detections)
        return Offer("box", names, scores, lambda i, than, place: (detection(i), None), boxes)
    if found.maps is not None:
        maps = found.maps.double().cpu()
        best = maps.argmax(0) if len(maps) > 1 else (maps[0] <= 0).long()  # a single class: 1 means "not found"
        shares = torch.stack([(best == i).double().mean() for i in range(len(maps))])
        names = tuple(name(i) for i in range(len(maps)))
        return Offer(
            "pixel",
            names,
            shares,
            lambda i, than, place: (region(i, pixel=place), None),
            found=best.clamp(max=len(maps) - 1),
        )
    assert found.logits is not None
    shares = probabilities(found.logits, model.multilabel or found.labels)
    return Offer("class", tuple(name(i) for i in range(len(shares))), shares, lambda i, than, place: (i, than))


def _of_texts(model: LoadedModel, vector: Tensor, texts: tuple[str, ...]) -> Offer:
    assert model.embed_text is not None
    directions = F.normalize(model.embed_text(texts).detach().double().cpu(), dim=1)

    def ask(index: int, than: Rivals, place: Place | None) -> tuple[Targets, Rivals]:
        asked = text(texts[index])
        if than is None:
            return asked, None
        if not isinstance(than, int) or not 0 <= than < len(texts) or than == index:
            raise TargetError("pick another text to compare with")
        return asked - text(texts[than]), None

    return Offer("text", texts, directions @ F.normalize(vector.double().cpu(), dim=0), ask)


def with_text(given: Given, words: str) -> Given:
    """The texts with another one in front."""
    words = " ".join(words.split())
    if not words:
        raise TargetError("there is no text: type what to look for")
    if len(words) > LONGEST_TEXT:
        raise TargetError(f"the text is longer than {LONGEST_TEXT} letters: shorten it")
    return Given((words, *(other for other in given.texts if other != words))[:MOST_TEXTS], given.place)
