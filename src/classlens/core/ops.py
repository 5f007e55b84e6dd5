"""The table of operations: the kind of each, its spellings, and what a rule needs to know about it.

`F.relu(x)`, `torch.relu(x)`, `x.relu()`, `x.relu_()` and `F.relu(x, inplace=True)` are all `"relu"`. Rules are
keyed by these names, and every list of operations in this package is read from the table by kind.

    >>> canonical(torch.Tensor.__iadd__), OPERATIONS["add"].kind.value
    ('add', 'addition')
    >>> sorted(of_kind(Kind.DIVISION))
    ['div', 'rdiv']

The parameters of an operation come from torch's own signatures (`core.signatures`). The table gives `parameters` only
where these are missing, or differ between spellings.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from classlens.core.signatures import INPUT_NAMES, signature_of, signatures
from classlens.errors import UnsupportedOp


class Kind(enum.StrEnum):
    """What an operation does to its inputs."""

    LINEAR = "linear"  # W x + b
    ACTIVATION = "activation"  # a nonlinearity of each unit
    POINTWISE = "pointwise"  # another function of one unit
    NORM = "normalisation"
    SOFTMAX = "softmax"
    SAME = "same"  # the identity in evaluation mode
    COPY = "copy"  # the same values in other memory
    RESHAPE = "reshape"  # the same values in the same order
    MOVE = "move"  # the same values, or some of them, in other places
    JOIN = "join"  # several tensors side by side
    CHOICE = "choice"  # each value is taken from one of several tensors
    MAX_POOL = "max pool"
    MAXIMUM = "maximum"
    MINIMUM = "minimum"
    AVERAGE_POOL = "average pool"
    SUM = "sum"  # weighted sums over places, with weights that do not depend on the values
    ADDITION = "addition"
    PRODUCT = "product"  # of two values or more, unit by unit or as matrices
    ADDED_PRODUCT = "added product"  # a value, and a product added to it
    DIVISION = "division"
    ATTENTION = "attention"
    COMPARISON = "comparison"  # gives truth values
    CREATION = "creation"  # uses only the shape, type or device of a tensor, not its values
    QUERY = "query"  # returns a shape, a type, a device: nothing to record
    EXPORT = "export"  # leaves torch: later computations cannot be recorded


class Constants(enum.Enum):
    """Whether relevance may stay at constants that an operation combines with live values (a class token, a border)."""

    NO = enum.auto()
    YES = enum.auto()
    # If one of its tensors is a constant. (If none is, nothing stays. And the joined axis may be the batch axis, along
    # which relevance cannot be assigned to an image.)
    IF_THERE = enum.auto()


@dataclass(frozen=True)
class Operation:
    """One row of the table."""

    name: str
    kind: Kind
    spellings: tuple[str, ...] = ()  # other names in torch, without underscores around them
    parameters: tuple[str, ...] = ()  # names in order; "*name" takes the rest; (): as torch says
    several: bool = False  # its rule gets the relevance of each of several outputs
    constants: Constants = Constants.NO
    recompute: bool = False  # recompute an overwritten output on demand: that is rare, and a copy costs as much
    unruled: str = ""  # why it has no rule


def _rows(kind: Kind, text: str, **columns: Any) -> Iterator[Operation]:
    """Operations of one kind, as "name name=spelling=spelling ..."."""
    for word in text.split():
        name, *spellings = word.split("=")
        yield Operation(name, kind, tuple(spellings), **columns)


_BINARY = ("input", "other")
NEAREST = "upsample_nearest"  # `interpolate` that repeats values instead of mixing them
LIVE_WEIGHTS = "constant_through_live_weights"  # a linear layer or convolution whose input is not made of the image
_TABLE = (
    *_rows(Kind.LINEAR, "linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d"),
    *_rows(Kind.ACTIVATION, """relu relu6 leaky_relu prelu rrelu elu selu celu gelu silu mish hardswish hardtanh
           hardsigmoid sigmoid tanh softplus softsign threshold clamp=clip=clamp_min=clamp_max logsigmoid=log_sigmoid
           tanhshrink softshrink hardshrink"""),
    *_rows(Kind.POINTWISE, """abs=absolute square pow=ipow rpow sqrt rsqrt reciprocal exp exp2 expm1 log log1p log2
           log10 sin cos erf sign floor ceil round trunc"""),
    Operation("batch_norm", Kind.NORM, recompute=True),
    *_rows(Kind.NORM, "layer_norm group_norm instance_norm rms_norm local_response_norm normalize"),
    *_rows(Kind.SOFTMAX, "softmax log_softmax softmin"),
    *_rows(Kind.SAME, "detach", parameters=("input",)),
    *_rows(Kind.SAME, "identity dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout "
           "feature_alpha_dropout"),
    *_rows(Kind.COPY, "clone contiguous alias to=half=float=double=bfloat16=type=type_as=cpu=cuda"),
    *_rows(Kind.RESHAPE, "view=view_as reshape=reshape_as flatten=ravel unflatten squeeze unsqueeze atleast_1d "
           "atleast_2d atleast_3d"),
    *_rows(Kind.MOVE, "transpose=swapaxes=swapdims", parameters=("input", "dim0", "dim1")),
    *_rows(Kind.MOVE, "transpose_all transpose_last", parameters=("input",)),
    *_rows(Kind.MOVE, "getitem", parameters=("input", "index")),
    *_rows(Kind.MOVE, "pad=constant_pad_nd", constants=Constants.YES),
    *_rows(Kind.MOVE, """t permute movedim=moveaxis expand expand_as broadcast_to repeat tile repeat_interleave narrow
           select index_select gather take_along_dim masked_select roll flip rot90 diagonal unfold pixel_shuffle
           pixel_unshuffle channel_shuffle as_strided"""),
    *_rows(Kind.MOVE, NEAREST),
    *_rows(Kind.MOVE, "native_channel_shuffle",
           unruled="torch has no derivative of it; channel_shuffle does the same"),
    *_rows(Kind.MOVE, "split=unsafe_split=split_with_sizes=tensor_split", several=True,
           parameters=("input", "split_size_or_sections", "dim")),
    *_rows(Kind.MOVE, "chunk=unsafe_chunk unbind hsplit vsplit dsplit", several=True),
    *_rows(Kind.JOIN, "cat=concat=concatenate stack hstack vstack=row_stack dstack column_stack",
           constants=Constants.IF_THERE),
    *_rows(Kind.CHOICE, "setitem", constants=Constants.YES, parameters=("input", "index", "value")),
    *_rows(Kind.CHOICE, "where masked_fill copy as_strided_scatter", constants=Constants.YES),
    *_rows(Kind.MAX_POOL, " ".join(f"{a}max_pool{n}d={a}max_pool{n}d_with_indices"
                                   for a in ("", "adaptive_") for n in (1, 2, 3))),
    *_rows(Kind.MAXIMUM, "amax"), *_rows(Kind.MAXIMUM, "max", several=True, constants=Constants.IF_THERE),
    *_rows(Kind.MAXIMUM, "maximum", constants=Constants.YES),
    *_rows(Kind.MINIMUM, "amin"), *_rows(Kind.MINIMUM, "min", several=True, constants=Constants.IF_THERE),
    *_rows(Kind.MINIMUM, "minimum", constants=Constants.YES),
    *_rows(Kind.AVERAGE_POOL, " ".join(f"{a}avg_pool{n}d" for a in ("", "adaptive_") for n in (1, 2, 3))),
    *_rows(Kind.SUM, "mean sum cumsum interpolate=upsample=upsample_bilinear grid_sample fold"),
    *_rows(Kind.ADDITION, "add=radd=iadd", recompute=True),
    *_rows(Kind.ADDITION, "sub=isub=subtract rsub neg=negative"),
    *_rows(Kind.PRODUCT, "mul=rmul=imul=multiply inner outer=ger", parameters=_BINARY),
    *_rows(Kind.PRODUCT, "matmul=mm=bmm=mv=dot rmatmul", parameters=_BINARY),
    *_rows(Kind.PRODUCT, "tensordot", parameters=(*_BINARY, "dims")),
    *_rows(Kind.PRODUCT, "einsum", parameters=("equation", "*operands")),
    *_rows(Kind.PRODUCT, f"bilinear {LIVE_WEIGHTS}"),
    *_rows(Kind.ADDED_PRODUCT, "addcmul addmm addmv addr addbmm baddbmm"),
    *_rows(Kind.DIVISION, "div=truediv=itruediv=idiv=divide=true_divide", parameters=_BINARY),
    *_rows(Kind.DIVISION, "rdiv=rtruediv", parameters=_BINARY,
           unruled="a constant divided by a live value is larger where the value is smaller"),
    *_rows(Kind.ATTENTION, "scaled_dot_product_attention"),
    *_rows(Kind.COMPARISON, "gt=greater ge=greater_equal lt=less le=less_equal eq ne=not_equal bitwise_not=invert",
           unruled="no relevance reaches a truth value"),
    *_rows(Kind.CREATION, """new_zeros new_ones new_full new_empty new_tensor zeros_like ones_like full_like empty_like
           rand_like randn_like randint_like""", unruled="its output is a constant"),
    *_rows(Kind.QUERY, "dim size numel is_floating_point shape dtype device ndim is_cuda requires_grad",
           unruled="it returns no tensor"),
    *_rows(Kind.EXPORT, "numpy array tolist dlpack", unruled="the recorder refuses it"),
)  # fmt: skip
OPERATIONS: dict[str, Operation] = {operation.name: operation for operation in _TABLE}


def of_kind(*kinds: Kind) -> frozenset[str]:
    """The names of all operations of the given kinds."""
    return frozenset(name for name, operation in OPERATIONS.items() if operation.kind in kinds)


LINEAR_OPS = of_kind(Kind.LINEAR)
SEVERAL_OUTPUTS = frozenset(name for name, operation in OPERATIONS.items() if operation.several)
UNRULED = frozenset(name for name, operation in OPERATIONS.items() if operation.unruled)
RECOMPUTED = frozenset(name for name, operation in OPERATIONS.items() if operation.recompute)
KEEPS_CONSTANTS = {name: row.constants for name, row in OPERATIONS.items() if row.constants is not Constants.NO}

_ALIASES = {spelling: operation.name for operation in _TABLE for spelling in operation.spellings}
# `T`, `mT`, ... are properties: their getter is called `__get__` and only its owner knows the name.
_GETTERS = {
    getattr(torch.Tensor, name).__get__: op
    for op, names in {"transpose_all": ("T", "H"), "transpose_last": ("mT", "mH"), "detach": ("data",)}.items()
    for name in names
}
GRAD_SWITCH = torch._C._set_grad_enabled  # `torch.no_grad()` inside a forward pass calls this


def getter(name: str) -> Any:
    """The function that torch calls for a property or a method of a tensor."""
    attribute = getattr(torch.Tensor, name)
    return attribute if callable(attribute) else attribute.__get__


QUERIES = frozenset(getter(name) for name in of_kind(Kind.QUERY))  # as functions: called all the time


def _name(func: Callable[..., Any]) -> str:
    if str(func).startswith("aten."):  # torch.ops.aten.add_.Tensor, as in exported programs
        return str(func).split(".")[1]
    name: str = getattr(func, "__name__", str(func))
    return name


@functools.lru_cache(1024)  # called for each operation of a forward pass
def canonical(func: Callable[..., Any]) -> str:
    """The canonical name of an operation."""
    if func in _GETTERS:
        return _GETTERS[func]
    name = _name(func)
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
    elif name.endswith("_") and not name.startswith("_"):
        name = name[:-1]
    return _ALIASES.get(name.lstrip("_"), name.lstrip("_"))


@functools.lru_cache(1024)
def kind_of(func: Callable[..., Any]) -> Kind | None:
    """The kind of a function's operation; None if it is not in the table."""
    operation = OPERATIONS.get(canonical(func))
    return None if operation is None else operation.kind


