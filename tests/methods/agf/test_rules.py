"""The rules of single nodes, and what `agf` adds to them at the image, on networks of a few units."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from classlens.core.capture import folded, record
from classlens.core.rules import rule_for
from classlens.core.rules.linear import boxed, linear_map
from classlens.core.rules.propagate import Ledger
from classlens.errors import CaptureError
from classlens.methods import METHODS, Case
from classlens.methods.agf import terms
from classlens.methods.agf.balanced import Magnitudes, probabilities
from classlens.methods.agf.published import Published, _reached
from classlens.methods.agf.streams import open_streams
from classlens.methods.layers import head_layers
from steps import Does

X = torch.tensor([[1e-9, 3.0, -2.0, 7.0, 0.0]]).double()
R = torch.tensor([[[1.0, 2.0, 4.0, 8.0, 16.0]]]).double()


def published(do: Callable[[Tensor], Tensor], x: Tensor, r: Tensor) -> list[Tensor | None]:
    """The share of the last node of a function, as the released code computes it."""
    node = record(Does(do).eval(), x).nodes[-1]
    rules = Published(None, terms.RELEASE, terms.Options(), set(), set(), {})  # type: ignore[arg-type]
    return list(rules.choose(node)(node, r))


@pytest.mark.parametrize("activation", [F.relu, F.relu6])
def test_a_relu_divides_by_its_input(activation: Callable[[Tensor], Tensor]) -> None:
    """1e-9 is added to it, so a unit as small as that passes half of its relevance on."""
    (share,) = published(activation, X, R)
    assert torch.allclose(share, torch.tensor([[[0.5, 2.0, 0.0, 8.0, 0.0]]]).double())


@pytest.mark.parametrize("do", [F.silu, torch.tanh, lambda x: 3 * x, lambda x: x / 2])
def test_other_units_pass_relevance_on_unless_they_are_0(do: Callable[[Tensor], Tensor]) -> None:
    (share,) = published(do, X, R)
    node = record(Does(do).eval(), X).nodes[-1]
    assert torch.equal(share, rule_for(node)(node, R * torch.tensor([1, 1, 1, 1, 0]))[0])
    assert share[0, 0, 4] == 0


def test_sums_are_shared_by_signed_values() -> None:
    u, w = published(lambda x: x + 2 * x.flip(1), X, R)
    z = X + 2 * X.flip(1)
    per_unit = R / (z + 1e-9 * (z + 0.0 >= 0) - 1e-9 * (z < 0))
    assert torch.allclose(u, X * per_unit, rtol=1e-6, atol=1e-7)
    assert torch.allclose(w, 2 * X.flip(1) * per_unit, rtol=1e-6, atol=1e-7)
    (mean,) = published(lambda x: x.mean(1, keepdim=True), X, R[..., :1])
    assert torch.allclose(mean, X / X.sum() * R[..., :1])
    (alone,) = published(lambda x: x + 1, X, R)  # a constant gets no share
    assert torch.equal(alone, R)


def test_what_is_no_sum_keeps_its_own_rule() -> None:
    (share,) = published(lambda x: x.flip(1), X, R)
    assert torch.equal(share, R.flip(2))


def test_layers_at_the_image_get_their_box() -> None:
    layer, r = nn.Linear(5, 3).double(), R[..., :3]
    node = record(layer.eval(), X).nodes[-1]
    rules = Published(None, terms.RELEASE, terms.Options(), set(), {node}, {})  # type: ignore[arg-type]
    assert torch.equal(rules.choose(node)(node, r)[0], boxed(linear_map(node), r, terms.RELEASE.quotient))


# ------------------------------------------------------------------------------------------------------------ balanced


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("with_position", [True, False])
def test_shares_by_influence(bias: bool, with_position: bool) -> None:
    """v |W|^T [R / (|W| v + |b|)], with v = |x| or |x| + 5 mean |x|; what the biases get is absorbed."""
    torch.manual_seed(0)
    layer, r = nn.Linear(5, 3, bias).double().eval(), torch.tensor([[[1.0, -2.0, 3.0]]]).double()
    sizes = Magnitudes.of(linear_map(record(layer, X).nodes[-1]))
    ledger = Ledger(1)
    found = (sizes.with_position() if with_position else sizes).share(r, ledger)[0, 0]
    w = layer.weight.detach().abs().numpy()
    b = layer.bias.detach().abs().numpy() if bias else np.zeros(3)
    v = X[0].abs().numpy()
    v = v + 5 * v.mean() if with_position else v
    slow = sum(v * w[i] * r[0, 0, i].item() / (w[i] @ v + b[i]) for i in range(3))
    assert np.allclose(found, slow)
    assert np.allclose(torch.as_tensor(ledger.absorbed).numpy(), r.sum().item() - slow.sum())


class Small(nn.Module):
    """A layer at stride 2, then deep ones at two resolutions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Conv2d(1, 2, 2, 2), nn.Conv2d(2, 2, 4, 4), nn.Conv2d(2, 3, 2, 2)
        self.d, self.head = nn.Conv2d(3, 3, 1), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.b, self.c, self.d):
            x = F.softplus(layer(x))
        return self.head(x.mean((2, 3)))


