"""Attention as it is found on a tape: its weights and their gradients by autograd, blocks and projections by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import classlens
from classlens.core.capture import Tape, record
from classlens.errors import MethodError
from classlens.methods.blocks import block_inputs, find_attentions, last_output, one_grid, projections
from steps import Does

Do = Callable[[Tensor], Tensor]
IMAGES = torch.randn(2, 4, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)  # six places
MASK = torch.eye(6, dtype=torch.bool) | (torch.arange(36).reshape(6, 6) % 3 == 0)
BIAS = torch.linspace(-1, 1, 36, dtype=torch.float64).reshape(6, 6)


def tokens(x: Tensor) -> Tensor:
    return x.flatten(2).mT


def recorded(do: Do, x: Tensor = IMAGES) -> Tape:
    return record(Does(do).eval(), x)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def same(s: Tensor) -> Tensor:
    return s


# Each: what the scores and the weights go through, and the weights that follow.
WAYS: dict[str, tuple[Do, Do, Do]] = {
    "plain": (same, same, same),
    "times a number": (lambda s: 0.5 * s, same, lambda s: 0.5 * s),
    "divided": (lambda s: s / 2, same, lambda s: s / 2),
    "with a bias": (lambda s: s + BIAS, same, lambda s: s + BIAS),
    "masked": (lambda s: s.masked_fill(~MASK, -1e9), same, lambda s: torch.where(MASK, s, -1e9)),
    "chosen": (lambda s: torch.where(MASK, s, -1e9), same, lambda s: torch.where(MASK, s, -1e9)),
    "reshaped": (lambda s: s.reshape(2, 1, 6, 6), lambda a: a.reshape(2, 6, 6), same),
    "copied": (lambda s: s.clone(), lambda a: a.contiguous(), same),
    "dropped out": (same, lambda a: F.dropout(a, 0.5, training=False), same),
    "scaled twice": (lambda s: s * 2 + BIAS, lambda a: F.dropout(a * 1.0, 0.5, False), lambda s: s * 2 + BIAS),
}


@pytest.mark.parametrize("name", WAYS)
def test_attention_that_is_written_out(name: str) -> None:
    before, after, expected = WAYS[name]

    def do(x: Tensor) -> Tensor:
        t = tokens(x)
        return after(before(t @ t.mT).softmax(-1)) @ t

    (found,) = find_attentions(recorded(do))
    t = tokens(IMAGES)
    assert found.node.op == "softmax"
    assert torch.allclose(found.weights, expected(t @ t.mT).softmax(-1)[:, None])
    assert found.keys is not None
    assert found.keys.grid == (2, 3)


OTHERS: dict[str, Do] = {
    "over channels": lambda x: tokens(x).softmax(-1) @ tokens(x).mT,
    "over queries": lambda x: (t := tokens(x), (t @ t.mT).softmax(1) @ t)[1],
    "not multiplied": lambda x: (t := tokens(x), (t @ t.mT).softmax(-1) + 1)[1],
    "of one key": lambda x: (t := tokens(x), (t @ t[:, :1].mT).softmax(-1) @ t[:, :1])[1],
    "of mixed images": lambda x: (t := x.flatten(1)[None], (t.mT @ t).softmax(-1) @ t.mT)[1],
    "of a matrix": lambda x: (t := x.flatten(1), (t @ t.T).softmax(-1) @ t)[1],
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_softmaxes_are_no_attention(name: str) -> None:
    assert find_attentions(recorded(OTHERS[name])) == []


def test_the_axis_of_a_softmax_may_be_counted_from_the_front() -> None:
    t = tokens(IMAGES)
    (found,) = find_attentions(recorded(lambda x: (t := tokens(x), (t @ t.mT).softmax(2) @ t)[1]))
    assert torch.allclose(found.weights, (t @ t.mT).softmax(-1)[:, None])


FORMS: dict[str, Callable[[Tensor, nn.MultiheadAttention], Tensor]] = {
    "fused": lambda t, _: F.scaled_dot_product_attention(t[:, None], 2 * t[:, None], 3 * t[:, None])[:, 0],
    "groups": lambda t, _: F.scaled_dot_product_attention(
        heads(t), heads(t)[:, :1], heads(3 * t)[:, 1:], enable_gqa=True
    ).transpose(1, 2).flatten(2),
    "written out": lambda t, _: (t @ t.mT).softmax(-1) @ (3 * t),
    "torch's layer": lambda t, layer: layer(t, 2 * t, 3 * t, need_weights=False)[0],
    "torch's layer, tokens first": lambda t, layer: layer(
        *(n * t.transpose(0, 1) for n in (1, 2, 3)), need_weights=False
    )[0].transpose(0, 1),
}  # fmt: skip


def heads(t: Tensor) -> Tensor:
    return t.unflatten(2, (2, 2)).transpose(1, 2)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_the_gradient_at_the_weights_is_autograds(form: str, count: int) -> None:
    """What attention gives is linear in its weights: a small change of one weight changes the score by its gradient."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(4, 2, batch_first="first" not in form).double().eval()
    tape = recorded(lambda x: FORMS[form](tokens(x), layer), IMAGES[:count])
    (found,) = find_attentions(tape)
    cotangent = torch.randn(3, *tape.output.shape).double()
    gradient = found.gradient(tape.gradients(cotangent, [found.output])[found.output])
    assert found.weights.shape == gradient.shape[1:] == (count, found.weights.shape[1], 6, 6)
    assert torch.allclose(found.weights.sum(-1), torch.ones(()).double())
    if form in ("fused", "written out"):
        slow = cotangent @ (3 * tokens(IMAGES[:count])).mT
        assert torch.allclose(gradient[:, :, 0], slow)
    elif form == "groups":
        slow = cotangent.unflatten(3, (2, 2)).transpose(2, 3) @ (3 * heads(tokens(IMAGES[:count]))[:, 1:]).mT
        assert torch.allclose(gradient, slow)
    else:
        values = F.linear(3 * tokens(IMAGES[:count]), layer.in_proj_weight[8:], layer.in_proj_bias[8:])
        slow = heads_of(cotangent @ layer.out_proj.weight) @ heads(values).mT
        assert torch.allclose(gradient, slow.detach())


