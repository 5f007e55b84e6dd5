"""Every operation of the table as networks call it: by position, by keyword, as a function and as a method.

`SPECS` has one call of each operation, its arguments by name. `writings` writes it in all the ways that torch has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from classlens.core.ops import OPERATIONS, Kind

Call = Callable[[Tensor], Any]


def numbers(*shape: int, seed: int = 1) -> Tensor:
    """Between 0.1 and 0.9, no two alike."""
    return 0.1 + 0.8 * torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


MASK = numbers(2, 4, 6, 6, seed=3) > 0.5
SHAPES: dict[str, tuple[int, ...]] = {
    "t": (2, 6), "linear": (2, 6), "outer": (6,), "addr": (6,), "addmv": (6,), "addmm": (2, 6), "bilinear": (2, 6),
    "addbmm": (4, 6), "baddbmm": (2, 4, 6), "fold": (2, 16, 9), "scaled_dot_product_attention": (2, 2, 5, 4),
    "conv3d": (2, 4, 6, 6, 6), "conv_transpose3d": (2, 4, 3, 3, 3), "inner": (2, 6), "dsplit": (2, 4, 6),
    **{f"{kind}{n}d": (2, 4, *[6] * n) for n in (1, 3) for kind in
       ("max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool", "dropout")},
    "conv1d": (2, 4, 6), "conv_transpose1d": (2, 4, 6), "transpose_all": (2, 6),
}  # fmt: skip

_CONV = {"bias": numbers(3), "stride": 2, "padding": 1, "dilation": 1, "groups": 1}
RARELY = 1e-12  # with probability 0, or in evaluation mode, dropout hands back its argument and is not written down
_POOL = {"kernel_size": 2, "stride": 2, "padding": 0}

# After the first argument, which is the live one: names and values, in order.
SPECS: dict[str, dict[str, Any]] = {
    "linear": {"weight": numbers(3, 6), "bias": numbers(3)},
    **{f"conv{n}d": {"weight": numbers(3, 4, *[3] * n), **_CONV} for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": {"weight": numbers(4, 3, *[3] * n), "bias": numbers(3), "stride": 1} for n in (1, 2, 3)},
    **{name: {} for name, row in OPERATIONS.items() if row.kind in (Kind.ACTIVATION, Kind.POINTWISE)},
    "leaky_relu": {"negative_slope": 0.1},
    "prelu": {"weight": numbers(4)},
    "elu": {"alpha": 1.5},
    "celu": {"alpha": 1.5},
    "hardtanh": {"min_val": -0.5, "max_val": 0.5},
    "threshold": {"threshold": 0.3, "value": 0.1},
    "clamp": {"min": 0.2, "max": 0.6},
    "softshrink": {"lambd": 0.2},
    "hardshrink": {"lambd": 0.2},
    "pow": {"exponent": 3.0},
    "rrelu": {"lower": 0.1, "upper": 0.3},
    "layer_norm": {"normalized_shape": [6]},
    "group_norm": {"num_groups": 2},
    "rms_norm": {"normalized_shape": [6]},
    "local_response_norm": {"size": 2},
    "normalize": {"p": 2.0, "dim": 1},
    "softmax": {"dim": 1},
    "log_softmax": {"dim": 1},
    "softmin": {"dim": 1},
    "detach": {},
    **{f"dropout{n}d": {"p": RARELY, "training": True} for n in (1, 2, 3)},
    "feature_dropout": {"p": RARELY, "train": True},
    "clone": {},
    "to": {"dtype": torch.float32},
    "view": {"size": (2, 144)},
    "reshape": {"shape": (2, 144)},
    "flatten": {"start_dim": 1, "end_dim": 2},
    "unflatten": {"dim": 1, "sizes": (2, 2)},
    "squeeze": {"dim": 1},
    "unsqueeze": {"dim": 1},
    "transpose": {"dim0": 1, "dim1": 2},
    "t": {},
    "permute": {"dims": (0, 2, 3, 1)},
    "movedim": {"source": 1, "destination": 2},
    "expand": {"size": (3, 2, 4, 6, 6)},
    "expand_as": {"other": numbers(3, 2, 4, 6, 6)},
    "broadcast_to": {"size": (3, 2, 4, 6, 6)},
    "repeat": {"repeats": (1, 2, 1, 1)},
    "tile": {"dims": (1, 2, 1, 1)},
    "repeat_interleave": {"repeats": 2, "dim": 1},
    "narrow": {"dim": 1, "start": 1, "length": 2},
    "select": {"dim": 1, "index": 2},
    "index_select": {"dim": 1, "index": torch.tensor([0, 2])},
    "take_along_dim": {"indices": torch.ones(2, 4, 6, 6).long(), "dim": 1},
    "gather": {"dim": 1, "index": torch.ones(2, 4, 6, 6, dtype=torch.int64)},
    "masked_select": {"mask": MASK},
    "roll": {"shifts": 1, "dims": 2},
    "flip": {"dims": (1, 2)},
    "rot90": {"k": 1, "dims": (2, 3)},
    "diagonal": {"offset": 0, "dim1": 2, "dim2": 3},
    "pixel_shuffle": {"upscale_factor": 2},
    "pixel_unshuffle": {"downscale_factor": 2},
    "channel_shuffle": {"groups": 2},
    "native_channel_shuffle": {"groups": 2},
    "as_strided": {"size": (2, 3), "stride": (144, 1), "storage_offset": 4},
    "pad": {"pad": (1, 0, 0, 2)},
    "split": {"split_size_or_sections": 2, "dim": 1},
    "chunk": {"chunks": 2, "dim": 1},
    "unbind": {"dim": 1},
    "masked_fill": {"mask": MASK, "value": 0.5},
    "as_strided_scatter": {"src": numbers(2, 3), "size": (2, 3), "stride": (144, 1), "storage_offset": 4},
    **{f"max_pool{n}d": _POOL | {"dilation": 1, "ceil_mode": True} for n in (1, 2, 3)},
    **{f"avg_pool{n}d": _POOL for n in (1, 2, 3)},
    **{f"adaptive_{kind}_pool{n}d": {"output_size": 2} for n in (1, 2, 3) for kind in ("max", "avg")},
    "amax": {"dim": (2, 3), "keepdim": True},
    "amin": {"dim": (2, 3), "keepdim": True},
    "max": {"dim": 1, "keepdim": True},
    "min": {"dim": 1, "keepdim": True},
    "maximum": {"other": numbers(2, 4, 6, 6)},
    "minimum": {"other": numbers(2, 4, 6, 6)},
    "mean": {"dim": (2, 3), "keepdim": True},
    "sum": {"dim": (2, 3), "keepdim": True},
    "cumsum": {"dim": 1},
    "interpolate": {"size": 3, "scale_factor": None, "mode": "bilinear"},
    "upsample_nearest": {"size": 3},
    "grid_sample": {"grid": 2 * numbers(2, 3, 3, 2) - 1},
    "fold": {"output_size": (4, 4), "kernel_size": (2, 2)},
    "add": {"other": numbers(2, 4, 6, 6)},
    "sub": {"other": numbers(2, 4, 6, 6)},
    "rsub": {"other": numbers(2, 4, 6, 6)},
    "neg": {},
    "mul": {"other": numbers(2, 4, 6, 6)},
    "div": {"other": numbers(2, 4, 6, 6)},
    "matmul": {"other": numbers(2, 4, 6, 3)},
    "inner": {"other": numbers(3, 6)},
    "outer": {"other": numbers(3)},
    "tensordot": {"other": numbers(6, 3), "dims": 1},
    "bilinear": {"input2": numbers(2, 5), "weight": numbers(3, 6, 5)},
    "addcmul": {"tensor1": numbers(6), "tensor2": numbers(6)},
    "addmm": {"mat1": numbers(2, 3), "mat2": numbers(3, 6)},
    "addmv": {"mat": numbers(6, 3), "vec": numbers(3)},
    "addr": {"vec1": numbers(6), "vec2": numbers(6)},
    "addbmm": {"batch1": numbers(5, 4, 3), "batch2": numbers(5, 3, 6)},
    "baddbmm": {"batch1": numbers(2, 4, 3), "batch2": numbers(2, 3, 6)},
    **{name: {"other": numbers(2, 4, 6, 6)} for name in ("gt", "ge", "lt", "le", "eq", "ne")},
    "hsplit": {"sections": 2},
    "vsplit": {"sections": 2},
    "dsplit": {"sections": 2},
}
for _by_hand in ("rpow", "rmatmul"):
    SPECS.pop(_by_hand, None)

ROWS = numbers(4)
DROPOUTS = "dropout", "alpha_dropout", "feature_alpha_dropout"
_NORM = {"running_mean": ROWS, "running_var": ROWS}

# Calls that no pattern covers: (operation, what arguments() must say, the call).
BY_HAND: list[tuple[str, dict[str, Any], Call]] = [
    ("rpow", {"other": 2}, lambda x: 2**x),
    ("rmatmul", {"other": numbers(2, 2)}, lambda x: torch.Tensor.__rmatmul__(x[..., :2, :], numbers(2, 2))),
    ("rdiv", {"other": 2}, lambda x: 2 / x),
    ("rsub", {"other": 1}, lambda x: 1 - x),
    ("getitem", {"index": 0}, lambda x: x[0]),
    ("getitem", {"index": (..., 1)}, lambda x: x[..., 1]),
    ("transpose_all", {}, lambda x: x.T),
    ("transpose_last", {}, lambda x: x.mT),
    ("detach", {}, lambda x: x.data * x),
    ("setitem", {"index": (slice(None), 1), "value": 0.0}, lambda x: _filled(x)),
    ("copy", {"src": 2 * numbers(2, 4, 6, 6)}, lambda x: (x * 1.0).copy_(2 * numbers(2, 4, 6, 6)) + x),
    ("cat", {"dim": 1}, lambda x: torch.cat([x, x], 1)),
    ("cat", {"dim": 1}, lambda x: torch.cat(tensors=[x, x], dim=1)),
    ("cat", {"dim": 1}, lambda x: torch.concat((x, x), axis=1)),
    ("stack", {"dim": 1}, lambda x: torch.stack([x, x], 1)),
    *(
        (name, {}, lambda x, name=name: getattr(torch, name)([x, x]))
        for name in ("hstack", "vstack", "dstack", "column_stack")
    ),
    ("where", {"condition": MASK, "other": 0.5}, lambda x: torch.where(MASK, x, 0.5)),
    ("where", {"condition": MASK, "other": 0.5}, lambda x: x.where(MASK, 0.5)),
    ("einsum", {"equation": "abcd->ab"}, lambda x: torch.einsum("abcd->ab", x)),
    ("atleast_1d", {}, lambda x: torch.atleast_1d(x.sum())),
    ("atleast_2d", {}, lambda x: torch.atleast_2d(x.sum())),
    ("atleast_3d", {}, lambda x: torch.atleast_3d(x.sum())),
    ("contiguous", {}, lambda x: x.mT.contiguous()),
    *(
        (name, {"p": RARELY, "training": True}, lambda x, name=name: getattr(F, name)(x, RARELY, True))
        for name in DROPOUTS
    ),
    *(
        (name, {"p": RARELY, "train": True}, lambda x, name=name: getattr(torch, name)(x, RARELY, True))
        for name in DROPOUTS
    ),
    ("instance_norm", {"eps": 0.1}, lambda x: F.instance_norm(x, eps=0.1)),
    (
        "scaled_dot_product_attention",
        {"attn_mask": None, "key": numbers(2, 2, 5, 4)},
        lambda x: F.scaled_dot_product_attention(numbers(2, 2, 5, 4), numbers(2, 2, 5, 4), x, None),
    ),
    ("unfold", {"dimension": 2, "size": 2, "step": 1}, lambda x: x.unfold(2, 2, 1)),
    ("unfold", {"kernel_size": 2}, lambda x: F.unfold(x, 2)),
    ("batch_norm", _NORM, lambda x: F.batch_norm(x, ROWS, ROWS)),
    (
        "batch_norm",
        _NORM | {"weight": None},
        lambda x: torch.batch_norm(x, None, None, ROWS, ROWS, False, 0.1, 1e-5, False),
    ),
    ("pad", {"pad": (1, 0), "value": 0.0}, lambda x: torch.constant_pad_nd(x, (1, 0), 0.0)),
    ("max", {"other": numbers(2, 4, 6, 6)}, lambda x: torch.max(x, numbers(2, 4, 6, 6))),
    ("max", {}, lambda x: x.max()),
    ("max_pool2d", {"kernel_size": 2, "return_indices": True}, lambda x: F.max_pool2d(x, 2, return_indices=True)[0]),
    ("mean", {"dim": 1, "keepdim": True}, lambda x: x.mean(axis=1, keepdims=True)),
    ("view", {"size": (2, -1)}, lambda x: x.view(2, -1)),
    ("permute", {"dims": (0, 2, 3, 1)}, lambda x: x.permute(0, 2, 3, 1)),
    ("view", {"other": numbers(2, 144)}, lambda x: x.view_as(numbers(2, 144))),
    ("to", {"dtype": torch.float32}, lambda x: x.type(torch.float32)),
    ("to", {}, lambda x: x.float()),
    ("to", {"other": torch.ones(1)}, lambda x: x.to(torch.ones(1))),
    ("to", {"other": torch.ones(1)}, lambda x: x.type_as(torch.ones(1))),
    ("clamp", {"min": 0.3}, lambda x: x.clamp_min(0.3)),
    ("clamp", {"max": 0.3}, lambda x: torch.clamp_max(x, max=0.3)),
    ("split", {"split_size_or_sections": [1, 3], "dim": 1}, lambda x: x.split_with_sizes([1, 3], 1)),
    ("split", {"split_size_or_sections": 2, "dim": 1}, lambda x: torch.tensor_split(x, 2, dim=1)),
    ("split", {"split_size_or_sections": (1, 2), "dim": 1}, lambda x: x.tensor_split((1, 2), 1)),
    ("linear", {"weight": numbers(6, 3).mT}, lambda x: x @ numbers(6, 3)),
    ("linear", {"weight": numbers(6, 3).mT}, lambda x: x.mm(mat2=numbers(6, 3))),
    ("linear", {"weight": numbers(6, 3).mT, "bias": numbers(3)}, lambda x: torch.addmm(numbers(3), x, numbers(6, 3))),
    ("matmul", {"other": numbers(6)}, lambda x: torch.mv(x[0, 0], vec=numbers(6))),
    ("bitwise_not", {}, lambda x: ~(x > 0)),
]


def _filled(x: Tensor) -> Tensor:
    x = x * 1.0
    x[:, 1] = 0.0
    return x


def writings(op: str) -> Iterator[tuple[str, Call]]:
    """(how it is written, the call) for each way in which torch lets this operation be called."""
    named = SPECS[op]
    for place, home in (("F", F), ("torch", torch), ("Tensor", Tensor)):
        for spelling in (op, *OPERATIONS[op].spellings):
            func = getattr(home, spelling, None)
            if func is None or (spelling != op and spelling not in SAME_CALL):
                continue
            yield f"{place}.{spelling}", lambda x, func=func: func(x, *named.values())
            if spelling == op and op not in ONE_NAME_ELSEWHERE:
                yield f"{place}.{spelling} by name", lambda x, func=func: func(x, **named)
                if home is not Tensor:
                    yield f"{place}.{spelling} all by name", lambda x, func=func: func(input=x, **named)
    if OPERATIONS[op].kind in (Kind.ACTIVATION, Kind.POINTWISE, Kind.ADDITION) and hasattr(Tensor, f"{op}_"):
        yield f"Tensor.{op}_", lambda x: getattr(x * 1.0, f"{op}_")(*named.values())


# Spellings that take the same arguments in the same order.
SAME_CALL = {"absolute", "negative", "clip", "swapaxes", "swapdims", "moveaxis", "subtract", "multiply", "divide",
             "true_divide", "greater", "greater_equal", "less", "less_equal", "not_equal", "ger"}  # fmt: skip
# Their parameters have other names in some of torch's own spellings.
ONE_NAME_ELSEWHERE = {"split", "matmul", "inner", "outer", "tensordot", "pad", "bilinear"}
