"""Which image, and which place in it, each entry of a recorded value belongs to.

Networks put images and places on other axes than the first ones: tokens before images, windows of patches stacked
along the batch axis, heads in between. So indices follow the tape: operations that move data move the indices too,
and the others keep the indices of the entries that they are computed at.

    >>> images = image_index(tape)
    >>> images[tokens]        # (tokens, B, C): the second axis holds the images
    Axis(axis=1, image=tensor([0, 1]))
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from classlens.core.capture.tape import Node, Tape, Value
from classlens.core.ops import LINEAR_OPS, NEAREST, Kind, of_kind

# Indices count from 1. The index 0 stands for entries that come from no image: a class token, padding.

_BY_UNIT = {"mul", "maximum", "minimum", "addcmul", "where", "masked_fill"}
_MOVES = of_kind(Kind.COPY, Kind.RESHAPE, Kind.MOVE, Kind.JOIN, Kind.CHOICE) - _BY_UNIT - {NEAREST}
_COPIES, _RESHAPES = of_kind(Kind.COPY), of_kind(Kind.RESHAPE)
_FILL = {"pad", "setitem"}
_UNIT_BY_UNIT = _BY_UNIT | of_kind(
    Kind.ACTIVATION, Kind.POINTWISE, Kind.NORM, Kind.SOFTMAX, Kind.SAME, Kind.ADDITION, Kind.DIVISION, Kind.COMPARISON
)
_POOLS = of_kind(Kind.MAX_POOL, Kind.AVERAGE_POOL) | (LINEAR_OPS - {"linear"}) | {"interpolate", NEAREST}
_REDUCTIONS = {"mean", "sum", "amax", "amin", "max", "min"}
_PRODUCTS = of_kind(Kind.PRODUCT, Kind.ADDED_PRODUCT, Kind.ATTENTION)
_BY_STRIDE = {"as_strided", "as_strided_scatter"}

# Indices are stored once along each axis on which they do not change: (B, 1, h, w) for a feature map (B, C, h, w).


@dataclass(frozen=True)
class Numbering:
    """What is counted: images, or places."""

    fresh: Callable[[torch.Size], Tensor]  # the indices of a feature map (B, C, ...) of whole images
    merged: Callable[[Tensor], Tensor | None]  # where a linear layer reads several entries; None: they do not mix
    restarts: bool = False  # a convolution or pool makes new entries, also where the old ones are unknown


# ------------------------------------------------------------------------------------------------------------- images


@dataclass(frozen=True, eq=False)
class Axis:
    """The axis of a value along which its images lie, and the image of each of its entries."""

    axis: int
    image: Tensor  # (entries of the axis,)

    def total(self, relevance: Tensor, images: int) -> Tensor:
        """(K, images): the sums of relevance (K, *shape) for each image, in float64."""
        # A sum in another precision would copy the tensor: only the sums over the last axes are added in float64.
        rows = relevance.movedim(1 + self.axis, 1)
        rows = rows.flatten(3).sum(3) if rows.dim() > 3 else rows
        rows = rows.flatten(2).sum(2, dtype=torch.float64) if rows.dim() > 2 else rows.double()
        return rows.new_zeros(len(rows), images).index_add_(1, self.image.to(rows.device), rows)

    def first(self, relevance: Tensor, images: int) -> Tensor:
        """(K, images, entries of an image, ...): relevance (K, *shape) with the images first."""
        rows = relevance.movedim(1 + self.axis, 1)
        if not self.in_order:
            rows = rows.index_select(1, self.image.argsort(stable=True).to(rows.device))
        found: Tensor = rows.unflatten(1, (images, -1))
        return found

    def restored(self, rows: Tensor, shape: Sequence[int]) -> Tensor:
        """(K, *shape): the inverse of `first`, whose axes after the images may have been flattened."""
        others = [size for axis, size in enumerate(shape) if axis != self.axis]
        rows = rows.reshape(len(rows), shape[self.axis], *others)
        if not self.in_order:
            rows = rows.index_select(1, self.image.argsort(stable=True).argsort().to(rows.device))
        return rows.movedim(1, 1 + self.axis)

    @functools.cached_property
    def in_order(self) -> bool:
        """Whether the first image comes first, then the second: nothing has to be moved, or copied."""
        return bool((self.image[1:] >= self.image[:-1]).all())


def image_index(tape: Tape) -> dict[Value, Axis]:
    """The images of each value; a value whose entries mix images, or for which this is unknown, is missing."""
    images = tape.image.shape[0]
    if images == 1:
        values = [tape.image, *(value for node in tape.nodes for value in node.outputs if value.shape)]
        return {value: Axis(0, torch.zeros(value.shape[0], dtype=torch.int64)) for value in values}
    numbers = torch.arange(1.0, images + 1, dtype=torch.float32, device=tape.image.tensor.device)

    def fresh(shape: torch.Size) -> Tensor:
        return numbers.reshape(-1, *[1] * (len(shape) - 1))

    numbering = Numbering(fresh, lambda index: None)
    axes = {value: _axis_of(index, value.shape) for value, index in _followed(tape, numbering, _filled).items()}
    return {value: axis for value, axis in axes.items() if axis is not None}


def _axis_of(index: Tensor, shape: Sequence[int]) -> Axis | None:
    """The axis that the image depends on."""
    for axis, size in enumerate(shape):
        rows = index.movedim(axis, 0)
        rows = rows.reshape(len(rows), -1)
        high = rows.amax(1)
        low = torch.where(rows == 0, torch.inf, rows).amin(1)
        if high.min() > 0 and torch.equal(low, high):
            return Axis(axis, (high - 1).long().expand(size))
    return None


def _filled(index: Tensor) -> Tensor:
    """The class token of an image belongs to it: an unknown entry gets the image of the others on its axis."""
    found = _axis_of(index, index.shape) if bool((index == 0).any()) else None
    if found is None:
        return index
    return (found.image + 1).float().reshape([-1 if i == found.axis else 1 for i in range(index.dim())])


# ------------------------------------------------------------------------------------------------ following the tape


def _followed(tape: Tape, numbering: Numbering, finish: Callable[[Tensor], Tensor]) -> dict[Value, Tensor]:
    """The indices of each value: those of the image, or of the last feature map, moved along."""
    found = {tape.image: numbering.fresh(tape.image.shape)}
    with torch.no_grad():
        for node in tape.nodes:
            known = [found.get(value) for value in node.inputs]
            if all(index is None for index in known) and not (numbering.restarts and node.op in _POOLS):
                continue
            for value, index in zip(node.outputs, _through(node, known, tape, numbering), strict=True):
                if index is not None and index.numel() and _fits(index.shape, value.shape):
                    found[value] = finish(index) if node.op in _MOVES else index
    return found


def _through(node: Node, known: list[Tensor | None], tape: Tape, numbering: Numbering) -> Sequence[Tensor | None]:
    """The indices of a node's outputs."""
    out = node.outputs[0].shape
    if node.op in _COPIES:
        return known[:1]
    if node.op in _RESHAPES:  # not by the operation itself: `view` refuses indices that are stored once
        return [None if known[0] is None else _reshaped(known[0], node.inputs[0].shape, out)]
    if node.op in _MOVES:
        return _moved(node, known)
    if node.op in _POOLS:
        whole = len(out) > 2 and out[0] == node.inputs[0].shape[0] == tape.image.shape[0]
        return [numbering.fresh(out) if whole else _of_first_axis(known[0], out), *[None] * (len(node.outputs) - 1)]
    if node.op in _UNIT_BY_UNIT:
        return [_broadcast(known, out)]
    if node.op in _REDUCTIONS:
        return [_reduced(node, known[0], numbering), *[None] * (len(node.outputs) - 1)]
    if node.op == "linear" and known[0] is not None and known[0].shape[-1] > 1:  # it reads several places
        known = [numbering.merged(known[0]), *known[1:]]
    index = _at_rows(node, known, out)
    if index is None and node.op not in _PRODUCTS:  # an operation on a batch keeps it
        index = _of_first_axis(known[0], out)
    return [index, *[None] * (len(node.outputs) - 1)]


