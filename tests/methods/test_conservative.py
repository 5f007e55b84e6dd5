"""The altered backward pass, rule by rule, against autograd of the same network with its constants detached."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import classlens
from classlens.core.capture import Value, record
from classlens.errors import MethodError, UnsupportedOp
from classlens.methods import conservative
from classlens.methods.blocks import find_attentions
from classlens.methods.conservative import Altered, _is_pooled, _on_image, bias_at, gamma_back
from classlens.methods.registry import Case
from steps import Does

Do = Callable[[Tensor], Tensor]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def altered(do: Do, x: Tensor, start: Tensor, **options: float) -> Tensor:
    """The altered gradient of a function, for one class."""
    tape = record(Does(do).eval(), x)
    return Altered(tape, found=find_attentions(tape), **options).run(start[None])[0]


def same(do: Do, detached: Do, x: Tensor) -> bool:
    """Whether the altered gradient of a function is autograd's gradient of the other."""
    leaf = x.clone().requires_grad_()
    out = detached(leaf)
    assert torch.allclose(out, do(x))  # what is detached changes no value
    start = random(*out.shape, seed=9)
    (expected,) = torch.autograd.grad(out, leaf, start)
    return torch.allclose(altered(do, x, start), expected, rtol=1e-9, atol=1e-12)


# ----------------------------------------------------------------------------------------------------- normalisations

X, W, B = random(2, 4, 6), random(6, seed=1), random(6, seed=2)


def normed(x: Tensor, axes: tuple[int, ...], eps: float) -> Tensor:
    """A layer norm whose standard deviation is a constant."""
    centred = x - x.mean(axes, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(axes, keepdim=True) + eps).detach()


def rooted(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps).detach()


def fixed(x: Tensor) -> Tensor:
    return (x - W[:4, None]) * torch.rsqrt(B[:4, None] ** 2 + 1e-5)


NORMS: dict[str, tuple[Do, Do]] = {
    "layer": (lambda x: F.layer_norm(x, (6,), W, B), lambda x: normed(x, (-1,), 1e-5) * W + B),
    "layer without weights": (lambda x: F.layer_norm(x, (6,)), lambda x: normed(x, (-1,), 1e-5)),
    "layer over two axes": (lambda x: F.layer_norm(x, (4, 6), eps=0.5), lambda x: normed(x, (-2, -1), 0.5)),
    "layer by defaults": (lambda x: torch.layer_norm(1e-3 * x, (6,)), lambda x: normed(1e-3 * x, (-1,), 1e-5)),
    "batch": (
        lambda x: F.batch_norm(x, W[:4], B[:4] ** 2, B[2:], W[2:]),
        lambda x: fixed(x) * B[2:, None] + W[2:, None],
    ),
    "batch of its own": (
        lambda x: F.batch_norm(x, None, None, training=True),  # as autograd has it
        lambda x: F.batch_norm(x, None, None, training=True),
    ),
    "rms": (lambda x: F.rms_norm(x, (6,), W, eps=0.3), lambda x: rooted(x, 0.3) * W),
    "rms of small values": (lambda x: F.rms_norm(1e-8 * x, (6,)), lambda x: rooted(1e-8 * x, 2.0**-52)),
}


@pytest.mark.parametrize("name", NORMS)
def test_the_deviation_of_a_norm_is_a_constant(name: str) -> None:
    assert same(*NORMS[name], X)


def by_group(x: Tensor, groups: int, eps: float) -> Tensor:
    parts = x.unflatten(1, (groups, -1))
    return normed(parts, tuple(range(2, parts.dim())), eps).flatten(1, 2)


@pytest.mark.parametrize("shape", [(2, 6), (2, 6, 3, 2)])
def test_the_deviation_of_a_group_is_a_constant(shape: tuple[int, ...]) -> None:
    wide = [6] + [1] * (len(shape) - 2)
    weight, bias, x = W.reshape(wide), B.reshape(wide), random(*shape)
    assert same(lambda x: F.group_norm(x, 3, W, B, eps=0.2), lambda x: by_group(x, 3, 0.2) * weight + bias, x)
    assert same(lambda x: F.group_norm(x, 2), lambda x: by_group(x, 2, 1e-5), x)
    assert same(lambda x: torch.group_norm(1e-3 * x, 2), lambda x: by_group(1e-3 * x, 2, 1e-5), x)


# ------------------------------------------------------------------------------------------------ activations, products


