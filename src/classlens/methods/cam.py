"""Class activation maps: where the deep spatial features for a class are active."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from classlens.core.rules.generic import divide
from classlens.errors import MethodError
from classlens.methods.featuremaps import chosen_maps
from classlens.methods.places import enlarged
from classlens.methods.registry import UNRELIABLE, Case, Result, is_release, method

Weigh = Callable[[Tensor, Tensor], Tensor]  # features (B,C,*places), gradients (K,B,C,*places) -> (K,B,1,*places)


def on_image(maps: Tensor, size: Sequence[int]) -> Tensor:
    """(K,B,1,*places) -> (B,K,*size), linear along each axis."""
    return enlarged(maps.flatten(0, 1), size).reshape(*maps.shape[:2], *size).transpose(0, 1)


def weighted_by_mean_gradient(features: Tensor, gradients: Tensor) -> Tensor:
    """Grad-CAM, Eqs. 1 and 2: (sum_c x_c mean(gradient_c))+, (K,B,1,*places)."""
    weights = gradients.mean(tuple(range(3, gradients.dim())), keepdim=True)
    return (weights * features).sum(2, keepdim=True).clamp(min=0)


def weighted_by_each_gradient(features: Tensor, gradients: Tensor) -> Tensor:
    """LayerCAM, Eqs. 5 and 6: (sum_c x_c gradient_c+)+, (K,B,1,*places)."""
    return (features * gradients.clamp(min=0)).sum(2, keepdim=True).clamp(min=0)


def weighted_by_signed_gradient(features: Tensor, gradients: Tensor) -> Tensor:
    """ODAM: (sum_c x_c gradient_c)+, each gradient with its sign, (K,B,1,*places)."""
    return (features * gradients).sum(2, keepdim=True).clamp(min=0)


def shown(case: Case, starts: Tensor, layer: str | None, shallower: int, weigh: Weigh) -> Result:
    """The weighted feature maps, enlarged to the image. A position that a target does not read shows nothing."""
    size = case.images.shape[2:]
    maps, notes = torch.zeros(()), []
    for seen in chosen_maps(case, starts, layer, shallower):
        found = on_image(weigh(seen.features, seen.gradients) * (seen.gradients != 0).any(2, keepdim=True), size)
        if seen.pairs is None:
            return Result(found)
        maps = maps.to(found).expand_as(found).clone() if maps.dim() == 0 else maps
        for k, image in seen.pairs:
            maps[image, k] = found[image, k]
        notes += [seen.note] if seen.note else []
    return Result(maps, notes=tuple(dict.fromkeys(notes)))


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
    released = is_release(variant)

    def weigh(features: Tensor, gradients: Tensor) -> Tensor:
        cam = weighted_by_mean_gradient(features, gradients)
        return divide(cam, cam.amax(tuple(range(3, cam.dim())), keepdim=True)) if released else cam

    found = shown(case, case.directions(), layer, shallower, weigh)
    return replace(found, notes=(*found.notes, _AVERAGED)) if found.notes else found


_AVERAGED = "gradcam averages gradients over all positions, so its maps of two places can be alike; layercam does not"


@method(
    "layercam",
    family="activation maps",
    summary="last feature map, each position weighted by its own positive gradient",
    class_specific=True, signed=False, conserves=False, scalars=True,
    paper="Jiang et al.: LayerCAM, IEEE TIP 2021",
)  # fmt: skip
def layercam(case: Case, layer: str | None = None, shallower: int = 0) -> Result:
    """(sum_c x_c gradient_c+)+: sharp even in shallow layers."""
    return shown(case, case.directions(), layer, shallower, weighted_by_each_gradient)


@method(
    "odam",
    family="activation maps",
    summary="a feature map, each position weighted by its own gradient, positive part; made for the boxes of detectors",
    class_specific=True, signed=False, conserves=False, scalars=True,
    paper="Zhao and Chan: ODAM, ICLR 2023",
)  # fmt: skip
def odam(case: Case, layer: str | None = None, shallower: int = 0) -> Result:
    """(sum_c x_c gradient_c)+ at the last feature map that the target reads wholly, or at `layer`.

    The authors take the level of the feature pyramid that produced the box: name it with `layer`. For the last map of
    a classifier this is HiResCAM.

    Before a layer norm, as in most transformers, the terms of a position cancel: the length of a token does not matter
    to the norm. The report then says that rounding decides.
    """
    cancelled: list[bool] = []

    def weigh(features: Tensor, gradients: Tensor) -> Tensor:
        cancelled.append(_cancels(features, gradients))
        return weighted_by_signed_gradient(features, gradients)

    found = shown(case, case.directions(), layer, shallower, weigh)
    return replace(found, notes=(*found.notes, _CANCELLED)) if any(cancelled) else found


def _cancels(features: Tensor, gradients: Tensor) -> bool:
    """Whether the terms x_c gradient_c of an image add up to nothing but rounding errors, at every position."""
    terms = features * gradients
    sums, sizes = (t.flatten(2).amax(2) for t in (terms.sum(2).abs(), terms.abs().sum(2)))
    return bool((sums < 100 * torch.finfo(terms.dtype).eps * sizes).any())  # never where all terms are 0


_CANCELLED = f"what speaks for and against the target cancels at every position, so rounding decides; {UNRELIABLE}"


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
    return shown(case, starts, layer, shallower, weighted_by_mean_gradient)


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
