"""Products of attention: the flow of tokens by hand, the rows that are read, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import classlens
from classlens.core.capture import Node, image_index, record
from classlens.core.rules.generic import Shares
from classlens.errors import MethodError, UnsupportedOp
from classlens.methods.blocks import find_attentions
from classlens.methods.rollout import (
    _halves,
    _in_proportion,
    _through_fused,
    attention_relevance,
    gained,
    halved,
    positive_mean,
    rows_read,
    through_attention,
)
from steps import Does

FUSED = F.scaled_dot_product_attention


class Tokens(nn.Module):
    """Patches as tokens, a function of them, their mean, a head."""

    def __init__(self, do: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patch, self.do, self.head = nn.Conv2d(3, 4, 2, 2), do, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.do(self.patch(x).flatten(2).mT).mean(1))


def model(do: Callable[[Tensor], Tensor]) -> nn.Module:
    return Tokens(do).double().eval()


X = torch.randn(2, 3, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_rows_sum_to_1_with_the_identity() -> None:
    attention = torch.tensor([[0.2, 0.8], [0.6, 0.4]])
    assert torch.allclose(halved(attention), torch.tensor([[0.6, 0.4], [0.3, 0.7]]))
    assert torch.allclose(halved(attention.expand(3, 2, 2)), torch.tensor([[0.6, 0.4], [0.3, 0.7]]).expand(3, 2, 2))
    pools = torch.tensor([[0.25, 0.75]])  # one query: it is none of the tokens, so nothing flows past
    assert torch.equal(halved(pools), pools)


def test_what_tokens_gain_from_others() -> None:
    """read ((I + E2) (I + E1) - I); attention that pools has no identity: read P (I + E1)."""
    source = torch.Generator().manual_seed(1)
    first, second, pools = (torch.rand(n, 3, generator=source).double() for n in (3, 3, 2))
    read, one = torch.rand(3, generator=source).double(), torch.eye(3).double()
    assert torch.allclose(gained(read, [first, second])[0], read @ ((one + second) @ (one + first) - one))
    assert torch.allclose(gained(read[:2], [first, pools])[0], read[:2] @ pools @ (one + first))


def test_the_positive_part_is_taken_for_each_head() -> None:
    gradient = torch.tensor([2.0, -3.0]).reshape(1, 1, 2, 1, 1)  # two heads
    assert positive_mean(gradient, torch.tensor(0.5)).flatten().tolist() == [0.5]  # (1 + 0) / 2


def test_rows_that_are_read_have_equal_weights() -> None:
    gradient = torch.zeros(1, 2, 3, 4, 5)  # one class, two images, three heads, four queries, five keys
    gradient[0, 0, 2, 1, 4] = -1e-9
    gradient[0, 0, 0, 3, 0] = 7.0
    expected = torch.tensor([[0, 0.5, 0, 0.5], [0.25, 0.25, 0.25, 0.25]])  # without any gradient: all rows
    assert torch.equal(rows_read(gradient)[0], expected)


def test_relevance_of_attention_by_hand() -> None:
    """Half of the relevance of A v goes to either factor, in proportion; half of A's goes on to q and k each."""
    q, k, v, weights, r = (
        torch.rand(1, 1, 3, size, generator=torch.Generator().manual_seed(size)).double() for size in (2, 2, 2, 3, 2)
    )
    r_weights, r_q, r_k, r_v = through_attention(q, k, v, weights, r[None])
    slow_w, slow_v = torch.zeros(3, 3).double(), torch.zeros(3, 2).double()
    for i in range(3):
        for c in range(2):
            z = weights[0, 0, i] * v[0, 0, :, c]
            slow_w[i] += z / z.sum() * r[0, 0, i, c] / 2
            slow_v[:, c] += z / z.sum() * r[0, 0, i, c] / 2
    assert torch.allclose(r_weights[0, 0, 0], slow_w, rtol=1e-6)
    assert torch.allclose(r_v[0, 0, 0], slow_v, rtol=1e-6)
    assert torch.allclose(r_q.sum(), slow_w.sum() / 2, rtol=1e-6)
    assert torch.allclose(r_k.sum(), slow_w.sum() / 2, rtol=1e-6)
    assert not torch.allclose(r_q[0, 0, 0], r_k[0, 0, 0])


