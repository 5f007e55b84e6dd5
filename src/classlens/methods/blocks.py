"""Attention, found on the tape: its weights, the places of its tokens, and the blocks of a transformer.

Attention may be written as one fused operation, or as softmax between two products:

    >>> [found.node.op for found in attentions(tape)]
    ['scaled_dot_product_attention', 'scaled_dot_product_attention', 'softmax']
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from classlens.core.capture import Axis, Grid, Node, Places, Tape, Value, image_index, place_index
from classlens.core.ops import LINEAR_OPS, Kind, of_kind
from classlens.core.rules.attention import fused_weights, repeated_heads
from classlens.errors import MethodError

_PRODUCTS = of_kind(Kind.PRODUCT) - {"mul"}
_SCALES = of_kind(Kind.ADDITION, Kind.DIVISION, Kind.SAME, Kind.COPY, Kind.RESHAPE) | {"mul", "masked_fill", "where"}
_ON_THE_WAY = _SCALES | of_kind(Kind.MOVE, Kind.NORM) | {"linear"}
_ADDITIONS = of_kind(Kind.ADDITION)


@dataclass(frozen=True, eq=False)
class Attention:
    """One attention of a recorded network. Windows of an image count as heads of it."""

    node: Node  # the fused operation, or the softmax
    weights: Tensor  # (B, heads, queries, keys)
    keys: Places | None  # the places of the keys; None: unknown
    axis: Axis  # where the images are in its weights, as it lays them out
    images: int

    @property
    def output(self) -> Value:
        """The value whose gradient `gradient` needs."""
        return self.node.outputs[0]

    def gradient(self, at_output: Tensor) -> Tensor:
        """(K, B, heads, queries, keys): the gradient at the weights, from that at the output (K, *shape).

        d(A v) = dA v, so it is the gradient at A v times the values.
        """
        if self.node.op == "softmax":
            return self.by_head(at_output)
        values = repeated_heads(self.node, _tensor(self.node.arguments()["value"]))
        return self.by_head(at_output @ values.mT)

    def by_head(self, t: Tensor) -> Tensor:
        """(K, ..., queries, keys), in the layout of the operation, as (K, B, heads, queries, keys)."""
        rows = self.axis.first(t, self.images)[:, :, None]  # a single image may have no axis besides its tokens
        return rows.flatten(2, -3)


def attentions(tape: Tape, needed_by: str) -> list[Attention]:
    """Every attention of a network, in the order of the forward pass; an error if it has none."""
    found = find_attentions(tape)
    if not found:
        raise MethodError(f"{needed_by} needs attention, and this network has none; use agf or lrp")
    return found


def find_attentions(tape: Tape) -> list[Attention]:
    """Every attention of a network, in the order of the forward pass."""
    images, places = image_index(tape), place_index(tape)
    return [one for node in tape.nodes if (one := _attention(tape, node, images, places)) is not None]


def _attention(tape: Tape, node: Node, images: dict[Value, Axis], places: dict[Value, Places]) -> Attention | None:
    output = node.outputs[0]
    count = tape.image.shape[0]
    if node.op == "softmax":
        product = _scored_by(tape, node)
        if product is None or output not in images:
            return None
        weights, read = output.tensor, product.inputs
    elif node.op == "scaled_dot_product_attention":
        named = node.arguments()
        weights, read = fused_weights(node), (named["query"], named["key"])
    else:
        return None
    axis = images.get(output)
    if axis is None or (count > 1 and axis.axis in _token_axes(node)):
        raise MethodError(f"the images cannot be told apart at {node.where}; explain one image at a time")
    one = Attention(node, weights, _places_of_keys(weights, [places.get(value) for value in read]), axis, count)
    return replace(one, weights=one.by_head(weights[None])[0])


def _token_axes(node: Node) -> tuple[int, ...]:
    """The axes of an output on which only tokens of one image may lie: attention would mix images there."""
    axes = len(node.outputs[0].shape)
    return axes - 2, axes - 1


def _places_of_keys(weights: Tensor, read: Sequence[Places | None]) -> Places | None:
    """The places of the keys, from those of what the scores read: queries and keys, or keys alone.

    Tokens that attend to each other must be in one order, or the attention of two blocks could not be multiplied.
    """
    keys = read[-1]
    if weights.shape[-1] != weights.shape[-2] or keys is None:
        return keys
    return keys if _same_order(read[0], keys, keys.index.numel()) else None


def _same_order(a: Places | None, b: Places | None, tokens: int) -> bool:
    if a is None or b is None:
        return False
    return a.index.numel() == tokens and torch.equal(a.index.flatten(), b.index.flatten())


def _scored_by(tape: Tape, node: Node) -> Node | None:
    """The product that gives the scores of a softmax over the last axis, if its output goes into another product."""
    named, value = node.arguments(), node.inputs[0]
    if named.get("dim") not in (-1, len(value.shape) - 1) or len(value.shape) < 3 or value.shape[-1] < 2:
        return None
    before = tape.producer.get(value)
    while before is not None and before.op in _SCALES:
        before = tape.producer.get(before.inputs[0])
    found = before is not None and before.op in _PRODUCTS and bool(_products_with(tape, node.outputs[0]))
    return before if found else None


def _products_with(tape: Tape, weights: Value) -> list[Node]:
    """The products of attention weights, possibly scaled or reshaped, with values."""
    users = tape.consumers.get(weights, [])
    while len(users) == 1 and users[0].op in _SCALES:
        users = tape.consumers.get(users[0].outputs[0], [])
    return [user for user in users if user.op in _PRODUCTS]


def _tensor(argument: Value | Tensor) -> Tensor:
    return argument.tensor if isinstance(argument, Value) else argument


# ----------------------------------------------------------------------------------------------- tokens of one grid


def one_grid(found: Sequence[Attention], needed_by: str) -> Grid:
    """The patch grid that every attention reads as a whole, for methods that multiply attention of all blocks."""
    tokens = found[0].weights.shape[-1]
    for position, one in enumerate(found):
        queries, keys = one.weights.shape[-2:]
        pools = position == len(found) - 1 and queries < keys
        if keys != tokens or (queries != keys and not pools):
            raise MethodError(
                f"{needed_by} multiplies the attention of all blocks, so all must have the same tokens; "
                f"{one.node.where} has {queries} queries and {keys} keys after {tokens} tokens; use attnlrp or agf"
            )
    places = found[0].keys
    other = next((one for one in found if not _same_order(places, one.keys, tokens)), None)
    if places is None or other is not None:
        raise MethodError(
            f"{needed_by} multiplies the attention of all blocks; in {(other or found[0]).node.where} the patches of "
            "an image are cut into windows, or they are in no order that can be read; use attnlrp or agf"
        )
    return places.grid


# ------------------------------------------------------------------------------------------------------------ blocks


def block_inputs(tape: Tape, found: Sequence[Attention]) -> list[Value]:
    """The input of each block: the value that its attention reads and that is added to what comes out.

    The sum skips the attention, so the value is found upwards from the attention, through norms and projections.
    """
    inputs: list[Value] = []
    for one in found:
        value: Value | None = one.node.inputs[0]
        while value is not None and not _is_added(tape, value):
            node = tape.producer.get(value)
            value = node.inputs[0] if node is not None and node.op in _ON_THE_WAY | _PRODUCTS else None
        if value is not None and value not in inputs:
            inputs.append(value)
    return inputs


def _is_added(tape: Tape, value: Value) -> bool:
    users = tape.consumers.get(value, [])
    return len(users) > 1 and any(user.op in _ADDITIONS and len(user.inputs) == 2 for user in users)


def last_output(tape: Tape, block: Value) -> Value:
    """The output of the last block: the last sum of two live values of the shape of its input."""
    sums = [n for n in tape.nodes if n.op in _ADDITIONS and len(n.inputs) == 2 and n.outputs[0].shape == block.shape]
    return sums[-1].outputs[0] if sums else block


def projections(tape: Tape, found: Sequence[Attention]) -> set[Node]:
    """The linear layers that make queries, keys and values, and those that read what attention gives."""
    layers: set[Node] = set()
    for one in found:
        todo = list(one.node.inputs)
        if one.node.op == "softmax":  # it reads queries and keys alone
            todo += [value for product in _products_with(tape, one.output) for value in product.inputs]
        while todo:
            node = tape.producer.get(todo.pop())
            if node is None or node in layers:
                continue
            if node.op in LINEAR_OPS:
                layers.add(node)
            elif node.op in _ON_THE_WAY | _PRODUCTS and node.op not in of_kind(Kind.NORM):
                todo.extend(node.inputs)
        layers.update(_readers(tape, one.node.outputs[0]))
    return layers


def _readers(tape: Tape, value: Value) -> list[Node]:
    """The linear layers that a value reaches by moves, and by the product with the values."""
    found: list[Node] = []
    moves = of_kind(Kind.MOVE, Kind.RESHAPE, Kind.COPY, Kind.SAME) | _PRODUCTS
    todo = [value]
    while todo:
        for node in tape.consumers.get(todo.pop(), []):
            if node.op in LINEAR_OPS:
                found.append(node)
            elif node.op in moves:
                todo.extend(node.outputs)
    return found