def test_the_gradient_where_the_values_are_learnt() -> None:
    values = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(1)).double()
    tape = recorded(lambda x: attended(tokens(x), tokens(x), values))
    (found,) = find_attentions(tape)
    cotangent = torch.randn(3, 2, 6, 4).double()
    assert torch.allclose(found.gradient(cotangent)[:, :, 0], cotangent @ values.mT)


def test_a_single_image_needs_no_axis_of_its_own() -> None:
    (found,) = find_attentions(recorded(lambda x: (t := tokens(x)[0], attended(t, t, t))[1], IMAGES[:1]))
    t = tokens(IMAGES)[0]
    assert torch.allclose(found.weights, (t @ t.mT / 2).softmax(-1)[None, None])
    cotangent = torch.randn(3, 6, 4).double()
    assert torch.allclose(found.gradient(cotangent), (cotangent @ t.mT)[:, None, None])


def heads_of(t: Tensor) -> Tensor:
    """(K,B,tokens,channels) -> (K,B,heads,tokens,channels of a head)."""
    return t.unflatten(3, (2, 2)).transpose(2, 3)


def one_row(x: Tensor) -> Tensor:
    """The tokens of all pictures as those of one."""
    return tokens(x).flatten(0, 1)[None]


def test_images_among_the_channels_are_refused() -> None:
    """(channels, tokens, images): the scores add up products of all images."""

    def mixed(x: Tensor) -> Tensor:
        t = x.flatten(2).permute(1, 2, 0)
        return attended(t, t, t).permute(2, 0, 1)

    with pytest.raises(MethodError, match="cannot be told apart"):
        find_attentions(recorded(mixed))


BETWEEN: dict[str, Callable[[Tensor, nn.MultiheadAttention], Tensor]] = {
    "fused": lambda t, _: F.scaled_dot_product_attention(t, t, t),
    "written out": lambda t, _: (t @ t.mT).softmax(-1) @ t,
    "torch's layer": lambda t, layer: layer(t, t, t, need_weights=False)[0],
}


