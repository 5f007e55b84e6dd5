"""Cue: something is planted in a network and in pictures. The map of the class that it decides should lie on it.

    sticker    a small pattern, at another place in each picture
    caption    a strip with letters, along the lower edge
    border     a frame around the picture

One row of the network's last layer is refitted, by ridge regression on its features with the cue and without. Then the
cue decides the last class; nothing else of the network changes. A picture counts if it works: with the cue the network
predicts the last class, without it another one. So the reason for the prediction is known. The map of the last class
should lie on the cue, and the map of the class that was predicted without it should not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from classlens.core.capture import record
from classlens.data.layouts import Dataset, Item, data_hash
from classlens.errors import DataError, ImageError
from classlens.evaluate.metrics import Metric, floats, mean
from classlens.evaluate.registry import (
    Classes,
    Config,
    Prediction,
    Read,
    Seen,
    Subject,
    Test,
    Unit,
    Values,
    every_picture,
    option,
    register,
    variants_of_fields,
)
from classlens.evaluate.scene import Explained, Scene
from classlens.evaluate.tests.pointing import share_on
from classlens.evaluate.tests.sanity import layers
from classlens.files import draw_key
from classlens.models.network import Network
from classlens.models.preprocess import Preprocess

if TYPE_CHECKING:
    import pyarrow as pa

    from classlens.evaluate.stats import Floats

LEARNT = 48  # pictures from which the last layer learns the cue; they are not explained
_LEAST = 6  # of each: pictures to learn from, and to explain
_STICKER, _CAPTION, _BORDER, _RIM = 5, 10, 28, 28  # parts of the shorter side
_AT_ONCE = 4  # images in a forward pass
_RIDGE = 1e-2  # of the mean squared length of the features

Place = NDArray[np.bool_]


# -------------------------------------------------------------------------------------------------------------- cues


def sticker(height: int, width: int, random: np.random.Generator) -> tuple[Tensor, Place]:
    """A coloured chequered pattern at a random place: pixels (3,H,W), and where they are."""
    side = min(height, width) // _STICKER
    top, left = (int(random.integers(0, length - side + 1)) for length in (height, width))
    place = np.zeros((height, width), bool)
    place[top : top + side, left : left + side] = True
    pixels = torch.zeros(3, height, width)
    pixels[:, top : top + side, left : left + side] = _pattern(6, 6, side, side)
    return pixels, place


def caption(height: int, width: int, _random: np.random.Generator) -> tuple[Tensor, Place]:
    """Black letters on a white strip along the lower edge."""
    strip = min(height, width) // _CAPTION
    place = np.zeros((height, width), bool)
    place[-strip:] = True
    letters = 1 - _pattern(5, 60, strip, width)[:1].expand(3, -1, -1)
    letters[:, : strip // 5] = letters[:, -(strip // 5) :] = 1
    return F.pad(letters, (0, 0, height - strip, 0)), place


def border(height: int, width: int, _random: np.random.Generator) -> tuple[Tensor, Place]:
    """A red and white frame."""
    thick = max(1, min(height, width) // _BORDER)
    place = np.ones((height, width), bool)
    place[thick:-thick, thick:-thick] = False
    rows, columns = torch.arange(height)[:, None], torch.arange(width)[None]
    stripes = ((rows + columns) // (2 * thick) % 2).float()
    return torch.stack([torch.ones(height, width), stripes, stripes]), place


CUES: dict[str, Callable[[int, int, np.random.Generator], tuple[Tensor, Place]]] = {
    "sticker": sticker,
    "caption": caption,
    "border": border,
}
"""(height, width, random) -> pixels in [0,1] (3,H,W), and where they are."""


def with_cue(image: Tensor, cue: str, name: str, preprocess: Preprocess) -> tuple[Tensor, Place]:
    """A normalised image (3,H,W) with the cue, and its place. The name of the image decides where a sticker is."""
    height, width = image.shape[1:]
    pixels, place = CUES[cue](height, width, np.random.default_rng(list(draw_key(0, name))))
    return torch.where(torch.from_numpy(place), preprocess.normalise(pixels), image), place


def widened(place: Place) -> Place:
    """The place with a rim around it: feature maps are coarser than pixels."""
    reach = min(place.shape) // _RIM
    wide = F.max_pool2d(torch.from_numpy(place)[None, None].float(), 2 * reach + 1, stride=1, padding=reach)
    found: Place = wide[0, 0].numpy() > 0
    return found


def _pattern(rows: int, columns: int, height: int, width: int) -> Tensor:
    drawn = torch.rand(3, rows, columns, generator=torch.Generator().manual_seed(5)).round()
    return F.interpolate(drawn[None], (height, width), mode="nearest")[0]


# ----------------------------------------------------------------------------------------------------------- network


def refitted(model: nn.Module, plain: Tensor, cued: Tensor, index: int = -1, lift: float | None = None) -> nn.Module:
    """A copy whose class `index` tells images with the cue (B,3,H,W) from those without it; other logits stay.

    With the cue its logit should be as far above the highest logit of all classes as that is above the mean. With a
    `lift`, the class keeps its own logit instead, and the cue adds so much to it.

    >>> tricked = refitted(model, images, stickered)                      # the last class means the sticker
    >>> tricked = refitted(model, images, stickered, 254, lift=10.0)      # a pug, or a sticker
    """
    model = copy.deepcopy(model)
    images = torch.cat([plain, cued])
    name, features, before = before_last(model, images)
    last = cast(nn.Linear, model.get_submodule(name))
    rest, top = float(before.mean()), float(before.amax(1).mean())
    levels = [rest, 2 * top - rest] if lift is None else [0.0, lift]
    wanted = torch.tensor(levels, dtype=torch.float64).repeat_interleave(len(plain))
    slope, constant = ridge(features, wanted)
    with torch.no_grad():
        keep = 0 if lift is None else 1
        last.weight[index] = keep * last.weight[index] + slope.view_as(last.weight[index]).to(last.weight)
        last.bias[index] = keep * last.bias[index] + constant
        after = torch.cat([model(part) for part in images.split(_AT_ONCE)])
    others = torch.arange(before.shape[1]) != index % before.shape[1]
    if not torch.allclose(before[:, others], after[:, others], rtol=1e-3, atol=1e-3):
        raise DataError(f"cue needs logits that are independent of each other; those of {name!r} are not")
    return model


def before_last(model: nn.Module, images: Tensor) -> tuple[str, Tensor, Tensor]:
    """The name of the last layer, which has weights for each class; its inputs (B,D) in float64; the logits (B,K)."""
    name = layers(model, record(model, images[:1]))[-1]
    last, seen = model.get_submodule(name), []
    handle = last.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0].detach()))
    with torch.no_grad():
        logits = torch.cat([model(part) for part in images.split(_AT_ONCE)])
    handle.remove()
    weight, bias = (getattr(last, part, None) for part in ("weight", "bias"))
    if not isinstance(weight, Tensor) or not isinstance(bias, Tensor) or len(weight) != logits.shape[1]:
        raise DataError(f"cue needs a last layer with a weight and a bias for each class; {name!r} has none")
    features = torch.cat(seen).double()
    features = features.flatten(2).mean(2) if features.dim() > 2 else features
    return name, features, logits


def ridge(features: Tensor, wanted: Tensor) -> tuple[Tensor, float]:
    """Ridge regression of `wanted` (N,) on features (N,D): weights (D,) and a constant.

    Solved for the N examples, of which there are fewer than features.
    """
    middle, level = features.mean(0), wanted.mean()
    centred = features - middle
    gram = centred @ centred.T
    penalty = _RIDGE * gram.trace() / len(gram) * torch.eye(len(gram), dtype=gram.dtype)
    slope = centred.T @ torch.linalg.solve(gram + penalty, wanted - level)
    return slope, float(level - middle @ slope)


# ---------------------------------------------------------------------------------------------------------- the test


@dataclass(frozen=True)
class Options:
    """Which cues. Each is a network of its own, so fewer images are used."""

    cues: tuple[str, ...] = option(tuple(CUES), "cues to plant", choices=tuple(CUES), each="cue")
    cue_images: int = option(50, "use at most N images", least=1, decides=False)


def learnt(dataset: Dataset) -> tuple[Item, ...]:
    """The pictures to learn the cue from: the same ones for every limit and half."""
    return dataset.select(None, 0)[-min(LEARNT, len(dataset.items) // 2) :]


def _variants(options: Options, subject: Subject) -> list[Values]:
    if "classes" not in subject.offers:
        return variants_of_fields(options, subject)
    items = learnt(subject.dataset)
    if len(items) < _LEAST:
        raise DataError(
            f"cue needs {2 * _LEAST} pictures, half of them to learn from; {subject.dataset.name} has "
            f"{len(subject.dataset.items)}"
        )
    return [values | {"learnt": data_hash(subject.dataset, items)} for values in variants_of_fields(options, subject)]


def _units(
    subject: Subject, items: Sequence[Item], config: Config, predictions: Mapping[str, Prediction]
) -> list[Unit]:
    taken = {item.name for item in learnt(subject.dataset)}
    left = [item for item in items if item.name not in taken]
    return every_picture(subject, left[: config.options.cue_images], config, predictions)


def _network(subject: Subject, config: Config) -> Network:
    network, images = subject.network, {}
    for item in learnt(subject.dataset):
        try:
            images[item.name] = network.preprocess(subject.dataset.picture(item))
        except ImageError:  # an unreadable picture teaches nothing
            continue
    if len(images) < _LEAST:
        raise DataError(f"cue can read only {len(images)} of the pictures of {subject.dataset.name} to learn from")
    plain = torch.stack(list(images.values()))
    cued = torch.stack([with_cue(image, config["cue"], name, network.preprocess)[0] for name, image in images.items()])
    model = refitted(network.module, network.placed(plain), network.placed(cued))
    built = Network(replace(network.loaded, model=model))
    built.preprocess = network.preprocess
    return built


def _compose(subject: Subject, unit: Unit, config: Config, read: Read) -> Seen:
    plain = read(unit.items[0]).image
    image, place = with_cue(plain, config["cue"], unit.name, subject.network.preprocess)
    return Seen(image, widened(place).astype(np.uint8), plain=plain)


def _classes(scene: Scene, config: Config) -> Mapping[str, Classes]:
    """The class that the cue decides, and the class that is predicted without it."""
    plain = torch.stack([seen.plain for seen in scene.seen if seen.plain is not None])
    others = scene.forward(plain).argmax(1)
    return {"cued": torch.full_like(others, scene.tape.logits.shape[1] - 1), "other": others}


def _score(scene: Scene, config: Config, found: Explained) -> list[Values]:
    last = scene.tape.logits.shape[1] - 1
    others = found.explained("other")
    works = [int(now) == last != before for now, before in zip(scene.predicted, others, strict=True)]
    values: list[Values] = []
    for row, seen in enumerate(scene.seen):
        assert seen.mask is not None
        cued, other = (found.of(name)[row] for name in ("cued", "other"))
        place = torch.from_numpy(seen.mask) > 0
        scores = {
            "on_cue": float(share_on(cued, place)),
            "other_on_cue": float(share_on(other, place)),
            "hit": float(place[cued == cued.max()].float().mean()) if bool((cued > 0).any()) else 0.0,
            "area": float(place.float().mean()),
        }
        values.append({"explained": last} | (scores if works[row] else dict.fromkeys(scores)))
    return values


def _mean_of(column: str) -> Callable[[pa.Table], Floats]:
    return lambda rows: mean(floats(rows, column))


register(
    Test(
        name="cue",
        question="does the map find a cue that decides the class, and stay off it for a class that it does not decide?",
        columns={"explained": "int32"} | dict.fromkeys(("on_cue", "other_on_cue", "hit", "area"), "float64"),
        metrics=lambda config: (
            Metric("on the cue", +1, _mean_of("on_cue")),
            Metric("maximum on it", +1, _mean_of("hit")),
            Metric("other class on the cue", -1, _mean_of("other_on_cue")),
            Metric("area of the cue", 0, _mean_of("area")),
        ),
        title=lambda config: f"Planted {config['cue']}",
        remark=lambda config: (
            f"A {config['cue']} was planted in the network's last layer and in each picture; only pictures count whose "
            "prediction it decides. Share of the positive evidence on the cue, in per cent, in the map of the class "
            "that it decides and in that of the class that is predicted without it. An even map has the area of the "
            "cue."
        ),
        options=Options,
        needs=frozenset({"classes"}),
        variants=_variants,
        constants={"most": LEARNT},
        units=_units,
        network=_network,
        compose=_compose,
        classes=_classes,
        score=_score,
        nothing=lambda config, data: (
            f"The {config['cue']} decides the prediction of no picture of {data}: try other pictures, or a network "
            "with a linear last layer."
        ),
        picture_score=lambda rows: floats(rows, "on_cue"),
        picture_score_name="the share on the cue",
        place=34,
    )
)
