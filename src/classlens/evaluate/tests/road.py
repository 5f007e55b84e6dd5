"""Road: remove pixels in the order of a map, but fill them in from their neighbours, so that the hole has no shape.

ROAD (Rong et al., ICML 2022): each removed pixel becomes the weighted mean of its neighbours, which gives a linear
system, plus a little noise. A black fill lets the network see the shape of the hole; this does not. The logit of the
explained class is measured, as a share of what the picture has above the same picture blurred:

    deletion    the most relevant pixels go first; lower is better
    insertion   only the most relevant pixels stay; higher is better

Smooth maps remove whole regions, which a fill from neighbours hides best. So each method is scored a second time with
its map blurred (`gain of blur`): where that is better, the test rewards smoothness and not the map.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from classlens.evaluate.metrics import Metric, lists, mean
from classlens.evaluate.panels import Panel
from classlens.evaluate.registry import Config, Test, Values, register
from classlens.evaluate.scene import Explained, Scene
from classlens.evaluate.stats import Floats
from classlens.evaluate.tests.perturbation import blurred, ranks
from classlens.models.network import images_per_forward

if TYPE_CHECKING:
    import pyarrow as pa

    from classlens.evaluate.tables import Table

FRACTIONS = (0.1, 0.3, 0.5, 0.7, 0.9)
NOISE = 0.01  # standard deviation, of the normalised input
CONTROL = 1 / 28  # the blurred map's sigma, of the picture's side
_EDGES, _CORNERS = 1 / 6, 1 / 12  # weights of the neighbours
_TOLERANCE, _MOST = 1e-3, 200  # of the solver: relative residual, iterations


def imputed(images: Tensor, gone: Tensor, seed: int = 0) -> Tensor:
    """Images (B,3,H,W) whose pixels `gone` (B,H,W) are filled in from their neighbours, with a little noise.

    A removed pixel p is the mean of its neighbours q, some of which are removed too: sum_q w_pq (x_p - x_q) = 0. This
    is symmetric and positive, so conjugate gradients solve it, all images and channels at once.
    """
    gone = gone[:, None].to(images)
    if not gone.any():
        return images
    known = images * (1 - gone)
    degree = _neighbours(torch.ones_like(gone))
    if bool((gone.flatten(1).amin(1) > 0).any()):  # nothing is left to fill in from
        raise ValueError("every pixel is removed")

    def system(x: Tensor) -> Tensor:
        return gone * (degree * x - _neighbours(x))

    x = gone * _first_guess(known, gone)
    x = _solved(system, gone * _neighbours(known), x)
    noise = torch.randn(images.shape[1:], generator=torch.Generator().manual_seed(seed)).to(images)
    return known + gone * (x + NOISE * noise)


def _neighbours(x: Tensor) -> Tensor:
    """The weighted sum of the eight neighbours; outside is nothing."""
    kernel = x.new_tensor([[_CORNERS, _EDGES, _CORNERS], [_EDGES, 0, _EDGES], [_CORNERS, _EDGES, _CORNERS]])
    return F.conv2d(x.flatten(0, 1)[:, None], kernel[None, None], padding=1).view_as(x)


def _first_guess(known: Tensor, gone: Tensor) -> Tensor:
    """Holes filled from coarser and coarser means: large holes would take the solver long."""
    there = 1 - gone
    if min(known.shape[2:]) < 2:
        return known / there.clamp(min=1e-6)
    size = known.shape[2:]
    half, weight = (F.avg_pool2d(t, 2, ceil_mode=True, count_include_pad=False) for t in (known, there))
    seen = (weight > 0).to(known)
    coarse = half / weight.clamp(min=1e-6) * seen
    if bool((seen == 0).any()):
        coarse = coarse + (1 - seen) * _first_guess(coarse, 1 - seen)
    return known + gone * F.interpolate(coarse, size, mode="bilinear")


def _solved(system: Callable[[Tensor], Tensor], right: Tensor, x: Tensor) -> Tensor:
    """Conjugate gradients for each image and channel."""
    axes = (2, 3)
    residual = right - system(x)
    direction, size = residual, (residual**2).sum(axes, keepdim=True)
    enough = _TOLERANCE**2 * (right**2).sum(axes, keepdim=True)
    for _ in range(_MOST):
        if bool((size <= enough).all()):
            break
        moved = system(direction)
        step = size / (direction * moved).sum(axes, keepdim=True).clamp(min=1e-30)
        x = x + step * direction
        residual = residual - step * moved
        new = (residual**2).sum(axes, keepdim=True)
        direction, size = residual + new / size.clamp(min=1e-30) * direction, new
    return x


def curves(
    forward: Callable[[Tensor], Tensor], images: Tensor, maps: Tensor, explained: Tensor, at_once: int, seed: int = 0,
    fractions: Sequence[float] = FRACTIONS,
) -> Tensor:  # fmt: skip
    """(2,steps,B): the logits of the explained classes with the highest pixels removed, and with only these left."""
    order, pixels = ranks(maps, seed).to(images.device), maps[0].numel()
    found = []
    for most in (True, False):
        for fraction in fractions:
            count = int(pixels * fraction)
            gone = order >= pixels - count if most else order < pixels - count
            batches = zip(images.split(at_once), gone.split(at_once), strict=True)
            logits = torch.cat([forward(imputed(*batch, seed)) for batch in batches]).double().cpu()
            found.append(logits.gather(1, explained.cpu()[:, None])[:, 0])
    return torch.stack(found).view(2, len(fractions), -1)


# ---------------------------------------------------------------------------------------------------------- the test


def _score(scene: Scene, config: Config, found: Explained) -> list[Values]:
    images = scene.network.placed(scene.images)
    explained = scene.asked.targets[:, scene.asked.columns["predicted"]]
    at_once = images_per_forward(scene.tape, None)
    side = min(images.shape[2:])
    smooth = blurred(images, side / 8)
    clean, nothing = (
        logits.double().cpu().gather(1, explained.cpu()[:, None])[:, 0]
        for logits in (scene.tape.logits.detach(), scene.forward(smooth))
    )
    maps = found.of("predicted")
    range_ = (clean - nothing).clamp(min=1e-6)
    values: list[Values] = [{"explained": k} for k in found.explained("predicted")]
    for name, judged in (("", maps), ("blurred_", blurred(maps[:, None].float(), CONTROL * side)[:, 0])):
        shares = (curves(scene.forward, images, judged, explained, at_once, config["seed"]) - nothing) / range_
        for row, value in enumerate(values):
            value |= {f"{name}deletion": shares[0, :, row].tolist(), f"{name}insertion": shares[1, :, row].tolist()}
    return values


def _area(column: str) -> Callable[[pa.Table], Floats]:
    return lambda rows: mean(np.clip(lists(rows, column), 0, 1).mean(1))


def _gain(column: str) -> Callable[[pa.Table], Floats]:
    """How much better the blurred map is."""
    sign = -1 if column == "deletion" else 1

    def columns(rows: pa.Table) -> Floats:
        plain, smooth = (np.clip(lists(rows, name), 0, 1).mean(1) for name in (column, f"blurred_{column}"))
        return mean(sign * (smooth - plain))

    return columns


def _panels(table: Table, rows: Mapping[str, pa.Table]) -> list[Panel]:
    shares = tuple(100 * fraction for fraction in FRACTIONS)
    return [
        Panel(
            f"ROAD {name}: {table.data}", "logit, %", f"pixels {what}, %", shares,
            lines={method: 100 * np.clip(lists(part, name), 0, 1).mean(0) for method, part in rows.items()},
        )
        for name, what in (("deletion", "removed"), ("insertion", "left"))
    ]  # fmt: skip


register(
    Test(
        name="road",
        question="does the logit fall without the pixels that the map marks, filled in from their neighbours?",
        columns={"explained": "int32"}
        | dict.fromkeys(("deletion", "insertion", "blurred_deletion", "blurred_insertion"), "list<float64>"),
        metrics=lambda config: (
            Metric("deletion", -1, _area("deletion")),
            Metric("insertion", +1, _area("insertion")),
            Metric("gain of blur, deletion", 0, _gain("deletion")),
            Metric("gain of blur, insertion", 0, _gain("insertion")),
        ),
        title=lambda config: "ROAD",
        remark=lambda config: (
            "The mean logit of the class, in per cent of what the picture has above its blurred self, with 10 to 90 % "
            "of the pixels removed (deletion) or left (insertion). The gain of blur is how much better the same map is "
            "when it is blurred: if it is above 0, the test rewards smoothness."
        ),
        needs=frozenset({"classes"}),
        constants={"fractions": FRACTIONS, "noise": NOISE, "control": CONTROL},
        score=_score,
        panels=_panels,
        picture_score=lambda rows: np.clip(1 - lists(rows, "deletion"), 0, 1).mean(1),
        picture_score_name="how much of the logit is gone, on average, without the highest pixels",
        place=12,
    )
)
