from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import classlens
from classlens.core.capture import record
from classlens.core.rules.attention import attention_weights, by_argument, opened, through_weights
from classlens.errors import UnsupportedOp
from networks import pictures
from steps import Does, back


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def by_hand(weights: Tensor, values: Tensor, relevance: Tensor) -> Tensor:
    """Every output i, channel c hands R_ic to the values j by a_ij |v_jc|."""
    share = torch.zeros_like(values)
    for i in range(len(weights)):
        for c in range(values.shape[1]):
            z = weights[i] * values[:, c].abs()
            share[:, c] += z / z.sum() * relevance[i, c]
    return share


def test_attention_weights_are_a_gate() -> None:
    x, r = tokens(1, 4, 3), torch.rand(1, 4, 3, dtype=torch.float64)
    expected = by_hand(torch.softmax(x[0] @ x[0].mT, -1), x[0], r[0])
    for do in (
        lambda x: torch.softmax(x @ x.mT, -1) @ x,
        lambda x: torch.einsum("bij,bjc->bic", torch.softmax(torch.einsum("bic,bjc->bij", x, x), -1), x),
        lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], scale=1.0)[:, 0],
    ):
        assert torch.allclose(back(do, x, r)[0], expected)


def test_values_that_heads_share_get_what_all_heads_send() -> None:
    x, r = tokens(1, 4, 3), torch.rand(1, 2, 4, 3, dtype=torch.float64)
    queries = torch.stack([x, 2 * x], 1)  # (1, heads, places, channels)

    def shared(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(torch.stack([x, 2 * x], 1), x[:, None], x[:, None], scale=1.0)

    expected = sum(by_hand(torch.softmax(queries[0, h] @ x[0].mT, -1), x[0], r[0, h]) for h in range(2))
    assert torch.allclose(back(shared, x, r)[0], expected)


def test_groups_of_queries_share_keys_and_values() -> None:
    """Four heads of queries, two of keys and values: heads 0 and 1 read the first, heads 2 and 3 the second."""
    x, r = tokens(1, 4, 5, 3), torch.rand(1, 4, 5, 3, dtype=torch.float64)
    expected = torch.zeros(4, 5, 3).double()
    for head in range(4):
        kv = x[0, head // 2]
        expected[head // 2] += by_hand(torch.softmax(x[0, head] @ kv.mT, -1), kv, r[0, head])
    fused = F.scaled_dot_product_attention
    found = back(lambda x: fused(x, x[:, :2], x[:, :2], scale=1.0, enable_gqa=True), x, r)
    assert torch.allclose(found[0], expected)


def test_a_learnt_query_looks_at_live_values() -> None:
    """Attention pooling: the query is a constant, keys and values are made of the image."""
    x, query, r = tokens(1, 4, 3), tokens(1, 1, 3) + 1, torch.rand(1, 1, 3, dtype=torch.float64)
    expected = by_hand(torch.softmax(query[0] @ x[0].mT, -1), x[0], r[0])
    found = back(lambda x: F.scaled_dot_product_attention(query, x, x, scale=1.0), x, r)
    assert torch.allclose(found[0], expected)


def test_learnt_values_are_refused() -> None:
    x, r, layer = tokens(1, 4, 4), torch.rand(1, 4, 4).double(), nn.MultiheadAttention(4, 2).double().eval()
    for do in (
        lambda x: F.scaled_dot_product_attention(x, x, tokens(1, 4, 4)),
        lambda x: layer(x, x, tokens(1, 4, 4), need_weights=False)[0],
    ):
        with pytest.raises(UnsupportedOp, match="no rule for attention whose values do not depend on the image"):
            back(do, x, r)


@pytest.mark.parametrize("mask", ["none", "causal", "additive", "boolean"])
def test_weights_of_fused_attention(mask: str) -> None:
    q, k, v = (tokens(2, 3, 5, 4) + i for i in range(3))
    given = {"additive": tokens(5, 5), "boolean": torch.eye(5, dtype=torch.bool) | (tokens(5, 5) > 0)}.get(mask)
    weights = attention_weights(q, k, given, mask == "causal", None)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=given, is_causal=mask == "causal")
    assert torch.allclose(weights @ v, expected)
    r = torch.rand(2, *expected.shape, dtype=torch.float64)
    assert torch.allclose(through_weights(weights, v, r).sum((3, 4)), r.sum((3, 4)))


FUSED: dict[str, dict[str, Any]] = {
    "plain": {}, "causal": {"is_causal": True}, "scaled": {"scale": 0.3}, "groups": {"enable_gqa": True},
    "additive": {"attn_mask": tokens(5, 5)}, "boolean": {"attn_mask": tokens(5, 5).abs() > 0.3},
}  # fmt: skip


@pytest.mark.parametrize("how", [*FUSED, "mask of the image"])
def test_fused_attention_in_three_steps_is_the_same(how: str) -> None:
    """Scores, softmax, and weights times values, each run again on its own inputs."""

    def do(x: Tensor) -> Tensor:
        if how == "mask of the image":
            x = x[:, 0]
            return F.scaled_dot_product_attention(x, x.flip(1), x + 1, attn_mask=x @ x.mT)
        few = 2 if how == "groups" else 4
        return F.scaled_dot_product_attention(x, x[:, :few].flip(2), x[:, :few] + 1, **FUSED[how])

    node = record(Does(do).eval(), tokens(1, 4, 5, 3)).nodes[-1]
    score, soft, mix = opened(node)
    (scores,) = score.call(*(value.tensor for value in score.inputs))
    (weights,) = soft.call(scores)
    assert torch.isfinite(scores).all()
    assert torch.allclose(mix.call(weights, mix.inputs[1].tensor)[0], node.outputs[0].tensor)
    assert [v.tensor.shape for v in (*score.outputs, *soft.outputs)] == [scores.shape, weights.shape]
    assert len(score.inputs) == (3 if how == "mask of the image" else 2)


def test_shares_by_name_go_to_the_inputs_in_their_order() -> None:
    """A value that is several arguments gets one share for each; what has no share gets none."""

    def do(x: Tensor) -> Tensor:
        y = x + 1
        return F.scaled_dot_product_attention(y, x, y, attn_mask=(x @ x.mT))

    node = record(Does(do).eval(), tokens(1, 4, 3)).nodes[-1]
    named = node.arguments()
    q, k, v = torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0)
    shares = by_argument(node, {"value": v, "key": k, "query": q, "scale": torch.tensor(4.0)})
    of = [(value, share) for value, share in zip(node.inputs, shares, strict=True) if share is not None]
    assert [share for value, share in of if value is named["key"]] == [k]
    assert sorted(share for value, share in of if value is named["query"]) == [q, v]
    assert len(of) == 3 < len(node.inputs) == 4


@pytest.mark.parametrize("sizes", [{}, {"kdim": 6, "vdim": 6}, {"kdim": 6, "vdim": 6, "bias": False}], ids=str)
def test_a_learnt_query_in_torchs_layer(sizes: dict[str, Any]) -> None:
    """Attention pooling, also with keys and values of another size than the query."""
    torch.manual_seed(0)
    layer, wide = nn.MultiheadAttention(8, 2, batch_first=True, **sizes).double().eval(), sizes.get("vdim", 8)
    x, query, r = tokens(1, 5, wide), tokens(1, 1, 8) + 1, torch.rand(1, 1, 8, dtype=torch.float64)
    found = back(lambda x: layer(query, x, x, need_weights=False)[0], x, r)
    as_live = back(lambda x: layer(query + 0 * x.sum(), x, x)[0], x, r)
    assert torch.allclose(found, as_live)
    assert torch.allclose(found.sum(), r.sum())


def test_torchs_attention_layer_equals_its_parts() -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, batch_first=True).double().eval()
    nn.init.normal_(layer.in_proj_bias)
    x = tokens(2, 5, 8)
    r = torch.rand(2, 5, 8, dtype=torch.float64)

    def parts(x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (2, 4)).transpose(1, 2)
            for t in F.linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1)
        )
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        return layer.out_proj(seen)

    whole = back(lambda x: layer(x, x, x, need_weights=False)[0], x, r)
    # In parts, the three projections are one linear layer: only the third's rows get relevance.
    assert torch.allclose(parts(x), layer(x, x, x)[0])
    assert torch.allclose(whole, back(parts, x, r))
    assert torch.allclose(whole.sum((1, 2)), r.sum((1, 2)))


