"""No matrix product meets denormal numbers, which are a hundred times slower on some CPUs, and no map loses by it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import classlens
from classlens.core.capture import Tape, record
from classlens.core.rules import propagate, rule_for
from classlens.core.rules.propagate import smallest_peak, without_denormals
from classlens.methods import METHODS
from networks import pictures
from quick import QUICK

FAMILIES = "attribution-guided factorisation", "relevance propagation"
PROPAGATE = [name for name, method in METHODS.items() if method.family in FAMILIES] + ["deeplift-shap"]
OPERANDS = {  # of the products of matrices, the places of their operands
    "mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "mv": (0, 1), "convolution": (0, 1), "convolution_backward": (0, 2),
}  # fmt: skip


class Fading(nn.Module):
    """Each weak channel reads strong ones, and weak ones a thousandth as much; nothing else reads weak channels.

    So relevance and gradients of weak channels fade by 1e-3 in each layer, though all weights and values are ordinary.
    """

    def __init__(self, depth: int = 8, channels: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.a = nn.ModuleList(nn.Conv2d(channels, channels, 1, bias=False) for _ in range(depth))
        self.b = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(depth))
        self.value = nn.ModuleList(nn.Linear(channels, channels, bias=False) for _ in range(depth))
        self.head = nn.Linear(channels, 5)
        for layer in (*self.a, *self.b, *self.value):
            faded(layer.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        for a, b, value in zip(self.a, self.b, self.value, strict=True):
            x = (a(x) + b(x)).relu()
            v = value(x.flatten(2).mT)
            strong = v[..., :1].contiguous()
            x = F.scaled_dot_product_attention(strong, strong, v, scale=1e-3).mT.reshape(x.shape)
        return self.head(x.mean((2, 3)))


def faded(weight: Tensor) -> None:
    """The second half of the channels is weak."""
    half = len(weight) // 2
    weight.abs_().add_(0.1)
    weight[half:, half:] *= 1e-3
    weight[:half, half:] = 0
    weight[1::2, :half:2] *= -0.1  # some contributions oppose
    weight /= weight.abs().sum(tuple(range(1, weight.dim())), keepdim=True)


class Denormals(TorchDispatchMode):
    """Counts the denormal numbers among the operands of products."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.found = 0
        self.off = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for place in () if self.off else OPERANDS.get(func.overloadpacket.__name__, ()):
            size = args[place].abs()
            self.products += 1
            self.found += int(((size > 0) & (size < torch.finfo(size.dtype).tiny)).sum())
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Denormals]:
    """Counts in all products but those of autograd's own backward pass, which belong to torch."""
    inner: Callable[..., Any] = Tape.gradients
    with Denormals() as seen:

        def gradients(*args: Any, **kwargs: Any) -> Any:
            seen.off = True
            found = inner(*args, **kwargs)
            seen.off = False
            return found

        monkeypatch.setattr(Tape, "gradients", gradients)
        yield seen


@pytest.fixture(scope="module")
def fading() -> nn.Module:
    torch.manual_seed(0)
    return Fading().eval()


@pytest.mark.parametrize("method", PROPAGATE)
def test_no_operand_of_a_product_is_denormal(method: str, fading: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    with counted(monkeypatch) as seen:
        found = classlens.explain(fading, pictures(1, (6, 6)), [0, 3], method, **QUICK.get(method, {}))
    assert seen.products > 30
    assert seen.found == 0
    assert (found.maps.abs().amax((2, 3)) > 0).all()


@pytest.mark.parametrize("method", ["agf", "lrp", "deeplift-shap"])
def test_the_network_is_a_fair_trial(method: str, fading: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    x, options = pictures(1, (6, 6)), QUICK.get(method, {})
    without = classlens.explain(fading, x, [0, 3], method, **options).maps
    module = importlib.import_module("classlens.core.rules.propagate")
    monkeypatch.setattr(module, "without_denormals", lambda relevance, peak: relevance)
    with counted(monkeypatch) as seen:
        found = classlens.explain(fading, x, [0, 3], method, **options).maps
    assert seen.found > 100
    assert torch.allclose(without, found, rtol=1e-5, atol=0)


def test_only_negligible_relevance_is_dropped() -> None:
    r = torch.tensor([1.0, -1e-24, 1e-25, 1e-26, -1e-30, 1e-40, float("nan"), float("-inf")])
    expected = [1.0, -1e-24, 1e-25, 0.0, 0.0, 0.0, float("nan"), float("-inf")]
    assert torch.equal(without_denormals(r, 10.0).nan_to_num(7), torch.tensor(expected).nan_to_num(7))
    small = torch.tensor([1e-30, -1e-36, 1e-40])  # a start of 1e-30: all but what is denormal
    assert torch.equal(without_denormals(small, 1e-30), torch.tensor([1e-30, -1e-36, 0.0]))


def test_double_precision_has_its_own_threshold_and_half_precision_none() -> None:
    r = torch.tensor([1e-40, 1e-200, 1e-210, 1e-310], dtype=torch.float64)
    assert torch.equal(without_denormals(r, 1.0), r * torch.tensor([1, 1, 0, 0]))
    half = torch.tensor([1e-4, 6e-8], dtype=torch.float16)
    assert torch.equal(without_denormals(half, 1.0), half)


def test_the_peak_is_that_of_the_weakest_class() -> None:
    a, b = torch.tensor([[[3.0, -5.0]], [[0.0, 0.0]]]), torch.tensor([[[[0.25]]], [[[4.0]]]])
    assert smallest_peak([a]) == 5
    assert smallest_peak([a, b]) == 0.25
    assert smallest_peak([torch.zeros(1, 1, 3)]) == 1


def test_a_tiny_start_gives_the_same_map_on_its_own_scale() -> None:
    """Two classes at once: what is negligible for one is all that the other has."""
    torch.manual_seed(0)
    tape = record(Fading(3).eval(), pictures(1, (8, 8)))
    one = torch.rand(1, *tape.output.shape)
    start = torch.cat([one, 1e-30 * one])
    large, tiny = propagate(tape, {tape.output: start}, rule_for).relevance
    assert torch.allclose(tiny.double() * 1e30, large.double(), rtol=1e-4, atol=1e-8 * float(large.abs().max()))
    assert abs(float(tiny.double().sum()) * 1e30 / float(large.double().sum()) - 1) < 1e-4


@pytest.mark.parametrize("method", [m for m in PROPAGATE if METHODS[m].scalars and METHODS[m].conserves])
def test_a_tiny_question_gets_a_map(method: str) -> None:
    torch.manual_seed(0)
    found = classlens.explain(
        Fading(3).eval(), pictures(1, (8, 8)), lambda logits: 1e-30 * logits[0], method, **QUICK.get(method, {})
    )
    assert (found.maps.abs() > 0).double().mean() > 0.5
