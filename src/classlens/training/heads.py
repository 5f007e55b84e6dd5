"""Finds the head of a network and replaces it by one for other classes.

>>> backbone = with_new_head("torchvision:vgg16", "vgg16_features.safetensors", classes=20, hidden=(512, 512))
>>> backbone.head
Head(path='classifier', sizes=(25088, 512, 512, 20), dropout=0.5)
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from classlens.core.capture import pick_output
from classlens.errors import ModelError
from classlens.models import LoadedModel, Preprocess, load
from classlens.models._text import some
from classlens.models.cards import Card, read_card
from classlens.models.checkpoint import read_weights
from classlens.models.heads import Head, replace_head
from classlens.models.network import input_size

_PASSING = (nn.ReLU, nn.Dropout, nn.Identity, nn.Flatten)  # modules between fully connected layers


@dataclass(frozen=True)
class Backbone:
    """A network with a new head: the published body, the head with random weights."""

    name: str
    loaded: LoadedModel
    head: Head
    overrides: Mapping[str, Any] = field(default_factory=dict)  # of the card that describes the body

    @property
    def model(self) -> nn.Module:
        return self.loaded.model

    @property
    def head_path(self) -> str:
        return self.head.path

    @property
    def head_module(self) -> nn.Module:
        return self.model.get_submodule(self.head.path)

    def features(self, images: Tensor) -> Tensor:
        """The features of the images, (B, inputs of the head)."""
        seen: list[Tensor] = []
        hook = self.head_module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            with torch.no_grad():
                self.model(images)
        finally:
            hook.remove()
        return seen[0].float()


def with_new_head(
    name: str,
    weights: str | os.PathLike[str] | None,
    classes: int,
    hidden: Sequence[int] = (),
    dropout: float = 0.5,
    seed: int = 0,
) -> Backbone:
    """A network by name or card, with a new head for other classes.

    `weights` may be a file without weights for the head (only the convolutions). With `hidden` layers, all fully
    connected layers at the end are replaced, otherwise only the last one.
    """
    card = _card_of(name)
    from_file = weights is not None and weights != "default"
    loaded = load(name, None if from_file else weights)
    if card is not None and card.head is not None:  # the new head takes the place of the card's
        path, inputs = card.head.path, card.head.sizes[0]
    else:
        path, inputs = find_head(loaded.model, loaded.preprocess, whole=bool(hidden))
    head = Head(path, (inputs, *hidden, classes), dropout if hidden else 0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        replace_head(loaded.model, head)
    if from_file and weights is not None:
        _fill_body(loaded.model, head, weights)
    return Backbone(name, loaded, head) if card is None else Backbone(card.architecture, loaded, head, card.overrides)


def _card_of(name: str | os.PathLike[str]) -> Card | None:
    """The card, if the backbone is one."""
    path = Path(name)
    if not path.exists() and path.suffix != ".json":
        return None
    if path.is_file() and path.suffix != ".json":
        raise ModelError(
            f"--backbone {name} is a file; give the name of a network or a card, and pass the file with --weights"
        )
    card = read_card(path)
    if card.pyramid is not None:
        raise ModelError(f"--backbone {name} is a segmentation network, which has no head for classes; give another")
    return card


def find_head(model: nn.Module, preprocess: Preprocess, whole: bool = False) -> tuple[str, int]:
    """The path of the linear layer that computes the logits, and its number of inputs.

    `whole`: the module with all fully connected layers at the end, such as VGG's `classifier`, if there is one. A
    backbone without a head may end with `nn.Identity` instead, in the place of the head.
    """
    calls, logits = _leaf_calls(model, preprocess)
    linear = [i for i, (_, module, _) in enumerate(calls) if isinstance(module, nn.Linear)]
    if not linear or not _same(calls[linear[-1]][2], logits):
        if calls and isinstance(calls[-1][1], nn.Identity) and _same(calls[-1][2], logits) and logits.dim() == 2:
            return calls[-1][0], logits.shape[1]
        last = type(calls[-1][1]).__name__ if calls else "nothing"
        raise ModelError(
            f"no head was found that could be replaced: the logits must be the output of a linear layer, and the last "
            f"layer is a {last}; a backbone without a head must end with an nn.Identity in its place and return (B,D)"
        )
    name, module, _ = calls[linear[-1]]
    end = _fully_connected_end(model, calls[: linear[-1] + 1]) if whole else None
    return end or (name, _inputs(module))


def _leaf_calls(model: nn.Module, preprocess: Preprocess) -> tuple[list[tuple[str, nn.Module, Tensor]], Tensor]:
    """(name, module, output) of every leaf module that a forward pass calls, in order, and the logits."""
    calls: list[tuple[str, nn.Module, Tensor]] = []

    def keep(name: str, module: nn.Module, output: Tensor) -> None:
        calls.append((name, module, output))

    hooks = [
        module.register_forward_hook(lambda module, _, output, name=name: keep(name, module, output))
        for name, module in model.named_modules()
        if not list(module.children())
    ]
    try:
        with torch.no_grad():
            logits = pick_output(model(torch.zeros(1, 3, *input_size(preprocess))), None)
    finally:
        for hook in hooks:
            hook.remove()
    return calls, logits


def _fully_connected_end(model: nn.Module, calls: Sequence[tuple[str, nn.Module, Tensor]]) -> tuple[str, int] | None:
    """The module that holds only the linear layers at the end and the activations between them."""
    chain: list[tuple[str, nn.Module]] = []
    for name, module, _ in reversed(calls):
        if not isinstance(module, (nn.Linear, *_PASSING)):
            break
        chain.insert(0, (name, module))
    for path, module in model.named_modules():  # outermost first
        leaves = [f"{path}.{name}" for name, leaf in module.named_modules() if name and not list(leaf.children())]
        if path and leaves and calls[-1][0] in leaves and set(leaves) <= {name for name, _ in chain}:
            return path, next(
                _inputs(layer) for name, layer in chain if name in leaves and isinstance(layer, nn.Linear)
            )
    return None


def _fill_body(model: nn.Module, head: Head, path: str | os.PathLike[str]) -> None:
    """Load the weights of everything except the head; the weights of another head in the file are ignored."""
    inside = f"{head.path}."
    state = {key: value for key, value in read_weights(path).items() if not key.startswith(inside)}
    try:
        missing, unexpected = model.load_state_dict(state, strict=False)
    except RuntimeError:  # torch lists every shape that differs
        raise ModelError(f"{os.fspath(path)} does not fit the network: weights of another shape") from None
    # Some files lack the batch counters, which have no effect in eval mode.
    missing = [key for key in missing if not key.startswith(inside) and not key.endswith("num_batches_tracked")]
    if missing or unexpected:
        raise ModelError(
            f"{os.fspath(path)} does not fit the network: {some(missing)} weights missing outside the head, "
            f"{some(unexpected)} unexpected"
        )


def _inputs(module: nn.Module) -> int:
    assert isinstance(module, nn.Linear)
    return module.in_features


def _same(a: object, b: Tensor) -> bool:
    return isinstance(a, Tensor) and a.shape == b.shape and torch.equal(a, b)
