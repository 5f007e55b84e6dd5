"""Replaces the head of a network, as described by a card.

>>> replace_head(model, Head("classifier", (25088, 512, 512, 20), dropout=0.5))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from classlens.errors import ModelError

_MOST_WEIGHTS = 10**9  # 4 GB; VGG's head has an eighth of that


@dataclass(frozen=True)
class Head:
    """Fully connected layers that replace one module: `sizes` are inputs, hidden layers, classes.

    >>> Head("fc", (2048, 20))                                        # one linear layer
    >>> Head("classifier", (25088, 4096, 4096, 20), dropout=0.5)      # like VGG's
    """

    path: str
    sizes: tuple[int, ...]
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if len(self.sizes) < 2 or not all(type(size) is int and size > 0 for size in self.sizes):
            raise ModelError(f"head: sizes must be positive integers, inputs first, classes last, not {self.sizes}")
        weights = sum(before * after for before, after in zip(self.sizes[:-1], self.sizes[1:], strict=True))
        if weights > _MOST_WEIGHTS:
            raise ModelError(f"head: sizes make more than {_MOST_WEIGHTS:,} weights; check them")
        if not self.path:
            raise ModelError("head: path must name a module of the network")
        if not 0 <= self.dropout < 1:
            raise ModelError(f"head: dropout must be in [0, 1), not {self.dropout}")

    def build(self) -> nn.Module:
        """The layers with random weights; ReLU and dropout follow each hidden layer."""
        layers: list[nn.Module] = []
        for before, after in zip(self.sizes[:-1], self.sizes[1:], strict=True):
            layers += [nn.Linear(before, after), nn.ReLU(inplace=True), nn.Dropout(self.dropout)]
        return layers[0] if len(self.sizes) == 2 else nn.Sequential(*layers[:-2])

    def to_json(self) -> dict[str, Any]:
        return {"path": self.path, "sizes": list(self.sizes), "dropout": self.dropout}

    @classmethod
    def from_json(cls, data: Any) -> Head:
        known = {"path", "sizes", "dropout"}
        good = isinstance(data, dict) and {"path", "sizes"} <= set(data) <= known
        if not good or not isinstance(data["path"], str) or not isinstance(data["sizes"], list):
            raise ModelError('head must be {"path": "fc", "sizes": [2048, 20]}, optionally with "dropout"')
        dropout = data.get("dropout", 0.0)
        if type(dropout) not in (int, float):
            raise ModelError(f"head: dropout must be a number, not {dropout!r}")
        return cls(data["path"], tuple(data["sizes"]), float(dropout))


def replace_head(model: nn.Module, head: Head) -> None:
    """Replace a module by a new head with random weights."""
    if head.path not in dict(model.named_modules()):
        raise ModelError(f"head: the network has no module {head.path!r}")
    parent, _, name = head.path.rpartition(".")
    setattr(model.get_submodule(parent), name, head.build().train(model.training))