@pytest.mark.parametrize("learnt", ["", "query", "key", "value"])
def test_each_argument_of_fused_attention_gets_its_own_share(learnt: str) -> None:
    source = torch.Generator().manual_seed(0)
    maps = {name: nn.Parameter(torch.rand(3, 3, generator=source).double()) for name in ("query", "key", "value")}
    x, r = (torch.rand(2, 3, 4, generator=source).double().mT for _ in range(2))
    given = {name: 1 + x @ weight if name != learnt else x.flip(1) for name, weight in maps.items()}

    def do(x: Tensor) -> Tensor:
        return FUSED(**{name: 1 + x @ maps[name] if name != learnt else t for name, t in given.items()})

    node = record(Does(do).eval(), x).nodes[-1]
    kept: dict[Node, Tensor] = {}
    shares = _through_fused(node, r[None], kept)
    weights = (given["query"] @ given["key"].mT / 3**0.5).softmax(-1)
    at_weights, *expected = through_attention(*given.values(), weights, r[None])
    expected = [share for name, share in zip(given, expected, strict=True) if name != learnt]
    assert torch.allclose(kept[node], at_weights)
    assert len(shares) == len(expected) == len(node.inputs)
    assert all(s is not None and torch.allclose(s, e) for s, e in zip(shares, expected, strict=True))


def test_a_gate_passes_all_relevance_to_attention() -> None:
    """Twice a sigmoid of 0, made of the image: the same numbers as without it."""
    kept = []
    for gated in (False, True):
        network = model(lambda t, gated=gated: FUSED(t, t, t) * (2 * (0 * t).sigmoid() if gated else 1))
        tape = record(network, X)
        (found,) = attention_relevance(tape, torch.ones(1, *tape.output.shape).double(), find_attentions(tape)).values()
        kept.append(found)
    assert torch.allclose(*kept)


@pytest.mark.parametrize("start", [-1, 2])
def test_a_block_that_is_not_there(start: int) -> None:
    two = model(lambda t: FUSED(t, t, t) + FUSED(2 * t, t, t))
    for method in ("attention-rollout", "transformer-attribution"):
        with pytest.raises(MethodError, match=f"start={start} is not possible; this network has 2 blocks"):
            classlens.explain(two, X, 0, method, start=start)


def test_heads_that_share_keys_are_refused() -> None:
    def groups(t: Tensor) -> Tensor:
        h = t.unflatten(2, (2, 2)).transpose(1, 2)
        return FUSED(h, h[:, :1], h[:, :1], enable_gqa=True).transpose(1, 2).flatten(2)

    with pytest.raises(UnsupportedOp, match="transformer-attribution has no rule for heads that share keys"):
        classlens.explain(model(groups), X, 0, "transformer-attribution")
    assert classlens.explain(model(groups), X, 0, "generic-attention").maps.std() > 0


def test_weights_that_are_the_output_are_refused() -> None:
    layer = nn.MultiheadAttention(4, 2, batch_first=True).double().eval()

    def weights_alone(t: Tensor) -> Tensor:
        return layer(t, t, t)[1] @ t

    with pytest.raises(MethodError, match=r"^transformer-attribution needs attention, and this network has none"):
        classlens.explain(model(weights_alone), X, 0, "transformer-attribution")


@pytest.mark.parametrize("method", ["attention-rollout", "generic-attention"])
def test_the_method_that_needs_attention_is_named(method: str) -> None:
    with pytest.raises(MethodError, match=f"^{method} needs attention, and this network has none"):
        classlens.explain(model(lambda t: t.relu()), X, 0, method)


def added(do: Callable[[Tensor], Tensor], x: Tensor, r: Tensor) -> Shares:
    """Relevance at the summands of the last sum of a function."""
    tape = record(Does(do).eval(), x)
    return _in_proportion(tape.nodes[-1], r, axes=image_index(tape))


