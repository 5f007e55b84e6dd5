"""The roles of layers: which layers read the image, which compute the logits, ...

They are found on the tape, so this works for any architecture.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from classlens.core.capture import (
    Axis,
    Node,
    Places,
    Point,
    Tape,
    Value,
    has_own_gradient,
    image_index,
    last_linear,
    place_index,
)
from classlens.core.ops import LINEAR_OPS, SEVERAL_OUTPUTS, Kind, of_kind
from classlens.core.rules.linear import linear_map
from classlens.core.rules.propagate import smallest_peak, without_denormals
from classlens.errors import MethodError
from classlens.methods.places import convolution

_ACTIVATIONS, _NORMS, _RESHAPES = of_kind(Kind.ACTIVATION), of_kind(Kind.NORM), of_kind(Kind.RESHAPE)
_COPIES = of_kind(Kind.SAME, Kind.COPY)
_JOINS = of_kind(Kind.JOIN)
# Each output value is one of the input values.
_MOVES = _COPIES | of_kind(Kind.RESHAPE, Kind.MOVE, Kind.JOIN, Kind.CHOICE, Kind.MAX_POOL, Kind.MAXIMUM, Kind.MINIMUM)
# Sums of live values, however they are written (`a + b`, `stack().sum(0)`, a mean, a pool): Def. 1 with signed values.
SIGNED_SUMS = of_kind(Kind.ADDITION, Kind.SUM, Kind.AVERAGE_POOL, Kind.MAX_POOL) - {"grid_sample"} | {"amax"}
_ARITHMETIC = of_kind(Kind.ADDITION, Kind.DIVISION) | {"mul"}


def last_layers(tape: Tape) -> list[Node]:
    """The weight layers nearest to the logits: usually one linear layer, or a 1x1 convolution before a pool."""
    found = last_linear(tape.nodes, tape.output)
    if not found:
        raise MethodError("the model has no linear or convolutional layer, so there is no evidence to propagate")
    return found


def head_layers(tape: Tape) -> list[Node]:
    """The start of the head: the last weight layers, or the first of the dense layers that lead to them.

    Some networks end with several dense layers. Only a chain of dense layers is followed: the head ends at a branch,
    and at a value that still has spatial positions.
    """
    nodes = last_layers(tape)
    while len(nodes) == 1 and (before := _dense_before(tape, nodes[0])):
        nodes = [before]
    return nodes


def _dense_before(tape: Tape, node: Node) -> Node | None:
    """The weight layer before `node`, with only element-wise operations in between."""
    value = linear_map(node).value
    while _places(value) == 1 and len(tape.consumers[value]) == 1 and value in tape.producer:
        node = tape.producer[value]
        if node.op in LINEAR_OPS:
            return node if _places(linear_map(node).value) == 1 else None
        if len(node.inputs) != 1:
            return None
        value = node.inputs[0]
    return None


def _places(value: Value) -> int:
    """The number of spatial positions of a value: 1 for (B,C) and (B,C,1,1)."""
    return math.prod(value.shape[2:])


def first_layers(tape: Tape) -> set[Node]:
    """The weight layers that read the image itself, possibly padded, sliced, joined or rescaled before."""
    found, pixels = set(), {tape.image}  # values that hold only pixels of the image
    for node in tape.nodes:
        if node.op in LINEAR_OPS:
            if node.arguments()["input"] in pixels:
                found.add(node)
        elif pixels.issuperset(node.inputs):
            rescales = node.op in _ARITHMETIC and len(node.inputs) == 1
            if node.op in _MOVES or rescales:
                pixels.update(node.outputs)
    return found


def meets_activation_first(tape: Tape, node: Node) -> bool:
    """Whether the output of a layer passes an activation before it is added to something (or used twice)."""
    value = node.outputs[0]
    while True:
        users = tape.consumers.get(value, [])
        if len(users) != 1:
            return bool(users) and all(user.op in _ACTIVATIONS for user in users)
        (user,) = users
        if user.op in _ACTIVATIONS:
            return True
        if (whole := _joined_again(tape, user)) is not None:
            value = whole
            continue
        alone = len(user.inputs) == 1 and user.op not in SEVERAL_OUTPUTS
        if user.op not in _NORMS and not (alone and user.op in _MOVES | _ARITHMETIC):  # scaling is a norm by hand
            return False
        value = user.outputs[0]


def _joined_again(tape: Tape, node: Node) -> Value | None:
    """The value that holds all pieces of a split side by side, as they were before; None for anything else."""
    users = {user for piece in node.outputs for user in tape.consumers.get(piece, [])}
    if node.op not in SEVERAL_OUTPUTS or len(users) != 1:
        return None
    (user,) = users
    whole = user.outputs[0]
    same = user.inputs == node.outputs and whole.shape == node.inputs[0].shape
    return whole if user.op in _JOINS and same and torch.equal(whole.tensor, node.inputs[0].tensor) else None


def spatial_before_flatten(tape: Tape, value: Value) -> tuple[int, ...] | None:
    """(C, *places) of the feature map that was flattened into `value`, or None."""
    node = tape.producer.get(value)
    while node is not None and node.op in _COPIES:
        value = node.inputs[0]
        node = tape.producer.get(value)
    if node is None or node.op not in _RESHAPES or value.tensor.dim() != 2:
        return None
    source = node.inputs[0].shape
    whole = source[0] == value.shape[0] == tape.image.shape[0]  # a row for each image, not for each token
    is_map = whole and len(source) == len(tape.image.shape) and math.prod(source[2:]) > 1
    return tuple(source[1:]) if is_map else None


def is_spatial_conv(tape: Tape, node: Node) -> bool:
    """A convolution over the positions of the image whose kernel is larger than 1x1."""
    return node.op == convolution(tape) and any(k > 1 for k in linear_map(node).kernel)


def own_gradient(tape: Tape, node: Node, gradients: Mapping[Point, Tensor]) -> Tensor:
    """The gradient at the input of a layer, *through that layer*: W^T g_out.

    If the input has no other use, this is autograd's gradient at the input. Otherwise it is what autograd passes on
    within the layer or, where that cannot be told, one adjoint.
    """
    if node in gradients:
        return gradients[node]
    layer = linear_map(node)
    if len(tape.consumers[layer.value]) == 1:
        return gradients[layer.value]
    gradient = gradients[node.outputs[0]]
    return layer.adjoint(without_denormals(gradient, smallest_peak([gradient])), layer.weight)


def gradient_points(tape: Tape, nodes: Iterable[Node]) -> list[Point]:
    """Where `own_gradient` needs gradients."""

    def point(node: Node) -> Point:
        value = linear_map(node).value
        if len(tape.consumers[value]) == 1:
            return value
        return node if has_own_gradient(node) else node.outputs[0]

    return [point(node) for node in nodes]


def evidence_at(tape: Tape, nodes: Iterable[Node], gradients: Mapping[Point, Tensor]) -> dict[Value, Tensor]:
    """Phi^(1) = x * gradient at the inputs of layers: {value: (K, *shape)}.

    The gradient is the one through that layer, so an input with several uses is not counted twice.
    """
    found: dict[Value, Tensor] = {}
    for node in nodes:
        layer = linear_map(node)
        share = layer.x * own_gradient(tape, node, gradients)
        found[layer.value] = found[layer.value] + share if layer.value in found else share
    return found


# -------------------------------------------------------------------------------------------------------------- tokens


@dataclass(frozen=True, eq=False)
class Tokens:
    """What a linear layer reads: the patches of each image, in whatever layout, and tokens without a place.

    Patches may lie on one axis or on several, before or after the images, or cut into windows.
    """

    places: Places
    axis: Axis
    images: int
    shape: torch.Size  # of the value; the channels are last

    def as_map(self, t: Tensor) -> Tensor:
        """(K, *shape) as a feature map (K, B, C, tokens, 1): the factorisation needs positions, not their layout."""
        return self.axis.first(t, self.images).flatten(2, -2).mT[..., None]

    def restored(self, found: Tensor) -> Tensor:
        """The inverse of `as_map`."""
        return self.axis.restored(found[..., 0].mT, self.shape)

    def on_grid(self, share: Tensor) -> Tensor:
        """Relevance (K, *shape), summed over channels: (K, B, *places)."""
        return self.places.on_grid(share, self.axis, self.images)


def token_layers(tape: Tape, nodes: Iterable[Node]) -> dict[Node, Tokens]:
    """The linear layers that read the patches of an image.

    Each place of the grid has one token; others, such as a class token, registers or padding, have no place.
    """
    layers = {node: node.inputs[0] for node in nodes if node.op == "linear" and len(node.inputs) == 1}
    if not layers:
        return {}
    images, places, count = image_index(tape), place_index(tape), tape.image.shape[0]
    return {
        node: Tokens(places[value], images[value], count, value.shape)
        for node, value in layers.items()
        if value in places and value in images and _each_place_once(places[value], value, count)
    }


def _each_place_once(places: Places, value: Value, images: int) -> bool:
    every = math.prod(places.grid)
    if places.index.shape[-1] != 1 or every == 1:  # a layer that mixes places, or one without any
        return False
    index = places.index.expand(*value.shape[:-1], 1).flatten().long()
    return bool((index.bincount(minlength=every + 1)[1:] == images).all())