@pytest.mark.parametrize("activation", [F.gelu, F.relu, F.silu, torch.tanh])
def test_the_gate_of_an_activation_is_a_constant(activation: Do) -> None:
    x = random(2, 5)
    assert same(activation, lambda x: x * (activation(x) / x).detach(), x)


def test_an_activation_of_two_values_has_both_gradients() -> None:
    """A slope that the image makes is no constant: there is no y / x to take."""

    def do(x: Tensor) -> Tensor:
        return F.prelu(x, x.mean((0, 2)))

    assert same(do, do, X)


def test_at_0_the_gate_of_an_activation_is_its_slope() -> None:
    x, start = torch.tensor([[0.0, 2.0]]).double(), torch.tensor([[3.0, 3.0]]).double()
    for activation, slope in ((F.silu, 0.5), (torch.tanh, 1.0), (F.relu, 0.0)):
        gate = torch.tensor([[slope, float(activation(x)[0, 1]) / 2]]).double()
        assert torch.allclose(altered(activation, x, start), start * gate)


def test_a_stabiliser_is_added_below() -> None:
    x, start = random(2, 5), random(2, 5, seed=1)
    assert torch.allclose(altered(F.gelu, x, start, stabiliser=0.5), start * F.gelu(x) / (x + 0.5))