@pytest.mark.parametrize("form", BETWEEN)
def test_attention_between_images_is_refused(form: str) -> None:
    """No map of a single picture can be read from weights between the tokens of two. One picture alone is fine."""
    layer = nn.MultiheadAttention(4, 2, batch_first=True).double().eval()

    def mixed(x: Tensor) -> Tensor:
        return BETWEEN[form](one_row(x), layer)[0].unflatten(0, (len(x), 6)).mean(1)

    with pytest.raises(MethodError, match=r"cannot be told apart at \S+ .*explain one image at a time"):
        find_attentions(recorded(mixed))
    (found,) = find_attentions(recorded(mixed, IMAGES[:1]))
    assert found.weights.shape[-2:] == (6, 6)


# -------------------------------------------------------------------------------------------------------------- blocks


class Block(nn.Module):
    def __init__(self, after: bool) -> None:
        super().__init__()
        self.norm, self.mlp, self.after, self.fused = nn.LayerNorm(4), nn.Linear(4, 4), after, False
        self.q, self.k, self.v, self.out = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.after else self.norm(x)
        q, k, v = self.q(y), self.k(y), self.v(y)
        seen = F.scaled_dot_product_attention(q, k, v) if self.fused else (q @ k.mT / 2).softmax(-1) @ v
        x = x + self.out(seen.contiguous())
        return self.norm(x + self.mlp(x)) if self.after else x + self.mlp(self.norm(x)).relu()


