"""The feature map that a class activation map shows: found on the tape, for any architecture.

A classifier pools its last feature map, so its score reads every position of it, and that map is the one to show. A
target of a segmentation network or a detector reads a few positions of the last maps. Averaging a gradient over
positions that the target does not read would lose where the target is. So such a target gets the deepest map of which
it reads every position or, if there is none, the coarsest map: usually the end of the encoder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from classlens.core.capture import Tape, Value
from classlens.core.capture.reading import chosen_values, is_inside, layer_names
from classlens.core.names import near
from classlens.core.ops import LINEAR_OPS, NEAREST, Kind, channels_last, of_kind
from classlens.errors import MethodError
from classlens.methods.inputs import whole
from classlens.methods.places import convolution
from classlens.methods.registry import Case

_AVERAGES, _SUMS = of_kind(Kind.AVERAGE_POOL), ("mean", "sum")
_KEEP_VALUES = of_kind(Kind.SAME, Kind.COPY, Kind.RESHAPE, Kind.MOVE, Kind.JOIN, Kind.DIVISION) | {"mul"}
_MOST_EXTRA_TOKENS = 16  # class, distillation and register tokens besides the patches


@dataclass(frozen=True, eq=False)
class FeatureMap:
    """A recorded value and how to read it as a map."""

    value: Value
    as_map: Callable[[Tensor], Tensor]  # (..., *shape without batch) -> (..., C, *places)
    above: int  # weight layers between it and the logits

    def places(self) -> int:
        """The number of its positions."""
        return math.prod(self.as_map(self.value.tensor).shape[2:])

    def restored(self, maps: Tensor) -> Tensor:
        """The inverse of `as_map`: (N,B,C,*places) -> (N, *shape); 0 where the value has no place (a class token)."""
        shape = self.value.shape
        entry = self.as_map(torch.arange(shape[1:].numel(), device=maps.device).reshape(1, *shape[1:])).flatten()
        found = maps.new_zeros(*maps.shape[:2], shape[1:].numel())
        found[..., entry] = maps.flatten(2)
        whole: Tensor = found.unflatten(2, shape[1:])
        return whole


def spatial_cuts(tape: Tape) -> list[FeatureMap]:
    """Feature maps with more than one position that all evidence passes through; the deepest first.

    No skip connection or branch bypasses such a map. The input of an average pool is preferred to its output: it holds
    the same evidence in more detail. Proposals have positions of their own, so their maps do not count.
    """
    cuts, frontier, above = [], {tape.output}, 0
    others = averaged(tape) | chosen_values(tape.nodes)
    for node in reversed(tape.nodes):
        frontier.difference_update(node.outputs)
        frontier.update(node.inputs)
        above += node.op in LINEAR_OPS
        if len(frontier) == 1:
            (value,) = frontier
            found = feature_map(tape, value, above)
            if found is not None and value is not tape.image and value not in others:
                cuts.append(found)
    return cuts


def averaged(tape: Tape) -> set[Value]:
    """The outputs of average pools, also of those written out as sums over windows, and copies of them."""
    found: set[Value] = set()
    axes = len(tape.image.shape)  # of a map; its windows have one more for each axis of places
    for node in tape.nodes:
        before, after = len(node.inputs[0].shape), len(node.outputs[0].shape)
        pooled = node.op in _AVERAGES or (node.op in _SUMS and (before, after) == (2 * axes - 2, axes))
        if pooled or (node.op in _KEEP_VALUES and found.issuperset(node.inputs)):
            found.update(node.outputs)
    return found


def feature_map(tape: Tape, value: Value, above: int = 0) -> FeatureMap | None:
    """A value read as (B,C,*places), (B,*places,C) or tokens (B,n,C), whichever it is; None without positions.

    Places are (h,w) or, in a network for volumes or videos, (d,h,w). Maps of proposals, with their own positions, are
    none of the image.
    """
    shape = value.shape
    if shape[:1] != tape.image.shape[:1]:
        return None
    if len(shape) == len(tape.image.shape):
        last = channels_last(shape, tape.image.shape[2:])
        if math.prod(shape[1:-1] if last else shape[2:]) > 1:
            return FeatureMap(value, _channels_last(len(shape) - 2) if last else _channels_first, above)
    if len(shape) == 3:
        for grid in _grids(tape, shape[2]):
            extra = shape[1] - math.prod(grid)
            if 0 <= extra <= _MOST_EXTRA_TOKENS:
                return FeatureMap(value, _tokens(extra, grid), above)
    return None


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


@dataclass(frozen=True, eq=False)
class Seen:
    """A feature map for some of the targets: its values and the gradients of these targets there."""

    pairs: list[tuple[int, int]] | None  # (k, image) of the targets; None: all of them
    features: Tensor  # (B,C,*places)
    gradients: Tensor  # (K,B,C,*places)
    note: str = ""


def chosen_maps(case: Case, cotangents: Tensor, layer: str | None, shallower: int) -> Iterator[Seen]:
    """The map of a named layer, or the deepest map that all evidence passes through and that the targets read wholly.

    Targets that read a part of that map get an earlier one.
    `shallower=n` selects the first map with at least n weight layers between it and that one.
    """
    whole(0, shallower=shallower)
    if layer is not None:
        yield _read(case, cotangents, named_map(case.tape, layer))
        return
    cuts = spatial_cuts(case.tape)
    if not cuts:
        raise MethodError(
            "the model has no spatial feature map that all of its evidence passes through; "
            "use a relevance or gradient method such as lrp or integrated-gradients"
        )
    deepest, gradients = _with_gradients(case, cotangents, cuts)
    read = share_read(cuts[deepest].as_map(gradients))  # (K,B)
    wholly = (read == 1) | (read == 0)
    if wholly.any():
        yield replace(
            _read(case, cotangents, _further_up(cuts, deepest, shallower), None if shallower else gradients),
            pairs=None if wholly.all() else _pairs(wholly),
        )
    if not wholly.all():
        yield from _earlier(case, cotangents, _pairs(~wholly), shallower)


def _with_gradients(case: Case, cotangents: Tensor, cuts: list[FeatureMap]) -> tuple[int, Tensor]:
    """The deepest map at whose positions the targets have gradients, and the gradients of its value.

    After the last attention of a transformer, only the class token has gradients; the patches have none.
    """
    deepest, gradients = 0, case.tape.gradients(cotangents, [cuts[0].value])[cuts[0].value]
    while gradients.any() and not cuts[deepest].as_map(gradients).any() and deepest + 1 < len(cuts):
        deepest += 1
        gradients = case.tape.gradients(cotangents, [cuts[deepest].value])[cuts[deepest].value]
    return deepest, gradients


def share_read(gradients: Tensor) -> Tensor:
    """(K,B): the share of the positions of a map at which a target has a gradient in any channel.

    >>> share_read(torch.tensor([[1.0, 0.0], [0.0, 0.0]])[None, None, None])
    tensor([[0.2500]], dtype=torch.float64)
    """
    return (gradients != 0).any(2).flatten(2).double().mean(2)


def _pairs(where: Tensor) -> list[tuple[int, int]]:
    return [(int(k), int(b)) for k, b in where.nonzero()]


def _earlier(case: Case, cotangents: Tensor, pairs: list[tuple[int, int]], shallower: int) -> Iterator[Seen]:
    """For each target, the deepest map that it reads wholly or, if there is none, the coarsest map that it reads."""
    maps = all_maps(case.tape)
    if not maps:
        raise MethodError(
            "the target reads only a part of the last feature map, and there is no earlier one; use a relevance or "
            "gradient method such as lrp or integrated-gradients"
        )
    for k in dict.fromkeys(k for k, _ in pairs):
        gradients = case.tape.gradients(cotangents[k : k + 1], [found.value for found in maps])
        shares = torch.stack([share_read(found.as_map(gradients[found.value]))[0] for found in maps])  # (maps,B)
        for image in [b for other, b in pairs if other == k]:
            read = shares[:, image].tolist()
            best = min((i for i, share in enumerate(read) if share), key=lambda i: (read[i] < 1, maps[i].places(), i))
            seen = _read(case, cotangents[k : k + 1], _further_up(maps, best, shallower))
            size = "x".join(map(str, seen.features.shape[2:]))
            part = "" if read[best] == 1 else f", of which it reads {100 * read[best]:.2g} %"
            yield Seen(
                [(k, image)], seen.features, seen.gradients.expand(len(cotangents), *seen.gradients.shape[1:]),
                f"the target reads a part of the last feature map; shown is an earlier one, {size}{part}",
            )  # fmt: skip


def all_maps(tape: Tape) -> list[FeatureMap]:
    """The cuts, and all maps that a convolution or an upsampling reads; the deepest first.

    With no weight layer above it, a map is the network's own output: logits for each pixel or query.
    """
    found = {cut.value: cut for cut in spatial_cuts(tape) if cut.above}
    read_maps = convolution(tape), convolution(tape, transposed=True), "interpolate", NEAREST
    others = averaged(tape) | chosen_values(tape.nodes)
    above, depth = 0, {value: i for i, node in enumerate(tape.nodes) for value in node.outputs}
    for node in reversed(tape.nodes):
        above += node.op in LINEAR_OPS
        value = node.arguments()["input"] if above and node.op in read_maps else None
        if value not in depth or value in others or value.shape[0] != tape.image.shape[0]:
            continue
        if math.prod(value.shape[2:]) > 1:
            found.setdefault(value, FeatureMap(value, _channels_first, above))
    return sorted(found.values(), key=lambda one: -depth[one.value])


def _further_up(maps: list[FeatureMap], start: int, shallower: int) -> FeatureMap:
    """The first map at least `shallower` weight layers above maps[start]."""
    reached = [found for found in maps[start:] if found.above - maps[start].above >= shallower]
    if not reached:
        most = maps[-1].above - maps[start].above
        raise MethodError(f"shallower={shallower} is not possible; the shallowest map is {most} weight layers up")
    return reached[0]


def _read(case: Case, cotangents: Tensor, found: FeatureMap, gradients: Tensor | None = None) -> Seen:
    if gradients is None:
        gradients = case.tape.gradients(cotangents, [found.value])[found.value]
    return Seen(None, found.as_map(found.value.tensor), found.as_map(gradients))


def named_map(tape: Tape, layer: str) -> FeatureMap:
    """The last output of a module."""
    inside = [node for node in tape.nodes if is_inside(node, layer)]
    if not inside:
        hint = near(layer, layer_names(tape.nodes))
        raise MethodError(f"no operation was recorded in a layer {layer!r}{hint}")
    found = feature_map(tape, inside[-1].outputs[0])
    if found is None:
        shape = tuple(inside[-1].outputs[0].shape)
        raise MethodError(
            f"the layer {layer!r} returns {shape}, which is not a spatial feature map; name an earlier layer"
        )
    return found
