"""Methods for transformers, against the numbers of the authors' code; golden/README.md says how these were made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import classlens
from classlens.errors import MethodError
from classlens.methods import METHODS
from classlens.methods.rollout import gained

FOLDER = Path(__file__).resolve().parents[1] / "golden" / "transformers"
SIZES = {"sq": (32, 32), "ns": (64, 48)}
FORMS = ("fused", "written out", "einsum", "torch's layer", "tokens first")
both = pytest.mark.parametrize("case", SIZES)


class Block(nn.Module):
    """A pre-norm block whose attention is written in one of several ways."""

    def __init__(self, dim: int, heads: int, form: str) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.heads, self.form = heads, form

    def attend(self, x: Tensor) -> Tensor:
        if self.form in ("torch's layer", "tokens first"):
            x = x if self.form == "tokens first" else x.transpose(0, 1)
            out, _ = F.multi_head_attention_forward(
                x, x, x, x.shape[2], self.heads, self.qkv.weight, self.qkv.bias, None, None, False, 0.0,
                self.proj.weight, self.proj.bias, training=False, need_weights=False,
            )  # fmt: skip
            return out if self.form == "tokens first" else out.transpose(0, 1)
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.form == "fused":
            seen = F.scaled_dot_product_attention(q, k, v)
        elif self.form == "einsum":
            scores = torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5
            seen = torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)
        else:
            seen = ((q * q.shape[-1] ** -0.5) @ k.mT).softmax(-1) @ v
        return self.proj(seen.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Transformer(nn.Module):
    """The ViT of the golden numbers; `pool`: the class token, the mean of all tokens, or registers besides."""

    def __init__(self, case: str, form: str = "fused", pool: str = "class token") -> None:
        super().__init__()
        tokens = SIZES[case][0] * SIZES[case][1] // 64 + 1
        self.patch = nn.Conv2d(3, 24, 8, 8)
        self.token, self.position = nn.Parameter(torch.zeros(1, 1, 24)), nn.Parameter(torch.zeros(1, tokens, 24))
        self.blocks = nn.ModuleList(Block(24, 3, form) for _ in range(3))
        self.norm, self.head, self.form, self.pool = nn.LayerNorm(24, eps=1e-6), nn.Linear(24, 7), form, pool

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        if self.pool == "registers":
            x = torch.cat([x, self.token.expand(len(x), 2, -1)], 1)
        x = x.transpose(0, 1) if self.form == "tokens first" else x
        for block in self.blocks:
            x = block(x)
        x = self.norm(x.transpose(0, 1) if self.form == "tokens first" else x)
        return self.head(x.mean(1) if self.pool == "mean" else x[:, 0])


def golden(case: str, form: str = "fused", pool: str = "class token") -> tuple[nn.Module, Tensor, Tensor]:
    """(network, images, targets (2,2)) in float64."""
    state = load_file(FOLDER / f"weights_{case}.safetensors")
    renamed = {"cls_token": "token", "pos_embed": "position"}
    state = {
        renamed.get(k, k.replace("patch_embed.proj", "patch").replace("attn.", "").replace("mlp.", "")): v
        for k, v in state.items()
    }
    model = Transformer(case, form, pool)
    model.load_state_dict(state)
    inputs = np.load(FOLDER / f"inputs_{case}.npz")
    model = model.double().eval()
    x = torch.from_numpy(inputs["images"]).double()
    with torch.no_grad():
        assert pool != "class token" or torch.allclose(model(x), torch.from_numpy(inputs["logits"]))
    return model, x, torch.from_numpy(inputs["targets"])


def stored(name: str, case: str) -> Any:
    return np.load(FOLDER / f"{name}_{case}.npz")


def on_grid(maps: Any) -> Tensor:
    """(B,K,h,w) enlarged as the maps are."""
    found = torch.as_tensor(maps).double()
    return F.interpolate(found, scale_factor=8, mode="bilinear", align_corners=False)


def far(ours: Tensor, theirs: Tensor) -> float:
    """The largest deviation relative to the largest value."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("form", FORMS)
@both
def test_attention_rollout(case: str, form: str) -> None:
    model, x, targets = golden(case, form)
    theirs = stored("rollout", case)
    for start, name in ((0, "rollout"), (1, "rollout_start1")):
        found = classlens.explain(model, x, targets, "attention-rollout", start=start).maps
        assert far(found, on_grid(theirs[name][:, None]).expand_as(found)) < 1e-10


