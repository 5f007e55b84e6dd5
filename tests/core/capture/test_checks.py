"""Only modules whose mode changes their output count as being in training mode."""

from __future__ import annotations

import types

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import classlens
from classlens.core.capture import record
from classlens.core.capture.checks import depends_on_mode
from classlens.errors import ModelError
from networks import build, pictures


class Drops(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, self.training)


class DropsInAHelper(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self._drop(x)

    def _drop(self, x: Tensor) -> Tensor:
        return next(y for y in [F.dropout(x, 0.5, self.training)])


class Inherits(DropsInAHelper):
    """Nothing of its own."""


class StaysFrozen(nn.Module):
    """Sets the mode, and never reads it."""

    def train(self, mode: bool = True) -> StaysFrozen:
        self.training = mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def patched() -> nn.Module:
    module = nn.Identity()
    module.forward = types.MethodType(Drops.forward, module)
    return module


@pytest.mark.parametrize("module", [
    Drops(), DropsInAHelper(), Inherits(), patched(), nn.Dropout(0.1), nn.AlphaDropout(0.1), nn.BatchNorm2d(3),
    nn.InstanceNorm2d(3, track_running_stats=True), nn.RReLU(), nn.MultiheadAttention(4, 2, dropout=0.1),
], ids=lambda module: type(module).__name__)  # fmt: skip
def test_modules_that_depend_on_the_mode(module: nn.Module) -> None:
    assert depends_on_mode(module)


@pytest.mark.parametrize("module", [
    nn.Module(), nn.Identity(), nn.Sequential(), nn.ReLU(), nn.Conv2d(3, 3, 1), nn.LayerNorm(3), nn.GroupNorm(1, 3),
    nn.Dropout(0.0), nn.BatchNorm2d(3, track_running_stats=False), nn.InstanceNorm2d(3), nn.RReLU(0.2, 0.2),
    nn.MultiheadAttention(4, 2), StaysFrozen(),
], ids=lambda module: type(module).__name__)  # fmt: skip
def test_modules_that_do_not(module: nn.Module) -> None:
    assert not depends_on_mode(module)


def identity_head() -> nn.Module:
    model = build("residual")
    model.fc = nn.Identity()  # after eval(), so it is in training mode
    return model


def parametrised() -> nn.Module:
    model = build("residual")
    nn.utils.parametrizations.weight_norm(model.fc)
    nn.utils.parametrizations.orthogonal(model.c1)
    return model


def traced() -> nn.Module:
    return torch.fx.symbolic_trace(build("residual"))


def exported() -> nn.Module:
    return torch.export.export(build("residual"), (pictures(1),)).module()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch's own
@pytest.mark.parametrize("method", ["agf", "lrp", "gradient"])
@pytest.mark.parametrize(
    "make", [identity_head, parametrised, exported, lambda: torch.fx.symbolic_trace(build("residual"))]
)
def test_networks_with_harmless_parts_in_training_mode(make: object, method: str) -> None:
    model, x = make(), pictures(1)
    assert any(module.training for module in model.modules())
    plain = model if make is parametrised else identity_head().eval() if make is identity_head else build("residual")
    if make is parametrised:
        plain = build("residual")
        plain.fc.weight.data, plain.c1.weight.data = model.fc.weight.detach(), model.c1.weight.detach()
    e, expected = (classlens.explain(m, x, 1, method) for m in (model, plain))
    assert torch.allclose(e.maps, expected.maps, rtol=1e-4, atol=1e-6)
    if make is not identity_head:
        assert e.report.ops.keys() >= {"conv2d", "batch_norm", "relu", "linear"}


def test_training_mode_itself_is_refused() -> None:
    with pytest.raises(ModelError, match=r"^the model is in training mode"):
        record(build("residual").train(), pictures())
    for part in (Drops(), DropsInAHelper(), patched()):
        with pytest.raises(ModelError, match=r"part of the model \([12]\) is in training mode.*call model\.eval"):
            record(nn.Sequential(nn.Identity(), part.eval()).eval().append(part.train()), pictures())


def test_exported_programs_say_what_to_give() -> None:
    program = torch.export.export(build("plain"), (pictures(1),))
    with pytest.raises(ModelError, match=r"give program\.module\(\)"):
        classlens.explain(program, pictures(1))
    with pytest.raises(ModelError, match=r"cannot run on input of shape \(2, 3, 32, 32\)"):
        classlens.explain(program.module(), pictures(2))
