"""Class activation maps: where the last spatial features that speak for a class are active."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from classlens.capture import Tape, Value
from classlens.errors import MethodError
from classlens.methods.registry import Case, Result, method


def spatial_cuts(tape: Tape) -> list[Value]:
    """Feature maps (B,C,h,w), h*w > 1, that everything the output uses passes through; the deepest first.

    Beside such a map runs no skip connection and no branch, so it is a fair place to look.
    """
    cuts, frontier = [], {tape.output}
    for node in reversed(tape.nodes):
        if frontier.isdisjoint(node.outputs):
            continue
        frontier.difference_update(node.outputs)
        frontier.update(node.inputs)
        if len(frontier) == 1:
            (value,) = frontier
            if value.tensor.dim() == 4 and value.shape[2] * value.shape[3] > 1 and value is not tape.image:
                cuts.append(value)
    return cuts


def last_feature_map(case: Case) -> Value:
    cuts = spatial_cuts(case.tape)
    if not cuts:
        raise MethodError(
            "the model has no spatial feature map (B,C,h,w) that all of its evidence passes through; "
            "use a relevance or gradient method such as lrp or integrated-gradients"
        )
    return cuts[0]


def enlarged(maps: Tensor, size: tuple[int, int]) -> Tensor:
    """(K,B,1,h,w) -> (B,K,H,W), bilinear."""
    flat = F.interpolate(maps.flatten(0, 1), size=size, mode="bilinear", align_corners=False)
    return flat.unflatten(0, maps.shape[:2])[:, :, 0].transpose(0, 1)


@method(
    "gradcam",
    family="activation maps",
    summary="last feature map, its channels weighted by their mean gradient, positive part",
    class_specific=True, signed=False, conserves=False,
    paper="Selvaraju et al.: Grad-CAM, ICCV 2017",
)  # fmt: skip
def gradcam(case: Case) -> Result:
    """Eq. 6: (sum_c x_c mean(gradient_c))+, enlarged to the image."""
    value = last_feature_map(case)
    gradient = case.tape.gradients(case.one_hot(), [value])[value]  # (K,B,C,h,w)
    weights = gradient.mean((-2, -1), keepdim=True)
    cam = (weights * value.tensor).sum(2, keepdim=True).clamp(min=0)
    return Result(enlarged(cam, (case.images.shape[2], case.images.shape[3])))
