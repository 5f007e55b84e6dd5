from collections.abc import Callable, Iterable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import classlens
from classlens.core.capture import Node, Places, Tape, Value, folded, record
from classlens.core.rules.linear import linear_map
from classlens.methods import layers
from classlens.methods.agf import terms as agf
from classlens.methods.layers import (
    _each_place_once,
    evidence_at,
    first_layers,
    gradient_points,
    head_layers,
    is_spatial_conv,
    last_layers,
    meets_activation_first,
    own_gradient,
    spatial_before_flatten,
    token_layers,
)
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


class Parts(nn.Module):
    """Named layers, put together by a function of (layers, image)."""

    def __init__(self, do: Callable[[nn.ModuleDict, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.do, self.layers = do, nn.ModuleDict(layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.do(self.layers, x)


def names(nodes: Iterable[Node]) -> list[str]:
    return sorted(node.module.removeprefix("layers.") for node in nodes)


def parts(do: Callable[[nn.ModuleDict, Tensor], Tensor], size: int = 4, **layers: nn.Module) -> Tape:
    torch.manual_seed(0)
    return record(Parts(do, **layers).eval(), torch.randn(2, 3, size, size))


@pytest.mark.parametrize(
    ("do", "last"),
    [
        (lambda m, x: m.a(x.mean((2, 3))) + m.b(x.amax((2, 3))), ["a", "b"]),
        (lambda m, x: m.b(m.a(x.mean((2, 3))).relu()).relu(), ["b"]),
        (lambda m, x: (y := m.a(x.mean((2, 3)))) + y.relu(), ["a"]),  # by two ways, and one layer all the same
        (lambda m, x: torch.cat([m.a(x.mean((2, 3))), x.mean((2, 3))], 1), ["a"]),
    ],
)
def test_the_last_layers_are_those_that_nothing_but_other_operations_follows(do, last: list[str]) -> None:
    assert names(last_layers(parts(do, a=nn.Linear(3, 3), b=nn.Linear(3, 3)))) == last


@pytest.mark.parametrize(
    ("do", "head", "size"),
    [
        (lambda m, x: m.c(m.a(x.mean((2, 3))).relu()) + m.d(m.b(x.mean((2, 3))).relu()), ["c", "d"], 4),  # two ends
        (lambda m, x: m.b(m.a(x.mean((2, 3))).unflatten(1, (2, 3)).relu().flatten(1)[:, :3]), ["b"], 4),  # places
        (lambda m, x: m.b(m.a(x.mean((2, 3)))[:, :3] + x.mean((2, 3))), ["b"], 4),  # a branch
        (lambda m, x: m.c(m.conv(x).relu().flatten(1)), ["conv"], 1),  # a picture of one pixel
        (lambda m, x: m.a(x.relu().flatten(1)), ["a"], 1),  # the first layer there is
        (lambda m, x: m.c(m.conv(x).relu().flatten(1)), ["c"], 2),  # the layer itself reads places
        (lambda m, x: m.c(m.b(m.a(x.mean((2, 3)))[:, :3]).relu()), ["a"], 4),
    ],
)
def test_only_a_chain_of_dense_layers_is_a_head(do, head: list[str], size: int) -> None:
    layers = {
        "a": nn.Linear(3, 6),
        "b": nn.Linear(3, 3),
        "c": nn.Linear(3 if size == 4 else 5, 4),
        "d": nn.Linear(3, 4),
    }
    if "conv" in do.__code__.co_names:
        layers["conv"] = nn.Conv2d(3, 5, size)
    elif head == ["c", "d"]:
        layers["a"] = nn.Linear(3, 3)
    assert names(head_layers(parts(do, size, **layers))) == head


ON_THE_IMAGE: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda x: x, "rescaled": lambda x: (x - 0.5) / 0.2 * 2 + 1, "padded": lambda x: F.pad(x, (1, 1, 1, 1)),
    "sliced": lambda x: x[:, :, 1:], "flipped": lambda x: x.flip(3), "joined": lambda x: torch.cat([x, x.flip(2)], 2),
    "with a frame": lambda x: torch.cat([x, torch.ones(2, 3, 1, 4)], 2), "dropped": lambda x: F.dropout(x, 0.1, False),
    "pooled": lambda x: F.max_pool2d(x, 2), "the larger": lambda x: torch.maximum(x, x.flip(3)),
    "chosen": lambda x: torch.where(torch.ones(4, 4) > 0, x, 0.0), "cast": lambda x: x.double().float(),
    "reshaped": lambda x: x.flatten(2).unflatten(2, (4, 4)), "stacked": lambda x: torch.stack([x, x], 2).flatten(2, 3),
}  # fmt: skip
NOT_ON_THE_IMAGE: dict[str, Callable[[Tensor], Tensor]] = {
    "squashed": lambda x: x.relu(), "cut off": lambda x: torch.maximum(x, torch.zeros(())), "squared": lambda x: x * x,
    "averaged": lambda x: F.avg_pool2d(x, 2),
    "less its mean": lambda x: x - x.mean((2, 3), keepdim=True),
    "beside its mean": lambda x: torch.cat([x, x.mean(2, keepdim=True)], 2),
}  # fmt: skip


@pytest.mark.parametrize("name", [*ON_THE_IMAGE, *NOT_ON_THE_IMAGE])
def test_the_first_layers_read_the_image_itself(name: str) -> None:
    before = (ON_THE_IMAGE | NOT_ON_THE_IMAGE)[name]
    tape = parts(lambda m, x: m.b(m.a(before(x)).relu()).mean((2, 3)), a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(4, 5, 1))
    assert names(first_layers(tape)) == (["a"] if name in ON_THE_IMAGE else [])


def test_several_layers_may_read_the_image() -> None:
    def do(m: nn.ModuleDict, x: Tensor) -> Tensor:
        of_weight = F.conv2d(torch.ones(2, 3, 4, 4), x[:1, :, :1, :1].expand(4, -1, -1, -1))
        return (m.a(x) + m.b(x.flip(2)) + of_weight).mean((2, 3))

    tape = parts(do, a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(3, 4, 1))
    assert names(first_layers(tape)) == ["a", "b"]  # and not the one that takes its weight from it


@pytest.mark.parametrize(
    ("after", "meets"),
    [
        (lambda y: y.relu(), True), (lambda y: y, False), (lambda y: y + 1, False), (lambda y: y.relu() + y, False),
        (lambda y: y.relu() + y.tanh(), True), (lambda y: F.layer_norm(y, (4, 4)).relu(), True),
        (lambda y: F.max_pool2d(y, 2).relu(), True), (lambda y: y.flip(2).transpose(2, 3).relu(), True),
        (lambda y: F.avg_pool2d(y, 2).relu(), False), (lambda y: torch.cat([y, y], 1).relu(), False),
        (lambda y: torch.cat([y.flip(2), y.sigmoid()], 1).relu(), False), (lambda y: (y * y).relu(), False),
        (lambda y: torch.stack(y.chunk(2, 1)).relu(), False), (lambda y: F.normalize(y).flatten(1).tanh(), True),
        (lambda y: torch.cat([y, torch.ones(2, 4, 4, 4)], 1).relu(), True), (lambda y: y.clamp(0, 6), True),
        (lambda y: y.clamp(max=y.mean()), False), (lambda y: (2 * y).relu(), True), (lambda y: (y / 3).relu(), True),
        (lambda y: (y + 1).relu(), True), (lambda y: (2 * y) + y.relu(), False),
        (lambda y: torch.cat(y.split(1, 1), 1).relu(), True), (lambda y: torch.cat(y.chunk(2, 1), 1), False),
        (lambda y: torch.cat(y.chunk(2, 1)[::-1], 1).relu(), False),
        (lambda y: torch.cat(y.chunk(2, 1), 2).relu(), False),
        (lambda y: torch.cat([y.chunk(2, 1)[0], y.flip(1)], 1).relu(), False),
        (lambda y: (y.chunk(2, 1)[0] + 1).relu(), False), (lambda y: sum(y.split(1, 1)).relu(), False),
    ],
)  # fmt: skip
def test_whether_an_activation_comes_first(after: Callable[[Tensor], Tensor], meets: bool) -> None:
    tape = parts(lambda m, x: after(m.a(x)), a=nn.Conv2d(3, 4, 1))
    assert meets_activation_first(tape, next(n for n in tape.nodes if n.op == "conv2d")) is meets


@pytest.mark.parametrize(
    ("before", "shape"),
    [
        (lambda x: x.flatten(1), (3, 4, 4)), (lambda x: x.reshape(len(x), -1), (3, 4, 4)),
        (lambda x: F.dropout(x.view(2, 48), 0.1, False).clone().contiguous(), (3, 4, 4)),
        (lambda x: x[:, :, :1, :2].flatten(1), (3, 1, 2)),
        (lambda x: x[:, :, :1].flatten(1), (3, 1, 4)), (lambda x: x[..., :1].flatten(1), (3, 4, 1)),
        (lambda x: x.mean((2, 3), keepdim=True).flatten(1), None),  # one place
        (lambda x: x.mean((2, 3)), None), (lambda x: x.flatten(2), None), (lambda x: x[:, 0].flatten(1), None),
        (lambda x: x.flatten(1).relu(), None), (lambda x: x, None), (lambda x: F.dropout(x, 0.1, False), None),
    ],
)  # fmt: skip
def test_the_feature_map_before_flattening(before: Callable[[Tensor], Tensor], shape: tuple[int, ...] | None) -> None:
    width = before(torch.zeros(2, 3, 4, 4)).shape[-1]
    tape = parts(lambda m, x: m.fc(before(x)), fc=nn.Linear(width, 2))
    fc = next(n for n in tape.nodes if n.op == "linear")
    assert spatial_before_flatten(tape, fc.inputs[0]) == shape


@pytest.mark.parametrize(
    ("layer", "spatial"),
    [
        (nn.Conv2d(3, 4, 3), True), (nn.Conv2d(3, 4, (1, 2)), True), (nn.Conv2d(3, 4, 1), False),
        (nn.Conv3d(2, 4, (1, 3, 3)), False), (nn.ConvTranspose2d(3, 4, 3), False),
    ],
)  # fmt: skip
def test_convolutions_that_see_more_than_one_place(layer: nn.Module, spatial: bool) -> None:
    three = isinstance(layer, nn.Conv3d)
    tape = parts(lambda m, x: m.a(x[:, None, :2].expand(-1, 2, -1, -1, -1) if three else x), a=layer)
    assert is_spatial_conv(tape, next(n for n in tape.nodes if "conv" in n.op)) is spatial


def test_evidence_is_taken_through_each_layer_apart() -> None:
    """x that two last layers and something else read: x W^T g for both, and nothing of the third way."""

    def do(m: nn.ModuleDict, x: Tensor) -> Tensor:
        y = x.mean((2, 3))
        return m.a(y) + m.b(y).relu() + y * 7

    tape = parts(do, a=nn.Linear(3, 3), b=nn.Linear(3, 3))
    layers = last_layers(tape)
    cotangents = torch.rand(2, 2, 3)
    gradients = tape.gradients(cotangents, gradient_points(tape, layers))
    ((value, evidence),) = evidence_at(tape, layers, gradients).items()
    of_layer = {node.module: linear_map(node) for node in layers}
    on = (of_layer["layers.b"].forward(value.tensor, of_layer["layers.b"].weight) + of_layer["layers.b"].bias) > 0
    slow = cotangents @ of_layer["layers.a"].weight + (cotangents * on) @ of_layer["layers.b"].weight
    assert torch.allclose(evidence, value.tensor * slow, atol=1e-6)


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


@pytest.mark.parametrize("extra", [0, 1, 7])
def test_patches_are_read_on_their_grid(extra: int) -> None:
    tape = record(Tokens(extra).eval(), torch.randn(2, 3, 16, 24))
    found = token_layers(tape, tape.nodes)
    assert [(node.module, tokens.places.grid) for node, tokens in found.items()] == [("mix", (2, 3))]
    (tokens,) = found.values()
    places = torch.arange(6.0)
    share = torch.cat([torch.full((extra,), 100.0), places])[:, None].expand(1, 2, -1, 4)
    assert torch.equal(tokens.on_grid(share), (4 * places).reshape(2, 3).expand(1, 2, 2, 3))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "tokens": lambda x: x.flatten(2).mT,
    "tokens first": lambda x: x.flatten(2).permute(2, 0, 1),
    "one axis": lambda x: x.permute(0, 2, 3, 1).reshape(-1, 4),
    "channels last": lambda x: x.permute(0, 2, 3, 1),
    "windows": lambda x: x.unflatten(3, (3, 2)).unflatten(2, (2, 2)).permute(0, 2, 4, 3, 5, 1).reshape(-1, 4, 4),
    "shifted": lambda x: LAYOUTS["windows"](x.roll((-1, -1), (2, 3))),
    "windows first": lambda x: LAYOUTS["windows"](x).unflatten(0, (len(x), -1)).transpose(0, 1).flatten(0, 1),
}


class Laid(nn.Module):
    """A linear layer over patches in some layout; before it, 2 x 2 patches may become one, or one 2 x 2."""

    def __init__(self, layout: str, merge: str = "") -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Conv2d(3, 4, 8, 8), nn.Linear(4, 5), nn.Linear(5, 2)
        self.both = nn.Linear(16, 4)
        self.layout, self.merge = LAYOUTS[layout], merge

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        if self.merge == "mean":
            x = x.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).mean((3, 5))
        if self.merge == "repeat":
            x = x[:, :, :, None, :, None].expand(-1, -1, -1, 2, -1, 2).flatten(4).flatten(2, 3)
        if self.merge == "layer":
            x = torch.cat([x[:, :, i::2, j::2] for j in range(2) for i in range(2)], 1)
            x = self.both(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        self.before = x.detach().clone()
        mixed = torch.relu(self.mix(self.layout(x)))
        return self.head(mixed).sum() + mixed.reshape(2, -1)[:, :2]


@pytest.mark.parametrize("merge", ["", "layer", "mean", "repeat"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_patches_in_any_layout_are_put_in_their_place(layout: str, merge: str) -> None:
    """Against the values themselves: what a layer reads at a place is what the map before it has there."""
    torch.manual_seed(0)
    model = Laid(layout, merge).eval()
    scale = {"": 1, "repeat": 0.5}.get(merge, 2)
    tape = record(model, torch.randn(2, 3, int(32 * scale), int(48 * scale)))
    (layer,) = (node for node in tape.nodes if node.module == "mix")
    tokens = token_layers(tape, tape.nodes)[layer]
    value = layer.inputs[0]
    assert tokens.places.grid == (4, 6)
    expected = model.before
    assert torch.allclose(tokens.on_grid(value.tensor[None]), expected.sum(1)[None], atol=1e-6)
    as_map = tokens.as_map(value.tensor[None])
    assert as_map.shape == (1, 2, 4, 24, 1)
    assert torch.equal(tokens.restored(as_map), value.tensor[None])
    for image in range(2):  # the same tokens, in another order
        ours, theirs = as_map[0, image, :, :, 0].mT, expected[image].flatten(1).mT
        assert torch.equal(ours[ours[:, 0].argsort()], theirs[theirs[:, 0].argsort()])


@pytest.mark.parametrize(("some", "whole"), [(slice(None), True), (slice(0, 1), False), (slice(1, 2), False)])
def test_each_place_has_a_token_or_the_layer_has_no_grid(some: slice, whole: bool) -> None:
    """Two patches are a grid; the first alone or the last alone is not."""
    layer = nn.Linear(4, 2)
    tape = parts(
        lambda m, x: m.mix(m.embed(x).flatten(2).mT[:, some]).sum(1), embed=nn.Conv2d(3, 4, (4, 2), 2), mix=layer
    )
    assert bool(token_layers(tape, tape.nodes)) is whole


@pytest.mark.parametrize(("index", "whole"), [([1, 2, 0], True), ([1], False), ([2], False), ([1, 1, 2], False)])
def test_each_place_counts_once(index: list[int], whole: bool) -> None:
    """Two places; 0 is a token without a place."""
    places = Places((1, 2), torch.tensor(index, dtype=torch.float32)[None, :, None])
    shape = torch.Size([3, len(index), 4])
    assert _each_place_once(places, Value(torch.zeros(shape), None, shape), 3) is whole


def test_a_weight_of_the_image_makes_no_token_layer() -> None:
    def do(m: nn.ModuleDict, x: Tensor) -> Tensor:
        return F.linear(m.embed(x).flatten(2).mT, x.mean((0, 2, 3))[:, None].expand(3, 4)).mean(1)

    tape = parts(do, embed=nn.Conv2d(3, 4, 2, 2))
    assert not token_layers(tape, tape.nodes)


def test_layers_that_mix_places_are_no_token_layers() -> None:
    """A layer over the places themselves, and blocks that overlap, have no grid of tokens."""

    class Mixes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.over_places, self.overlap = nn.Conv2d(3, 4, 8, 8), nn.Linear(24, 24), nn.Linear(8, 4)
            self.after, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.over_places(self.embed(x).flatten(2)).unflatten(2, (4, 6)).permute(0, 2, 3, 1)
            x = self.overlap(torch.cat([x[:, :, :-1], x[:, :, 1:]], -1))
            return self.head(self.after(x).mean((1, 2)))

    tape = record(Mixes().eval(), torch.randn(2, 3, 32, 48))
    assert not token_layers(tape, tape.nodes)


def test_tokens_of_unknown_images_make_no_token_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    tape = parts(lambda m, x: m.mix(m.embed(x).flatten(2).mT).sum(1), embed=nn.Conv2d(3, 4, 2, 2), mix=nn.Linear(4, 2))
    assert token_layers(tape, tape.nodes)
    monkeypatch.setattr(layers, "image_index", lambda tape: {})
    assert not token_layers(tape, tape.nodes)


def test_sums_of_signed_values() -> None:
    """However they are written; not the sampling at places that the image says."""
    assert {"add", "sub", "mean", "sum", "avg_pool2d", "max_pool2d", "amax"} <= layers.SIGNED_SUMS
    assert layers.SIGNED_SUMS.isdisjoint({"grid_sample", "mul", "matmul", "softmax", "relu"})


def test_a_single_place_is_no_grid() -> None:
    shape = torch.Size([3, 1, 4])
    assert not _each_place_once(Places((1, 1), torch.ones(1, 1, 1)), Value(torch.zeros(shape), None, shape), 3)


def test_a_flattened_piece_of_an_image_is_no_map_of_it() -> None:
    """Quarters, stacked along the batch axis: a row for each quarter."""

    def do(m: nn.ModuleDict, x: Tensor) -> Tensor:
        quarters = x.unflatten(3, (2, 2)).unflatten(2, (2, 2)).permute(0, 2, 4, 1, 3, 5).flatten(0, 2)
        return m.fc(quarters.flatten(1)).unflatten(0, (len(x), 4)).mean(1)

    tape = parts(do, fc=nn.Linear(12, 2))
    (fc,) = [node for node in tape.nodes if node.op == "linear"]
    assert spatial_before_flatten(tape, fc.inputs[0]) is None


class Shared(nn.Module):
    """A value that a layer, and something else, reads; what makes the layer's weight differs."""

    def __init__(self, weight: str) -> None:
        super().__init__()
        self.first, self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.weight = weight
        self.norm.running_mean.uniform_(-1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        weight = self.conv.weight
        if self.weight == "computed":
            weight = weight / weight.norm()
        elif self.weight == "of the value":
            weight = weight * y.mean()
        inside = F.pad(y, [1, 1, 1, 1]) if self.weight == "padded apart" else y
        z = F.conv2d(inside, weight, self.conv.bias, padding=0 if self.weight == "padded apart" else 1)
        return (self.norm(z).relu() + 3 * y).mean((2, 3))


@pytest.mark.parametrize("weight", ["plain", "computed", "padded apart", "of the value"])
def test_the_gradient_through_a_layer_leaves_out_other_uses_of_its_input(weight: str) -> None:
    """Here one adjoint of the gradient at the layer's output; ours comes from autograd, where it can be told."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model, x = Shared(weight).double().eval(), torch.randn(2, 3, 5, 4, dtype=torch.float64)
    tape = folded(record(model, x))
    (layer,) = [node for node in tape.nodes if node.module in ("", "norm", "conv") and node.op == "conv2d"]
    cotangents = torch.randn(3, 2, 4, dtype=torch.float64)
    (point,) = gradient_points(tape, [layer])
    gradients = tape.gradients(cotangents, [point, layer.outputs[0]])
    found = linear_map(layer)
    slow = found.adjoint(gradients[layer.outputs[0]], found.weight)
    assert torch.allclose(own_gradient(tape, layer, gradients), slow, atol=1e-12)
    assert (point is layer) == (weight != "of the value")
    assert slow.abs().max() > 0
