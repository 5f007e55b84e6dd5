"""`torch.no_grad()` inside a network: a constant where torch's own gradient goes another way, otherwise no obstacle."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import classlens
from classlens.core.capture import record
from networks import pictures

GRADIENTS = ["gradient", "gradient-x-input", "smoothgrad(samples=2)", "integrated-gradients(steps=3)", "fullgrad"]


class Parted(nn.Module):
    """Convolutions around a part."""

    def __init__(self, part: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 1, 1)
        self.last, self.head = nn.Conv2d(8, 16, 3, 2, 1), nn.Linear(16, 10)
        self.part = part
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.last(self.part(self.middle, F.relu(self.first(x)))))
        return self.head(x.mean((2, 3)))


def rounded(_: nn.Module, x: Tensor) -> Tensor:
    """A straight-through estimator, with detach."""
    return x + ((x * 8).round() / 8 - x).detach()


def rounded_without_gradients(_: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        added = (x * 8).round() / 8 - x
    return x + added


def branch(middle: nn.Module, x: Tensor) -> Tensor:
    return x + middle(x).detach()


def branch_without_gradients(middle: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        added = middle(x)
        with torch.enable_grad():
            added = added * 1  # gradients were cut before
    return x + added


PAIRS = [(rounded, rounded_without_gradients), (branch, branch_without_gradients)]


@pytest.mark.parametrize("method", [*GRADIENTS, "agf", "gradcam(layer=first)", "attnlrp", "lrp"])
@pytest.mark.parametrize(("detached", "switched"), PAIRS)
def test_it_cuts_gradients_as_detach_does(
    method: str, detached: Callable[..., Tensor], switched: Callable[..., Tensor]
) -> None:
    x = pictures(2)
    expected = classlens.explain(Parted(detached), x, 3, method).maps
    found = classlens.explain(Parted(switched), x, 3, method).maps
    assert expected.abs().max() > 0
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6 * expected.abs().max().item())


@pytest.mark.parametrize("part", [part for pair in PAIRS for part in pair])
def test_the_gradient_is_torchs_own(part: Callable[..., Tensor]) -> None:
    model, x = Parted(part), pictures(1).requires_grad_()
    (expected,) = torch.autograd.grad(model(x)[0, 3], x)
    for _ in range(2):  # the second pass is not recorded
        found = classlens.explain(model, x.detach(), 3, "gradient-x-input")
        assert torch.allclose(found.maps[:, 0], (expected * x).sum(1), atol=1e-7)


def test_attnlrp_stops_where_gradients_stop() -> None:
    """With gamma at 0 and no biases it is torch's gradient x input, but for small stabilisers."""
    model, x = Parted(branch), pictures(1)
    for layer in (model.first, model.middle, model.last, model.head):
        nn.init.zeros_(layer.bias)
    image = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(model(image)[0, 3], image)
    found = classlens.explain(model, x, 3, "attnlrp(conv_gamma=0, linear_gamma=0)").maps[:, 0]
    pair = torch.stack([found.flatten(), (expected * x).sum(1).flatten()])
    assert torch.corrcoef(pair)[0, 1] > 0.999


class Frozen(Parted):
    """A linear probe: the backbone runs without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = F.relu(self.last(self.part(self.middle, F.relu(self.first(x)))))
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("method", [*GRADIENTS, "agf", "gradcam", "lrp"])
def test_a_frozen_backbone_is_explained(method: str) -> None:
    x, part = pictures(2), lambda middle, x: middle(x)
    expected = classlens.explain(Parted(part), x, 3, method).maps
    frozen = Frozen(part)
    for _ in range(2):
        assert torch.allclose(classlens.explain(frozen, x, 3, method).maps, expected, rtol=1e-5, atol=1e-7)


def test_gradients_are_on_again_afterwards() -> None:
    record(Parted(rounded_without_gradients), pictures(1))
    assert torch.is_grad_enabled()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch's, in passes without gradients
def test_a_part_of_a_custom_function_may_switch_gradients_off() -> None:
    """Reentrant checkpointing does. What torch computes there is no constant, and relevance passes through it."""

    def checkpointed(middle: nn.Module, x: Tensor) -> Tensor:
        return x + torch.utils.checkpoint.checkpoint(middle, x, use_reentrant=True)

    x = pictures(1)
    tape = record(Parted(checkpointed), x)
    assert tape.obeys
    assert not any(node.cut for node in tape.nodes)
    expected = classlens.explain(Parted(lambda middle, x: x + middle(x)), x, 3, "lrp").maps
    assert torch.allclose(classlens.explain(Parted(checkpointed), x, 3, "lrp").maps, expected)
