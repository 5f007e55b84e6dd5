"""Linear and convolutional layers as one abstraction: x -> W x + b with its adjoint, and the rules based on it.

`linear_map(node)` reads stride, padding, dilation and groups from the recorded call, so the rules below are
written once, with W and x as in the equations.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from classlens.core.capture import Axis, Node, Value
from classlens.core.capture.fold import pad_sizes, scaled
from classlens.core.ops import per_axis
from classlens.core.rules.generic import Quotient, Shares, divide
from classlens.errors import UnsupportedOp

_CONV: dict[int, Any] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_T: dict[int, Any] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def images_first(value: Value) -> Axis | None:
    """The images of a value (B, ...)."""
    return Axis(0, torch.arange(value.shape[0]))


@dataclass(frozen=True, eq=False)
class LinearMap:
    """A recorded linear layer."""

    value: Value  # its live input
    unscaled: Tensor  # the weight without `scale`
    bias: Tensor | None  # shaped to be added to the output
    forward: Callable[..., Tensor]  # (x, W) -> W x; (x, W, b) -> W x + b, with b (outputs,)
    adjoint: Callable[[Tensor, Tensor], Tensor]  # (r (K, *output shape), W) -> W^T r (K, *input shape)
    of_ones: Callable[[Tensor], Tensor]  # W -> W 1, for one image; cheaper than `forward` of an image of ones
    kernel: tuple[int, ...]  # () for a linear layer
    stacks: bool = False  # a weight may have more input channels than x: its adjoint then has more channels too
    scale: Tensor | None = None  # of a normalisation folded into the layer
    images: Callable[[Value], Axis | None] = images_first  # where the images are in its input, and in its output

    @property
    def x(self) -> Tensor:
        return self.value.tensor

    @functools.cached_property
    def weight(self) -> Tensor:
        return scaled(self.unscaled, self.scale)

    def adjoints(self, r: Tensor, *weights: Tensor) -> Sequence[Tensor]:
        """W^T r for several weights. Of an image with three channels, six cost as much as three."""
        if not self.stacks:
            return [self.adjoint(r, w) for w in weights]
        return self.adjoint(r, torch.cat(weights, 1)).chunk(len(weights), 2)

    def of_each_image(self, t: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        """`reduce` takes (K, n) to (K,); here over all of an image's entries in t (K, *shape), to be broadcast to t.

        Tokens may come before images, (tokens,B,C), or both on one axis: the first axis alone is not the images.
        """
        axis = self.images(self.value)
        if axis is None:
            raise UnsupportedOp(
                f"a layer reads a value of shape {tuple(self.value.shape)} in which images cannot be told apart; "
                "explain one image at a time"
            )
        rows = t.movedim(1 + axis.axis, 1).flatten(2)
        found = rows.new_empty(rows.shape[:2])
        for image in axis.image.unique():
            own = (axis.image == image).to(t.device)
            found[:, own] = reduce(rows[:, own].flatten(1))[:, None]
        return found.reshape([len(t), *(n if i == axis.axis else 1 for i, n in enumerate(t.shape[1:]))])


def linear_map(node: Node) -> LinearMap:
    """The linear map that a `linear`, `convNd` or `conv_transposeNd` node applied."""
    a = node.arguments()
    value: Value = a["input"]
    # A weight that depends on the image (dynamic convolution) is treated as a constant.
    weight, bias, scale = _constant(a["weight"]), _constant(a.get("bias")), a.get("scale")
    assert weight is not None
    if node.op == "linear":
        return LinearMap(value, weight, bias, F.linear, torch.matmul, lambda w: w.sum(1), (), scale=scale)
    kernel = tuple(weight.shape[2:])
    bias = None if bias is None else bias.reshape(-1, *[1] * len(kernel))
    kind = _Transposed if node.op.startswith("conv_transpose") else _Convolution
    conv = kind.of(value.shape, kernel, a)
    stacks = isinstance(conv, _Convolution) and conv.groups == 1
    return LinearMap(value, weight, bias, conv.forward, conv.adjoint, conv.of_ones, kernel, stacks, scale)


@dataclass(frozen=True)
class _Convolution:
    """A convolution of an input of some size, as it was called."""

    size: torch.Size
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    before: tuple[int, ...]  # zeros around the input; padding="same" with an even kernel has one more after it
    after: tuple[int, ...]

    @classmethod
    def of(cls, size: torch.Size, kernel: tuple[int, ...], a: dict[str, Any]) -> _Convolution:
        n = len(kernel)
        stride, dilation = per_axis(a.get("stride", 1), n), per_axis(a.get("dilation", 1), n)
        padding = _padding(a.get("padding", 0), kernel, dilation, n)
        return cls(size, kernel, stride, dilation, a.get("groups", 1), *padding)

    @functools.cached_property
    def one_place(self) -> bool:
        """Whether each output reads a single position, so that it is a matrix product."""
        return max(self.kernel) == 1 and self.groups == 1 and max(*self.before, *self.after) == 0

    def forward(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        padding: Any = self.before
        if self.before != self.after:
            x, padding = F.pad(x, pad_sizes(self.before, self.after)), 0
        out: Tensor = _CONV[len(self.kernel)](x, w, b, self.stride, padding, self.dilation, self.groups)
        return out

    def adjoint(self, r: Tensor, w: Tensor) -> Tensor:
        return _classwise(r, lambda flat: self._back(flat, w))

    def _back(self, r: Tensor, w: Tensor) -> Tensor:
        if self.one_place:
            return _back_by_matrix(r, w, self.size[2:], self.stride)
        # torch's gradient of a convolution computes the same, and takes up to twice as long.
        library = _CONV_T[len(self.kernel)]
        sides = list(zip(self.size[2:], self.before, self.after, strict=True))
        spans = [s + b + a - d * (k - 1) - 1 for (s, b, a), k, d in zip(sides, self.kernel, self.dilation, strict=True)]
        unread = tuple(span % stride for span, stride in zip(spans, self.stride, strict=True))
        out: Tensor
        if self.before == self.after:
            out = library(r, w, None, self.stride, self.before, unread, self.groups, self.dilation)
            return out
        out = library(r, w, None, self.stride, 0, unread, self.groups, self.dilation)
        for axis, (s, b, _) in enumerate(sides):
            out = out.narrow(2 + axis, b, s)
        return out

    def of_ones(self, w: Tensor) -> Tensor:
        """The weights summed over input channels and over the positions of the kernel that lie inside the image."""
        out = w.sum(1)
        if self.one_place:
            return out[None]
        sizes = zip(self.size[2:], self.kernel, self.stride, self.dilation, self.before, self.after, strict=True)
        for along_axis in sizes:  # one axis of the kernel becomes one of the output
            out = torch.tensordot(out, _inside(*along_axis).to(w), ([1], [1]))
        return out[None]


@dataclass(frozen=True)
class _Transposed:
    """A transposed convolution: its adjoint is a convolution."""

    size: torch.Size
    geometry: tuple[Any, ...]  # stride, padding, dilation, groups, as a convolution takes them
    extra: tuple[int, ...]  # output_padding

    @classmethod
    def of(cls, size: torch.Size, kernel: tuple[int, ...], a: dict[str, Any]) -> _Transposed:
        n = len(kernel)
        stride, dilation = per_axis(a.get("stride", 1), n), per_axis(a.get("dilation", 1), n)
        padding, extra = per_axis(a.get("padding", 0), n), per_axis(a.get("output_padding", 0), n)
        return cls(size, (stride, padding, dilation, a.get("groups", 1)), extra)

    def forward(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        stride, padding, dilation, groups = self.geometry
        out: Tensor = _CONV_T[w.dim() - 2](x, w, b, stride, padding, self.extra, groups, dilation)
        return out

    def adjoint(self, r: Tensor, w: Tensor) -> Tensor:
        return _classwise(r, lambda flat: _CONV[w.dim() - 2](flat, w, None, *self.geometry))

    def of_ones(self, w: Tensor) -> Tensor:
        return self.forward(w.new_ones(1, *self.size[1:]), w)


def _back_by_matrix(r: Tensor, w: Tensor, places: Sequence[int], stride: tuple[int, ...]) -> Tensor:
    """The adjoint of a 1x1 convolution: a matrix product, and zeros at the positions that a stride skips.

    It is up to four times as fast as torch's own adjoint, which has no special case for this.
    """
    at_places: Tensor = torch.matmul(w.flatten(1).mT, r.flatten(2)).unflatten(2, r.shape[2:])
    if max(stride) == 1:
        return at_places
    out = at_places.new_zeros(*at_places.shape[:2], *places)
    out[(slice(None), slice(None), *(slice(None, None, s) for s in stride))] = at_places
    return out


@functools.lru_cache(maxsize=512)
def _inside(size: int, kernel: int, stride: int, dilation: int, before: int, after: int) -> Tensor:
    """(outputs, kernel): 1 where a position of the kernel lies inside the image, along one axis."""
    outputs = (size + before + after - dilation * (kernel - 1) - 1) // stride + 1
    place = torch.arange(outputs)[:, None] * stride + torch.arange(kernel) * dilation - before
    return (place >= 0) & (place < size)


def _classwise(r: Tensor, back: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a convolution to K classes of B images as to K*B images."""
    share: Tensor = back(r.flatten(0, 1)).unflatten(0, r.shape[:2])
    return share


