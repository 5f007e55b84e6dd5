"""Every rule of a linear map against its definition as a double sum over an explicit matrix."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import reference
from classlens.core.capture import Axis, folded, record
from classlens.core.rules import linear, propagate, rule_for
from classlens.core.rules.linear import LinearMap, linear_map, output_stride
from classlens.errors import UnsupportedOp


class Layer(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Bare(nn.Module):
    """A function called with nothing but input and weight."""

    def __init__(self, function: Callable[..., Tensor], shape: tuple[int, ...]) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


LAYERS = {
    "conv": lambda: nn.Conv2d(3, 4, 3, padding=1),
    "strided": lambda: nn.Conv2d(3, 4, 3, stride=2, padding=(1, 0)),
    "grouped, dilated": lambda: nn.Conv2d(4, 6, 3, padding=2, dilation=2, groups=2),
    "even same": lambda: nn.Conv2d(3, 4, 4, padding="same"),
    "valid": lambda: nn.Conv2d(3, 4, (1, 3), padding="valid"),
    "transposed": lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1),
    "one place": lambda: nn.Conv2d(3, 4, 1),
    "one place, strided": lambda: nn.Conv2d(3, 4, 1, stride=(2, 3)),
    "one place, strided along one axis": lambda: nn.Conv2d(3, 4, 1, stride=(1, 2)),
    "one place, grouped": lambda: nn.Conv2d(4, 6, 1, groups=2),
    "one place, padded": lambda: nn.Conv2d(3, 4, 1, padding=(0, 1)),
    "odd same, dilated": lambda: nn.Conv2d(3, 4, (5, 2), padding="same", dilation=(1, 2)),
    "bare": lambda: Bare(F.conv2d, (4, 3, 2, 2)),
    "bare transposed": lambda: Bare(F.conv_transpose2d, (3, 4, 2, 2)),
    "transposed 1d": lambda: nn.ConvTranspose1d(3, 4, 3, stride=2, dilation=2),
    "transposed 3d": lambda: nn.ConvTranspose3d(4, 2, 2, groups=2),
    "1d": lambda: nn.Conv1d(3, 4, 3, padding=1),
    "3d": lambda: nn.Conv3d(2, 3, 2),
    "linear": lambda: nn.Linear(10, 6),
    "tokens": lambda: nn.Linear(5, 4),
}
SHAPES = {
    "grouped, dilated": (4, 5, 6), "1d": (3, 9), "3d": (2, 3, 4, 3), "linear": (10,), "tokens": (3, 5),
    "valid": (3, 4, 6), "one place, grouped": (4, 3, 4), "transposed 1d": (3, 4), "transposed 3d": (4, 2, 3, 2),
}  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")


def case(name: str, batch: int = 3, classes: int = 2) -> tuple[LinearMap, nn.Module, Tensor]:
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
def test_by_default_influence_decides(layer: str) -> None:
    """C of Eq. 8 is the rule of every kind of linear layer."""
    found, module, relevance = case(layer)
    tape = record(Layer(module).eval(), found.x)
    ours = propagate(tape, {tape.output: relevance}, rule_for).relevance
    assert torch.allclose(ours, linear.absolute(found, relevance))


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


@pytest.mark.parametrize("layer", LAYERS)
def test_of_ones_is_the_layer_of_an_image_of_ones(layer: str) -> None:
    found, _, _ = case(layer)
    whole = found.forward(torch.ones_like(found.x[:1]), found.weight)
    assert torch.allclose(found.of_ones(found.weight).expand_as(whole), whole)


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


@pytest.mark.parametrize(
    ("layer", "norm", "shape"),
    [(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), (3, 5, 5)), (nn.Linear(3, 4), nn.BatchNorm1d(4), (3,))],
    ids=["conv2d", "linear"],
)
def test_a_folded_normalisation_scales_the_weight(layer: nn.Module, norm: nn.Module, shape: tuple[int, ...]) -> None:
    nn.init.uniform_(norm.running_var, 0.5, 2)
    nn.init.normal_(norm.running_mean)
    x = torch.randn(2, *shape, dtype=torch.float64)
    (node,) = folded(record(nn.Sequential(layer, norm).double().eval(), x)).nodes
    found = linear_map(node)
    assert torch.allclose(found.forward(x, found.weight) + found.bias, norm(layer(x)))
    assert found.unscaled.data_ptr() == layer.weight.data_ptr()  # no copy


def test_what_is_taken_over_each_image_stays_apart() -> None:
    """Tokens before images, two windows of each image along the first axis, and images that nobody can tell apart."""
    found, _, _ = case("tokens")
    t = torch.randn(2, 4, 3, 5, generator=torch.Generator().manual_seed(0))  # two classes

    def largest(images: Axis | None) -> Tensor:
        return dataclasses.replace(found, images=lambda value: images).of_each_image(t, lambda rows: rows.amax(1))

    assert torch.equal(largest(Axis(1, torch.arange(3))), t.amax((1, 3), keepdim=True))
    windows = t.unflatten(1, (2, 2)).amax((2, 3, 4)).repeat_interleave(2, 1)
    assert torch.equal(largest(Axis(0, torch.tensor([0, 0, 1, 1]))), windows[:, :, None, None])
    with pytest.raises(UnsupportedOp, match="in which images cannot be told apart; explain one image at a time"):
        largest(None)


@pytest.mark.parametrize(("height", "stride"), [(224, 1), (112, 2), (7, 32), (17, 16), (14, 16), (15, 16), (28, 8)])
def test_stride_of_a_feature_map(height: int, stride: int) -> None:
    assert output_stride((height, height), (224, 224)) == stride


def test_an_axis_of_one_position_has_no_say_in_the_stride() -> None:
    assert output_stride((1, 14, 14), (1, 112, 112)) == 8
    assert output_stride((28,), (224,)) == 8
    assert output_stride((1, 1), (2, 2)) == 2
    assert output_stride((1,), (1,)) == 1


@pytest.mark.parametrize("rule", [name for name in RULES if name != "z^B"])
def test_a_large_matrix_in_blocks_is_the_same(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, _, relevance = case("linear")
    whole = RULES[rule][0](found, relevance)
    monkeypatch.setattr(linear, "_BLOCK", 2 * found.weight.shape[1])  # two outputs at a time
    assert torch.allclose(RULES[rule][0](found, relevance), whole, rtol=1e-12)


def test_blocks_are_small_and_whole_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each output once and in order, with its own bias and scale; at least one at a time."""
    found, _, relevance = case("linear")
    found = dataclasses.replace(found, scale=torch.arange(1.0, 7.0).double())
    outputs, inputs = found.unscaled.shape
    seen: list[LinearMap] = []

    @linear.by_blocks
    def counted(layer: LinearMap, relevance: Tensor) -> Tensor:
        seen.append(layer)
        assert relevance.shape[-1] == len(layer.unscaled)
        return layer.adjoint(relevance, layer.weight)

    assert (outputs, inputs) == (6, 10)
    for weights, rows in ((1, [1] * 6), (10, [1] * 6), (41, [4, 2]), (60, [6])):
        seen.clear()
        monkeypatch.setattr(linear, "_BLOCK", weights)
        assert torch.allclose(counted(found, relevance), found.adjoint(relevance, found.weight))
        assert [len(layer.unscaled) for layer in seen] == rows
        assert (seen[0] is found) == (len(rows) == 1)  # nothing is copied that need not be
        for name in ("unscaled", "bias", "scale"):
            assert torch.equal(torch.cat([getattr(layer, name) for layer in seen]), getattr(found, name))
    convolution, _, relevance = case("conv")  # these are small
    monkeypatch.setattr(linear, "_BLOCK", 1)
    seen.clear()
    linear.by_blocks(lambda layer, r: seen.append(layer) or r)(convolution, relevance)
    assert seen == [convolution]