def half(product: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
    """A product of which each factor gets half of the gradient."""
    return product((a + a.detach()) / 2, b.detach()) + product(a.detach(), (b - b.detach()) / 2)


def gated(x: Tensor) -> Tensor:
    """A sigmoid whose quotient by its input is a constant."""
    return x * (torch.sigmoid(x) / x).detach()


PRODUCTS: dict[str, tuple[Do, Do]] = {
    "gate first": (lambda x: torch.sigmoid(x[:, :1]) * x[:, 1:], lambda x: torch.sigmoid(x[:, :1]).detach() * x[:, 1:]),
    "gate last": (lambda x: x[:, 1:] * torch.sigmoid(x[:, :1]), lambda x: x[:, 1:] * torch.sigmoid(x[:, :1]).detach()),
    "two gates": (
        lambda x: torch.sigmoid(x[:, 1:]) * torch.sigmoid(2 * x[:, :1]),
        lambda x: half(torch.mul, gated(x[:, 1:]), gated(2 * x[:, :1])),
    ),
    "two signals": (lambda x: x[:, 1:] * x[:, :1], lambda x: half(torch.mul, x[:, 1:], x[:, :1])),
    "two matrices": (lambda x: x @ x.mT, lambda x: half(torch.matmul, x, x.mT)),
    "a constant": (lambda x: 3 * x, lambda x: 3 * x),
    "a constant matrix": (lambda x: x @ MIX, lambda x: x @ MIX),
    "nothing": (lambda x: F.dropout(2 * x, 0.5, training=False), lambda x: 2 * x),
    "a constant in einsum": (lambda x: torch.einsum("bij,jk->bik", x, MIX), lambda x: x @ MIX),
    "partly cut off": (lambda x: 3 * x + x.detach() * 2, lambda x: 3 * x + x.detach() * 2),
    "a sum": (lambda x: (x + 2 * x.flip(1)).mean(1), lambda x: (x + 2 * x.flip(1)).mean(1)),
    "the first of two outputs": (lambda x: torch.std_mean(x, 2)[0], lambda x: torch.std_mean(x, 2)[0]),
    "parts": (lambda x: (p := x.chunk(2, 1))[0] - 5 * p[1], lambda x: x[:, :2] - 5 * x[:, 2:]),
}
MIX = random(3, 3, seed=3)


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_gate_is_a_constant_and_signals_get_half(name: str) -> None:
    assert same(*PRODUCTS[name], random(2, 4, 3))


def test_a_part_that_is_overwritten_gets_nothing_from_there() -> None:
    def do(x: Tensor) -> Tensor:
        y = 2 * x
        y[:, :2].copy_(x[:, 2:])
        return y

    assert same(do, lambda x: torch.cat([x[:, 2:], 2 * x[:, 2:]], 1), random(2, 4, 3))


def test_a_second_output_has_no_rule() -> None:
    with pytest.raises(UnsupportedOp, match=r"no rule for std_mean .*of which a later output is used"):
        altered(lambda x: torch.std_mean(x, 2)[1], random(2, 4, 3), random(2, 4, seed=1))


# ----------------------------------------------------------------------------------------------------------- attention

T = random(2, 4, 5, 3)  # (images, heads, tokens, channels)
FUSED = F.scaled_dot_product_attention


def weights(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT * 3**-0.5).softmax(-1).detach()


def scored(x: Tensor, by: Callable[..., Tensor] = lambda product, a, b: product(a, b)) -> Tensor:
    return by(torch.matmul, x, x.mT)


MIX5 = random(5, 5, seed=4)
ATTENTION: dict[str, tuple[Do, Do]] = {
    "fused": (lambda x: FUSED(x, 2 * x, x.flip(2)), lambda x: weights(x, 2 * x) @ x.flip(2)),
    "groups": (
        lambda x: FUSED(x, x[:, :2], 3 * x[:, 2:], enable_gqa=True),
        lambda x: weights(x, x[:, [0, 0, 1, 1]]) @ (3 * x[:, [2, 2, 3, 3]]),
    ),
    "heads that share": (lambda x: FUSED(x, x, x[:, :1]), lambda x: weights(x, x) @ x[:, :1]),
    "written out": (
        lambda x: ((x @ (2 * x).mT * 3**-0.5).softmax(-1)) @ x.flip(2),
        lambda x: weights(x, 2 * x) @ x.flip(2),
    ),
    "its output in a product": (
        lambda x: FUSED(x, x, x) @ x.mT,
        lambda x: half(torch.matmul, weights(x, x) @ x, x.mT),
    ),
    "mixed by a layer afterwards": (  # which makes other values of the weights: a product of two signals
        lambda x: (a := scored(x).softmax(-1), a @ x + F.linear(a, MIX5) @ x)[1],
        lambda x: (a := scored(x, half).softmax(-1), a.detach() @ x + half(torch.matmul, F.linear(a, MIX5), x))[1],
    ),
    "added to scores": (
        lambda x: (a := scored(x).softmax(-1), a @ x + (a + scored(x)) @ x)[1],
        lambda x: (
            a := scored(x, half).softmax(-1),
            a.detach() @ x + half(torch.matmul, a + scored(x, half), x),
        )[1],
    ),
    "softmax afterwards": (
        lambda x: (a := scored(x).softmax(-1), a @ x + a.softmax(-1) @ x)[1],
        lambda x: (a := scored(x, half).softmax(-1), a.detach() @ x + half(torch.matmul, a.softmax(-1), x))[1],
    ),
    "scaled afterwards": (
        lambda x: (0.5 * (x @ x.mT * 3**-0.5).softmax(-1)).flatten(0, 1) @ x.flatten(0, 1),
        lambda x: (0.5 * weights(x, x)).flatten(0, 1) @ x.flatten(0, 1),
    ),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_the_weights_of_attention_are_constants(name: str) -> None:
    assert same(*ATTENTION[name], T)
    assert same(*ATTENTION[name], random(3, 4, 5, 3))  # not as many images as groups


@pytest.mark.parametrize("bias", [True, False])
def test_torchs_attention_layer_with_constant_weights(bias: bool) -> None:
    """Values that are also queries or keys get their share once, and get it as values."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(6, 2, bias=bias, batch_first=True).double().eval()
    x = random(2, 5, 6)

    def detached(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            _, a = layer(q, k, v, average_attn_weights=False)
        w, b = layer.in_proj_weight.chunk(3)[2], layer.in_proj_bias.chunk(3)[2] if bias else None
        return layer.out_proj((a @ F.linear(v, w, b).unflatten(2, (2, 3)).transpose(1, 2)).transpose(1, 2).flatten(2))

    assert same(lambda x: layer(x, x, x, need_weights=False)[0], lambda x: detached(x, x, x), x)
    assert same(lambda x: layer(2 * x, x, x)[0], lambda x: detached(2 * x, x, x), x)
    assert same(lambda x: layer(x, 2 * x, 3 * x)[0], lambda x: detached(x, 2 * x, 3 * x), x)
    assert same(lambda x: layer(y := 2 * x, 3 * x, y)[0], lambda x: detached(2 * x, 3 * x, 2 * x), x)


def test_learnt_values_are_refused() -> None:
    x, layer = random(1, 4, 4), nn.MultiheadAttention(4, 2).double().eval()
    values = random(1, 4, 4, seed=1)
    for do in (lambda x: FUSED(x, x, values), lambda x: layer(x, x, values, need_weights=False)[0]):
        with pytest.raises(UnsupportedOp, match="no rule for attention whose values do not depend on the image"):
            altered(do, x, values)


# ----------------------------------------------------------------------------------------------------------- gamma rule


@pytest.mark.parametrize("bias", [True, False])
def test_gamma_by_hand(bias: bool) -> None:
    """R = g y goes back by z = x w, those of the output's sign 1 + gamma times; then it is divided by x."""
    torch.manual_seed(0)
    layer, x, g = nn.Linear(5, 4, bias).double().eval(), random(1, 5), random(1, 1, 4, seed=1)
    x[0, 2] = 0.0
    tape = record(layer, x)
    (found,) = gamma_back(tape.nodes[-1], g, 0.7)
    y, expected = layer(x)[0], torch.zeros(5).double()
    for i in range(4):
        z = x[0] * layer.weight[i]
        constant = layer.bias[i] if bias else torch.zeros(()).double()
        more = [part + 0.7 * part * (part.sign() == y[i].sign()) for part in (z, constant)]
        expected += more[0] / (more[0].sum() + more[1]) * g[0, 0, i] * y[i]
    on = x[0] != 0
    assert 0 < (y > 0).sum() < 4  # both signs are tried
    assert torch.allclose(found[0, 0, on], (expected / x[0])[on].detach(), rtol=1e-4)
    assert (found[0, 0, ~on] == 0).all()


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(("x", "w"), [(1.0, 1e-6), (1e-10, 1.0)])
def test_denominators_are_kept_away_from_0(x: float, w: float, sign: float) -> None:
    """z + 1e-6 and x + 1e-10, each further from 0 on its own side: at these sizes they halve the gradient g w."""
    layer = nn.Linear(1, 1, bias=False).double().eval()
    nn.init.constant_(layer.weight, w if x < w else sign * w)
    given = torch.tensor([[sign * x if x < w else x]]).double()
    (found,) = gamma_back(record(layer, given).nodes[-1], torch.ones(1, 1, 1).double(), 0.0)
    kept = 0.5 if x > w else 0.5 * x / (x + 1e-6)
    assert float(found) == pytest.approx(layer.weight.item() * kept, rel=1e-3)


def test_biases_of_either_sign_at_outputs_of_either_sign() -> None:
    """The bias of an output takes part 1 + gamma times only if it has the output's sign."""
    torch.manual_seed(1)
    layer, x, g = nn.Linear(5, 60).double().eval(), random(1, 5), random(1, 1, 60, seed=1)
    y, z = layer(x)[0], x[0] * layer.weight
    more = [part * (1 + 0.7 * (part.sign() == side)) for part, side in ((z, y.sign()[:, None]), (layer.bias, y.sign()))]
    assert {(a, b) for a, b in zip((y > 0).tolist(), (layer.bias > 0).tolist(), strict=True)} == {
        (a, b) for a in (True, False) for b in (True, False)
    }
    expected = ((g[0, 0] * y / (more[0].sum(1) + more[1]))[:, None] * more[0]).sum(0) / x[0]
    (found,) = gamma_back(record(layer, x).nodes[-1], g, 0.7)
    assert torch.allclose(found[0, 0], expected.detach(), rtol=1e-3)


# ------------------------------------------------------------------------------------------------------------ attnlrp


def attnlrp(model: nn.Module, x: Tensor, conv: float, linear: float) -> Tensor:
    return classlens.explain(model.double().eval(), x, 1, "attnlrp", conv_gamma=conv, linear_gamma=linear).maps


def test_convolutions_and_linear_layers_have_a_gamma_each() -> None:
    """Without gamma it is gradient times input, as in every network of ReLUs without biases; each gamma changes it."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3, bias=False)
    model, x = nn.Sequential(*layers), random(1, 3, 4, 4)
    plain = classlens.explain(model.double().eval(), x, 1, "gradient-x-input").maps
    assert (attnlrp(model, x, 0.0, 0.0) - plain).norm() < 1e-3 * plain.norm()
    for changed in (attnlrp(model, x, 1.0, 0.0), attnlrp(model, x, 0.0, 1.0)):
        assert (changed - plain).norm() > 0.1 * plain.norm()
        assert torch.allclose(changed.sum(), plain.sum(), rtol=1e-3)  # and all of it arrives


def patches(x: Tensor) -> Tensor:
    """(B,3,2,6) -> (B,6,6): six patches of two pixels, with three colours each."""
    return x.unflatten(3, (3, 2)).permute(0, 2, 3, 1, 4).flatten(3).flatten(1, 2)


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_projections_of_attention_have_no_gamma(kind: str) -> None:
    """With it, other channels, and so other pixels of a patch, would get the relevance of a token."""
    torch.manual_seed(0)
    dense, conv = nn.Linear(6, 4, bias=False), nn.Conv2d(3, 4, (1, 2), (1, 2), bias=False)
    project = nn.Linear(4, 4, bias=False) if kind == "linear" else nn.Conv1d(4, 4, 1, bias=False)

    def do(x: Tensor) -> Tensor:
        tokens = project(conv(x).flatten(2).mT) if kind == "linear" else project(dense(patches(x)).mT).mT
        return FUSED(tokens, tokens, tokens).mean(1)

    model, x = Does(do), random(1, 3, 2, 6)
    model.layers = nn.ModuleList([dense, conv, project])
    with_gamma = (0.0, 3.0) if kind == "linear" else (3.0, 0.0)
    plain = attnlrp(model, x, 0.0, 0.0)
    assert torch.allclose(attnlrp(model, x, *with_gamma), plain, rtol=1e-3, atol=1e-6)
    assert (attnlrp(model, x, *reversed(with_gamma)) - plain).norm() > 0.1 * plain.norm()  # patches have theirs


# ------------------------------------------------------------------------------------------------------------ libragrad


@pytest.mark.parametrize(
    ("shape", "pooled"),
    [((2, 5), True), ((2, 5, 1, 1), True), ((2, 1, 5), True), ((2, 5, 3), False), ((2, 3, 1, 4), False)],
)
def test_a_pooled_value_holds_one_place_for_each_image(shape: tuple[int, ...], pooled: bool) -> None:
    assert _is_pooled(Value(torch.zeros(shape), None, torch.Size(shape))) is pooled


class Plain(nn.Module):
    """Patches as tokens, one block of attention around a skip connection, a mean, a head."""

    def __init__(self, biases: bool, norm: Do) -> None:
        super().__init__()
        self.patch, self.head = nn.Conv2d(3, 6, 4, 4, bias=biases), nn.Linear(6, 3, bias=biases)
        self.attend, self.norm = nn.MultiheadAttention(6, 2, bias=biases, batch_first=True), norm
        if biases:
            nn.init.normal_(self.attend.in_proj_bias)
            nn.init.normal_(self.attend.out_proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).mT
        y = self.norm(x)
        x = x + self.attend(y, y, y, need_weights=False)[0]
        return self.head(x).mean(1)


@pytest.mark.parametrize("biases", [True, False])
def test_libragrad_adds_up_to_the_logit(biases: bool) -> None:
    """Input times gradient of the only block, plus the shares of biases, also of those inside of torch's layer."""
    torch.manual_seed(0)
    norm = NORMS["layer" if biases else "layer without weights"][0]
    e = classlens.explain(Plain(biases, norm).double().eval(), random(2, 3, 8, 12), [[0, 2], [0, 2]], "libragrad")
    assert torch.allclose(F.avg_pool2d(e.maps, 4).sum((2, 3)), e.logits[:, [0, 2]].double())


def test_the_bias_of_the_layer_before_the_first_block_does_not_count() -> None:
    class Embedded(Plain):
        def __init__(self) -> None:
            super().__init__(True, F.relu)
            self.inside = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            t = self.inside(self.patch(x).flatten(2).mT)
            return self.head(t + self.attend(t, t, t, need_weights=False)[0]).mean(1)

    torch.manual_seed(0)
    e = classlens.explain(Embedded().double().eval(), random(2, 3, 8, 12), 0, "libragrad")
    assert torch.allclose(F.avg_pool2d(e.maps, 4).sum((2, 3)), e.logits[:, :1].double())


def test_the_constant_that_a_layer_adds() -> None:
    x, bias = random(2, 6, 3, 2), random(6, seed=1)
    kernel, dense = random(6, 6, 1, 1, seed=2), random(6, 2, seed=3)
    for do in (
        lambda b: lambda x: F.conv2d(x, kernel, b), lambda b: lambda x: F.linear(x, dense, b),
        lambda b: lambda x: F.group_norm(x, 2, W, b), lambda b: lambda x: F.layer_norm(x.movedim(1, -1), (6,), W, b),
    ):  # fmt: skip
        found = bias_at(record(Does(do(bias)).eval(), x).nodes[-1])
        added = do(bias)(x) - do(None)(x)
        assert torch.allclose(found.expand_as(added), added)
        assert bias_at(record(Does(do(None)).eval(), x).nodes[-1]) is None
    assert bias_at(record(Does(lambda x: x + 1).eval(), x).nodes[-1]) is None
    of_the_image = Does(lambda x: F.layer_norm(x, (2,), None, x.mean((0, 1, 2)))).eval()  # no constant
    assert bias_at(record(of_the_image, x).nodes[-1]) is None


def test_a_share_that_cannot_be_drawn_is_refused() -> None:
    """A layer over the tokens mixes their places; without its bias, the map would lack a share."""
    torch.manual_seed(0)

    class Mixes(Plain):
        def forward(self, x: Tensor) -> Tensor:
            tokens = self.patch(x).flatten(2).mT
            tokens = tokens + self.attend(tokens, tokens, tokens, need_weights=False)[0]
            return self.head(F.linear(tokens.mT, MIX6, BIAS6).mean(2))

    model = Mixes(True, NORMS["layer"][0]).double().eval()
    with pytest.raises(MethodError, match=r"the places of a value of shape \(2, 6, 6\) cannot be read, so its share"):
        classlens.explain(model, random(2, 3, 8, 12), 0, "libragrad")


def test_shares_on_two_grids_are_added() -> None:
    """Each is enlarged to the image from the grid of its own value."""
    x = random(2, 3, 8, 12)
    tape = record(Does(lambda x: F.avg_pool2d(F.avg_pool2d(x, 2), 2).sum((2, 3))).eval(), x)
    case = Case(nn.Identity(), x, tape, torch.tensor([[0], [1]]))
    fine, coarse = (node.outputs[0] for node in tape.nodes[:2])
    shares = [(value, random(1, *value.shape, seed=i)) for i, value in enumerate((fine, coarse, fine))]
    together = _on_image(case, shares).maps
    assert torch.allclose(together, sum(_on_image(case, [share]).maps for share in shares))


def test_a_pooled_share_has_no_place() -> None:
    """It is left out; if there is no other, nothing can be drawn."""
    x = random(2, 3, 8, 12)
    tape = record(Does(lambda x: F.avg_pool2d(x, 2).relu().sum((2, 3))).eval(), x)
    case = Case(nn.Identity(), x, tape, torch.tensor([[0], [1]]))
    on_places, pooled = ((value, random(1, *value.shape)) for value in (tape.nodes[0].outputs[0], tape.output))
    assert torch.equal(_on_image(case, [on_places, pooled]).maps, _on_image(case, [on_places]).maps)
    with pytest.raises(MethodError, match="the tokens of this network are in no order on a grid"):
        _on_image(case, [pooled])


@pytest.mark.parametrize("places", [1, 2])
def test_a_grid_of_one_place_is_pooled_too(places: int) -> None:
    x = random(2, 3, 4, 4 * places)
    tape = record(Does(lambda x: F.avg_pool2d(x, 4).relu().sum((2, 3))).eval(), x)
    value = tape.nodes[0].outputs[0]
    case = Case(nn.Identity(), x, tape, torch.tensor([[0], [1]]))
    if places == 1:
        with pytest.raises(MethodError, match="in no order on a grid"):
            _on_image(case, [(value, value.tensor[None])])
    else:
        assert _on_image(case, [(value, value.tensor[None])]).maps.any()


def test_a_share_of_unknown_images_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x = random(2, 3, 8, 12)
    tape = record(Does(lambda x: F.avg_pool2d(x, 2).sum((2, 3))).eval(), x)
    value = tape.nodes[0].outputs[0]
    monkeypatch.setattr(conservative, "image_index", lambda tape: {})
    with pytest.raises(MethodError, match=r"the places of a value of shape \(2, 3, 4, 6\) cannot be read"):
        _on_image(Case(nn.Identity(), x, tape, torch.tensor([[0], [1]])), [(value, value.tensor[None])])


def test_libragrad_needs_attention() -> None:
    with pytest.raises(MethodError, match=r"^libragrad needs attention, and this network has none"):
        classlens.explain(Does(lambda x: x.mean((2, 3))).eval(), random(2, 3, 8, 12), 0, "libragrad")


MIX6, BIAS6 = random(6, 6, seed=5), random(6, seed=6)


def test_a_block_that_is_not_there() -> None:
    model, x = Plain(True, NORMS["layer"][0]).double().eval(), random(1, 3, 8, 12)
    with pytest.raises(MethodError, match=r"start=1 is not possible; 1 blocks with a skip connection were found"):
        classlens.explain(model, x, 0, "libragrad", start=1)
