"""Backward hooks of the user neither disturb an explanation nor are disturbed by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import classlens
from classlens.core.capture import record
from classlens.errors import CaptureError
from networks import build, pictures

METHODS = ["agf", "lrp", "gradient", "smoothgrad(samples=2)"]


def full(model: nn.Module, hook: Callable[..., Any]) -> None:
    for module in (model, model.c1, model.fc):
        module.register_full_backward_hook(hook)


def before(model: nn.Module, hook: Callable[..., Any]) -> None:
    model.c1.register_full_backward_pre_hook(hook)


def older(model: nn.Module, hook: Callable[..., Any]) -> None:
    model.fc.register_backward_hook(hook)


def of_a_tensor(model: nn.Module, hook: Callable[..., Any]) -> None:
    def attach(module: nn.Module, args: object, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(hook)

    model.c2.register_forward_hook(attach)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's, about the older kind of hook
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("attach", [full, before, older, of_a_tensor])
def test_backward_hooks(attach: Callable[[nn.Module, Callable[..., Any]], None], method: str) -> None:
    x, calls = pictures(1), []
    expected = classlens.explain(build("residual"), x, 1, method).maps
    model = build("residual")
    attach(model, lambda *args: calls.append(args))
    for _ in range(2):
        assert torch.equal(classlens.explain(model, x, 1, method).maps, expected)
    assert not calls
    model(x.requires_grad_()).sum().backward()
    assert calls  # still attached


def test_a_hook_that_changes_gradients_changes_no_map() -> None:
    x, model = pictures(1), build("residual")
    expected = classlens.explain(model, x, 1, "gradient").maps
    model.c1.register_full_backward_hook(lambda module, into, out: tuple(7 * g for g in into))
    assert torch.equal(classlens.explain(model, x, 1, "gradient").maps, expected)


def test_the_network_may_still_ask_whether_there_are_gradients() -> None:
    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert x.requires_grad == torch.is_grad_enabled()
            return (x * 2 if x.requires_grad else x + x).flatten(1)

    assert [node.op for node in record(Asks().eval(), pictures()).nodes] == ["mul", "flatten"]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # torch's, about a single process
def test_fully_sharded_models() -> None:
    if not torch.distributed.is_available():
        pytest.skip("torch was built without distributed")
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        x, plain, model = pictures(1), build("residual"), build("residual")
        for part in (model.c1, model.c2, model):
            fully_shard(part, mesh=mesh)
        for method in METHODS:
            maps = classlens.explain(plain, x, 1, method).maps
            assert torch.allclose(classlens.explain(model, x, 1, method).maps, maps, rtol=1e-4, atol=1e-6)
        for network in (plain, model):  # it trains as before
            network(x).sum().backward()
        for own, sharded in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.allclose(own.grad, sharded.grad.full_tensor(), rtol=1e-4, atol=1e-6)
        half = fully_shard(build("plain"), mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        with pytest.raises(CaptureError, match="explain it before fully_shard"):
            classlens.explain(half, x)
    finally:
        torch.distributed.destroy_process_group()