def test_epsilon_and_gamma_of_contributions_that_cancel() -> None:
    """1 - 1 = 0 counts as positive: z = +eps, and with gamma the positive contribution counts more."""
    layer = nn.Linear(2, 1, bias=False).double()
    nn.init.ones_(layer.weight)
    found = linear_map(record(layer.eval(), torch.tensor([[1.0, -1.0]]).double()).nodes[0])
    r = torch.ones(1, 1, 1).double()
    assert torch.allclose(linear.epsilon(found, r), torch.tensor([1e6, -1e6]).double())  # eps is 1e-6
    assert torch.allclose(linear.gamma(found, r), torch.tensor([1.25 / 0.25, -1 / 0.25]).double())  # gamma is 1/4


@pytest.mark.parametrize("layer", LAYERS)
def test_adjoints_of_several_weights_are_those_of_each(layer: str) -> None:
    """In one call where the weights can be stacked: convolutions of any geometry, but without groups."""
    found, module, r = case(layer)
    others = found.weight, found.weight.clamp(min=0), found.weight.flip(0)
    together = found.adjoints(r, *others)
    for share, w in zip(together, others, strict=True):
        assert torch.allclose(share, found.adjoint(r, w), atol=1e-12)
    alone = getattr(module, "groups", 1) == 1 and isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    assert found.stacks or not alone


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "dilation"), [(7, 3, 2, 1), (8, 3, 2, 1), (11, 2, 3, 2), (9, 5, 4, 1)]
)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_positions_that_no_kernel_reads_get_nothing(
    size: int, kernel: int, stride: int, dilation: int, groups: int, dtype: torch.dtype
) -> None:
    """The adjoint is torch's gradient of the convolution, also where the stride leaves a rest at the border."""
    module = nn.Conv2d(4, 8, kernel, stride, 1, dilation, groups, bias=False).to(dtype)
    x = torch.randn(2, 4, size, size + 1, dtype=dtype)
    found = linear_map(record(Layer(module).eval(), x).nodes[-1])
    r = torch.randn(3, *module(x).shape, dtype=dtype)
    point = x.clone().requires_grad_()
    slow = torch.stack([torch.autograd.grad((module(point) * one).sum(), point)[0] for one in r])
    assert torch.allclose(found.adjoint(r, found.weight), slow, atol=1e-5 if dtype == torch.float32 else 1e-12)
