from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import classlens
from classlens.core.capture import record
from classlens.methods.agf import terms as agf
from classlens.methods.layers import first_layers, head_layers, meets_activation_first, over_places, patch_layers
from networks import build, pictures


class Head(nn.Module):
    """A feature map, and a head made of the given layers behind a pool."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.pool, self.head = nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.conv(x).relu()))


@pytest.mark.parametrize(
    ("model", "first"),
    [
        (lambda: build("dense-head"), "head.0"),  # a flattened map under three linear layers
        (lambda: build("plain"), "head.3"),
        (lambda: Head(nn.Conv2d(4, 6, 1), nn.Hardswish(), nn.Flatten(), nn.Linear(6, 5)), "head.0"),
        (lambda: Head(nn.Flatten(), nn.LayerNorm(4), nn.Linear(4, 5)), "head.2"),
        (lambda: Head(nn.Flatten(), nn.Linear(4, 8), nn.Dropout(), nn.Tanh(), nn.Linear(8, 5)), "head.1"),
    ],
)
def test_a_head_begins_with_its_first_dense_layer(model, first: str) -> None:
    assert [node.module for node in head_layers(record(model().eval(), pictures()))] == [first]


def test_a_branch_ends_the_search() -> None:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.a, self.b = nn.Conv2d(3, 4, 3), nn.Linear(4, 4), nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x).relu().mean((2, 3))
            return self.b(x + self.a(x).relu())

    assert [node.module for node in head_layers(record(Skip().eval(), pictures()))] == ["b"]


@pytest.mark.parametrize("multilabel", [False, True])
def test_agf_starts_with_the_gradient_through_the_whole_head(multilabel: bool) -> None:
    """What is put in is x times the gradient at the flattened feature map, computed here by autograd alone.

    The score depends on whether classes compete.
    """
    model, x = build("dense-head"), pictures()[:1]
    e = classlens.explain(model, x, [[2]], "agf", multilabel=multilabel)
    assert e.multilabel == multilabel
    features = []
    model.head[0].register_forward_pre_hook(lambda _module, inputs: features.append(inputs[0]))
    score = (agf.highlighted_from_lowest if multilabel else agf.above_rivals)(model(x), torch.tensor([[2]]))
    (gradient,) = torch.autograd.grad(score.sum(), features[-1])
    assert e.report.started.item() == pytest.approx((features[-1] * gradient).sum().item(), rel=1e-4)


class Stem(nn.Module):
    """A convolution behind something that is done to the image, and one behind that."""

    def __init__(self, prepare: Callable[[Tensor], Tensor], channels: int) -> None:
        super().__init__()
        self.prepare, self.first, self.second = prepare, nn.Conv2d(channels, 4, 1), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(self.prepare(x)).relu()).mean((2, 3))


def rescaled(x: Tensor) -> Tensor:
    return torch.cat([x[:, i : i + 1] * 2.0 + 0.1 * i for i in range(3)], 1)


def by_hand(x: Tensor) -> Tensor:
    padded = x.new_zeros(len(x), 3, x.shape[2] + 2, x.shape[3] + 2)
    padded[:, :, 1:-1, 1:-1] = x
    return padded


@pytest.mark.parametrize(
    ("prepare", "channels"),
    [
        (lambda x: torch.cat([x[:, :, i::2, j::2] for i in (0, 1) for j in (0, 1)], 1), 12),  # places into channels
        (rescaled, 3), (by_hand, 3), (lambda x: torch.hstack([x, x.flip(3)]), 6), (lambda x: 1 - x, 3), (torch.neg, 3),
        (lambda x: torch.stack(x.unbind(1), 1), 3), (lambda x: x.chunk(3, 1)[1], 1), (lambda x: x.split(1, 1)[2], 1),
        (lambda x: torch.maximum(x, x.flip(3)), 3), (lambda x: x.amin(1, keepdim=True), 1),
        (lambda x: torch.cat([x, torch.ones_like(x)], 1), 6),
    ],
)  # fmt: skip
def test_a_layer_that_reads_pixels_is_a_first_layer(prepare: Callable[[Tensor], Tensor], channels: int) -> None:
    tape = record(Stem(prepare, channels).eval(), pictures())
    assert [node.module for node in first_layers(tape)] == ["first"]


@pytest.mark.parametrize("join", [torch.cat, torch.hstack, lambda pair: torch.maximum(*pair), sum])
def test_a_layer_that_reads_pixels_beside_features_is_none(join: Callable[[list[Tensor]], Tensor]) -> None:
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 3, 1), nn.LazyConv2d(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(join([x, self.first(x).relu()])).mean((2, 3))

    model = Beside().eval()
    model(pictures())
    assert [node.module for node in first_layers(record(model, pictures()))] == ["first"]


@pytest.mark.parametrize("join", [torch.cat, torch.hstack, torch.stack])
@pytest.mark.parametrize("alone", [True, False])
def test_joined_with_another_value_no_activation_is_met_first(
    join: Callable[[list[Tensor]], Tensor], alone: bool
) -> None:
    """The three ways to join are one kind: before, hstack was passed over and cat was not."""

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            a, b = self.a(x), self.b(x)
            b = torch.ones_like(b) if alone else b
            return join([a, b]).relu().flatten(1)

    tape = record(Joined().eval(), pictures())
    assert meets_activation_first(tape, tape.nodes[0]) == alone


def test_of_a_layer_that_is_split_no_part_speaks_for_the_whole() -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            left, right = self.a(x).chunk(2, 1)
            return (left.relu() + right).flatten(1)

    tape = record(Split().eval(), pictures())
    assert not meets_activation_first(tape, tape.nodes[0])


class Tokens(nn.Module):
    """Patches of 8 pixels, `extra` tokens in front of them."""

    def __init__(self, extra: int) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Conv2d(3, 4, 8, 8), nn.Linear(4, 5), nn.Linear(5, 2)
        self.extra = nn.Parameter(torch.randn(1, extra, 4))

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.cat([self.extra.expand(len(x), -1, -1), self.embed(x).flatten(2).mT], 1)
        return self.head(torch.relu(self.mix(tokens)).mean(1))


@pytest.mark.parametrize("extra", [0, 1, 5, 6])
def test_patches_are_read_on_their_grid(extra: int) -> None:
    tape = record(Tokens(extra).eval(), torch.randn(2, 3, 16, 24))
    found = patch_layers(tape, tape.nodes)
    if extra == 6:  # more than a class token and registers: no grid
        assert not found
        return
    assert [(node.module, grid) for node, grid in found.items()] == [("mix", (2, 3))]
    places = torch.arange(6.0)
    share = torch.cat([torch.full((extra,), 100.0), places])[:, None].expand(1, 2, -1, 4)
    assert torch.equal(over_places(share, (2, 3)), (4 * places).reshape(2, 3).expand(1, 2, 2, 3))
    as_features = places.reshape(2, 3).expand(1, 2, 4, 2, 3)
    assert torch.equal(over_places(as_features, (2, 3)), over_places(share, (2, 3)))