def _constant(argument: Value | Tensor | None) -> Tensor | None:
    if isinstance(argument, Value):
        return argument.tensor
    return None if argument is None else argument.detach()


def _padding(
    padding: Any, kernel: tuple[int, ...], dilation: tuple[int, ...], n: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if isinstance(padding, tuple) and isinstance(padding[0], tuple):  # padding folded in from its own operation
        return padding
    if padding == "valid":
        padding = 0
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return tuple(t // 2 for t in total), tuple(t - t // 2 for t in total)
    even = per_axis(padding, n)
    return even, even


def only(node: Node, value: Value, share: Tensor) -> Shares:
    """Give one input of a node the whole share, the others nothing."""
    shares: list[Tensor | None] = [None] * len(node.inputs)
    shares[node.inputs.index(value)] = share
    return shares


_BLOCK = 2**20  # weights

LinearRule = Callable[..., Tensor]


def by_blocks(rule: LinearRule) -> LinearRule:
    """A rule of a linear layer, computed for blocks of outputs if the weight matrix is large.

    Outputs distribute their relevance independently, so the shares of blocks add up. |W| or W+ of a large matrix is
    never complete in memory: filling it takes far longer than multiplying with it.
    """

    @functools.wraps(rule)
    def blockwise(layer: LinearMap, relevance: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        outputs, inputs = layer.unscaled.shape[:2]
        rows = max(1, _BLOCK // inputs)
        if layer.kernel or rows >= outputs:
            return rule(layer, relevance, *args, **kwargs)
        total: Tensor | None = None
        for at in range(0, outputs, rows):
            block = slice(at, at + rows)
            bias, scale = (None if t is None else t[block] for t in (layer.bias, layer.scale))
            part = dataclasses.replace(layer, unscaled=layer.unscaled[block], bias=bias, scale=scale)
            share = rule(part, relevance[..., block], *args, **kwargs)
            total = share if total is None else total.add_(share)
        assert total is not None
        return total

    return blockwise


# ---------------------------------------------------------------------------------------------------- the rules


@by_blocks
def absolute(layer: LinearMap, relevance: Tensor, quotient: Quotient = divide) -> Tensor:
    """C = G(|x|, |W|, R): relevance by absolute influence (Eq. 8)."""
    x, w = layer.x.abs(), layer.weight.abs()
    return x * layer.adjoint(quotient(relevance, layer.forward(x, w)), w)


@by_blocks
def agnostic(layer: LinearMap, relevance: Tensor, quotient: Quotient = divide) -> Tensor:
    """A = G(1, |W|, R): the same with all inputs equal (Eq. 9), so it is independent of texture."""
    w = layer.weight.abs()
    return layer.adjoint(quotient(relevance, layer.of_ones(w)), w)


@by_blocks
def positive(layer: LinearMap, relevance: Tensor, quotient: Quotient = divide, alpha: float = 1.0) -> Tensor:
    """LRP alpha-beta with beta = alpha - 1.

    R_j = sum_i (alpha z_ji+ / sum_j z_ji+  -  beta z_ji- / sum_j z_ji-) R_i with z_ji = w_ij x_j. Positive
    contributions come from x+ W+ and x- W-, negative ones from x+ W- and x- W+.
    """
    share = _one_sign(layer, alpha * relevance, True, quotient)
    return share if alpha == 1 else share + _one_sign(layer, (1 - alpha) * relevance, False, quotient)


def _one_sign(layer: LinearMap, relevance: Tensor, agreeing: bool, quotient: Quotient) -> Tensor:
    """Relevance through the contributions of one sign."""
    parts = [(x, w if agreeing else v) for x, w, v in by_sign(layer)]
    total = torch.stack([layer.forward(x, w) for x, w in parts]).sum(0)
    per_unit = quotient(relevance, total)
    return torch.stack([x * layer.adjoint(per_unit, w) for x, w in parts]).sum(0)


def by_sign(layer: LinearMap) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(|x|, |weights| that make z > 0, |weights| that make z < 0) for the positive part of x, and the negative one."""
    w_pos, w_neg = layer.weight.clamp(min=0), (-layer.weight).clamp(min=0)
    yield layer.x.clamp(min=0), w_pos, w_neg
    if (layer.x < 0).any():
        yield (-layer.x).clamp(min=0), w_neg, w_pos


@by_blocks
def epsilon(layer: LinearMap, relevance: Tensor, quotient: Quotient = divide, eps: float = 1e-6) -> Tensor:
    """LRP-epsilon: R_j = sum_i z_ji R_i / (z_i + eps sign z_i) with z_i = sum_j z_ji; the bias is left out."""
    z = layer.forward(layer.x, layer.weight)
    z = torch.where(z < 0, z - eps, z + eps)
    return layer.x * layer.adjoint(quotient(relevance, z), layer.weight)


@by_blocks
def gamma(layer: LinearMap, relevance: Tensor, quotient: Quotient = divide, weight: float = 0.25) -> Tensor:
    """LRP-gamma, for inputs of any sign: contributions that agree with the output's sign count 1 + gamma times."""
    z = layer.forward(layer.x, layer.weight)
    share = torch.zeros_like(layer.x)
    for side, more, less in ((z >= 0, 1 + weight, 1), (z < 0, 1, 1 + weight)):
        parts = [(x, more * w - less * v) for x, w, v in by_sign(layer)]
        per_unit = quotient(relevance * side, torch.stack([layer.forward(x, w) for x, w in parts]).sum(0))
        share = share + torch.stack([x * layer.adjoint(per_unit, w) for x, w in parts]).sum(0)
    return share


@by_blocks
def flat(layer: LinearMap, relevance: Tensor, quotient: Quotient = divide) -> Tensor:
    """Every input of a unit gets the same share: all inputs and weights are treated as 1."""
    ones = torch.ones_like(layer.weight)
    return layer.adjoint(quotient(relevance, layer.of_ones(ones)), ones)


def boxed(layer: LinearMap, relevance: Tensor, quotient: Quotient = divide) -> Tensor:
    """z^B for the layer that reads the image: x within [l, h], here the minimum and maximum of each image.

    R = x W^T s - l W+^T s - h W-^T s with s = R / (W x - W+ l - W- h).
    """
    x, w = layer.x, layer.weight
    axes = tuple(range(1, x.dim()))
    low, high = x.amin(axes, keepdim=True), x.amax(axes, keepdim=True)
    w_pos, w_neg = w.clamp(min=0), w.clamp(max=0)
    # Constant images use W 1, and W- is W - W+: one forward pass and two adjoints instead of three and three.
    low_out, high_out = (b.reshape(-1, *[1] * (relevance.dim() - 2)) for b in (low, high))
    z = layer.forward(x, w) - low_out * layer.of_ones(w_pos) - high_out * layer.of_ones(w_neg)
    s = quotient(relevance, z)
    whole, positive_part = layer.adjoints(s, w, w_pos)
    return (x - high) * whole + (high - low) * positive_part


def output_stride(places: Sequence[int], image: Sequence[int]) -> int:
    """How much smaller than the image a feature map is, as a power of two: 1, 2, 4, 8, 16, 32.

    >>> output_stride((17, 17), (260, 260)), output_stride((4, 14, 14), (16, 112, 112))
    (16, 8)

    The ratio is the geometric mean over the axes. An axis along which the image has one position does not count.
    """
    ratios = [math.log2(side / own) for own, side in zip(places, image, strict=True) if side > 1]
    return int(2 ** max(0, round(sum(ratios) / max(len(ratios), 1))))