WEIGHT = torch.tensor([[1.0, -2.0], [-3.0, 0.5], [2.0, 1.0]]).double()  # (3,2), of both signs
PRODUCTS: dict[str, Callable[[Tensor], Tensor]] = {
    "matmul": lambda x: x @ WEIGHT, "rmatmul": lambda x: x.mT.__rmatmul__(WEIGHT.mT).mT,
    "mm": lambda x: x[0].mm(WEIGHT)[None],
    "einsum": lambda x: torch.einsum("bij,jk->bik", x, WEIGHT),
    "baddbmm": lambda x: torch.baddbmm(torch.zeros(1, 1, 2).double(), x, WEIGHT[None]),
    "addmm": lambda x: torch.addmm(torch.zeros(2).double(), x[0], WEIGHT)[None],
    "addbmm": lambda x: torch.addbmm(torch.zeros(4, 2).double(), x, WEIGHT[None])[None],
    "inner": lambda x: torch.inner(x, WEIGHT.mT), "tensordot": lambda x: torch.tensordot(x, WEIGHT, 1),
    "bilinear": lambda x: F.bilinear(x, torch.ones(1, 4, 1).double(), WEIGHT.mT[:, :, None].contiguous()),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_share_by_magnitude_whatever_they_are_called(name: str) -> None:
    x, r = tokens(1, 4, 3), torch.rand(1, 4, 2, dtype=torch.float64)
    slow = torch.zeros(4, 3).double()
    for i in range(4):
        for k in range(2):
            z = (x[0, i] * WEIGHT[:, k]).abs()
            slow[i] += z / z.sum() * r[0, i, k]
    assert torch.allclose(back(PRODUCTS[name], x, r)[0], slow)


def test_an_outer_product_gives_each_row_what_it_made() -> None:
    x, w, r = tokens(1, 4), tokens(3) - 0.5, torch.rand(1, 4, 3, dtype=torch.float64)
    assert torch.allclose(back(lambda x: torch.outer(x[0], w)[None], x, r), r.sum(2))


def test_of_two_live_factors_a_gate_gets_nothing_and_equals_get_half() -> None:
    x, r = tokens(1, 3, 3), torch.rand(1, 3, 3, dtype=torch.float64)
    gate = torch.sigmoid(x[0])
    for do in (lambda x: torch.sigmoid(x) @ (x * 3), lambda x: torch.einsum("bij,bjk->bik", torch.sigmoid(x), x * 3)):
        assert torch.allclose(back(do, x, r)[0], by_hand(gate, x[0], r[0]))
    on_left = back(lambda x: (x * 3) @ torch.sigmoid(x), x, r)[0]
    assert torch.allclose(on_left, by_hand(gate.mT, x[0].mT, r[0].mT).mT)
    as_left, as_right = by_hand(x[0].abs().mT, x[0].abs().mT, r[0].mT).mT, by_hand(x[0].abs(), x[0].abs(), r[0])
    assert torch.allclose(back(lambda x: (x * 3) @ (x * 2), x, r)[0], (as_left + as_right) / 2)
    two_gates = back(lambda x: torch.sigmoid(x) @ torch.sigmoid(x), x, r)[0]
    assert torch.allclose(two_gates, (by_hand(gate.mT, gate.mT, r[0].mT).mT + by_hand(gate, gate, r[0])) / 2)


def test_fused_attention_reads_its_arguments_by_place_and_name() -> None:
    x, r = tokens(1, 4, 3), torch.rand(1, 4, 3, dtype=torch.float64)
    scores = x[0] @ x[0].mT
    mask = torch.tensor([[0.0, 1, -2, 0], [1, 0, 0, 1], [0, 2, 0, 0], [0, 0, 1, 3]]).double()
    fused = F.scaled_dot_product_attention
    causal = torch.ones(4, 4, dtype=torch.bool).tril()
    root = 3**-0.5
    for do, expected in (
        (lambda x: fused(x, x, x, mask), root * scores + mask),
        (lambda x: fused(x, x, x, attn_mask=mask, scale=2.0), 2 * scores + mask),
        (lambda x: fused(x, x, x, x @ x.mT), root * scores + scores),  # a mask that depends on the image
        (lambda x: fused(x, x, x, None, 0.0, True), (root * scores).masked_fill(~causal, -torch.inf)),
        (lambda x: fused(x, x, x, is_causal=True), (root * scores).masked_fill(~causal, -torch.inf)),
        (lambda x: fused(x, x, x, causal), (root * scores).masked_fill(~causal, -torch.inf)),
    ):
        assert torch.allclose(back(do, x, r)[0], by_hand(expected.softmax(-1), x[0], r[0]))


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
def test_constant_keys_and_values_keep_their_share(options: dict[str, bool]) -> None:
    """torch's layer is recorded as what it calls, so its further tokens are constants that are joined to the values."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, batch_first=True, **options).double().eval()
    x, r = tokens(1, 5, 8), torch.rand(1, 5, 8, dtype=torch.float64)
    total = back(lambda x: layer(x, x, x)[0], x, r).sum()
    assert 0.5 * r.sum() < total < r.sum() * (0.99 if "add_bias_kv" in options else 1 + 1e-9)  # zeros get no share


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 8, "vdim": 6}], ids=str)
@pytest.mark.parametrize("mask", ["none", "constant", "of the image"])
def test_torchs_attention_layer_by_hand(options: dict[str, Any], mask: str) -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, batch_first=True, **options).double().eval()
    if layer.in_proj_bias is not None:
        nn.init.normal_(layer.in_proj_bias)
    x, r = tokens(1, 5, 8), torch.rand(1, 5, 8, dtype=torch.float64)
    wide = options.get("vdim", 8)

    def given(x: Tensor) -> Tensor | None:
        of_image = (x[0] @ x[0].mT).detach() if mask == "constant" else x[0] @ x[0].mT
        return None if mask == "none" else of_image

    def attend(x: Tensor) -> Tensor:
        return layer(x, x, x[..., :wide], attn_mask=given(x))[0]

    _, weights = layer(x, x, x[..., :wide], attn_mask=given(x), average_attn_weights=False)
    w_v = layer.in_proj_weight[16:] if layer.in_proj_weight is not None else layer.v_proj_weight
    v = x[0, :, :wide] @ w_v.mT + (0 if layer.in_proj_bias is None else layer.in_proj_bias[16:])
    seen = torch.cat([weights[0, h] @ v[:, 4 * h : 4 * h + 4] for h in range(2)], 1)
    r_seen = by_hand(layer.out_proj.weight.abs(), seen.mT, r[0].mT).mT
    r_v = torch.cat([by_hand(weights[0, h], v[:, 4 * h : 4 * h + 4], r_seen[:, 4 * h : 4 * h + 4]) for h in (0, 1)], 1)
    slow = torch.zeros(5, 8).double()
    slow[:, :wide] = by_hand(w_v.abs(), x[0, :, :wide].mT, r_v.mT).mT
    assert torch.allclose(back(attend, x, r)[0], slow)


class Transformer(nn.Module):
    """Patches, a class token, positions, two encoder layers, a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patch = nn.Conv2d(3, 16, 8, stride=8)
        self.token, self.position = nn.Parameter(torch.randn(1, 1, 16)), nn.Parameter(torch.randn(1, 17, 16))
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=True, activation="gelu")
        self.layers = nn.ModuleList([layer, nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)])
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, 0])


@pytest.mark.parametrize("method", ["agf", "lrp", "lrp-epsilon-gamma-box", "agf-release", "gradcam", "deeplift-shap"])
def test_a_transformer_is_explained(method: str) -> None:
    model, x = Transformer().double().eval(), pictures(2).double()
    e = classlens.explain(model, x, classlens.top(2), method)
    assert torch.isfinite(e.maps).all()
    assert not torch.allclose(e.maps[:, 0], e.maps[:, 1], rtol=1e-3, atol=0)
    single = torch.cat([classlens.explain(model, x[i : i + 1], e.targets[i : i + 1], method).maps for i in range(2)])
    assert torch.allclose(single, e.maps, rtol=1e-6, atol=1e-9 * float(e.maps.abs().max()))
    assert not any("relevance stream alone" in note for note in e.report.notes)  # patches of 8 pixels are factorised
    if method in ("agf", "lrp", "lrp-epsilon-gamma-box"):  # what the class token draws is accounted for
        assert e.report.conservation.max() < 1e-3
