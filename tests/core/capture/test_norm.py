"""Batch norms with fixed statistics: what is kept of them, and when free memory is asked for."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import classlens
from classlens import machine
from classlens.core.capture import folded, record, recorder
from classlens.core.capture.norm import affine, is_fixed
from classlens.errors import MachineError


class Net(nn.Module):
    """A convolution, its norm, and other uses of what the norm reads."""

    def __init__(self, again: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.second = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.fc, self.again, self.seen = nn.Linear(4, 5), again, list[weakref.ref[Tensor]]()
        for norm in (self.norm, self.second):
            norm.running_mean, norm.running_var = torch.randn(4), torch.rand(4) + 0.5
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        t = self.conv(x)
        self.seen.append(weakref.ref(t))
        view = t.view(t.shape)
        y = self.norm(t).relu_()
        if self.again == "second":
            y = y + self.second(t)
        if self.again == "overwritten":
            view.mul_(3)
            y = y * t.sigmoid()
        return self.fc(y.mean((2, 3)))


@pytest.mark.parametrize("again", ["", "second", "overwritten"])
@pytest.mark.parametrize("method", ["agf", "agf-release", "lrp", "lrp(variant=release)", "gradient", "deeplift-shap"])
def test_freeing_what_a_norm_reads_changes_no_bit(method: str, again: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    kept = classlens.explain(Net(again), x, 1, method).maps
    monkeypatch.setattr(recorder, "LARGE", 0)
    assert torch.equal(classlens.explain(Net(again), x, 1, method).maps, kept)


def test_what_a_norm_reads_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "LARGE", 0)
    gc.disable()
    try:
        model = Net()
        tape = record(model, torch.randn(1, 3, 16, 16, dtype=torch.float64))
        assert model.seen[0]() is None
    finally:
        gc.enable()
    conv = next(node for node in tape.nodes if node.op == "conv2d")
    assert torch.equal(conv.outputs[0].tensor, model.conv(conv.inputs[0].tensor))  # runs again


def test_statistics_of_the_batch_are_not_folded() -> None:
    """With `training=True` a norm ignores its running statistics, though it has some."""
    mean, var = torch.zeros(4), torch.ones(4)
    assert is_fixed({"running_mean": mean, "training": False})
    assert not is_fixed({"running_mean": mean, "training": True})

    class Batch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return F.batch_norm(self.conv(x), mean, var, training=True, momentum=0.0).square().mean((2, 3))

    tape = folded(record(Batch().eval(), torch.randn(2, 3, 8, 8)))
    assert "batch_norm" in tape.ops()


def test_scale_and_offset() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4, eps=0.1).double().eval()
    norm.running_mean, norm.running_var = torch.randn(4).double(), torch.rand(4).double()
    x = torch.randn(2, 4, 3, 3).double()
    scale, offset = affine(
        {"running_mean": norm.running_mean, "running_var": norm.running_var, "eps": 0.1, "weight": norm.weight,
         "bias": norm.bias}
    )  # fmt: skip
    assert torch.allclose(norm(x), x * scale[:, None, None] + offset[:, None, None])


# ----------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("where", ["recording", "sweeping"])
def test_a_line_before_memory_runs_out(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Net(), torch.randn(1, 3, 64, 64, dtype=torch.float64)
    monkeypatch.setattr(recorder, "MUCH_MEMORY", 0 if where == "recording" else 2**40)
    monkeypatch.setattr("classlens.chunks.MUCH_MEMORY", 0)
    monkeypatch.setattr(machine, "free_memory", lambda: 2**17)
    with pytest.raises(MachineError, match=r"1 x 3 x 64 x 64 needs about .* GB more.*0.000122 GB are free") as caught:
        classlens.explain(model, x, 1, "agf")
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(machine, "free_memory", lambda: 2**34)
    assert classlens.explain(model, x, 1, "agf").maps.isfinite().all()
