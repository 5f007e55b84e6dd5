"""`agf` beside a second, slow derivation of the same equations: every layer, the map, and what was absorbed."""

import functools

import pytest
import torch
from torch import Tensor

import classlens
import slow_agf
from slow_agf import Everything, Slow

TARGETS = [6, 36]  # the logit of the first is negative, the second is the most likely class


@functools.cache
def network() -> Everything:
    return Everything().double().eval()


@functools.cache
def images() -> Tensor:
    coarse = torch.randn(2, 3, 8, 16, generator=torch.Generator().manual_seed(3)).double()
    return torch.nn.functional.interpolate(coarse, (32, 64), mode="bilinear")


@functools.cache
def by_hand(b: int, k: int, score: str = "classes compete", without: str = "") -> Slow:
    dropped = frozenset([without] if without else [])
    return Slow(network(), images()[b : b + 1], TARGETS[k], slow_agf.SCORES[score], dropped)


def ours(**options: object) -> classlens.Explanation:
    return classlens.explain(network(), images(), [TARGETS, TARGETS], trace=True, **options)


def distance(found: Tensor, expected: Tensor) -> float:
    """Relative L2."""
    return float((found - expected).norm() / expected.norm().clamp(min=1e-300))


def test_the_network_is_the_one_that_is_followed_by_hand() -> None:
    for b in range(2):
        assert torch.allclose(by_hand(b, 0).logits, network()(images()[b : b + 1])[0], rtol=1e-10)
    strides = {round(by_hand(0, 0)._stride(step)) for step in by_hand(0, 0).deep}
    assert strides == {8, 16, 32}
    assert 0.2 < slow_agf.weight_of_residual(len(by_hand(0, 0).deep)) < 1


@pytest.mark.parametrize(("b", "k"), [(0, 0), (1, 1)])
def test_every_layer(b: int, k: int) -> None:
    slow = by_hand(b, k)
    for layer, (step, expected) in zip(ours().trace, slow.layers, strict=True):
        assert (layer.op, layer.name) == (step.op, step.name)
        for name, found in layer.terms.items():
            if name in expected:
                term = expected[name][None, None] if expected[name].dim() == 2 else expected[name]
                assert distance(found[k, b : b + 1], term) < 1e-9, (step.name or step.makes, name)


@pytest.mark.parametrize(("b", "k"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_the_map_and_the_ledger(b: int, k: int) -> None:
    slow, e = by_hand(b, k), ours()
    assert distance(e.maps[b, k], slow.map) < 1e-9
    assert float(e.report.started[b, k]) == pytest.approx(slow.started, rel=1e-9)
    assert float(e.report.absorbed[b, k]) == pytest.approx(slow.absorbed, rel=1e-9)
    assert slow.started == pytest.approx(slow.absorbed + float(slow.map.sum()), rel=1e-9)


def test_classes_that_do_not_compete() -> None:
    e = ours(multilabel=True)
    for b, k in ((0, 0), (1, 1)):
        slow = by_hand(b, k, "multilabel")
        assert distance(e.maps[b, k], slow.map) < 1e-9
        assert float(e.report.absorbed[b, k]) == pytest.approx(slow.absorbed, rel=1e-9)
    shares = [float(m.clamp(min=0).sum() / m.abs().sum()) for m in (e.maps[0, 0], e.maps[1, 1])]
    likely = [float(by_hand(b, b, "multilabel").logits[TARGETS[b]].detach().sigmoid()) for b in range(2)]
    assert shares[0] == pytest.approx(likely[0], rel=1e-9)  # the first is less likely than its map would say
    assert shares[1] < likely[1]


@pytest.mark.parametrize("term", ["Fx", "Fdx", "M", "coarse"])
def test_without_a_term(term: str) -> None:
    assert distance(ours(without=term).maps[0, 0], by_hand(0, 0, without=term).map) < 1e-9


def test_grad_cam_in_the_residuals_place() -> None:
    assert distance(ours(residual="gradcam").maps[0, 0], by_hand(0, 0, without="all but Grad-CAM").map) < 1e-9


def test_influence_alone() -> None:
    """only=C: neither the residual nor the coarse evidence."""
    slow = Slow(network(), images()[:1], TARGETS[0], without=frozenset(("Fx", "Fdx", "M", "coarse")))
    assert distance(ours(only="C").maps[0, 0], slow.map) < 1e-9


def test_a_number_made_of_logits() -> None:
    def asked(y: Tensor) -> Tensor:
        return y[0] * y[1] - 2 * y[4]

    e = classlens.explain(network(), images()[:1], asked)
    assert distance(e.maps[0, 0], Slow(network(), images()[:1], -1, lambda y, t: asked(y)).map) < 1e-9


def test_rivals_are_weighed_in_each_way() -> None:
    """With 1 / std(y), and with less where one rival would weigh more than a tenth: both occur here."""
    heaviest = []
    for b in range(2):
        y = by_hand(b, 0).logits.detach()
        for t in TARGETS:
            rivals = torch.cat([y[:t], y[t + 1 :]])
            heaviest.append(float((rivals / y.std(correction=0)).softmax(0).max()))
    assert min(heaviest) < slow_agf.TENTH < max(heaviest)
