"""Class activation maps: where the deep spatial features for a class are active."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from classlens.core.capture import Tape, Value
from classlens.core.ops import LINEAR_OPS, Kind, of_kind
from classlens.core.rules.generic import divide
from classlens.errors import MethodError
from classlens.methods.inputs import whole
from classlens.methods.places import convolution, enlarged
from classlens.methods.registry import Case, Result, is_release, method

_AVERAGES = of_kind(Kind.AVERAGE_POOL)
_MOST_EXTRA_TOKENS = 16  # class, distillation and register tokens besides the patches


@dataclass(frozen=True, eq=False)
class FeatureMap:
    """A recorded value and how to read it as a map."""

    value: Value
    as_map: Callable[[Tensor], Tensor]  # (..., *shape without batch) -> (..., C, *places)
    above: int  # weight layers between it and the logits


# ------------------------------------------------------------------------------------------------ choosing the layer


def spatial_cuts(tape: Tape) -> list[FeatureMap]:
    """Feature maps with more than one position that all evidence passes through; the deepest first.

    No skip connection or branch bypasses such a map. The input of an average pool is preferred to its output: it holds
    the same evidence in more detail.
    """
    cuts, frontier, above = [], {tape.output}, 0
    for node in reversed(tape.nodes):
        frontier.difference_update(node.outputs)
        frontier.update(node.inputs)
        above += node.op in LINEAR_OPS
        if len(frontier) == 1:
            (value,) = frontier
            found = feature_map(tape, value, above)
            if found is not None and value is not tape.image and tape.producer[value].op not in _AVERAGES:
                cuts.append(found)
    return cuts


def feature_map(tape: Tape, value: Value, above: int = 0) -> FeatureMap | None:
    """A value read as (B,C,*places), (B,*places,C) or tokens (B,n,C), whichever it is; None without positions.

    Places are (h,w) or, in a network for volumes or videos, (d,h,w).
    """
    shape = value.shape
    if len(shape) == len(tape.image.shape):
        last = _unlike(tape, shape[1:-1]) < _unlike(tape, shape[2:])  # decided by the aspect ratio of the image
        if math.prod(shape[1:-1] if last else shape[2:]) > 1:
            return FeatureMap(value, _channels_last(len(shape) - 2) if last else _channels_first, above)
    if len(shape) == 3:
        for grid in _grids(tape, shape[2]):
            extra = shape[1] - math.prod(grid)
            if 0 <= extra <= _MOST_EXTRA_TOKENS:
                return FeatureMap(value, _tokens(extra, grid), above)
    return None


def _unlike(tape: Tape, sides: Sequence[int]) -> float:
    """How much the axes differ in their ratio to the image; an axis of the image with one position does not count."""
    pairs = zip(sides, tape.image.shape[2:], strict=True)
    ratios = [math.log(own / whole) for own, whole in pairs if whole > 1]
    return max(ratios, default=0.0) - min(ratios, default=0.0)


def _grids(tape: Tape, channels: int) -> list[tuple[int, ...]]:
    """Sizes of the convolutional maps with this many channels: where patches became tokens."""
    op = convolution(tape)
    maps = [n.outputs[0].shape for n in tape.nodes if n.op == op and n.outputs[0].shape[1] == channels]
    return [tuple(shape[2:]) for shape in maps if math.prod(shape[2:]) > 1]


def _channels_first(t: Tensor) -> Tensor:
    return t


def _channels_last(axes: int) -> Callable[[Tensor], Tensor]:
    return lambda t: t.movedim(-1, -1 - axes)


def _tokens(extra: int, grid: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    return lambda t: t[..., extra:, :].mT.reshape(*t.shape[:-2], t.shape[-1], *grid)


def chosen_map(case: Case, cotangents: Tensor, layer: str | None, shallower: int) -> tuple[Tensor, Tensor]:
    """Features (B,C,*places) and gradients (K,B,C,*places) of a named layer, or of the deepest map with gradients.

    `shallower=n` selects the first map with at least n weight layers between it and that one.
    """
    whole(0, shallower=shallower)
    if layer is not None:
        return _read(case, cotangents, _named(case, layer))
    cuts = spatial_cuts(case.tape)
    if not cuts:
        raise MethodError(
            "the model has no spatial feature map that all of its evidence passes through; "
            "use a relevance or gradient method such as lrp or integrated-gradients"
        )
    gradients = case.tape.gradients(cotangents, [cuts[0].value])[cuts[0].value]
    deepest = 0
    # After the last attention of a transformer, only the class token has gradients; the patches have none.
    while gradients.any() and not cuts[deepest].as_map(gradients).any() and deepest + 1 < len(cuts):
        deepest += 1
        gradients = case.tape.gradients(cotangents, [cuts[deepest].value])[cuts[deepest].value]
    if not shallower:
        return cuts[deepest].as_map(cuts[deepest].value.tensor), cuts[deepest].as_map(gradients)
    reached = [cut for cut in cuts if cut.above - cuts[deepest].above >= shallower]
    if not reached:
        most = cuts[-1].above - cuts[deepest].above
        raise MethodError(f"shallower={shallower} is not possible; the shallowest map is {most} weight layers up")
    return _read(case, cotangents, reached[0])


def _read(case: Case, cotangents: Tensor, cut: FeatureMap) -> tuple[Tensor, Tensor]:
    gradients = case.tape.gradients(cotangents, [cut.value])[cut.value]
    return cut.as_map(cut.value.tensor), cut.as_map(gradients)


def _named(case: Case, layer: str) -> FeatureMap:
    """The last output of a module."""
    inside = [n for n in case.tape.nodes if n.module == layer or n.module.startswith(f"{layer}.")]
    if not inside:
        names = {".".join(n.module.split(".")[:i]) for n in case.tape.nodes for i in range(1, n.module.count(".") + 2)}
        near = difflib.get_close_matches(layer, sorted(names - {""}), n=3, cutoff=0.4)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise MethodError(f"no operation was recorded in a layer {layer!r}{hint}")
    found = feature_map(case.tape, inside[-1].outputs[0])
    if found is None:
        shape = tuple(inside[-1].outputs[0].shape)
        raise MethodError(
            f"the layer {layer!r} returns {shape}, which is not a spatial feature map; name an earlier layer"
        )
    return found


# ---------------------------------------------------------------------------------------------------------- the methods


def weighted_by_mean_gradient(features: Tensor, gradients: Tensor) -> Tensor:
    """Grad-CAM, Eqs. 1 and 2: (sum_c x_c mean(gradient_c))+, (K,B,1,*places)."""
    weights = gradients.mean(tuple(range(3, gradients.dim())), keepdim=True)
    return (weights * features).sum(2, keepdim=True).clamp(min=0)


def _on_image(case: Case, cam: Tensor) -> Result:
    """(K,B,1,*places) at the size of the image: maps (B,K,*size)."""
    size = case.images.shape[2:]
    return Result(enlarged(cam.flatten(0, 1), size).reshape(*cam.shape[:2], *size).transpose(0, 1))


@method(
    "gradcam",
    family="activation maps",
    summary="last feature map, its channels weighted by their mean gradient, positive part",
    class_specific=True, signed=False, conserves=False, scalars=True,
    paper="Selvaraju et al.: Grad-CAM, ICCV 2017",
)  # fmt: skip
def gradcam(case: Case, layer: str | None = None, shallower: int = 0, variant: str = "default") -> Result:
    """(sum_c x_c mean(gradient_c))+ at the last feature map, at `layer`, or `shallower` (4, 8) weight layers up.

    The release divides by the maximum and returns NaN if no value is positive; here such a map is 0.
    """
    cam = weighted_by_mean_gradient(*chosen_map(case, case.directions(), layer, shallower))
    if is_release(variant):
        cam = divide(cam, cam.amax(tuple(range(3, cam.dim())), keepdim=True))
    return _on_image(case, cam)


@method(
    "layercam",
    family="activation maps",
    summary="last feature map, each position weighted by its own positive gradient",
    class_specific=True, signed=False, conserves=False, scalars=True,
    paper="Jiang et al.: LayerCAM, IEEE TIP 2021",
)  # fmt: skip
def layercam(case: Case, layer: str | None = None, shallower: int = 0) -> Result:
    """(sum_c x_c gradient_c+)+: sharp even in shallow layers."""
    features, gradients = chosen_map(case, case.directions(), layer, shallower)
    return _on_image(case, (features * gradients.clamp(min=0)).sum(2, keepdim=True).clamp(min=0))


@method(
    "finer-cam",
    family="activation maps",
    summary="Grad-CAM of what distinguishes a class from the most similar ones",
    class_specific=True, signed=False, contrastive=True, conserves=False,
    paper="Zhang et al.: Finer-CAM, CVPR 2025",
)  # fmt: skip
def finer_cam(case: Case, alpha: float = 0.6, similar: int = 3, layer: str | None = None, shallower: int = 0) -> Result:
    """Grad-CAM of y_t - alpha * mean of the `similar` other logits nearest to y_t."""
    starts = apart_from_similar(case.tape.logits, case.targets, alpha, similar)
    return _on_image(case, weighted_by_mean_gradient(*chosen_map(case, starts, layer, shallower)))


def apart_from_similar(logits: Tensor, targets: Tensor, alpha: float, similar: int) -> Tensor:
    """(K,B,classes): the gradient at the logits of y_t - alpha * mean of the logits nearest to y_t.

    >>> apart_from_similar(torch.tensor([[5.0, 1.0, 4.0, 3.0]]), torch.tensor([[0]]), alpha=0.5, similar=2)
    tensor([[[ 1.0000,  0.0000, -0.2500, -0.2500]]])
    """
    classes = logits.shape[1]
    if not 1 <= similar < classes:
        raise MethodError(f"similar={similar} is not possible with {classes} classes; give 1 to {classes - 1}")
    own = F.one_hot(targets, classes).to(logits)  # (B,K,classes)
    distance = (logits[:, None] - logits.gather(1, targets)[:, :, None]).abs()
    nearest = distance.masked_fill(own.bool(), torch.inf).topk(similar, largest=False).indices
    return own.scatter(2, nearest, -alpha / similar).transpose(0, 1)
