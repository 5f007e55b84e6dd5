"""Random small networks, each written in an awkward way and again plainly.

>>> plan = drawn(random.Random(7))
>>> x = image_of(plan).double()
>>> bool(torch.allclose(awkward(plan)(x), Plain(plan)(x)))
True

The awkward form uses in-place writes, views, buffers, other spellings, wrappers and low precisions; the plain form is
in float64 and written as simply as possible. `fuzzing` compares their maps.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIDE, WIDTH, CLASSES = 8, 4, 5
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WRAPS = (
    "none", "hooks", "traced", "checkpoint", "autocast", "no_grad", "identity", "frozen", "channels_last", "dict",
    "parallel", "inference", "subclass",
)  # fmt: skip
_WEIGHTED = ("conv", "norm", "skip", "minus", "times", "join", "strided", "depthwise", "gate", "attend")
_SQUARE = ("skip", "minus", "times")  # they combine their input with a convolution of it
_PLAIN = ("relu", "leaky", "smooth", "max", "mean", "up", "same")
_HALVING = ("max", "mean", "strided")
Step = tuple[str, int, int]


@dataclass(frozen=True)
class Plan:
    """A network: the steps after its first convolution, its head, its precision, what is around it, and its weights.

    A step is its kind, how the awkward form writes it (0 to 3), and the size of its kernel or the number of its heads.
    """

    steps: tuple[Step, ...]
    head: str
    dtype: str
    wrap: str
    seed: int
    images: int = 1


def drawn(source: random.Random) -> Plan:
    """A random plan."""
    kinds = [source.choice(_WEIGHTED + _PLAIN) for _ in range(source.randint(1, 6))]
    steps = tuple((kind, source.randint(0, 3), source.choice((1, 3))) for kind in kinds)
    dtype = source.choice([*DTYPES, "float64", "float32"])
    head, wrap = source.choice(("pool", "flat")), source.choice(WRAPS)
    return Plan(steps, head, dtype, wrap, source.randint(0, 2**31 - 1), source.choice((1, 1, 2)))


# ----------------------------------------------------------------------------------------------------- the weights


def weights_of(plan: Plan) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """The weights of each step (the first is the convolution at the image), and those of the last linear layer."""
    source = torch.Generator().manual_seed(plan.seed)
    channels, side, found = WIDTH, SIDE, [_conv(3, WIDTH, 3, False, source)]
    for kind, _, k in plan.steps:
        made: dict[str, Tensor] = {}
        if kind == "gate":
            made = _conv(channels, channels, 1, False, source)
        elif kind == "depthwise":
            made = _conv(1, channels, k, False, source)
        elif kind == "attend":
            made = {name: _normal(source, channels, channels) / channels**0.5 for name in ("q", "k", "v", "o")}
        elif kind in _WEIGHTED:
            made = _conv(channels, channels if kind in _SQUARE else WIDTH, k, kind == "norm", source)
            channels = channels if kind in _SQUARE else channels + WIDTH if kind == "join" else WIDTH
        side = side_after(kind, side)
        found.append(made)
    inputs = channels * (side * side if plan.head == "flat" else 1)
    last = {"w": _normal(source, CLASSES, inputs) / inputs**0.5, "b": 0.1 * _normal(source, CLASSES)}
    rounded = [{k: t.to(DTYPES[plan.dtype]) for k, t in made.items()} for made in (*found, last)]
    return rounded[:-1], rounded[-1]


def side_after(kind: str, side: int) -> int:
    """The side of the feature map after a step: small maps are not halved, large ones not doubled."""
    if kind in _HALVING and side >= 4:
        return side // 2
    return side * 2 if kind == "up" and side <= 4 else side


def _normal(source: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=source, dtype=torch.float64)


def _conv(inputs: int, outputs: int, k: int, norm: bool, source: torch.Generator) -> dict[str, Tensor]:
    made = {"w": _normal(source, outputs, inputs, k, k) / (inputs * k * k) ** 0.5, "b": 0.1 * _normal(source, outputs)}
    if norm:
        made |= {"mean": 0.1 * _normal(source, outputs), "var": _normal(source, outputs).abs() + 0.5}
        made |= {"gain": _normal(source, outputs).abs() + 0.5, "shift": 0.1 * _normal(source, outputs)}
    return made


def image_of(plan: Plan) -> Tensor:
    """The images (B,3,H,W) that are explained, float32."""
    return torch.randn(plan.images, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(plan.seed + 1))


# ------------------------------------------------------------------------------------------------- the plain form


def convolve(t: Tensor, made: dict[str, Tensor], stride: int = 1, groups: int = 1) -> Tensor:
    """The convolution of a step, with its normalisation."""
    t = F.conv2d(t, made["w"], made["b"], stride, made["w"].shape[-1] // 2, groups=groups)
    if "gain" in made:
        t = F.batch_norm(t, made["mean"], made["var"], made["gain"], made["shift"])
    return t


def factor(t: Tensor, made: dict[str, Tensor]) -> Tensor:
    """Within [0,1] in some images, and not in others."""
    return 0.4 * F.relu(convolve(t, made))


def _gate(t: Tensor, made: dict[str, Tensor]) -> Tensor:
    return t * torch.sigmoid(F.conv2d(t.mean((2, 3), keepdim=True), made["w"], made["b"]))


def _attend(t: Tensor, made: dict[str, Tensor], heads: int) -> Tensor:
    tokens = t.flatten(2).mT
    # One layer for all three, as below: agf reads the gradient through a layer, so three layers are another network.
    parts = F.linear(tokens, torch.cat([made[name] for name in "qkv"])).chunk(3, -1)
    q, k, v = (parts[i].unflatten(2, (heads, -1)).transpose(1, 2) for i in range(3))
    weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
    seen = F.linear((weights @ v).transpose(1, 2).flatten(2), made["o"])
    return (tokens + seen).mT.unflatten(2, t.shape[2:])


def plain_step(t: Tensor, step: Step, made: dict[str, Tensor], side: int) -> Tensor:
    """One step, written as simply as possible; `side` is that of its input."""
    kind = step[0]
    if kind in (*_HALVING, "up") and side_after(kind, side) == side:
        return convolve(t, made) if kind == "strided" else t
    return _STEPS[kind](t, made, 1 if step[2] == 1 else 2)


_STEPS: dict[str, Callable[[Tensor, Any, int], Tensor]] = {
    "conv": lambda t, made, _: convolve(t, made),
    "norm": lambda t, made, _: convolve(t, made),
    "depthwise": lambda t, made, _: convolve(t, made, groups=made["w"].shape[0]),
    "strided": lambda t, made, _: convolve(t, made, 2),
    "skip": lambda t, made, _: convolve(t, made) + t,
    "minus": lambda t, made, _: t - convolve(t, made),
    "times": lambda t, made, _: t * factor(t, made),
    "join": lambda t, made, _: torch.cat([convolve(t, made), t], 1),
    "gate": lambda t, made, _: _gate(t, made),
    "attend": _attend,
    "relu": lambda t, *_: F.relu(t),
    "leaky": lambda t, *_: F.leaky_relu(t, 0.1),
    "smooth": lambda t, *_: F.silu(t),
    "max": lambda t, *_: F.max_pool2d(t, 2),
    "mean": lambda t, *_: F.avg_pool2d(t, 2),
    "up": lambda t, *_: F.interpolate(t, scale_factor=2),
    "same": lambda t, *_: t,
}


class Plain(nn.Module):
    """The network in float64, written plainly."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        steps, last = weights_of(plan)
        self.plan = plan
        self.steps = [{k: t.double() for k, t in made.items()} for made in steps]
        self.last = {k: t.double() for k, t in last.items()}
        sides = [SIDE]
        for step in plan.steps:
            sides.append(side_after(step[0], sides[-1]))
        self.sides = sides
        self.eval()

    def pooled(self, t: Tensor) -> Tensor:
        return t.mean((2, 3)) if self.plan.head == "pool" else t.flatten(1)

    def walk(self, x: Tensor, first: dict[str, Tensor], rest: Any) -> list[Tensor]:
        """The value after the first convolution and after each step."""
        values = [convolve(x, first)]
        for step, made, side in zip(self.plan.steps, rest, self.sides, strict=False):
            values.append(plain_step(values[-1], step, made, side))
        return values

    def forward(self, x: Tensor) -> Tensor:
        t = self.walk(x, self.steps[0], self.steps[1:])[-1]
        return F.linear(self.pooled(t), self.last["w"], self.last["b"])