# Aliases of keywords: torch also accepts numpy's names.
_KEYWORDS = dict.fromkeys((*INPUT_NAMES, "x1"), "input") | {"x2": "other", "axis": "dim", "keepdims": "keepdim"}


def arguments(op: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, however they were passed; omitted arguments are absent.

    >>> arguments("linear", F.linear, (1, 2), {"bias": 3})
    {'input': 1, 'weight': 2, 'bias': 3}
    >>> arguments("permute", torch.Tensor.permute, (1, 0, 2, 1), {})
    {'input': 1, 'dims': (0, 2, 1)}
    """
    signature = signature_of(func, args, kwargs)
    own = signature.names if signature is not None else ()
    rest = signature.rest if signature is not None else None
    names = own
    if op in OPERATIONS and OPERATIONS[op].parameters:
        names = OPERATIONS[op].parameters
        if names[-1].startswith("*"):
            names, rest = names[:-1], names[-1][1:]
    bound = dict(zip(names, args, strict=False))
    if len(args) > len(names):
        if rest is None:
            raise UnsupportedOp(f"the names of the arguments of {op} are unknown; read node.args and node.kwargs")
        first = names.index(rest) if rest in names else len(names)
        bound[rest] = tuple(args[first:])
    renamed = _KEYWORDS | dict(zip(own, names, strict=False))
    return bound | {renamed.get(key, key): value for key, value in kwargs.items()}


def channels_last(shape: Sequence[int], image: Sequence[int]) -> bool:
    """Whether a feature map is (B,h,w,C) rather than (B,C,h,w), by the aspect ratio of the image.

    >>> channels_last((1, 7, 7, 96), (224, 224)), channels_last((1, 96, 7, 7), (224, 224))
    (True, False)
    """
    return _unlike(shape[1:-1], image) < _unlike(shape[2:], image)


def _unlike(sides: Sequence[int], image: Sequence[int]) -> float:
    """How much the axes differ in their ratio to the image; an axis of the image with one position does not count."""
    ratios = [math.log(own / side) for own, side in zip(sides, image, strict=True) if side > 1]
    return max(ratios, default=0.0) - min(ratios, default=0.0)


def per_axis(size: int | Sequence[int], n: int) -> tuple[int, ...]:
    """A size, stride or padding for each of n axes, as convolutions and pools read it.

    >>> per_axis(3, 2), per_axis([3], 2), per_axis((3, 1), 2)
    ((3, 3), (3, 3), (3, 1))
    """
    sizes = (size,) if isinstance(size, int) else tuple(size)
    return sizes * n if len(sizes) == 1 else sizes


def is_mutating(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the call overwrites its first argument.

    >>> is_mutating(torch.Tensor.add_, (), {}), is_mutating(F.relu, (), {"inplace": True})
    (True, True)
    """
    if _always_mutates(func) or kwargs.get("inplace") is True:
        return True
    position = _inplace_position(func)
    return position is not None and len(args) > position and args[position] is True


@functools.lru_cache(1024)
def _always_mutates(func: Callable[..., Any]) -> bool:
    name = _name(func)
    if name.startswith("__") and name.endswith("__"):
        return name == "__setitem__" or (name[2] == "i" and name not in ("__invert__", "__int__", "__index__"))
    return name.endswith("_") and not name.endswith("__") and name != "requires_grad_"


@functools.lru_cache(1024)
def _inplace_position(func: Callable[..., Any]) -> int | None:
    """The position of a function's `inplace` argument."""
    return next((s.names.index("inplace") for s in signatures(func) if "inplace" in s.names), None)
