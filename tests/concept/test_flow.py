"""Relevance through channels: conserved, and equal to a slow second derivation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import classlens
from classlens.concept.flow import Flow, flow, followed
from classlens.core.capture import folded, record
from classlens.core.method_text import written
from classlens.errors import MethodError
from classlens.methods import METHODS
from classlens.methods.featuremaps import named_map, spatial_cuts
from networks import build, inputs

FOLLOWED = [written(name, one.linear) for name, one in METHODS.items() if one.linear is not None]


class Two(nn.Module):
    """A bottom with a skip connection, and a top that is not linear."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.more = nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.top, self.head = nn.Conv2d(6, 8, 3, padding=1), nn.Linear(8, 4)

    def bottom(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        return torch.relu(x + self.more(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.top(self.bottom(x))).mean((2, 3)))


class Bottom(nn.Module):
    """The units of the layer as outputs."""

    def __init__(self, two: Two) -> None:
        super().__init__()
        self.two = two

    def forward(self, x: Tensor) -> Tensor:
        return self.two.bottom(x).flatten(1)


def _flow(model: nn.Module, x: Tensor, targets: Tensor, method: str, at_once: int | None = None) -> Flow:
    tape = record(model, x)
    layer = next(cut for cut in spatial_cuts(folded(tape)) if cut.above > 1)
    found = flow(tape, model, targets, method, layer)
    return found if at_once is None else Flow(found.layer, found.relevance, found.onward, at_once)


@pytest.mark.parametrize("method", FOLLOWED)
def test_the_channels_of_a_layer_sum_to_the_map(method: str) -> None:
    model, x, targets = Two().eval().double(), torch.rand(2, 3, 12, 12).double(), torch.tensor([[1, 3], [0, 2]])
    whole = classlens.explain(model, x, targets, method).maps
    channels = _flow(model, x, targets, method, at_once=4).channels(range(6))
    assert channels.shape == (6, 2, 2, 12, 12)
    torch.testing.assert_close(channels.sum(0).transpose(0, 1), whole, rtol=1e-9, atol=1e-12 * float(whole.abs().max()))
    assert (channels.abs().flatten(1).amax(1) > 0).sum() > 3


@pytest.mark.parametrize("method", ["lrp", "lrp-ab", "lrp-epsilon-plus-flat"])
def test_a_channel_is_the_sum_over_its_units(method: str) -> None:
    """Slowly: the map of each unit of the layer by itself, times its relevance per activation."""
    model, x = Two().eval().double(), torch.rand(1, 3, 8, 8).double()
    found = _flow(model, x, model(x).argmax(1)[:, None], method)
    per_unit = torch.where(found.features == 0, 0, found.relevance[0] / found.features).flatten()
    units = classlens.explain(Bottom(model).eval(), x, torch.arange(len(per_unit))[None], method).maps[0]
    slow = (units * per_unit[:, None, None]).unflatten(0, (6, -1)).sum(1)
    fast = found.channels(range(6))[:, 0, 0]
    assert fast.abs().amax() > 0
    torch.testing.assert_close(fast, slow, rtol=1e-8, atol=1e-12 * float(slow.abs().max()))


@pytest.mark.parametrize("name", ["residual", "dense-head"])
def test_a_layer_by_name_in_other_networks(name: str) -> None:
    model, x = build(name).double(), inputs(name, 1).double()
    tape = record(model, x)
    for cut in spatial_cuts(folded(tape)):
        found = flow(tape, model, torch.tensor([[2]]), "lrp-epsilon-plus-flat", cut)
        whole = classlens.explain(model, x, 2, "lrp-epsilon-plus-flat").maps
        maps = found.channels(range(found.relevance.shape[2])).sum(0)[:, 0]
        torch.testing.assert_close(maps, whole[:, 0], rtol=1e-8, atol=1e-10 * float(whole.abs().max()))


def test_the_order_of_tokens_is_restored() -> None:
    model, x = build("tokens"), inputs("tokens", 2)
    tape = record(model, x)
    cut = spatial_cuts(tape)[0]
    maps = cut.as_map(cut.value.tensor)
    restored = cut.restored(maps[None])
    torch.testing.assert_close(cut.as_map(restored), maps[None])
    assert restored.shape == (1, *cut.value.shape)


def test_a_method_whose_rules_are_not_linear_is_refused() -> None:
    with pytest.raises(
        MethodError, match=r"^the relevance of agf cannot be followed in parts; choose one of agf\(only=C\), lrp, .*"
    ):
        followed("agf")
    with pytest.raises(MethodError, match=r"cannot be followed"):
        followed("gradcam")


def test_a_layer_that_is_folded_away_is_refused() -> None:
    model, x = build("plain"), inputs("plain", 1)
    tape = record(model, x)
    with pytest.raises(MethodError, match="no relevance arrives at this layer"):
        flow(tape, model, torch.tensor([[0]]), "lrp", named_map(tape, "features.4"))
