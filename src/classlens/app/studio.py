"""The networks of the page and a cache of recent results. Uses no gradio, no HTML and no files.

>>> studio = Studio({"lite0": load("efficientnet-lite0")})
>>> picture = studio.open(demo.picture())
>>> studio.offer(picture, "lite0").likeliest(2)
[(967, 0.18), (285, 0.15)]
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from PIL import Image
from torch import Tensor

from classlens import demo, render
from classlens.app.offers import Given, Offer, Rivals, offer
from classlens.core.method_text import AUTO
from classlens.core.targets import Targets
from classlens.data.images import open_image
from classlens.errors import DataError, ImageError, MethodError
from classlens.explanation import Explanation, explain
from classlens.methods import METHODS
from classlens.models import LoadedModel, Preprocess
from classlens.models.choice import named
from classlens.progress import listener

if TYPE_CHECKING:
    from classlens.concept import Concepts
    from classlens.trust import Trust

MAX_UPLOAD = 20 * 2**20  # bytes of a picture file
DEFAULT_METHOD = "agf"
FIRST_METHODS = ("agf", "gradcam", "fullgrad", "lrp", "clrp", "rap")  # compared side by side
MOST_METHODS = 12
_SHARP = 672  # pixels of a picture's edge on the page
_QUICK = 3.0  # seconds: slower explanations are not computed ahead
_KEPT = 256 * 2**20  # bytes of cached pictures and maps

T = TypeVar("T")
NOTHING = Given()  # but the first texts


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture as input for every network of the page. The file itself is not kept."""

    digest: str
    inputs: dict[str, Tensor]  # model -> (1,3,H,W)
    views: dict[str, Image.Image]  # model -> the same part of the picture in higher resolution, for display

    @property
    def nbytes(self) -> int:
        """The memory that it takes."""
        return sum(x.nbytes for x in self.inputs.values()) + sum(3 * v.width * v.height for v in self.views.values())


class OutOfDate(Exception):
    """A drawing that is no longer needed."""


class Upload(io.BytesIO):
    """The content of an image file, with a name for error messages."""

    name = "this file"