def _moved(node: Node, known: list[Tensor | None]) -> Sequence[Tensor | None]:
    """Run the operation on the indices."""

    def given(value: Value, index: Tensor | None) -> Tensor:
        if not value.tensor.is_floating_point():  # it says where to move
            return value.tensor
        index = value.tensor.new_zeros((), dtype=torch.float32) if index is None else index
        index = index.expand(value.shape)
        return index.contiguous() if node.op in _BY_STRIDE else index

    def moved(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        return node.call(*inputs, constants=lambda constant: torch.zeros_like(constant, dtype=torch.float32))

    inputs = [given(value, index) for value, index in zip(node.inputs, known, strict=True)]
    found = moved(inputs)
    if node.op not in _FILL:
        return [_thin(index) for index in found]
    # A number that is filled in is no index: it is the same if all indices are larger by 1.
    larger = moved([index + 1 if index.is_floating_point() else index for index in inputs])
    return [_thin(torch.where(a == b, 0, a)) for a, b in zip(found, larger, strict=True)]


def _reshaped(index: Tensor, before: torch.Size, after: torch.Size) -> Tensor | None:
    return _thin(index.expand(before).reshape(after)) if before.numel() == after.numel() else None


def _broadcast(known: list[Tensor | None], shape: torch.Size) -> Tensor | None:
    """The indices of the first operand that has any; where it has none, those of the next."""
    present = [index for index in known if index is not None and _fits(index.shape, shape)]
    if not present:
        return None
    index = present[0]
    for other in present[1:]:
        if bool((index == 0).any()):
            index = torch.where(index == 0, other, index)
    return index.reshape([1] * (len(shape) - index.dim()) + list(index.shape))


def _fits(small: Sequence[int], large: Sequence[int]) -> bool:
    pairs = zip(reversed(small), reversed(large), strict=False)
    return len(small) <= len(large) and all(a in (1, b) for a, b in pairs)


def _reduced(node: Node, index: Tensor | None, numbering: Numbering) -> Tensor | None:
    """A mean or a sum over axes along which the index is the same, or over blocks of places: a pool, written out."""
    named = node.arguments()
    axes, keep = named.get("dim"), bool(named.get("keepdim", False))
    if index is None or axes is None:
        return None
    high, low = index.amax(axes, keep), index.amin(axes, keep)
    if torch.equal(high, low):
        return high
    each = sorted(axis % index.dim() for axis in ((axes,) if isinstance(axes, int) else axes))
    together = index.movedim(each, list(range(-len(each), 0))).flatten(-len(each))
    blocks = numbering.merged(together)
    return None if blocks is None else blocks.reshape(high.shape)


def _of_first_axis(index: Tensor | None, shape: torch.Size) -> Tensor | None:
    """The index of the first axis, if it depends on no other."""
    if index is None or index.numel() != index.shape[0] or not shape or index.shape[0] not in (1, shape[0]):
        return None
    return index.reshape(-1, *[1] * (len(shape) - 1))


def _at_rows(node: Node, known: list[Tensor | None], shape: torch.Size) -> Tensor | None:
    """Linear layers, matrix products and attention compute each row of the output from that row of their input.

    If the rows are constants (a learnt query), the other operand gives the axes before them.
    """
    if node.op == "einsum":
        return _of_letters(node, known, shape)
    named = node.arguments()
    source = next((named[name] for name in ("query", "mat1", "batch1", "input") if name in named), None)
    if isinstance(source, Value):
        return _rows_of(dict(zip(node.inputs, known, strict=True))[source], shape)
    *_, last = known
    return None if last is None else _rows_of(_same_along(last, -2), shape)


def _rows_of(index: Tensor | None, shape: torch.Size) -> Tensor | None:
    rows = None if index is None else _same_along(index, -1)
    return None if rows is None else _broadcast([rows], shape)


def _same_along(index: Tensor, axis: int) -> Tensor | None:
    """The index, if it is the same everywhere on an axis."""
    return index if index.dim() >= -axis and index.shape[axis] == 1 else None


def _of_letters(node: Node, known: list[Tensor | None], shape: torch.Size) -> Tensor | None:
    """einsum: an operand's axes by their letters; those that the output lacks must not matter."""
    equation = node.args[0] if isinstance(node.args[0], str) else ""
    left, _, right = equation.replace(" ", "").partition("->")
    operands = node.args[1] if isinstance(node.args[1], tuple | list) else node.args[1:]
    by_value = dict(zip(node.inputs, known, strict=True))
    for letters, operand in zip(left.split(","), operands, strict=False):
        index = by_value.get(operand) if isinstance(operand, Value) else None
        if index is None or "." in equation or not right:
            continue
        for place, letter in reversed(list(enumerate(letters))):
            if letter not in right and index is not None:
                index = _same_along(index, place - len(letters))
        if index is not None:
            return _laid_out(index, letters, right)
    return None


def _laid_out(index: Tensor, letters: str, right: str) -> Tensor:
    """The axes of an operand, named by `letters`, in the order of the output."""
    kept = "".join(letter for letter in letters if letter in right)
    index = index.reshape([n for n, letter in zip(index.shape, letters, strict=True) if letter in right])
    index = index.permute([kept.index(letter) for letter in right if letter in kept])
    sizes = iter(index.shape)
    return index.reshape([next(sizes) if letter in kept else 1 for letter in right])


def _thin(index: Tensor) -> Tensor:
    """The indices with one entry along each axis on which they do not change."""
    for axis in range(index.dim()):
        one = index.narrow(axis, 0, min(1, index.shape[axis]))
        if index.stride(axis) == 0 or bool((index == one).all()):
            index = one
    return index.clone()


# ------------------------------------------------------------------------------------------------------------- places

Grid = tuple[int, ...]  # the number of places along each axis


@dataclass(frozen=True, eq=False)
class Places:
    """The place of each entry of a value on the grid of a feature map of whole images."""

    grid: Grid
    index: Tensor  # 1 to h*w, of a shape that broadcasts to the value's; 0: no place, such as a class token

    def on_grid(self, share: Tensor, axis: Axis, images: int) -> Tensor:
        """Relevance (K, *shape), summed over channels, heads and windows: (K, images, h, w)."""
        # What lies on one place is added first: channels, if they are not on the axis of the images.
        index = self.index.reshape([1] * (share.dim() - 1 - self.index.dim()) + list(self.index.shape))
        alike = [1 + i for i, size in enumerate(index.shape) if size == 1 and i != axis.axis]
        share = share.sum(alike, keepdim=True) if alike else share
        index = index.expand(share.shape[1:])[None]
        places = axis.first(index, images)[0].flatten(1).long()  # (images, entries)
        values = axis.first(share, images).flatten(2)
        found = values.new_zeros(*values.shape[:2], math.prod(self.grid) + 1)
        found.scatter_add_(2, places.expand(values.shape), values)
        on_grid: Tensor = found[..., 1:].unflatten(2, self.grid)
        return on_grid


def place_index(tape: Tape) -> dict[Value, Places]:
    """The places of each value that was computed place by place from a feature map (B, C, h, w).

    Attention computes each token from all others; its output belongs to the place of the query. A linear layer that
    reads 2 x 2 neighbours at once makes a coarser grid, and so does a sum over them; entries that are repeated, as a
    nearest-neighbour interpolation does, make a finer one.
    """
    grids: dict[int, Grid] = {}
    axes = len(tape.image.shape) - 2

    def fresh(shape: torch.Size) -> Tensor:
        count = math.prod(shape[2:]) if len(shape) - 2 == axes else 0  # a convolution over channels has no places
        if count:
            grids[count] = tuple(shape[2:])
        index = torch.arange(1.0, count + 1, dtype=torch.float32, device=tape.image.tensor.device)
        return index.reshape(1, 1, *shape[2:]) if count else index.new_zeros([1] * len(shape))

    def finer(index: Tensor) -> Tensor:
        grid, sizes = grids.get(int(index.max())), index.shape[2:]
        if grid is None or len(sizes) != axes or sizes == grid or any(a % b for a, b in zip(sizes, grid, strict=True)):
            return index
        repeated = torch.arange(1.0, math.prod(grid) + 1).to(index).reshape(1, 1, *grid)
        for axis, (size, before) in enumerate(zip(sizes, grid, strict=True), 2):
            repeated = repeated.repeat_interleave(size // before, axis)
        return fresh(torch.Size([1, 1, *sizes])) if torch.equal(index, repeated) else index

    def merged(index: Tensor) -> Tensor | None:
        grid = grids.get(int(index.max()))
        coarser = None if grid is None else _coarser(index, grid)
        if coarser is None:
            return None
        sizes, numbers = coarser
        fresh(torch.Size([1, 1, *sizes]))
        return numbers

    found = _followed(tape, Numbering(fresh, merged, restarts=True), finer)
    last = {value: grids.get(int(index.max())) for value, index in found.items() if index.numel()}
    return {value: Places(grid, found[value]) for value, grid in last.items() if grid is not None}


def _coarser(index: Tensor, grid: Grid) -> tuple[Grid, Tensor] | None:
    """Blocks of places, each read by one row (..., C) of a linear layer: the grid of blocks, and the block of each row.

    None if a row reads anything else than a whole block, or if the blocks do not cover the grid once.
    """
    rows = index.flatten(0, -2).long()  # (rows, C)
    if not bool((rows > 0).all()):
        return None
    at = torch.stack(torch.unravel_index(rows - 1, grid))  # (axes, rows, C)
    low, high = at.amin(2), at.amax(2)  # (axes, rows)
    block = (high - low)[:, 0] + 1
    sizes = [size // side for size, side in zip(grid, block.tolist(), strict=True)]
    number = torch.zeros_like(low[0])
    for axis, size in enumerate(sizes):
        number = number * size + low[axis] // block[axis]
    ordered = rows.sort(1).values
    distinct = (ordered[:, 1:] != ordered[:, :-1]).sum(1) + 1
    whole = bool((distinct == block.prod()).all())
    aligned = bool((low % block[:, None] == 0).all()) and bool((high - low + 1 == block[:, None]).all())
    once = torch.equal(number.sort().values, torch.arange(math.prod(sizes), device=number.device))
    if math.prod(sizes) < 2 or not (whole and aligned and once):
        return None
    return tuple(sizes), (number + 1.0).reshape(*index.shape[:-1], 1).float()