@pytest.mark.parametrize("form", FORMS)
@both
def test_generic_attention(case: str, form: str) -> None:
    model, x, targets = golden(case, form)
    found = classlens.explain(model, x, targets, "generic-attention").maps
    assert far(found, on_grid(stored("generic_attention", case)["relevance"])) < 1e-10


@pytest.mark.parametrize("form", FORMS)
@both
def test_transformer_attribution(case: str, form: str) -> None:
    model, x, targets = golden(case, form)
    theirs = stored("transformer_attribution", case)
    tolerance = 1e-8 if form != "written out" else 1e-5  # its queries are scaled first, so 1e-9 means something else
    for start, name in ((0, "relevance"), (1, "relevance_start1")):
        found = classlens.explain(model, x, targets, "transformer-attribution", start=start).maps
        assert far(found, on_grid(theirs[name])) < tolerance


@pytest.mark.parametrize("form", FORMS)
@both
def test_attnlrp(case: str, form: str) -> None:
    model, x, targets = golden(case, form)
    theirs = stored("attnlrp_default", case)
    for name in theirs.files:
        kind, conv, linear = name.split("_")
        gammas = {"conv_gamma": float(conv[1:]), "linear_gamma": float(linear[1:])}
        found = classlens.explain(model, x, targets, "attnlrp", **gammas).maps
        found = found if kind == "pixel" else F.avg_pool2d(found, 8) * 64
        assert far(found, torch.from_numpy(theirs[name])) < 1e-10


