"""Removal of channels: the class should vanish sooner if the channels with most evidence go first.

The channels of one layer are set to 0 in an order, more and more of them, and the rest of the network runs again. The
order is that of the evidence that `classlens concepts` divides into concepts, of the channels' relevance by the method,
of their activation, of their gradient, of the product of the two, or random. The sooner the probability of the class
falls, the better the order finds the channels that it depends on. The layer is the finest one at which
`classlens concepts` looks for concepts: nearer to the logits most orders agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from classlens.concept.evidence import evidence
from classlens.concept.flow import can_follow, flow
from classlens.concept.layers import candidates
from classlens.core.capture import Tape, folded
from classlens.evaluate.metrics import Metric, lists, mean
from classlens.evaluate.panels import Panel
from classlens.evaluate.registry import Config, Test, Values, register
from classlens.evaluate.scene import Explained, Scene, number
from classlens.evaluate.stats import Floats
from classlens.methods.featuremaps import FeatureMap, spatial_cuts
from classlens.methods.tail import Tail

if TYPE_CHECKING:
    import pyarrow as pa

    from classlens.evaluate.tables import Table

FRACTIONS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)  # of the channels that are removed
ORDERS = ("evidence", "relevance", "activation", "gradient", "product", "random")


def curve(tail: Tail, layer: FeatureMap, strength: Tensor, targets: Tensor) -> Tensor:
    """(B,1+fractions): the probability of classes (B,) while the strongest channels (B,C) go; that of all is first."""
    features = layer.as_map(layer.value.tensor)
    rank = strength.argsort(dim=1, descending=True, stable=True).argsort(1)
    found = []
    for fraction in (0.0, *FRACTIONS):
        gone = (rank < round(fraction * strength.shape[1]))[..., None, None]
        with torch.no_grad():
            logits = tail(layer.value.tensor - layer.restored((features * gone)[None])[0])
        found.append(logits.double().softmax(1).gather(1, targets[:, None].to(logits.device))[:, 0].cpu())
    return torch.stack(found, 1)


def strengths(scene: Scene, layer: FeatureMap, config: Config) -> dict[str, Tensor]:
    """(B,C): how strong each channel is, by every order that needs no part of the network above."""
    features = layer.as_map(layer.value.tensor)
    hot = torch.nn.functional.one_hot(scene.predicted, scene.tape.logits.shape[1]).to(scene.tape.logits)
    gradients = layer.as_map(scene.tape.gradients(hot[None], [layer.value])[layer.value])[0]
    drawn = [
        torch.rand(features.shape[1], generator=torch.Generator().manual_seed(number(config["seed"], name)))
        for name in scene.names
    ]
    return {
        "activation": features.abs().mean((2, 3)),
        "gradient": gradients.abs().mean((2, 3)),
        "product": (features * gradients).mean((2, 3)),
        "random": torch.stack(drawn).to(features.device),
    }


def layer_of(tape: Tape) -> FeatureMap | None:
    """The finest layer with concepts; in a network without coarse maps the deepest map; None without any."""
    found = candidates(tape)[-1:] or spatial_cuts(folded(tape))[:1]
    return found[0] if found else None


def curves(scene: Scene, layer: FeatureMap, config: Config, method: str) -> dict[str, Tensor]:
    """The curve of each order; a method whose relevance cannot be followed has none."""
    tail = Tail.after(scene.tape, layer.value, "channels cannot be removed from this layer")
    orders = strengths(scene, layer, config)
    orders["evidence"] = evidence(tail, layer, scene.predicted)[0].sum((2, 3))
    if can_follow(method):
        targets = scene.predicted[:, None].to(scene.tape.logits.device)
        relevance = flow(scene.tape, scene.network.module, targets, method, layer, scene.network.loaded.multilabel)
        orders["relevance"] = relevance.relevance[0].sum((2, 3))
    with scene.watch("further forward"):
        return {name: curve(tail, layer, strength, scene.predicted) for name, strength in orders.items()}


def _score(scene: Scene, config: Config, found: Explained) -> list[Values]:
    layer = layer_of(scene.tape)
    measured = {} if layer is None else curves(scene, layer, config, found.method)
    nothing = torch.full((len(scene.rows), 1 + len(FRACTIONS)), torch.nan)
    return [
        {"explained": explained} | {name: measured.get(name, nothing)[row].tolist() for name in ORDERS}
        for row, explained in enumerate(found.explained("predicted"))
    ]


def area(rows: pa.Table, order: str) -> Floats:
    """The mean height of each curve, by trapezoids over the removed fraction, with that of the clean image as 1."""
    return under(lists(rows, order))


def under(curves: Floats) -> Floats:
    """The same of curves (n,1+fractions)."""
    widths = np.diff((0.0, *FRACTIONS))
    found: Floats = (curves[:, 1:] + curves[:, :-1]) / 2 @ widths / widths.sum() / curves[:, 0]
    return found


def _area(order: str) -> Callable[[pa.Table], Floats]:
    return lambda rows: mean(area(rows, order))


def _sooner(order: str) -> Callable[[pa.Table], Floats]:
    return lambda rows: mean(area(rows, order) - area(rows, "evidence"))


def _panels(table: Table, rows: Mapping[str, pa.Table]) -> list[Panel]:
    found = []
    x = (0.0, *(100 * fraction for fraction in FRACTIONS))
    for order in ORDERS:
        lines = {
            method: 100 * np.mean(curves / curves[:, :1], 0)
            for method, part in rows.items()
            if not np.isnan(curves := lists(part, order)).any()
        }
        title = f"by {order}: {table.data}"
        found.append(Panel(title, "probability, % of the clean one", "channels removed, %", x, lines=lines))
    return found


register(
    Test(
        name="removal",
        question="does the class vanish sooner if the channels with most evidence are removed first?",
        columns={"explained": "int32"} | dict.fromkeys(ORDERS, "list<float64>"),
        metrics=lambda config: (
            Metric("AUC, relevance", -1, _area("relevance")),
            Metric("AUC, evidence", -1, _area("evidence")),
            *(Metric(f"{order} less evidence", +1, _sooner(order)) for order in ORDERS[1:]),
        ),
        title=lambda config: "Removal of channels",
        remark=lambda config: (
            "Area under the probability of the predicted class while up to half of a layer's channels are removed, "
            "those with most relevance by the method first, in % of the clean probability; lower is better. Then the "
            "same by the evidence of `classlens concepts`, and how much larger the area is if they are removed by the "
            "method's relevance, by activation, by gradient, by the product of both, or at random; above 0, the "
            "evidence finds the channels sooner. Methods whose relevance cannot be followed have no values by "
            "relevance, and networks without feature maps have none."
        ),
        needs=frozenset({"classes"}),
        constants={"fractions": FRACTIONS, "orders": ORDERS},
        score=_score,
        panels=_panels,
        place=48,
    )
)