class Traceable(Plain):
    """For torch.fx: no Python test of a value, so nothing but the plain form, in the plan's precision."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        for i, made in enumerate((*self.steps, self.last)):
            for key, tensor in made.items():
                add = self.register_buffer if key in ("mean", "var") else self.register_parameter
                held = tensor.to(DTYPES[plan.dtype])
                add(f"p{i}{key}", held if key in ("mean", "var") else nn.Parameter(held))  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        made = [{key: getattr(self, f"p{i}{key}") for key in m} for i, m in enumerate((*self.steps, self.last))]
        t = self.walk(x, made[0], made[1:-1])[-1]
        return F.linear(self.pooled(t), made[-1]["w"], made[-1]["b"])


# ----------------------------------------------------------------------------------------------- the awkward form


def rectified(t: Tensor, how: int) -> Tensor:
    if how == 1:
        return F.relu(t, inplace=True)
    if how == 2:
        t.view(t.shape).relu_()  # a write to a view
        return t
    return t.clamp(min=0) if how == 3 else torch.maximum(t, t.new_zeros(()))


def _leaky(t: Tensor, how: int) -> Tensor:
    return F.leaky_relu_(t, 0.1) if how % 2 else nn.LeakyReLU(0.1, inplace=how == 2)(t)


def _smooth(t: Tensor, how: int) -> Tensor:
    return nn.SiLU(inplace=how == 2)(t) if how % 2 == 0 else torch.ops.aten.silu(t)


def _sum(a: Tensor, b: Tensor, how: int) -> Tensor:
    if how == 1:
        a += b
        return a
    if how == 2:
        return torch.stack([a, b]).sum(0)
    return torch.add(b, a) if how == 3 else a + b


def _difference(a: Tensor, b: Tensor, how: int) -> Tensor:
    if how == 1:
        return torch.add(a, b / 2, alpha=-2)
    if how == 2:
        return torch.stack([a, -b], -1).mean(-1) * 2
    return b.neg().add_(a) if how == 3 else torch.sub(a, b)


def _product(a: Tensor, b: Tensor, how: int) -> Tensor:
    b = b.mul_(0.4).relu_() if how == 1 else 0.4 * b.clamp(min=0)
    if how == 2:
        return torch.mul(*torch.broadcast_tensors(b, a))
    return b.mul_(a) if how == 3 else a * b


def _joined(a: Tensor, b: Tensor, how: int) -> Tensor:
    if how == 1:
        out = a.new_empty(len(a), a.shape[1] + b.shape[1], *a.shape[2:])
        out[:, : a.shape[1]], out[:, a.shape[1] :] = a, b
        return out
    if how == 2:
        return torch.cat([a.mT, b.mT], dim=-3).mT
    return torch.concat((a, b), dim=1) if how == 3 else torch.hstack([a, b])


def _unchanged(t: Tensor, how: int) -> Tensor:
    if how == 1:
        return F.dropout(t.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2), 0.5, training=False)
    if how == 2:
        return t.flatten(2).unflatten(2, t.shape[2:])
    return torch.cat(t.split(1, dim=1), 1) if how == 3 else t.clone()


def _pooled(t: Tensor, kind: str, how: int) -> Tensor:
    half = t.shape[-1] // 2
    if kind == "max":
        # Not amax: of equal values it takes all, a pool the first.
        return (
            F.max_pool2d(t, 2, return_indices=True)[0]
            if how == 1
            else nn.AdaptiveMaxPool2d(half)(t)
            if how == 2
            else nn.MaxPool2d(2)(t)
        )
    if how == 3:
        return t.unflatten(3, (half, 2)).unflatten(2, (half, 2)).sum((3, 5)) / 4
    return F.adaptive_avg_pool2d(t, half) if how % 2 else nn.AvgPool2d(2)(t)


def _doubled(t: Tensor, how: int) -> Tensor:
    if how == 1:
        return t.repeat_interleave(2, 2).repeat_interleave(2, 3)
    if how == 2:
        return t[:, :, :, None, :, None].expand(-1, -1, -1, 2, -1, 2).flatten(4, 5).flatten(2, 3)
    return F.interpolate(t, size=2 * t.shape[-1]) if how == 3 else nn.Upsample(scale_factor=2)(t)


def _gated(t: Tensor, made: Any, how: int) -> Tensor:
    mean = F.adaptive_avg_pool2d(t, 1) if how % 2 else t.mean(-1, keepdim=True).mean(-2, keepdim=True)
    if how >= 2:
        inner = torch.addmm(made["b"], mean.flatten(1), made["w"].flatten(1).mT)[..., None, None]
    else:
        inner = F.conv2d(mean, made["w"], made["b"])
    return inner.sigmoid() * t if how == 2 else t.mul(inner.sigmoid_())


def _attention(t: Tensor, made: Any, heads: int, how: int) -> Tensor:
    tokens = t.flatten(2).transpose(1, 2)
    if how == 3:
        projections = torch.cat([made["q"], made["k"], made["v"]])
        first = tokens.transpose(0, 1)
        seen = F.multi_head_attention_forward(
            first, first, first, first.shape[-1], heads, projections, None, None, None, False, 0.0, made["o"], None,
            training=False, need_weights=False,
        )[0].transpose(0, 1)  # fmt: skip
    else:
        parts = (tokens @ torch.cat([made["q"], made["k"], made["v"]]).mT).unflatten(2, (3, heads, -1))
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        if how == 1:
            seen = F.scaled_dot_product_attention(q, k, v)
        else:
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k) if how else (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
            scores = scores / q.shape[-1] ** 0.5 if how else scores
            seen = torch.einsum("bhqk,bhkd->bhqd", F.softmax(scores, dim=-1), v) if how else scores.softmax(-1) @ v
        seen = torch.matmul(seen.transpose(1, 2).reshape(tokens.shape), made["o"].T)
    return (tokens + seen).transpose(1, 2).reshape(t.shape)


_COMBINED: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "minus": _difference, "times": _product, "skip": lambda t, out, how: _sum(out, t, how),
    "join": lambda t, out, how: _joined(out, t, how),
}  # fmt: skip


class Tagged(Tensor):
    """A class that only adds a name, as libraries for pictures have them."""


class Awkward(nn.Module):
    """The same network in its own precision, written as real networks are."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        steps, last = weights_of(plan)
        self.steps = nn.ModuleList(self._held(made, plan.wrap != "frozen") for made in steps)
        self.last = self._held(last, True)
        self.eval()
        if plan.wrap == "identity":
            self.extra = nn.Identity()  # after eval(): in training mode

    @staticmethod
    def _held(made: dict[str, Tensor], trained: bool) -> nn.ParameterDict:
        learnt = {k: nn.Parameter(t, requires_grad=trained and k not in ("mean", "var")) for k, t in made.items()}
        return nn.ParameterDict(learnt)

    def _layer(self, t: Tensor, made: nn.ParameterDict, how: int, stride: int = 1) -> Tensor:
        k = made["w"].shape[-1] // 2
        groups = t.shape[1] if made["w"].shape[1] != t.shape[1] else 1
        if how == 1:
            t = F.conv2d(F.pad(t, (k, k, k, k)), made["w"], made["b"], stride, groups=groups)
        elif how == 2:
            t = torch.conv2d(t, weight=made["w"], padding=(k, k), stride=(stride,), groups=groups)
            t = t + made["b"].type_as(t)[:, None, None]
        else:
            t = F.conv2d(t, made["w"], made["b"], stride, "same" if how == 3 and stride == 1 else k, 1, groups)
        if "gain" in made:
            t = F.batch_norm(t, made["mean"], made["var"], made["gain"], made["shift"])
        return t

    def _step(self, t: Tensor, step: Step, made: nn.ParameterDict) -> Tensor:
        kind, how, k = step
        resized = side_after(kind, t.shape[-1]) != t.shape[-1]
        if kind == "attend":
            return _attention(t, made, 1 if k == 1 else 2, how)
        if kind == "gate":
            return _gated(t, made, how)
        if kind in _WEIGHTED:
            out = self._layer(t, made, how, 2 if kind == "strided" and resized else 1)
            if kind in _COMBINED:
                return _COMBINED[kind](t, out, how)
            return out
        if kind in ("max", "mean", "up"):
            return t if not resized else _doubled(t, how) if kind == "up" else _pooled(t, kind, how)
        return {"relu": rectified, "leaky": _leaky, "smooth": _smooth, "same": _unchanged}[kind](t, how)

    def _body(self, t: Tensor) -> Tensor:
        for step, made in zip(self.plan.steps, list(self.steps)[1:], strict=True):
            t = self._step(t, step, made)
        return t

    def forward(self, x: Tensor) -> Any:
        wrap = self.plan.wrap
        with _AROUND.get(wrap, contextlib.nullcontext)():
            t = self._layer(x, self.steps[0], 0)
        if wrap == "inference":
            t = t.clone()  # which may be overwritten
        if wrap == "checkpoint":
            t = torch.utils.checkpoint.checkpoint(lambda t: self._body(t.clone()), t, use_reentrant=False)
        else:
            t = self._body(t)
        if wrap == "identity":
            t = self.extra(t)
        t = F.adaptive_avg_pool2d(t, 1).flatten(1) if self.plan.head == "pool" else t.reshape(len(t), -1)
        logits = F.linear(t, self.last["w"], self.last["b"])
        return {"logits": logits} if wrap == "dict" else logits


_AROUND = {"no_grad": torch.no_grad, "inference": torch.inference_mode}


def awkward(plan: Plan) -> nn.Module:
    """The network that is explained."""
    if plan.wrap == "traced":
        return torch.fx.symbolic_trace(Traceable(plan))
    model: nn.Module = Awkward(plan)
    if plan.wrap == "hooks":
        model.register_full_backward_hook(lambda module, into, out: tuple(3 * g for g in into))
    if plan.wrap == "subclass":
        for module in model.modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(weight.detach().as_subclass(Tagged), weight.requires_grad))
    if plan.wrap == "channels_last":
        model = model.to(memory_format=torch.channels_last)
    return nn.DataParallel(model) if plan.wrap == "parallel" else model