@pytest.mark.parametrize("form", FORMS)
@both
def test_libragrad(case: str, form: str) -> None:
    model, x, targets = golden(case, form)
    theirs, grid = stored("libragrad", case), [side // 8 for side in SIZES[case]]
    for start, name in ((0, "libra_fullgrad_plus"), (1, "libra_fullgrad_plus_skip1")):
        found = classlens.explain(model, x, targets, "libragrad", start=start).maps
        assert far(found, on_grid(torch.from_numpy(theirs[name])[..., 1:].unflatten(2, grid))) < 1e-10


@pytest.mark.parametrize("form", FORMS)
@both
def test_legrad(case: str, form: str) -> None:
    model, x, targets = golden(case, form)
    theirs = stored("legrad", case)
    for last, name in ((0, "map_all_dot"), (2, "map_last2_dot")):
        found = classlens.explain(model, x, targets, "legrad", last=last).maps
        assert far(found, on_grid(theirs[name])) < 1e-10


OURS = ("attention-rollout", "transformer-attribution", "generic-attention", "attnlrp", "libragrad", "legrad")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", OURS)
def test_images_and_classes_one_by_one_are_the_batch(method: str, form: str) -> None:
    model, x, targets = golden("ns", form)
    together = classlens.explain(model, x, targets, method).maps
    for i in range(2):
        for k in range(2):
            alone = classlens.explain(model, x[i : i + 1], targets[i : i + 1, k : k + 1], method).maps
            assert far(alone[0, 0], together[i, k]) < 1e-7
    single = classlens.explain(model.float(), x.float(), targets, method).maps
    assert single.dtype == torch.float32
    assert far(single, together) < (1e-3 if method in ("attnlrp", "transformer-attribution") else 1e-4)


@pytest.mark.parametrize("method", OURS)
def test_a_mean_of_tokens_and_registers(method: str) -> None:
    """Registers come last here; where they are is found, not assumed."""
    for pool in ("mean", "registers"):
        model, x, targets = golden("ns", pool=pool)
        maps = classlens.explain(model, x, targets, method).maps
        assert maps.shape == (2, 2, 64, 48)
        assert torch.isfinite(maps).all()
        assert (maps.flatten(2).std(2) > 0).all()


def test_the_rows_that_a_mean_reads() -> None:
    """Under a mean, rollout is the mean over all rows of the product."""
    model, x, targets = golden("sq", "written out", "mean")
    flows = []
    tokens = torch.cat([model.token.expand(2, -1, -1), model.patch(x).flatten(2).mT], 1) + model.position
    for block in model.blocks:
        q, k, _ = block.qkv(block.norm1(tokens)).unflatten(2, (3, 3, -1)).permute(2, 0, 3, 1, 4)
        flows.append(((q @ k.mT / 8**0.5).softmax(-1).mean(1) + torch.eye(17)) / 2)
        tokens = block(tokens)
    slow = (flows[2] @ flows[1] @ flows[0]).mean(1)[:, 1:].unflatten(1, (4, 4))
    found = classlens.explain(model, x, targets, "attention-rollout").maps
    assert far(found[:, :1], on_grid(slow[:, None].detach())) < 1e-10


def test_under_a_mean_the_class_is_seen() -> None:
    """The mean of the rows of I is the same for every patch. If attention's part is small, nothing else was seen."""
    torch.manual_seed(0)
    model, x, targets = golden("sq", "written out", "mean")
    with torch.no_grad():
        model.head.weight.mul_(1e-6)
    for method in ("generic-attention", "transformer-attribution"):
        found = classlens.explain(model, x, targets, method).maps
        assert (found.amin((2, 3)) < 0.7 * found.amax((2, 3))).all()  # with I, the ratio was 1 - 1e-6
        single = classlens.explain(model.float(), x.float(), targets, method).maps  # no digit is lost
        model.double()
        assert far(single.double(), found) < 1e-2


def test_what_a_mean_gains_is_the_product_without_the_identity() -> None:
    flows = [torch.rand(1, 1, 5, 5, dtype=torch.float64) for _ in range(3)]
    read = torch.full((1, 1, 5), 0.2, dtype=torch.float64)
    eye = torch.eye(5, dtype=torch.float64)
    whole = (eye + flows[2]) @ (eye + flows[1]) @ (eye + flows[0])
    assert torch.allclose(gained(read, flows), read[..., None, :] @ (whole - eye))
    pooling = torch.rand(1, 1, 1, 5, dtype=torch.float64)  # the last attention pools the tokens: no identity
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    assert torch.allclose(gained(one, [*flows, pooling]), pooling @ whole)


class Pools(nn.Module):
    """A block, then a learnt query that pools the tokens by attention."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.block, self.head = nn.Conv2d(3, 24, 8, 8), Block(24, 3, "fused"), nn.Linear(24, 7)
        self.query, self.pool = nn.Parameter(torch.randn(1, 1, 24)), nn.MultiheadAttention(24, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.block(self.patch(x).flatten(2).mT)
        return self.head(self.pool(self.query.expand(len(x), -1, -1), tokens, tokens, need_weights=False)[0][:, 0])


@pytest.mark.parametrize("method", [method for method in OURS if method != "legrad"])
def test_a_learnt_query_that_pools(method: str) -> None:
    torch.manual_seed(0)
    maps = classlens.explain(Pools().eval(), torch.randn(2, 3, 32, 48), classlens.top(2), method).maps
    assert maps.shape == (2, 2, 32, 48)
    assert (maps.flatten(2).std(2) > 0).all()


class Windows(nn.Module):
    """Attention inside 2x2 windows of patches, shifted in the second block."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.head = nn.Conv2d(3, 24, 4, 4), nn.Linear(24, 7)
        self.blocks = nn.ModuleList([Block(24, 3, "fused"), Block(24, 3, "written out")])

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).permute(0, 2, 3, 1)
        for shift, block in enumerate(self.blocks):
            whole = torch.roll(x, (-shift, -shift), (1, 2))
            b, h, w, c = whole.shape
            cut = whole.view(b, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, c)
            out = block(cut).view(b, h // 2, w // 2, 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
            x = torch.roll(out, (shift, shift), (1, 2))
        return self.head(x.mean((1, 2)))


def test_windows_are_put_back_or_refused() -> None:
    torch.manual_seed(0)
    model, x = Windows().eval(), torch.randn(2, 3, 32, 48)
    for method in ("attnlrp", "libragrad"):
        maps = classlens.explain(model, x, 1, method).maps
        assert maps.shape == (2, 1, 32, 48)
        assert (maps.flatten(2).std(2) > 0).all()
    for method in ("attention-rollout", "generic-attention", "transformer-attribution"):
        with pytest.raises(
            MethodError, match=f"^{method} multiplies the attention .* cut into windows.*use attnlrp or"
        ):
            classlens.explain(model, x, 1, method)


def test_networks_without_attention_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)).eval()
    refusing = [name for name, method in METHODS.items() if method.attention]
    assert set(refusing) == set(OURS) - {"attnlrp"}
    for name in refusing:
        with pytest.raises(MethodError, match=f"^{name} needs attention, and this network has none; use agf or lrp"):
            classlens.explain(model, torch.randn(1, 3, 16, 16), 0, name)


def test_blocks_that_are_not_there() -> None:
    model, x, _ = golden("sq")
    for method, options in (("attention-rollout", {"start": 3}), ("legrad", {"last": 4}), ("libragrad", {"start": -1})):
        with pytest.raises(MethodError, match="is not possible"):
            classlens.explain(model, x, 0, method, **options)
