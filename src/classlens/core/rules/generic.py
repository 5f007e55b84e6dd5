"""The generic attribution rule (Def. 1 of the paper) for any operation, and its helpers.

Relevance always has a leading axis for the targets: a value of shape (B, ...) has relevance (K, B, ...). Values do not
depend on the target, so broadcasting does the rest.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from classlens.core.capture import Node
from classlens.core.capture.backward import gradients, regular
from classlens.errors import CaptureError

Shares = Sequence[Tensor | None]  # one for each input of the node; None: that input gets nothing
Quotient = Callable[[Tensor, Tensor], Tensor]


_MANY = 4096  # numbers: fewer are faster compared than searched


def divide(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a / b, and 0 where b is 0.

    >>> divide(torch.tensor([1.0, 1.0]), torch.tensor([2.0, 0.0]))
    tensor([0.5000, 0.0000])
    """
    return _unless_zero(torch.div(a, b, out=out), b)


def divide_released(a: Tensor, b: Tensor) -> Tensor:
    """The released code's guarded division: a / (b + 1e-9), and 0 where b is 0."""
    return _unless_zero(a / (b + 1e-9), b)


def _unless_zero(quotient: Tensor, b: Tensor) -> Tensor:
    # On a CPU, comparing and filling takes ten times as long as dividing, and usually no divisor is 0. (On other
    # devices the check would cost more, because it waits for the device; for a few numbers it costs more too.)
    if b.device.type == "cpu" and b.numel() >= _MANY:
        low, high = b.aminmax()
        if low > 0 or high < 0 or b.abs().amin() > 0:
            return quotient
    return quotient.masked_fill_(b == 0, 0)


def magnitude(x: Tensor) -> Tensor:
    """|x| plus a tiny constant, so that inputs that are all 0 get equal shares instead of losing relevance."""
    return x.abs().add_(torch.finfo(x.dtype).tiny ** 0.5)


def transported(
    node: Node,
    relevance: Sequence[Tensor | None],
    inputs: Sequence[Tensor] | None = None,
    constants: Callable[[Tensor], Tensor] | None = None,
) -> list[Tensor | None]:
    """J^T R: the operation's own adjoint, for each class; None for masks and indices.

    For an operation that only moves data (view, cat, slice, max-pool) this is where each value came from.
    """
    points = [v.tensor for v in node.inputs] if inputs is None else list(inputs)
    return _run_with_adjoint(functools.partial(node.call, constants=constants), points)[1](relevance)


def _run_with_adjoint(
    operation: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]
) -> tuple[list[Tensor], Callable[[Sequence[Tensor | None]], list[Tensor | None]]]:
    """The outputs of an operation, and the adjoint that takes relevance from the outputs to the inputs."""
    floating = [p.is_floating_point() for p in inputs]
    points = [regular(p).detach().requires_grad_() if f else p for p, f in zip(inputs, floating, strict=True)]
    wanted = [p for p, f in zip(points, floating, strict=True) if f]
    with torch.inference_mode(False), torch.enable_grad():
        outputs = operation(*points)
    if any(one.is_complex() for one in (*points, *outputs)):
        raise CaptureError(
            "a part of the network computes with complex numbers, through which relevance cannot be traced; use a "
            "gradient method"
        )

    def adjoint(relevance: Sequence[Tensor | None]) -> list[Tensor | None]:
        used = [(o, r) for o, r in zip(outputs, relevance, strict=True) if r is not None and o.requires_grad]
        if not used:
            raise CaptureError(
                "a part of the network cannot be differentiated (a comparison, a rounding to integers), so relevance "
                "cannot be traced through it; use a method that needs no inside, such as rise"
            )
        classes = used[0][1].shape[0]
        with torch.inference_mode(False), torch.enable_grad(), _derivatives():
            columns = [
                gradients(
                    [o for o, _ in used], wanted, [r[k] for _, r in used], retain_graph=k + 1 < classes,
                    allow_unused=True,
                )
                for k in range(classes)
            ]  # fmt: skip
        found = iter(
            [
                torch.stack([torch.zeros_like(p) if g is None else g for g in column])
                for p, column in zip(wanted, zip(*columns, strict=True), strict=True)
            ]
        )
        return [next(found) if f else None for f in floating]

    return [o.detach() for o in outputs], adjoint


@contextlib.contextmanager
def _derivatives() -> Iterator[None]:
    """An operation that torch cannot differentiate, in one line."""
    try:
        yield
    except RuntimeError as error:  # "derivative for aten::heaviside is not implemented"
        if not str(error).startswith("derivative for"):
            raise
        raise CaptureError(f"relevance cannot be traced through a part of the network: {error}; use rise") from error


def proportional(
    node: Node,
    relevance: Tensor,
    modify: Callable[[Tensor], Tensor] = magnitude,
    quotient: Quotient = divide,
) -> Shares:
    """Def. 1: R_j = sum_i X_j dL_i/dX_j R_i / L_i(X), with X = modify(x); conserves relevance where L_i(X) != 0.

    Exact for operations with L(X) = J X: pools, means, sums, interpolation, padding.
    """
    return shared(node.call, [modify(v.tensor) for v in node.inputs], relevance, quotient)


def shared(
    operation: Callable[..., Sequence[Tensor]], points: Sequence[Tensor], relevance: Tensor, quotient: Quotient = divide
) -> Shares:
    """Def. 1 for the first output of any operation L, at the points X: R_j = sum_i X_j dL_i/dX_j R_i / L_i(X).

    >>> parts = shared(lambda x: [x.sum(1)], [torch.tensor([[1.0, 3.0]])], torch.tensor([[8.0]]))
    >>> parts[0]
    tensor([[[2., 6.]]])
    """
    (total, *others), adjoint = _run_with_adjoint(operation, points)  # a pool may return the winners' places too
    shares = adjoint([quotient(relevance, total), *[None] * len(others)])
    return [None if s is None else s.mul_(p) for p, s in zip(points, shares, strict=True)]


def unbroadcast(share: Tensor, shape: Sequence[int]) -> Tensor:
    """Sum a share (K, ...) over the axes along which its input, of the given shape, was broadcast."""
    extra = share.dim() - 1 - len(shape)
    if extra:
        share = share.sum(tuple(range(1, 1 + extra)))
    axes = tuple(i + 1 for i, n in enumerate(shape) if n == 1 and share.shape[i + 1] != 1)
    return share.sum(axes, keepdim=True) if axes else share
