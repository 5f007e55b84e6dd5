"""Every rule of a linear map against its definition as a double sum over an explicit matrix."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import reference
from classlens.core.capture import record
from classlens.core.rules import linear
from classlens.core.rules.linear import LinearMap, linear_map, output_stride


class Layer(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


LAYERS = {
    "conv": lambda: nn.Conv2d(3, 4, 3, padding=1),
    "strided": lambda: nn.Conv2d(3, 4, 3, stride=2, padding=(1, 0)),
    "grouped, dilated": lambda: nn.Conv2d(4, 6, 3, padding=2, dilation=2, groups=2),
    "even same": lambda: nn.Conv2d(3, 4, 4, padding="same"),
    "valid": lambda: nn.Conv2d(3, 4, (1, 3), padding="valid"),
    "transposed": lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1),
    "one place": lambda: nn.Conv2d(3, 4, 1),
    "one place, strided": lambda: nn.Conv2d(3, 4, 1, stride=(2, 3)),
    "1d": lambda: nn.Conv1d(3, 4, 3, padding=1),
    "3d": lambda: nn.Conv3d(2, 3, 2),
    "linear": lambda: nn.Linear(10, 6),
    "tokens": lambda: nn.Linear(5, 4),
}
SHAPES = {
    "grouped, dilated": (4, 5, 6), "1d": (3, 9), "3d": (2, 3, 4, 3), "linear": (10,), "tokens": (3, 5),
    "valid": (3, 4, 6),
}  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")


def case(name: str, batch: int = 2, classes: int = 3) -> tuple[LinearMap, nn.Module, Tensor]:
    """A layer's map for random signed input with exact zeros, and random relevance (K,B,...)."""
    generator = torch.Generator().manual_seed(3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        layer = LAYERS[name]().double()
    x = torch.randn(batch, *SHAPES.get(name, (3, 6, 5)), generator=generator, dtype=torch.float64)
    x = torch.where(torch.rand(x.shape, generator=generator) < 0.2, 0.0, x)
    node = record(Layer(layer).eval(), x).nodes[-1]
    relevance = torch.randn(classes, *node.outputs[0].shape, generator=generator, dtype=torch.float64)
    return linear_map(node), layer, relevance


def by_hand(name: str, rule: object) -> tuple[Tensor, Tensor]:
    """(ours, the slow one) for all images and classes."""
    ours_rule, slow_rule = rule  # type: ignore[misc]
    found, layer, relevance = case(name)
    ours = ours_rule(found, relevance)
    slow = torch.empty_like(ours)
    for b in range(relevance.shape[1]):
        w = reference.matrix(lambda t: layer(t[None])[0], found.x[b])
        for k in range(len(relevance)):
            share = slow_rule(found.x[b].flatten().numpy(), w, relevance[k, b].flatten().numpy())
            slow[k, b] = torch.from_numpy(np.asarray(share)).reshape(slow.shape[2:])
    return ours, slow


RULES = {
    "absolute": (linear.absolute, lambda x, w, r: reference.generic_rule(abs(x), abs(w), r)),
    "agnostic": (linear.agnostic, lambda x, w, r: reference.generic_rule(np.ones_like(x), abs(w), r)),
    "alpha 1": (linear.positive, lambda x, w, r: reference.alpha_beta(x, w, r, 1)),
    "alpha 2": (lambda m, r: linear.positive(m, r, alpha=2.0), lambda x, w, r: reference.alpha_beta(x, w, r, 2)),
    "epsilon": (lambda m, r: linear.epsilon(m, r, eps=0.1), lambda x, w, r: reference.epsilon(x, w, r, 0.1)),
    "gamma": (linear.gamma, lambda x, w, r: reference.gamma(x, w, r, 0.25)),
    "flat": (linear.flat, lambda x, w, r: reference.generic_rule(np.ones_like(x), (w != 0) * 1.0, r)),
    "z^B": (linear.boxed, reference.zbox),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("layer", LAYERS)
def test_rule_is_its_definition(layer: str, rule: str) -> None:
    ours, slow = by_hand(layer, RULES[rule])
    assert torch.allclose(ours, slow, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("layer", LAYERS)
def test_forward_and_adjoint_belong_together(layer: str) -> None:
    """<W x, r> = <x, W^T r>, and the forward is the layer without its bias."""
    found, module, r = case(layer)
    forward = found.forward(found.x, found.weight)
    bias = 0 if found.bias is None else found.bias
    assert torch.allclose(forward + bias, module(found.x), atol=1e-12)
    left = (forward * r).flatten(2).sum(2)
    right = (found.x * found.adjoint(r, found.weight)).flatten(2).sum(2)
    assert torch.allclose(left, right)


def test_weights_that_depend_on_the_image_are_read_as_they_were() -> None:
    class Dynamic(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            weight = x.mean((0, 2, 3)).view(1, 3, 1, 1) * torch.ones(4, 3, 3, 3, dtype=x.dtype)
            return F.conv2d(x, weight)

    x = torch.randn(1, 3, 5, 5, dtype=torch.float64)
    node = record(Dynamic().eval(), x).nodes[-1]
    found = linear_map(node)
    assert found.value is node.inputs[0]
    assert torch.allclose(found.forward(found.x, found.weight), node.outputs[0].tensor)


@pytest.mark.parametrize(("height", "stride"), [(224, 1), (112, 2), (7, 32), (17, 16), (14, 16), (15, 16), (28, 8)])
def test_stride_of_a_feature_map(height: int, stride: int) -> None:
    assert output_stride((height, height), (224, 224)) == stride


@pytest.mark.parametrize("rule", [name for name in RULES if name != "z^B"])
def test_a_large_matrix_in_blocks_is_the_same(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, _, relevance = case("linear")
    whole = RULES[rule][0](found, relevance)
    monkeypatch.setattr(linear, "_BLOCK", 2 * found.weight.shape[1])  # two outputs at a time
    assert torch.allclose(RULES[rule][0](found, relevance), whole, rtol=1e-12)
