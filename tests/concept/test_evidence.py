"""Evidence at a layer: it sums to the logit, is the integral of the gradient, and balances within a place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from classlens.concept import evidence as module
from classlens.concept.evidence import STEPS, by_sign, evidence
from classlens.core.capture import folded, record
from classlens.methods.featuremaps import FeatureMap, spatial_cuts
from classlens.methods.tail import Tail
from networks import build, inputs


class Bent(nn.Module):
    """A layer with features, and a top that is not linear in them."""

    def __init__(self, bias: float) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.stem, self.top, self.head = nn.Conv2d(3, 5, 4, stride=4), nn.Conv2d(5, 7, 1), nn.Linear(7, 3)
        nn.init.constant_(self.top.bias, bias)

    def above(self, x: Tensor) -> Tensor:
        return self.head(torch.sigmoid(self.top(x)).mean((2, 3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.above(torch.relu(self.stem(x)))


def _at(model: nn.Module, x: Tensor, layer: int = 0) -> tuple[Tail, FeatureMap]:
    tape = record(model, x)
    cut = spatial_cuts(folded(tape))[layer]
    return Tail.after(tape, cut.value, ""), cut


def _bent() -> tuple[Bent, Tensor, Tail, FeatureMap]:
    model, x = Bent(-1.0).eval().double(), 8 * torch.rand(2, 3, 8, 8).double()
    tape = record(model, x)
    (cut,) = [one for one in spatial_cuts(folded(tape)) if one.as_map(one.value.tensor).shape[1] == 5][:1]
    return model, x, Tail.after(tape, cut.value, ""), cut


def test_it_is_the_integral_of_the_gradient() -> None:
    """Slowly: many small steps, each of which adds the change of the logit to the units that make it."""
    model, x, tail, layer = _bent()
    targets = torch.tensor([2, 0])
    found, _ = evidence(tail, layer, targets)
    features = torch.relu(model.stem(x)).detach()
    slow, steps = torch.zeros_like(features), 1500
    for step in range(steps):
        at = (features * ((step + 0.5) / steps)).requires_grad_()
        model.above(at)[range(2), targets].sum().backward()
        slow += at.grad * features / steps
    torch.testing.assert_close(found, slow, rtol=0.05, atol=0.01 * float(slow.abs().max()))
    gained = (model.above(features) - model.above(0 * features))[range(2), targets].detach()
    assert ((found.flatten(1).sum(1) - gained).abs() <= module.NEAR * gained.abs()).all()
    torch.testing.assert_close(slow.flatten(1).sum(1), gained, rtol=1e-4, atol=1e-6)


def test_a_linear_top_takes_the_fewest_steps_and_is_exact() -> None:
    model, x = build("plain").double(), inputs("plain", 1).double()
    tail, layer = _at(model, x)
    found, passes = evidence(tail, layer, torch.tensor([1]))
    value = layer.value.tensor.detach()
    gained = float((tail(value) - tail(0 * value))[0, 1].detach())
    assert float(found.sum()) == pytest.approx(gained, rel=1e-9)
    assert passes == 2 + STEPS[0]


def test_more_steps_go_on_from_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """81 steps in four rounds are the 81 midpoints at once, and no more passes."""
    _, _, tail, layer = _bent()
    monkeypatch.setattr(module, "NEAR", -1.0)
    rounds, passes = evidence(tail, layer, torch.tensor([1, 1]))
    monkeypatch.setattr(module, "STEPS", (81,))
    once, same = evidence(tail, layer, torch.tensor([1, 1]))
    torch.testing.assert_close(rounds, once)
    assert passes == same == 2 + 81


def test_each_image_has_its_own_class() -> None:
    _, _, tail, layer = _bent()
    both, _ = evidence(tail, layer, torch.tensor([2, 0]))
    first, _ = evidence(tail, layer, torch.tensor([2, 2]))
    torch.testing.assert_close(both[0], first[0], rtol=0.02, atol=1e-3)
    assert not torch.allclose(both[1], first[1], rtol=0.1)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_it_works_without_gradients_around_it(context: Any) -> None:
    model, x = Bent(0.5).eval(), torch.rand(1, 3, 8, 8)
    with context():
        tail, layer = _at(model, x)
        inside, _ = evidence(tail, layer, torch.tensor([0]))
    tail, layer = _at(model, x)
    outside, _ = evidence(tail, layer, torch.tensor([0]))
    torch.testing.assert_close(inside, outside)
    assert not inside.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_class_token_stays_as_it_is() -> None:
    """Only features of places are taken away, so the token's own part of the logit is nobody's."""
    model, x = build("tokens").double(), inputs("tokens", 1).double()
    number = next(i for i, cut in enumerate(spatial_cuts(folded(record(model, x)))) if len(cut.value.shape) == 3)
    tail, layer = _at(model, x, number)
    found, _ = evidence(tail, layer, torch.tensor([0]))
    features = layer.as_map(layer.value.tensor).detach()
    bare = layer.value.tensor.detach() - layer.restored(features[None])[0]
    gained = float((tail(layer.value.tensor.detach()) - tail(bare))[0, 0].detach())
    assert bare.any()
    assert float(found.sum()) == pytest.approx(gained, rel=module.NEAR, abs=1e-12)


def test_units_of_a_place_balance_each_other() -> None:
    found = torch.randn(2, 6, 3, 3, generator=torch.Generator().manual_seed(0)).double()
    for_class, against = by_sign(found)
    torch.testing.assert_close((for_class + against).sum(1), found.sum(1))
    assert (for_class >= 0).all()
    assert (against <= 0).all()
    speaks = found.sum(1) > 0  # each place is for the class or against it
    torch.testing.assert_close(for_class.sum(1) > 0, speaks)
    torch.testing.assert_close(against.sum(1) < 0, ~speaks)
    # Of its units, those keep more that have more.
    b, _, y, x = (int(i) for i in speaks.nonzero()[0][[0, 0, 1, 2]])
    before, after = found[b, :, y, x].clamp(min=0), for_class[b, :, y, x]
    torch.testing.assert_close(after / after.sum(), before / before.sum())


def test_nothing_has_no_sides() -> None:
    assert not by_sign(torch.zeros(1, 4, 2, 2)).any()