class Studio:
    """The networks of a page and the folders for its concepts, fixed at its start, and a cache of recent results.

    Explanations are cached for the next click, up to a number of bytes. The most likely classes of a picture are
    computed ahead while the visitor looks at the first one.
    """

    def __init__(
        self, models: Mapping[str, LoadedModel], folders: Mapping[str, str] | None = None, index: Path | None = None
    ) -> None:
        self.models = dict(models)
        self.folders = dict(folders or {})  # name -> path: the pictures in which concepts are found
        self._index = index
        self._kept: OrderedDict[tuple[str, ...], tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()
        self._ahead = ThreadPoolExecutor(1, "ahead")
        self._turn = 0
        self._closed = False

    def open(self, content: bytes) -> Picture:
        """Decode the content of an image file, within the limits of `classlens.data.images`."""
        if len(content) > MAX_UPLOAD:
            raise too_large()
        digest = fingerprint(content)

        def read() -> Picture:
            image = open_image(Upload(content))
            inputs = {name: model.preprocess(image)[None] for name, model in self.models.items()}
            views = {name: _sharp(model.preprocess, image) for name, model in self.models.items()}
            return Picture(digest, inputs, views)

        return self._keep(_picture_key(digest), read, lambda picture: picture.nbytes)

    def recall(self, digest: str) -> Picture:
        """A picture that was opened before, as long as it is in memory; only whoever has the file knows its name."""
        with self._lock:
            kept = self._kept.get(_picture_key(digest))
        if kept is None:
            raise ImageError("your picture is no longer in memory: choose it again")
        picture: Picture = kept[0]
        return picture

    def offer(self, picture: Picture, model: str, given: Given = NOTHING) -> Offer:
        """What can be asked of a network about a picture: classes, boxes, classes of pixels, or texts."""
        look = partial(offer, self.models[model], picture.inputs[model])
        of_texts = self._keep((picture.digest, model), look, lambda _: 0)
        return self._keep((picture.digest, model, *given.texts, "offer"), partial(of_texts, given.texts), _offer_bytes)

    def explain(
        self, picture: Picture, model: str, index: int, method: str = DEFAULT_METHOD, rather_than: Rivals = None,
        given: Given = NOTHING,
    ) -> Explanation:  # fmt: skip
        """The explanation of one choice, from the cache if possible."""
        if method == AUTO:
            method = named(AUTO, self.models[model])
        elif method not in METHODS:  # a request may hold anything
            raise MethodError("there is no such method; pick one from the list")
        targets, than, key = self._asked(picture, model, index, rather_than, given)
        make = partial(explain, self.models[model], picture.inputs[model], targets, method, rather_than=than)
        return self._keep((*key, method), make, lambda e: e.maps.nbytes + e.pictures.nbytes)

    def _asked(
        self, picture: Picture, model: str, index: int, rather_than: Rivals, given: Given
    ) -> tuple[Targets, Rivals, tuple[str, ...]]:
        """A choice as the library takes it: targets and rivals; and the name of what is computed from it."""
        found = self.offer(picture, model, given)
        found.check(index)
        targets, than = found.ask(index, rather_than, given.place)  # refuses rivals that are not there
        rival = found.names[rather_than] if found.kind == "text" and isinstance(rather_than, int) else rather_than
        key = (picture.digest, model, str(index), found.names[index], f"than {rival}", f"at {given.place}")
        return targets, than, key

    def is_quick(self, picture: Picture, model: str, index: int, method: str, *asked: Any) -> bool:
        """Whether explaining another choice is fast enough to be done ahead."""
        return self.explain(picture, model, index, method, *asked).report.seconds < _QUICK

    def prefetch(
        self, picture: Picture, model: str, count: int, method: str = DEFAULT_METHOD, given: Given = NOTHING
    ) -> None:
        """Compute the most likely choices in the background; unfinished work of an earlier call is dropped."""
        self._turn += 1
        self._ahead.submit(self._compute_ahead, self._turn, picture, model, count, method, given)

    def _compute_ahead(self, turn: int, picture: Picture, model: str, count: int, method: str, given: Given) -> None:
        for index, _ in self.offer(picture, model, given).likeliest(count):
            if turn != self._turn or self._closed:
                return
            self.explain(picture, model, index, method, None, given)

    def decomposition(
        self, picture: Picture, model: str, index: int, method: str, rather_than: Rivals = None, given: Given = NOTHING
    ) -> bytes:
        """The terms of AGF, layer by layer, as a PNG (`classlens explain --trace` draws the same)."""
        targets, than, key = self._asked(picture, model, index, rather_than, given)

        def draw() -> bytes:
            asked = (self.models[model], picture.inputs[model], targets, method)
            return render.png(render.decomposition(explain(*asked, rather_than=than, trace=True)))

        return self._keep((*key, method, "decomposition"), draw, len)

    def trust(
        self, picture: Picture, model: str, index: int, method: str, rather_than: Rivals = None, given: Given = NOTHING
    ) -> Trust:
        """The trust card of one choice; the network is run some thirty times."""
        e = self.explain(picture, model, index, method, rather_than, given)
        _, _, key = self._asked(picture, model, index, rather_than, given)
        return self._keep((*key, method, "trust"), e.trust, lambda trust: trust.explanation.maps.nbytes)

    def concepts(self, picture: Picture, model: str, index: int, folder: str, given: Given = NOTHING) -> Concepts:
        """The concepts of a class in a picture, found in the pictures of one of the folders of the server."""
        from classlens.concept import concepts

        offer = self.offer(picture, model, given)
        offer.check(index)
        if folder not in self.folders:  # a request may hold anything
            raise DataError("there is no such folder; pick one from the list")
        if offer.kind != "class":
            raise MethodError(f"concepts are of classes, and this network finds {offer.words.several}")
        place = self.folders[folder]
        asked = (self.models[model], picture.inputs[model], index, place)
        make = partial(concepts, *asked, index=self._index, progress=listener())
        try:
            return self._keep((picture.digest, model, str(index), folder, "concepts"), make, _concepts_bytes)
        except DataError as error:  # where the folder is on this machine is nobody's business
            raise DataError(str(error).replace(place, folder)) from None

    def close(self) -> None:
        """Cancel pending computations."""
        self._closed = True
        self._ahead.shutdown(cancel_futures=True)

    def check_open(self) -> None:
        """Raise `OutOfDate` once the page is closed: a slow method must not delay the shutdown."""
        if self._closed:
            raise OutOfDate

    def _keep(self, key: tuple[str, ...], make: Callable[[], T], measure: Callable[[T], int]) -> T:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                kept: T = self._kept[key][0]
                return kept
        made = make()
        with self._lock:
            self._kept[key] = (made, measure(made))
            while len(self._kept) > 1 and sum(size for _, size in self._kept.values()) > _KEPT:
                self._kept.popitem(last=False)
        return made


def samples() -> dict[str, bytes]:
    """Sample pictures: the demo picture and two parts of it.

    >>> list(samples())
    ['cat and espresso', 'cat', 'espresso']
    """
    whole = Image.open(io.BytesIO(demo.picture()))
    parts = {"cat": (0, 0, 300, 270), "espresso": (112, 196, 428, 512)}
    return {"cat and espresso": demo.picture()} | {
        name: render.png(np.asarray(whole.crop(box))) for name, box in parts.items()
    }


def pick_sample(pictures: Mapping[str, bytes], index: object) -> bytes:
    """One of the samples by its position; a request may contain anything."""
    if not isinstance(index, int) or not 0 <= index < len(pictures):
        raise ImageError("there is no such sample; pick one from the row")
    return list(pictures.values())[index]


def _concepts_bytes(made: Concepts) -> int:
    arrays = sum(array.nbytes for array in made.arrays().values())
    return arrays + sum(one.crop.nbytes for concept in made.concepts for one in concept.references)


def _offer_bytes(made: Offer) -> int:
    return made.shares.nbytes + (0 if made.found is None else made.found.nbytes)


def _picture_key(digest: str) -> tuple[str, ...]:
    return ("picture", digest)


def fingerprint(content: bytes) -> str:
    """The name of a picture in memory: the SHA-256 of its file."""
    return hashlib.sha256(content).hexdigest()


def too_large() -> ImageError:
    """The error for a file above the upload limit."""
    return ImageError(f"this file is larger than {MAX_UPLOAD // 2**20} MB: scale the picture down first")


def decode(text: object) -> bytes:
    """The image file that a browser sent as base64."""
    if not isinstance(text, str) or not text:
        raise ImageError("no picture arrived: choose it again")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ImageError("the picture arrived incomplete: send it again") from None


def _sharp(preprocess: Preprocess, image: Image.Image) -> Image.Image:
    """The part of a picture that a network sees, in the resolution of the picture."""
    seen = preprocess.frame(image)
    if preprocess.resize is not None:
        size = (preprocess.resize,) if isinstance(preprocess.resize, int) else preprocess.resize
        finer = min(_SHARP / max(seen.size), min(image.size) / max(size))
        if finer > 1:
            scaled = replace(preprocess, resize=_times(preprocess.resize, finer), crop=_times(preprocess.crop, finer))
            seen = scaled.frame(image)
    seen.thumbnail((_SHARP, _SHARP))
    return seen


def _times(size: int | tuple[int, int] | None, factor: float) -> int | tuple[int, int] | None:
    if size is None or isinstance(size, int):
        return size and round(size * factor)
    return round(size[0] * factor), round(size[1] * factor)
