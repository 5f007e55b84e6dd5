"""FullGrad: the contributions of the input and of every bias to the output, each as a map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from classlens.core.capture import Axis, Node, Value, folded, image_index
from classlens.core.capture.norm import affine, is_fixed
from classlens.core.ops import LINEAR_OPS
from classlens.core.rules.linear import linear_map
from classlens.errors import UnsupportedOp
from classlens.methods.places import enlarged
from classlens.methods.registry import Balance, Case, Result, is_release, method, total


def bias_of(node: Node) -> Tensor | None:
    """The constant that a node adds to its output, in a shape that broadcasts."""
    if node.op in LINEAR_OPS:
        return linear_map(node).bias
    if node.op == "batch_norm" and is_fixed(node.arguments()):
        _, offset = affine(node.arguments())
        return offset.reshape(-1, *[1] * (len(node.outputs[0].shape) - 2))
    return None


def spread(t: Tensor) -> Tensor:
    """psi: |t|, minus its minimum, divided by its maximum; per class and image."""
    t = t.abs()
    axes = tuple(range(2, t.dim()))
    t = t - t.amin(axes, keepdim=True)
    return t / t.amax(axes, keepdim=True).clamp(min=torch.finfo(t.dtype).tiny)


@method(
    "fullgrad", family="gradients", summary="input gradient times input, plus a gradient map for every bias",
    class_specific=False, signed=False, conserves=True, scalars=True,
    paper="Srinivas, Fleuret: Full-Gradient Representation for Neural Network Visualization, NeurIPS 2019",
)  # fmt: skip
def fullgrad(case: Case, variant: str = "default") -> Result:
    """y_t = x . dy/dx + sum over biases b . dy/db, exactly, for networks of linear and ReLU-like layers.

    The balance in the report is this sum: `started` is the logit, `arrived` the sum over input and biases. Corrected:
    every image is scaled separately, and biases of dense layers are included (evenly over the image).
    """
    with_dense = not is_release(variant)
    tape = folded(case.tape)
    biased = [(node.outputs[0], bias) for node in tape.nodes if (bias := bias_of(node)) is not None]
    start = case.directions()
    gradients = tape.gradients(start, [tape.image, *(value for value, _ in biased)])
    axes, size = image_index(tape), case.images.shape[2:]
    direct = gradients[tape.image] * tape.image.tensor
    maps = spread(direct).sum(2)  # (K,B,*size)
    explained = total(direct)
    for value, bias in biased:
        share = _images_first(axes, value, gradients[value] * bias, len(case.images))
        explained = explained + total(share)
        if len(value.shape) == 2 + len(size) or with_dense:
            maps = maps + _as_map(spread(share), size)
    logit = total(start * case.tape.logits).T
    balance = Balance(logit, explained.T, torch.zeros_like(logit), logit.abs())
    return Result(maps.transpose(0, 1), balance)


def _images_first(axes: Mapping[Value, Axis], value: Value, share: Tensor, images: int) -> Tensor:
    """A share (K, *shape) as (K, images, ...), where tokens come first or windows are stacked along the batch axis."""
    if value not in axes:
        raise UnsupportedOp(f"fullgrad cannot tell the {images} images apart at a layer; explain one image at a time")
    found = axes[value].first(share, images)
    return found.squeeze(2) if found.shape[2] == 1 else found.flatten(2)


def _as_map(share: Tensor, size: Sequence[int]) -> Tensor:
    """The share of a bias, summed over channels and upsampled; a share without positions is spread evenly."""
    if share.dim() != 3 + len(size):
        return share.flatten(2).sum(2).reshape(*share.shape[:2], *[1] * len(size)).expand(*share.shape[:2], *size)
    return enlarged(share.sum(2).flatten(0, 1)[:, None], size).reshape(*share.shape[:2], *size)