class Net(nn.Module):
    """Two blocks; norms before or after."""

    def __init__(self, after: bool) -> None:
        super().__init__()
        self.patch, self.first, self.second, self.head = (
            nn.Conv2d(3, 4, 2, 2),
            Block(after),
            Block(after),
            nn.Linear(4, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = tokens(self.patch(x))
        return self.head(self.second(self.first(x)).mean(1))


@pytest.mark.parametrize("after", [False, True])
def test_blocks_and_their_projections(after: bool) -> None:
    torch.manual_seed(0)
    tape = record(Net(after).double().eval(), torch.randn(2, 3, 4, 6).double())
    found = find_attentions(tape)
    inputs = block_inputs(tape, found)
    sources = [tape.producer[value] for value in inputs]
    assert [node.module for node in sources] == (["", "first.norm"] if after else ["", "first"])
    assert last_output(tape, inputs[0]) is next(n for n in reversed(tape.nodes) if n.op == "add").outputs[0]
    names = {node.module for node in projections(tape, found)}
    assert names == {f"{block}.{name}" for block in ("first", "second") for name in "qkv"} | {"first.out", "second.out"}


def test_attnlrp_does_not_depend_on_how_attention_is_written() -> None:
    """Also where queries, keys and values have layers of their own: none of them gets the gamma rule."""
    torch.manual_seed(0)
    model, x = Net(False).double().eval(), torch.randn(2, 3, 4, 6).double()
    written = classlens.explain(model, x, 1, "attnlrp").maps
    model.first.fused = model.second.fused = True
    assert torch.allclose(classlens.explain(model, x, 1, "attnlrp").maps, written, rtol=1e-8)


def looked(t: Tensor) -> Tensor:
    """Attention between tokens."""
    return attended(t, t, t)


DENSE = nn.Linear(4, 4).double()
NO_BLOCKS: dict[str, Do] = {
    "the sum skips more than norms and projections": lambda t: t + looked(t.relu()),
    "a sum before it": lambda t: looked(F.layer_norm(DENSE(t) + 2 * t, (4,))),
    "plus a constant": lambda t: (t + 1).relu().mean() * looked(t),
    "times what comes out": lambda t: t * looked(t),
}


@pytest.mark.parametrize("name", NO_BLOCKS)
def test_what_is_no_block(name: str) -> None:
    """The value that attention reads, through norms and projections, has to be added to a live value."""
    tape = recorded(lambda x: NO_BLOCKS[name](tokens(x)))
    assert block_inputs(tape, find_attentions(tape)) == []


def test_two_attentions_of_one_block_have_one_input() -> None:
    tape = recorded(lambda x: (t := tokens(x) * 2, t + looked(t) + looked(3 * t))[1])
    assert block_inputs(tape, find_attentions(tape)) == [tape.nodes[2].outputs[0]]
    assert tape.nodes[2].op == "mul"


def test_the_last_output_is_a_sum_of_two_live_values() -> None:
    """Not a constant added after it, nor a product, nor a sum of another shape."""

    def do(x: Tensor) -> Tensor:
        t = tokens(x) * 2
        t = t + looked(t)
        u = (t + 1) * t.sigmoid()
        return u.mean(1) + t.mean(1)

    tape = recorded(do)
    (block,) = block_inputs(tape, find_attentions(tape))
    assert last_output(tape, block) is next(node for node in tape.nodes if len(node.inputs) == 2).outputs[0]


def test_a_layer_before_the_norm_is_no_projection() -> None:
    tape = recorded(lambda x: looked(F.layer_norm(DENSE(tokens(x)), (4,))))
    assert projections(tape, find_attentions(tape)) == set()


def test_a_network_of_blocks_without_sums_has_no_block_inputs() -> None:
    tape = recorded(lambda x: (t := tokens(x), F.scaled_dot_product_attention(t, t, t).mean(1))[1])
    found = find_attentions(tape)
    assert block_inputs(tape, found) == []
    assert last_output(tape, tape.image) is tape.image


# ------------------------------------------------------------------------------------------------------------ one grid


def test_all_blocks_must_have_the_same_tokens() -> None:
    def fewer(x: Tensor) -> Tensor:
        t = tokens(x)
        t = looked(t)[:, :4]
        return looked(t)

    tape = recorded(fewer)
    with pytest.raises(MethodError, match="has 4 queries and 4 keys after 6 tokens; use attnlrp or agf"):
        one_grid(find_attentions(tape), "a method")


def test_only_the_last_block_may_pool() -> None:
    query = torch.ones(2, 1, 4).double()
    last = recorded(lambda x: (t := tokens(x), (u := looked(t), attended(query, u, u))[1])[1])
    assert one_grid(find_attentions(last), "a method") == (2, 3)
    first = recorded(lambda x: (t := tokens(x), attended(attended(query, t, t).expand_as(t), t, t))[1])
    with pytest.raises(MethodError, match="has 1 queries and 6 keys after 6 tokens"):
        one_grid(find_attentions(first), "a method")
    more = recorded(lambda x: (t := tokens(x), attended(torch.cat([t, t], 1), t, t))[1])
    with pytest.raises(MethodError, match="has 12 queries and 6 keys after 6 tokens"):
        one_grid(find_attentions(more), "a method")


def test_tokens_in_no_order_are_refused() -> None:
    mix = torch.ones(6, 6).double()
    tape = recorded(lambda x: looked(mix @ tokens(x)))
    with pytest.raises(MethodError, match="or they are in no order that can be read; use attnlrp or agf"):
        one_grid(find_attentions(tape), "a method")


def test_a_softmax_of_the_image_itself_is_no_attention() -> None:
    assert find_attentions(recorded(lambda x: x.softmax(-1))) == []
    assert find_attentions(recorded(lambda x: tokens(x).softmax(-1) @ tokens(x).mT)) == []


def test_attention_between_the_pixels_themselves_has_no_projections() -> None:
    tape = recorded(lambda x: F.scaled_dot_product_attention(tokens(x), tokens(x), tokens(x)))
    found = find_attentions(tape)
    assert projections(tape, found) == set()
    assert block_inputs(tape, found) == []


def test_keys_that_are_learnt_have_no_places() -> None:
    keys = torch.ones(1, 6, 4).double()
    (found,) = find_attentions(recorded(lambda x: F.scaled_dot_product_attention(tokens(x), keys, tokens(x))))
    assert found.keys is None


def test_keys_have_places_if_the_queries_are_learnt() -> None:
    queries = torch.ones(5, 4).double()
    (found,) = find_attentions(recorded(lambda x: (queries @ tokens(x).mT).softmax(-1) @ tokens(x)))
    assert found.keys is not None
    assert (found.keys.grid, found.keys.index.flatten().tolist()) == ((2, 3), [1, 2, 3, 4, 5, 6])


def test_the_places_of_queries_are_not_those_of_keys() -> None:
    def few_keys(x: Tensor) -> Tensor:
        t = tokens(x)
        return (t @ t[:, :3].mT).softmax(-1) @ t[:, :3]

    (found,) = find_attentions(recorded(few_keys))
    assert found.weights.shape == (2, 1, 6, 3)
    assert found.keys is None


def test_attention_over_the_images_is_refused() -> None:
    """For each token, queries that are learnt choose among the images of the batch."""
    queries = torch.ones(5, 4).double()

    def do(x: Tensor) -> Tensor:
        scores = torch.einsum("btc,qc->tqb", tokens(x), queries)
        return torch.einsum("tqb,btc->tqc", scores.softmax(-1), tokens(x))

    with pytest.raises(MethodError, match="the images cannot be told apart at softmax"):
        find_attentions(recorded(do))


def test_keys_without_places_are_no_grid() -> None:
    learnt = torch.ones(1, 6, 4).double()

    def do(x: Tensor) -> Tensor:
        t = tokens(x)
        return attended(attended(t, t, t), learnt, t)

    with pytest.raises(MethodError, match=r"a method multiplies .*; in scaled_dot_product_attention .* are cut into"):
        one_grid(find_attentions(recorded(do)), "a method")


def test_windows_are_no_grid() -> None:
    def do(x: Tensor) -> Tensor:
        t = tokens(x).unflatten(1, (2, 3))
        return attended(attended(t, t, t), t, t)

    with pytest.raises(MethodError, match=r"a method multiplies .*; in scaled_dot_product_attention .* are cut into"):
        one_grid(find_attentions(recorded(do)), "a method")


def test_a_layer_behind_an_activation_is_no_projection() -> None:
    torch.manual_seed(0)
    layers = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("before", "q", "k", "v", "out")}).double()

    def do(x: Tensor) -> Tensor:
        t = layers["before"](tokens(x)).relu()
        return layers["out"](attended(layers["q"](t), layers["k"](t).relu(), 2 * layers["v"](t)))

    tape = recorded(do)
    found = projections(tape, find_attentions(tape))
    inside = [node for node in tape.nodes if node.op == "linear"]
    assert [node in found for node in inside] == [False, True, False, True, True]
    tape = recorded(lambda x: layers["out"](attended(tokens(x), tokens(x), tokens(x)) * tokens(x).sigmoid()))
    assert projections(tape, find_attentions(tape)) == set()  # a product with a gate, not with the values


