"""Where the images are in a value: against the gradients, which tell which image an entry depends on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from classlens.core.capture import Tape, Value, image_index, place_index, record
from steps import Does

TOKEN, QUERY, WEIGHT = torch.rand(1, 1, 4), torch.rand(2, 4), torch.rand(6, 4)
LAYER = nn.MultiheadAttention(4, 2).eval()


def tokens(x: Tensor) -> Tensor:
    return x.flatten(2).mT


def windows(x: Tensor) -> Tensor:
    rolled = torch.roll(x, (1, 1), (2, 3))
    return rolled.unflatten(3, (2, 2)).unflatten(2, (2, 2)).permute(0, 2, 4, 3, 5, 1).reshape(-1, 4, 4)


def class_token(x: Tensor) -> Tensor:
    return torch.cat([TOKEN.expand(len(x), -1, -1), tokens(x)], 1)


def heads(x: Tensor) -> Tensor:
    return F.linear(tokens(x), WEIGHT).reshape(len(x), 16, 3, 1, 2).permute(2, 0, 3, 1, 4)


def attended(x: Tensor) -> Tensor:
    q, k, v = heads(x).unbind(0)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def written_out(x: Tensor) -> Tensor:
    t = class_token(x)
    weights = torch.einsum("bid,bjd->bij", t, t).softmax(-1)
    return torch.einsum("bij,bjd->bid", weights, t)[:, 0]


DOES: dict[str, Callable[[Tensor], Tensor]] = {
    "a sum of nothing": lambda x: x + x[..., :0].sum(3, keepdim=True),
    "map": lambda x: F.conv2d(F.relu(x), torch.ones(3, 4, 1, 1)),
    "tokens": tokens, "tokens first": lambda x: class_token(x).transpose(0, 1) * 2, "windows": windows,
    "window tokens first": lambda x: F.layer_norm(windows(x), (4,)).transpose(0, 1),
    "class token": lambda x: F.linear(class_token(x), WEIGHT)[:, :2], "heads": heads, "attention": attended,
    "einsum": written_out, "mean of tokens first": lambda x: tokens(x).transpose(0, 1).mean(0),
    "padded": lambda x: F.pad(tokens(x).transpose(0, 1), (0, 0, 0, 0, 1, 2)),
    "learnt query": lambda x: F.scaled_dot_product_attention(QUERY[None].expand(len(x), -1, -1), tokens(x), tokens(x)),
    "query @ keys": lambda x: QUERY @ tokens(x).mT,
    "layer, tokens first": lambda x: LAYER(QUERY[:, None].expand(-1, len(x), -1), *[tokens(x).transpose(0, 1)] * 2)[0],
    "pooled": lambda x: F.interpolate(F.max_pool2d(x, 2), (3, 3)).mean((2, 3)),
}  # fmt: skip


def recorded(do: Callable[[Tensor], Tensor], images: int = 3) -> Tape:
    torch.manual_seed(0)
    return record(Does(do).eval(), torch.randn(images, 4, 4, 4))


def from_gradients(tape: Tape, value: Value) -> Tensor:
    """The image that each entry of a value depends on; -1: on none, -2: on several."""
    found = []
    for i in range(value.tensor.numel()):
        hot = torch.zeros(value.tensor.numel())
        hot[i] = 1
        (gradient,) = torch.autograd.grad(value.edge, [tape.image.edge], hot.reshape(value.shape), retain_graph=True)
        images = gradient.flatten(1).abs().sum(1).nonzero().flatten()
        found.append(int(images[0]) if len(images) == 1 else -1 - (len(images) > 1))
    return torch.tensor(found).reshape(value.shape)


@pytest.mark.parametrize("name", DOES)
def test_the_image_of_each_entry(name: str) -> None:
    tape = recorded(DOES[name])
    axis = image_index(tape)[tape.output]
    slow = from_gradients(tape, tape.output).movedim(axis.axis, -1)
    assert ((slow == axis.image) | (slow == -1)).all()
    assert (slow >= 0).any()


def test_totals_and_images_first() -> None:
    tape = recorded(DOES["window tokens first"])
    axis = image_index(tape)[tape.output]  # (4 places, 12 windows, 4)
    r = torch.arange(192.0).reshape(1, 4, 12, 4)
    slow = torch.stack([r[0, :, 4 * i : 4 * i + 4] for i in range(3)])
    assert torch.equal(axis.total(r, 3)[0], slow.sum((1, 2, 3)).double())
    assert torch.equal(axis.first(r, 3)[0].flatten(1).sort().values, slow.flatten(1).sort().values)


def test_values_that_mix_images_are_left_out() -> None:
    tape = recorded(lambda x: x.flatten(1).mT @ x.flatten(1))
    assert tape.output not in image_index(tape)


def test_one_image_is_everywhere() -> None:
    tape = recorded(windows, 1)
    axis = image_index(tape)[tape.output]
    assert axis.total(torch.ones(1, *tape.output.shape), 1).item() == 64


def test_a_pool_that_is_written_out_makes_a_coarser_grid() -> None:
    """A sum over the two axes of each 2 x 2 block; a mean over everything has no places."""
    for do in (lambda x: x.unflatten(3, (3, 2)).unflatten(2, (2, 2)).sum((3, 5)), lambda x: F.avg_pool2d(x, 2)):
        tape = record(
            Does(lambda x, do=do: do(F.conv2d(x, torch.ones(5, 3, 1, 1))) * 1.0).eval(), torch.rand(2, 3, 4, 6)
        )
        found = place_index(tape)[tape.output]
        assert found.grid == (2, 3)
        assert torch.equal(found.index.flatten(), torch.arange(1.0, 7))
    tape = record(Does(lambda x: F.conv2d(x, torch.ones(5, 3, 1, 1)).mean((2, 3)) * 1.0).eval(), torch.rand(2, 3, 4, 6))
    assert tape.output not in place_index(tape)
