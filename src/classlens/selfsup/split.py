"""Splits a network into two parts: features that compute a latent, and the linear head that reads it.

>>> encoder = split(model, images[:1])
>>> encoder.head.name, encoder.latents(images).shape
('classifier', torch.Size([4, 1280]))

The call of the head is recognised by its weight. Nothing is attached to the model, so two threads may use it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from classlens.core import ops
from classlens.core.capture import Node, Picker, Tape, pick_output, record, unwrap
from classlens.errors import ModelError
from classlens.methods.layers import last_layers

NO_HEAD = "none"  # the name of the head of a network whose output is its latent

Layer = Callable[[Tensor], Tensor]  # the linear map of the head
Reader = Callable[[Layer, Tensor], Tensor]  # (that map, the latent) -> the replacement of its output


@dataclass(frozen=True, eq=False)
class Head:
    """The linear layer that reads the latent (B,D)."""

    name: str  # its module, or NO_HEAD
    weight: Tensor  # (outputs,D), by which its call is recognised
    bias: Tensor | None
    last: bool  # whether its output is the logits


@dataclass(frozen=True, eq=False)
class Encoder:
    """A network whose head is known."""

    model: nn.Module  # as given
    network: nn.Module  # the same, or with a head appended
    head: Head
    output: Picker  # which of the network's outputs are the logits

    @torch.no_grad()
    def latents(self, images: Tensor) -> Tensor:
        """The latents (B,D), float32 on the CPU."""
        seen: list[Tensor] = []

        def look(layer: Layer, latent: Tensor) -> Tensor:
            seen.append(latent)
            return layer(latent)

        with AtHead(self.head, look):
            self.network(images)
        return seen[0].float().cpu()

    @torch.no_grad()
    def logits(self, images: Tensor) -> Tensor:
        """The logits (B,classes) of images."""
        return pick_output(self.network(images), self.output)


class AtHead(TorchFunctionMode):
    """While active, replaces the output of the head by `read(layer, latent)`."""

    def __init__(self, head: Head, read: Reader) -> None:
        super().__init__()
        self._head, self._read = head, read

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.linear:
            return func(*args, **kwargs)
        named = ops.arguments("linear", func, args, kwargs)
        if named["weight"] is not self._head.weight:
            return func(*args, **kwargs)
        return self._read(lambda x: func(x, named["weight"], named.get("bias")), named["input"])


class WithoutHead(nn.Module):
    """A network whose output is its latent, followed by an identity head.

    With it, the evidence for a latent starts where that for a class does: at the input of the last linear layer.
    """

    same: Tensor

    def __init__(self, network: nn.Module, latents: Tensor, output: Picker) -> None:
        super().__init__()
        self.network, self._pick = network, output
        self.register_buffer("same", torch.eye(latents.shape[1]).to(latents), persistent=False)
        self.training = network.training

    def forward(self, images: Tensor) -> Tensor:
        return F.linear(pick_output(self.network(images), self._pick).flatten(1), self.same)


def split(model: nn.Module, images: Tensor, head: str | None = None, output: Picker = None) -> Encoder:
    """Find the head of a network with some images (one is enough).

    `head`: None finds the last linear layer; the name of a module selects one (the first of its linear layers); "none"
    means that the network has no head and its output is the latent.
    """
    network = unwrap(model)
    if head == NO_HEAD:
        latents = record(network, images, output).logits.flatten(1)
        behind = WithoutHead(network, latents, output)
        return Encoder(network, behind, Head(NO_HEAD, behind.same, None, last=True), None)
    tape = record(network, images, output)
    if tape.float32:
        raise ModelError("the neighbour contrast needs a network in float32; call model.float() first")
    node = _last_linear(tape) if head is None else _named(tape, head)
    named = node.arguments()
    weight, bias = named["weight"], named.get("bias")
    if not any(weight is own for own in (*network.parameters(), *network.buffers())):
        raise ModelError(
            f"the weight of the head {node.module} is recomputed in every forward pass (weight_norm?), so its call "
            "cannot be recognised; remove the parametrisation first, or give head='none'"
        )
    uses = [other for other in tape.nodes if other.op == "linear" and other.arguments()["weight"] is weight]
    if len(uses) > 1:
        raise ModelError(f"the head {node.module} is used {len(uses)} times in one forward pass; name another head")
    return Encoder(network, network, Head(node.module, weight, bias, last=node.outputs[0] is tape.output), output)


def _last_linear(tape: Tape) -> Node:
    nodes = last_layers(tape)
    if len(nodes) > 1 or nodes[0].op != "linear":
        raise ModelError(
            f"the model has no linear head: its last layer is {nodes[0].where}; give the name of its head, or "
            "head='none' if its output is the latent itself"
        )
    return _reads_vectors(nodes[0])


def _named(tape: Tape, head: str) -> Node:
    inside = [node for node in tape.nodes if f"{node.module}.".startswith(f"{head}.")]
    linear = [node for node in inside if node.op == "linear"]
    if not linear:
        known = dict.fromkeys(node.module for node in tape.nodes if node.op == "linear")
        raise ModelError(f"the model has no linear layer in {head!r}; its linear layers: {', '.join(known) or 'none'}")
    return _reads_vectors(linear[0])


def _reads_vectors(node: Node) -> Node:
    if len(node.inputs[0].shape) != 2:
        shape = tuple(node.inputs[0].shape)
        raise ModelError(f"the head {node.module} reads a tensor of shape {shape}, not one latent for each image")
    return node