def small(targets: list[list[int]], **options: bool) -> Case:
    model = Small().double().eval()
    x = torch.randn(2, 1, 32, 48, generator=torch.Generator().manual_seed(1)).double()
    return Case(model, x, record(model, x), torch.tensor(targets), **options)


def test_deep_layers_are_the_coarse_evidence() -> None:
    """Those that read a map 8 times smaller than the image, or more: not b, which reads the output of a."""
    one, without = small([[0], [2]], trace=True), ("Fx", "Fdx", "M")
    fine = METHODS["agf"].run(one, without=(*without, "coarse"))
    phi = {layer.name: layer.terms["Phi"].sum(2) for layer in fine.trace if "Phi" in layer.terms}
    assert phi["c"].shape[2:] == (4, 6)
    assert phi["d"].shape[2:] == (2, 3)
    relevance = fine.maps.transpose(0, 1)[:, :, None]
    coarse = terms.coarse([phi["c"], phi["d"]], (32, 48))
    expected = terms.with_coarse(relevance, coarse, terms.nearby(relevance))[:, :, 0].transpose(0, 1)
    found = METHODS["agf"].run(one, without=without)
    assert torch.allclose(found.maps, expected)
    assert found.notes == ()


def test_a_label_of_its_own_has_the_odds_of_its_probability() -> None:
    one = small([[0], [2]], multilabel=True)
    with torch.no_grad():  # unlikely labels
        one.tape.output.tensor.sub_(3)
    found = METHODS["agf"].run(one)
    start = open_streams(one, folded(one.tape), head_layers(folded(one.tape)), (), terms.highlighted_from_lowest).start
    assert found.balance is not None
    assert torch.allclose(found.balance.started, sum(s.flatten(2).sum(2) for s in start.values()).T)
    assert found.balance.error().max() < 1e-9
    positive = found.maps.clamp(min=0).sum((2, 3)) / found.maps.abs().sum((2, 3))
    assert (positive <= probabilities(one).T + 1e-9).all()
    other = small([[0], [2]])
    started = open_streams(other, folded(other.tape), head_layers(folded(other.tape)), (), terms.above_rivals).start
    plain = METHODS["agf"].run(other).balance
    assert plain is not None
    assert torch.allclose(plain.started, sum(s.flatten(2).sum(2) for s in started.values()).T)


def test_probabilities_are_those_of_classes() -> None:
    """1 for what is not a class."""
    one = small([[0, -1, 3], [2, 1, -1]])
    y = one.tape.logits.detach().sigmoid()
    expected = torch.stack([torch.stack([y[0, 0], y[1, 2]]), torch.stack([y.new_ones(()), y[1, 1]])])
    assert torch.equal(probabilities(one)[:2], expected)
    assert probabilities(one)[2].tolist() == [float(y[0, 3]), 1.0]


@pytest.mark.parametrize("method", ["agf", "agf-paper", "agf-release"])
def test_values_are_freed_behind_the_last_sweep(method: str) -> None:
    one = small([[0], [2]], once=True)
    METHODS[method].run(one)
    with pytest.raises(CaptureError, match="was freed"):
        _ = one.tape.nodes[3].outputs[0].tensor


@pytest.mark.parametrize("places", [(), (3,), (3, 3), (2, 3, 3)])
def test_a_layer_that_no_relevance_reaches_gets_no_share(places: tuple[int, ...]) -> None:
    """For each class and image: the shift alone would give it some."""
    share, relevance = torch.rand(2, 3, 4, *places) + 1, torch.zeros(2, 3, 5, *places)
    relevance[0, 1], relevance[1, 0], relevance[1, 2, -1] = -1.0, 2.0, 0.5
    reached = torch.tensor([[False, True, False], [True, False, True]])
    found = _reached(share, relevance)
    assert torch.equal(found[reached], share[reached])
    assert not found[~reached].any()
    assert torch.equal(_reached(share, relevance + 3), share)