@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize("axis", [0, 1])
def test_sums_are_in_proportion_for_each_image(axis: int, images: int) -> None:
    """u R / (u + w) and w R / (u + w), each scaled: their sums are |sum| / (|sum| + |sum|) of all of R."""
    source = torch.Generator().manual_seed(0)
    x = torch.rand(images, 2, 5, generator=source).double()
    r = torch.randn(2, *x.transpose(0, axis).shape, generator=source).double()
    u, w = added(lambda x: (t := x.transpose(0, axis).clone(), t.sin() + (3 * t).cos())[1], x, r)
    for k in range(2):
        for image in range(images):
            own, mine = x[image], r[k].select(axis, image)
            parts = [part / (own.sin() + (3 * own).cos()) * mine for part in (own.sin(), (3 * own).cos())]
            whole = sum(abs(part.sum()) for part in parts)
            for part, found in zip(parts, (u, w), strict=True):
                expected = part * (abs(part.sum()) / whole * mine.sum() / part.sum())
                assert torch.allclose(found[k].select(axis, image), expected, rtol=1e-6)


def test_factors_of_a_product_get_half_each() -> None:
    x, r = torch.rand(1, 2, 3).double() + 1, torch.rand(1, 1, 2, 2).double()
    a, b = _halves(record(Does(lambda x: x.sin() @ x.mT).eval(), x).nodes[-1], r)
    slow = [torch.zeros(2, 3).double() for _ in range(2)]
    for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
        z = x[0, i].sin() * x[0, j]
        slow[0][i] += z / z.sum() * r[0, 0, i, j] / 2
        slow[1][j] += z / z.sum() * r[0, 0, i, j] / 2
    assert torch.allclose(a[0, 0], slow[0], rtol=1e-6)
    assert torch.allclose(b[0, 0].mT, slow[1], rtol=1e-6)


def test_rollout_takes_the_mean_of_the_heads() -> None:
    torch.manual_seed(1)
    layer = nn.MultiheadAttention(4, 2, batch_first=True).double().eval()
    net = model(lambda t: t + layer(t, t, t, need_weights=False)[0])
    t = net.patch(X).flatten(2).mT
    weights = layer(t, t, t)[1].detach()  # torch's own mean over heads
    expected = ((weights + torch.eye(6)) / 2).mean(1).unflatten(1, (2, 3))[:, None]
    expected = F.interpolate(expected, X.shape[2:], mode="bilinear", align_corners=False)
    assert torch.allclose(classlens.explain(net, X, 1, "attention-rollout").maps, expected)


def test_a_constant_gets_no_share_of_a_sum() -> None:
    x, r = torch.rand(2, 3).double() + 1, torch.rand(1, 2, 3).double()
    (found,) = added(lambda x: x + 1, x, r)
    assert torch.equal(found, r)


def test_a_sum_in_which_images_mix_is_refused() -> None:
    with pytest.raises(UnsupportedOp, match=r"the images cannot be told apart at add .*explain one image at a time"):
        classlens.explain(model(lambda t: FUSED(t, t, t) + t.mean(0, keepdim=True)), X, 0, "transformer-attribution")


@pytest.mark.parametrize("method", ["attention-rollout", "generic-attention", "transformer-attribution"])
def test_one_block_is_enough_and_classes_come_together(method: str) -> None:
    one = model(lambda t: t + FUSED(t, 2 * t, t))
    together = classlens.explain(one, X, [[0, 2], [1, 2]], method).maps
    assert (together.flatten(2).std(2) > 0).all()
    for image, classes in enumerate(([0, 2], [1, 2])):
        for k, target in enumerate(classes):
            alone = classlens.explain(one, X[image : image + 1], target, method).maps
            assert torch.allclose(alone[0, 0], together[image, k], rtol=1e-6)


def test_tokens_that_come_before_images_have_the_same_map() -> None:
    """(tokens, images, channels) and (images, tokens, channels), with the sums of a skip connection in either."""
    torch.manual_seed(1)
    first, last = (nn.MultiheadAttention(4, 2, batch_first=way).double().eval() for way in (False, True))
    last.load_state_dict(first.state_dict())

    def tokens_first(t: Tensor) -> Tensor:
        u = t.transpose(0, 1) * 2
        return (u + first(u, u, u)[0]).transpose(0, 1)

    def images_first(t: Tensor) -> Tensor:
        u = t * 2
        return u + last(u, u, u)[0]

    ours, theirs = (
        classlens.explain(model(do), X, 1, "transformer-attribution").maps for do in (tokens_first, images_first)
    )
    assert torch.allclose(ours, theirs, rtol=1e-6)