def test_two_tokens_are_enough() -> None:
    t = tokens(IMAGES[..., :1])
    (found,) = find_attentions(recorded(lambda x: (t := tokens(x), (t @ t.mT).softmax(-1) @ t)[1], IMAGES[..., :1]))
    assert torch.allclose(found.weights, (t @ t.mT).softmax(-1)[:, None])


class Backwards(nn.Module):
    """Attention whose keys and values are in the order of the queries, or reversed: the same output."""

    def __init__(self, reverse: tuple[bool, bool], fused: bool) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 5)
        self.mix = nn.ModuleList([nn.Linear(8, 24), nn.Linear(8, 24)])
        self.reverse, self.fused = reverse, fused

    def forward(self, x: Tensor) -> Tensor:
        t = self.patches(x).flatten(2).mT
        for mix, reverse in zip(self.mix, self.reverse, strict=True):
            q, k, v = mix(t).chunk(3, -1)
            if reverse:
                k, v = k.flip(1), v.flip(1)
            t = t + (F.scaled_dot_product_attention(q, k, v) if self.fused else (q @ k.mT / 8**0.5).softmax(-1) @ v)
        return self.head(t.mean(1))


@pytest.mark.parametrize("method", ["attention-rollout", "generic-attention", "transformer-attribution", "legrad"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("reverse", [(True, True), (False, True)])
def test_keys_in_another_order_are_refused(method: str, fused: bool, reverse: tuple[bool, bool]) -> None:
    torch.manual_seed(0)
    images = torch.randn(1, 3, 16, 16)
    classlens.explain(Backwards((False, False), fused).eval(), images, 1, method)
    with pytest.raises(MethodError, match="no order that can be read"):
        classlens.explain(Backwards(reverse, fused).eval(), images, 1, method)
