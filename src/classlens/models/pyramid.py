"""A small segmentation head on any backbone: a feature pyramid, as a card describes it.

>>> pyramid = Pyramid(("_blocks.4", "_blocks.10", "_blocks.15"), (40, 112, 320), classes=21)
>>> Segmenter(efficientnet_lite0, pyramid)(images).shape          # (B,21,H/8,W/8)

Three feature maps of the body, of 1/8, 1/16 and 1/32 of the input (or what comes nearest), are brought to one width by
1x1 convolutions, added from coarse to fine, and a 3x3 convolution and the classifier follow (FPN, Lin et al. 2017).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from classlens.errors import ModelError
from classlens.models._text import reason

_WIDTH = 128
_STRIDES = (8, 16, 32)


@dataclass(frozen=True)
class Pyramid:
    """Which layers of the body the head reads, finest first, their channels, and the number of classes."""

    layers: tuple[str, ...]
    channels: tuple[int, ...]
    classes: int

    def __post_init__(self) -> None:
        numbers = (*self.channels, self.classes)
        if len(self.layers) != len(self.channels) or not self.layers or len(set(self.layers)) < len(self.layers):
            raise ModelError("pyramid: give the names of different layers, and the channels of each")
        if not all(type(number) is int and 0 < number < 10**5 for number in numbers):
            raise ModelError(f"pyramid: channels and classes must be positive integers, not {numbers}")

    def to_json(self) -> dict[str, Any]:
        return {"layers": list(self.layers), "channels": list(self.channels), "classes": self.classes}

    @classmethod
    def from_json(cls, data: Any) -> Pyramid:
        good = isinstance(data, dict) and set(data) == {"layers", "channels", "classes"}
        lists = good and all(isinstance(data[key], list) for key in ("layers", "channels"))
        if not lists or not all(isinstance(name, str) for name in data["layers"]):
            raise ModelError('pyramid must be {"layers": ["layer2", ...], "channels": [128, ...], "classes": 21}')
        return cls(tuple(data["layers"]), tuple(data["channels"]), data["classes"])


class PyramidHead(nn.Module):
    """Feature maps, finest first -> logits (B,classes,h,w) of the finest map's size."""

    def __init__(self, pyramid: Pyramid) -> None:
        super().__init__()
        self.lateral = nn.ModuleList([nn.Conv2d(channels, _WIDTH, 1) for channels in pyramid.channels])
        self.mix = nn.Sequential(
            nn.Conv2d(_WIDTH, _WIDTH, 3, padding=1, bias=False), nn.BatchNorm2d(_WIDTH), nn.ReLU(inplace=True)
        )
        self.classify = nn.Conv2d(_WIDTH, pyramid.classes, 1)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        *finer, found = [layer(x) for layer, x in zip(self.lateral, maps, strict=True)]
        for x in reversed(finer):
            found = x + F.interpolate(found, size=x.shape[2:], mode="bilinear", align_corners=False)
        logits: Tensor = self.classify(self.mix(found))
        return logits


class Segmenter(nn.Module):
    """A body without its own head, and a pyramid head."""

    def __init__(self, body: nn.Module, pyramid: Pyramid) -> None:
        super().__init__()
        self.body, self.head = cut(body, pyramid.layers), PyramidHead(pyramid)
        self.train(body.training)

    def forward(self, images: Tensor) -> Tensor:
        """(B,3,H,W) -> logits (B,classes,h,w)."""
        logits: Tensor = self.head(self.body(images))
        return logits


class _Outside(fx.Tracer):
    """Looks only into modules that hold one of the layers; all others stay as they are."""

    def __init__(self, layers: Sequence[str]) -> None:
        super().__init__()
        self.layers = layers

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not _holds(module_qualified_name, self.layers)


def cut(body: nn.Module, layers: Sequence[str]) -> fx.GraphModule:
    """A network that returns the outputs of these layers, without what comes after them; it shares the weights."""
    try:
        graph = _Outside(layers).trace(body)
    except Exception as error:  # control flow that depends on values, or anything in the user's code
        raise ModelError(f"the backbone cannot be cut at its layers ({reason(error)}): use another one") from error
    calls = {layer: [n for n in graph.nodes if n.op == "call_module" and n.target == layer] for layer in layers}
    wrong = [layer for layer, found in calls.items() if len(found) != 1]
    if wrong:
        raise ModelError(f"pyramid: the backbone has no layer {wrong[0]!r} that is called once")
    for node in [n for n in graph.nodes if n.op == "output"]:
        graph.erase_node(node)
    graph.output(tuple(calls[layer][0] for layer in layers))
    made = fx.GraphModule(body, graph)
    made.graph.eliminate_dead_code()
    made.recompile()
    made.delete_all_unused_submodules()
    return made.train(body.training)


def find_pyramid(body: nn.Module, size: tuple[int, int], classes: int) -> Pyramid:
    """The last blocks whose outputs have 1/8, 1/16 and 1/32 of the input's size (H,W), and that are called once.

    A block is a module of other modules. The outermost is taken, since a block inside a coarser one is not finished.
    """
    seen: dict[str, list[tuple[int, ...]]] = {}

    def keep(name: str, output: Any) -> None:
        seen.setdefault(name, []).append(tuple(output.shape) if isinstance(output, Tensor) else ())

    blocks = [(name, module) for name, module in body.named_modules() if name and list(module.children())]
    hooks = [module.register_forward_hook(lambda m, _, y, name=name: keep(name, y)) for name, module in blocks]
    try:
        weight = next(body.parameters())
        with torch.no_grad():
            body(torch.zeros(1, 3, *size).to(weight))
    finally:
        for hook in hooks:
            hook.remove()
    maps = {name: shapes[0] for name, shapes in seen.items() if len(shapes) == 1 and len(shapes[0]) == 4}
    found: dict[str, int] = {}
    for stride in _STRIDES:
        wanted = tuple(-(-length // stride) for length in size)
        fitting = [name for name, shape in maps.items() if shape[2:] == wanted and not _holds(name, found)]
        fitting.sort(key=lambda name: -name.count("."))  # keeps the order of the calls
        if fitting:
            found[fitting[-1]] = maps[fitting[-1]][1]
    if len(found) < 2:
        raise ModelError(
            "the backbone has no feature maps of 1/8, 1/16 and 1/32 of its input that a segmentation head could read"
        )
    return Pyramid(tuple(found), tuple(found.values()), classes)


def _holds(name: str, others: Iterable[str]) -> bool:
    return any(other.startswith(f"{name}.") for other in others)
