"""Which numbers of a forward pass to explain: picked from the network's result, or from inside one of its layers.

>>> Reading((Pick(("out",), index=(15, 40, 60)),))        # the logit of class 15 at one pixel, for each image
>>> Reading((Pick(layer="layer3", index=(7,)),))          # channel 7 of a layer, at all its positions

A reading only selects, so that the evidence for a number is found by the rules of the network alone. It gives the
output (B,n) of a tape, and targets combine its n numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from classlens.core.capture.recorder import Recorder
from classlens.core.capture.tape import Node, Value
from classlens.core.names import near
from classlens.core.ops import LINEAR_OPS
from classlens.errors import TargetError

Inside = Callable[[str], list[Tensor]]  # the name of a layer -> its outputs, one for each call


@dataclass(frozen=True)
class Pick:
    """Some numbers of each image: an index into a part of the result, or into the output of a layer."""

    path: tuple[str | int, ...] = ()  # keys and indices that lead to a tensor of the result
    layer: str | None = None  # instead: the layer whose output it is
    call: int = -1  # which call of the layer
    index: tuple[int, ...] = ()  # after the batch axis; what is left is flattened
    unit: bool = False  # divided by its length: the numbers of a direction
    rows: bool = False  # the first axis is not that of the images, and `index` includes it; for a single image
    chosen: bool = False  # the network chose from the image what the index means: another image has something else

    def of(self, result: Any, inside: Inside) -> Tensor:
        """(B,n)."""
        found = at_path(result, self.path) if self.layer is None else inside(self.layer)[self.call]
        if self.rows:
            return found[self.index].reshape(1, -1)
        index: tuple[slice | int, ...] = (slice(None), *self.index)
        flat: Tensor = found[index].reshape(len(found), -1)
        return F.normalize(flat, dim=1) if self.unit else flat


@dataclass(frozen=True)
class Reading:
    """All numbers that the targets of an explanation read, side by side."""

    picks: tuple[Pick, ...]
    output: Any = None  # how to select the part of the result that paths start from, as in `pick_output`

    @property
    def layers(self) -> frozenset[str]:
        """The layers that it looks into."""
        return frozenset(pick.layer for pick in self.picks if pick.layer is not None)

    @property
    def one_pass(self) -> bool:
        """Whether its indices mean something in this forward pass alone: proposals depend on the image."""
        return any(pick.rows or pick.chosen for pick in self.picks)

    def read(self, result: Any, inside: Inside) -> Tensor:
        """(B,n): the numbers of all picks."""
        parts = [pick.of(result, inside) for pick in self.picks]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def at_path(result: Any, path: Sequence[str | int]) -> Any:
    """The part of nested dicts, tuples and lists that a path leads to."""
    for key in path:
        result = result[key]
    return result


# ------------------------------------------------------------------------------------------------------ inside layers


def is_inside(node: Node, layer: str) -> bool:
    """Whether an operation was called in a layer or in one of its parts."""
    return node.module == layer or node.module.startswith(f"{layer}.")


def last_of_calls(nodes: Sequence[Node], layer: str) -> list[Node]:
    """The last operation of each call of a layer; operations outside the layer separate two calls.

    A linear layer is one operation, so each of its operations is a call.
    """
    found: list[Node] = []
    previous: Node | None = None
    for node in nodes:
        if is_inside(node, layer):
            same_call = bool(found) and found[-1] is previous and not (node.op in LINEAR_OPS and node.module == layer)
            found[-1 if same_call else len(found) :] = [node]
        previous = node
    if not found:
        raise TargetError(f"no operation was recorded in a layer {layer!r}{near(layer, layer_names(nodes))}")
    return found


def layer_names(nodes: Sequence[Node]) -> set[str]:
    """The names of all layers in which operations were recorded, and of the modules that hold them."""
    names = {".".join(n.module.split(".")[:i]) for n in nodes for i in range(1, n.module.count(".") + 2)}
    return names - {""}


def inside_of(recorder: Recorder | None) -> Inside:
    """The outputs of layers in a forward pass that was recorded."""

    def outputs(layer: str) -> list[Tensor]:
        assert recorder is not None, "layers are read in recorded passes alone"
        live = recorder.live()
        values = [node.outputs[0] for node in last_of_calls(recorder.nodes, layer)]
        return [live[value] for value in values if value in live]

    return outputs


def chosen_values(nodes: Sequence[Node]) -> set[Value]:
    """What a network computes of candidates that it chose by their values: proposals, the best queries.

    Its rows mean something on this image alone, and its positions are not those of the image.
    """
    found: set[Value] = set()
    for node in nodes:
        if node.op in ("topk", "sort", "argsort", "argmax", "nonzero", "nms") or not found.isdisjoint(node.inputs):
            found.update(node.outputs)
    return found


def before(nodes: Sequence[Node], node: Node) -> set[Node]:
    """All operations that an operation depends on."""
    producer = {made: one for one in nodes for made in one.outputs}
    found: set[Node] = set()
    todo = list(node.inputs)
    while todo:
        one = producer.get(todo.pop())
        if one is not None and one not in found:
            found.add(one)
            todo.extend(one.inputs)
    return found


def last_linear(nodes: Sequence[Node], value: Value) -> list[Node]:
    """The weight layers nearest to a value, with no other weight layer in between."""
    producer = {made: node for node in nodes for made in node.outputs}
    found, todo, seen = [], [value], set()
    while todo:
        node = producer.get(todo.pop())
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.op in LINEAR_OPS:
            found.append(node)
        else:
            todo.extend(node.inputs)
    return found
