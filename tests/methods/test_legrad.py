"""LeGrad: what it refuses, because it could not classify a block's tokens or put them in their places."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import classlens
from classlens.errors import MethodError

MIX = torch.rand(6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def by_windows(t: Tensor) -> Tensor:
    """Attention inside of each half of the patches."""
    halves = t.unflatten(1, (2, -1))
    return F.scaled_dot_product_attention(halves, halves, halves).flatten(1, 2)


class Net(nn.Module):
    """Two blocks of attention; `kind` says what is unusual."""

    def __init__(self, kind: str = "", blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patch, self.head, self.kind = nn.Conv2d(3, 4, 2, 2), nn.Linear(4, 3), kind
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        first = self.patch(x).flatten(2).mT
        t = first.flip(1) if self.kind == "flipped" else first
        t = MIX @ t if self.kind == "mixed" else t
        t = t.unflatten(1, (2, 3)) if self.kind == "rows" else t
        t = torch.cat([torch.ones_like(t[:, :1]), t], 1) if self.kind == "token" else t
        for layer in self.layers:
            y = MIX @ layer(t) if self.kind == "mixed inside" else layer(t)
            seen = by_windows(y) if self.kind == "windows" else F.scaled_dot_product_attention(y, y, y)
            t = seen if self.kind == "no sums" else t + seen
            t = t[:, 1:] if self.kind == "fewer" else t
        if self.kind == "written":
            t = t.clone()
            t[:, :, 1:].mul_(2)
        beside = self.head(first.mean(1)) if self.kind == "beside" else 0
        seen = t.flatten(1, -2).mean(1)
        return self.head(seen.tanh() if self.kind == "bent" else seen) + beside


X = torch.randn(2, 3, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def explained(kind: str, **options: int) -> Tensor:
    return classlens.explain(Net(kind).double().eval(), X, 1, "legrad", **options).maps


def slow(model: Net, last: int) -> Tensor:
    """By autograd: the score of the mean token of a block's output, differentiated at the block's attention."""
    t, maps = model.patch(X).flatten(2).mT, []
    for layer in model.layers:
        y = layer(t)
        a = (y @ y.mT / 2).softmax(-1)
        t = t + a @ y
        seen = t.mean(1)
        score = model.head(seen.tanh() if model.kind == "bent" else seen)[:, 1].sum()
        (gradient,) = torch.autograd.grad(score, a, retain_graph=True)
        maps.append(gradient.clamp(min=0).mean(1).unflatten(1, (2, 3)))
    return F.interpolate(torch.stack(maps[-last:]).sum(0)[:, None], X.shape[2:], mode="bilinear", align_corners=False)


@pytest.mark.parametrize("blocks", [1, 3])
def test_all_blocks_however_many_there_are(blocks: int) -> None:
    model = Net("", blocks).double().eval()
    found = classlens.explain(model, X, 1, "legrad", last=0).maps
    assert torch.allclose(found, slow(model, blocks).detach())


@pytest.mark.parametrize("last", [1, 2])
def test_legrad_by_autograd(last: int) -> None:
    expected = slow(Net().double(), last).detach()
    assert torch.allclose(explained("", last=last), expected)
    if last == 2:
        assert torch.allclose(explained(""), expected)  # the default
        assert torch.allclose(explained("", last=0), expected)  # all


def test_the_tokens_of_each_image_are_averaged() -> None:
    """Not those of other images: where the head is no linear function, these would count."""
    assert torch.allclose(explained("bent"), slow(Net("bent").double(), 2).detach())


def test_classes_together_are_those_alone() -> None:
    model = Net().double().eval()
    together = classlens.explain(model, X, [[0, 2], [0, 2]], "legrad").maps
    alone = [classlens.explain(model, X, k, "legrad").maps for k in (0, 2)]
    assert torch.allclose(together, torch.cat(alone, 1))


def test_legrad_needs_attention() -> None:
    with pytest.raises(MethodError, match=r"^legrad needs attention, and this network has none"):
        classlens.explain(nn.Sequential(nn.Flatten(), nn.Linear(72, 3)).double().eval(), X, 0, "legrad")


def test_a_class_token_is_not_drawn() -> None:
    assert explained("token").shape == (2, 1, 4, 6)
    assert explained("token").std() > 0


def test_patches_in_another_order_are_put_in_their_places() -> None:
    assert torch.allclose(explained("flipped"), explained(""))


@pytest.mark.parametrize("kind", ["fewer", "no sums", "rows"])
def test_blocks_that_differ_are_refused(kind: str) -> None:
    with pytest.raises(MethodError, match="all blocks must have the same tokens; this network's blocks differ"):
        explained(kind)


def test_a_head_that_reads_other_values_too_is_refused() -> None:
    with pytest.raises(MethodError, match=r"legrad cannot classify the tokens of a block: add .* reads other values"):
        explained("beside")


@pytest.mark.parametrize("kind", ["mixed inside", "windows"])
def test_patches_without_an_order_are_refused(kind: str) -> None:
    with pytest.raises(MethodError, match=r"the patches that scaled_dot_product_attention .* are in no order"):
        explained(kind)


def test_tokens_without_an_order_are_refused() -> None:
    with pytest.raises(MethodError, match="the tokens of each block, and these are in no order that can be read"):
        explained("mixed")


def test_a_step_that_writes_to_a_view_is_refused() -> None:
    with pytest.raises(MethodError, match=r"cannot classify the tokens of a block: the model writes to a view"):
        explained("written")


@pytest.mark.parametrize("last", [-1, 3])
def test_blocks_that_are_not_there(last: int) -> None:
    with pytest.raises(MethodError, match=f"last={last} is not possible; this network has 2 blocks with attention"):
        explained("", last=last)
