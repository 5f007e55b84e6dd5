"""Gradients by autograd: right for every memory layout, also where torch's own are not."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import classlens
from classlens.core.capture import record
from classlens.core.capture.backward import gradients, has_odd_layout, regular

C, H, W = 4, 6, 5
SOURCE = torch.Generator().manual_seed(3)
MEAN, SHIFT = (torch.randn(C, generator=SOURCE, dtype=torch.float64) for _ in range(2))
VAR, GAIN = (torch.rand(C, generator=SOURCE, dtype=torch.float64) + 0.5 for _ in range(2))
NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "batch_norm": lambda x: F.batch_norm(x, MEAN, VAR, GAIN, SHIFT),
    "batch statistics": lambda x: F.batch_norm(x, None, None, GAIN, SHIFT, training=True),
    "instance_norm": lambda x: F.instance_norm(x, weight=GAIN, bias=SHIFT),
    "group_norm": lambda x: F.group_norm(x, 2, GAIN, SHIFT),
}


def layouts(t: Tensor) -> list[Tensor]:
    """The same values (1, C, H, W) in several memory orders; the stride of an axis of length 1 may be anything."""
    last = t.contiguous(memory_format=torch.channels_last)
    odd = [last.as_strided(t.shape, (s, 1, W * C, C)) for s in (1, C, W * C)]
    other = [t.contiguous().as_strided(t.shape, (s, H * W, W, 1)) for s in (1, W)]
    return [t, last, t.mT.contiguous().mT, *odd, *other]


def by_differences(norm: Callable[[Tensor], Tensor], x: Tensor, g: Tensor) -> Tensor:
    """The gradient of sum(g * norm(x)), entry by entry."""
    eye = torch.eye(x.numel(), dtype=x.dtype).reshape(-1, *x.shape)
    rows = [((norm(x + 1e-5 * e) - norm(x - 1e-5 * e)) * g).sum() / 2e-5 for e in eye]
    return torch.stack(rows).reshape(x.shape)


@pytest.mark.parametrize("name", NORMS)
def test_norms_in_any_memory_order(name: str) -> None:
    norm = NORMS[name]
    x, g = torch.randn(2, 1, C, H, W, generator=SOURCE, dtype=torch.float64)
    expected = by_differences(norm, x, g)
    for at, given in itertools.product(layouts(x), layouts(g)):
        assert torch.equal(given, g)
        for point in (at.detach(), regular(at).detach()):
            point.requires_grad_()
            (found,) = gradients([norm(point)], [point], [given], has_odd_layout(point))
            assert torch.allclose(found, expected, atol=1e-6), (point.stride(), given.stride())


def test_the_guard_is_needed() -> None:
    """Once torch computes these gradients right by itself, the module can go."""
    x, g = torch.randn(2, 1, C, H, W, generator=SOURCE, dtype=torch.float64)
    norm = NORMS["batch_norm"]
    point = x.clone().requires_grad_()
    found = [torch.autograd.grad(norm(point), point, given)[0] for given in layouts(g)]
    assert not all(torch.allclose(one, found[0]) for one in found)


def test_odd_layouts() -> None:
    x = torch.randn(1, C, H, W)
    assert [has_odd_layout(t) for t in layouts(x)] == [False] * 3 + [True] * 3 + [False] * 2
    assert not has_odd_layout(torch.randn(1, H, W, C, 3).permute(0, 4, 1, 2, 3))
    assert has_odd_layout(torch.randn(H, W, C, 1, 3).permute(3, 4, 0, 1, 2))
    assert all(torch.equal(regular(t), x) and not has_odd_layout(regular(t)) for t in layouts(x))


class FromTokens(nn.Module):
    """Tokens (N,B,C) become a map that a BatchNorm reads, in whatever layout they have."""

    def __init__(self, copy: bool) -> None:
        super().__init__()
        self.conv, self.norm, self.copy = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), copy
        self.norm.running_var = torch.rand(4) + 0.5
        self.head = nn.Linear(4, 5)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.conv(x).permute(2, 3, 0, 1).contiguous()
        t = tokens.permute(2, 3, 0, 1)
        return self.head(self.norm(t.contiguous() if self.copy else t).square().mean((2, 3)))


@pytest.mark.parametrize("method", ["gradient", "integrated-gradients", "gradcam", "fullgrad", "deeplift-shap", "agf"])
def test_a_norm_that_reads_an_odd_layout(method: str) -> None:
    torch.manual_seed(0)
    plain, odd = FromTokens(copy=True), FromTokens(copy=False)
    odd.load_state_dict(plain.state_dict())
    x = torch.randn(1, 3, 8, 8)
    assert record(odd, x).odd
    assert not record(plain, x).odd
    wanted, found = (classlens.explain(model, x, 1, method).maps for model in (plain, odd))
    assert torch.allclose(wanted, found, atol=1e-5 * float(wanted.abs().max()))


def test_gradients_of_tensors_are_those_from_their_cotangents() -> None:
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    y, z, g, h = x.exp(), (x * x).sum(1), torch.randn(2, 3).double(), torch.randn(2).double()
    (found,) = gradients([y, z], [x], [g, h])
    assert torch.allclose(found, g * x.exp() + 2 * x * h[:, None])
    with pytest.raises(ValueError, match=r"a cotangent of shape \(3,\) for an output of \(2, 3\)"):
        gradients([x.exp()], [x], [g[0]])


def test_the_first_explanation_imports_no_algebra() -> None:
    """torch imports sympy to compare the shapes of outputs and cotangents: a second for nothing."""
    code = (
        "import sys, torch, classlens; m = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1),"
        "torch.nn.Flatten(), torch.nn.Linear(4, 3)).eval();"
        "[classlens.explain(m, torch.rand(1, 3, 8, 8), 1, name) for name in ('agf', 'gradient')];"
        "print('sympy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
