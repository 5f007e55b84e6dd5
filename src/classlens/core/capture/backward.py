"""Gradients by autograd, right in every memory layout.

On CPUs, torch's gradient of a batch norm is wrong without a word if its input and the gradient of its output lie in
memory in different orders and torch takes them for the same. That happens with one image, because the stride of an axis
of length 1 may be anything: (1,C,H,W) with strides (C, 1, W C, C) has its channels last, but torch calls it contiguous.
Tokens (N,B,C) that become a map have such strides. So the gradient is put into an order that torch reads right.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

_NORMS = frozenset(("NativeBatchNormBackward0", "NativeBatchNormLegitBackward0"))  # an instance norm is one inside
_NEARBY = 12  # functions: a layer with its weights, its padding and its norm has fewer
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def gradients(
    outputs: Sequence[Tensor | GradientEdge], inputs: Sequence[Tensor | GradientEdge], cotangents: Sequence[Tensor],
    odd: bool = False, **options: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """`torch.autograd.grad`; `odd` says that a batch norm reads a tensor of which `has_odd_layout` is true.

    torch gets edges of its graph. With tensors, it would switch modes off for the backward pass, such as the one that
    keeps checkpointed parts in float32.
    """
    starts: list[GradientEdge] = []
    given: list[Tensor | None] = []
    for one, cotangent in zip(outputs, cotangents, strict=True):
        seeded = isinstance(one, Tensor)
        starts.append(_seed(one, cotangent) if isinstance(one, Tensor) else one)
        given.append(None if seeded else cotangent)
    ends = [_edge(one) for one in inputs]
    with _in_order(starts, odd):
        return torch.autograd.grad(starts, ends, given, **options)


def _seed(output: Tensor, cotangent: Tensor) -> GradientEdge:
    """A number whose gradient at `output` is the cotangent.

    To compare the shapes of outputs and cotangents, torch imports a library for algebra, which takes as long as half of
    torch. A number needs no cotangent.
    """
    if output.shape != cotangent.shape:
        raise ValueError(f"a cotangent of shape {tuple(cotangent.shape)} for an output of {tuple(output.shape)}")
    with torch.inference_mode(False), torch.enable_grad():
        return get_gradient_edge(_Seed.apply(output, cotangent))  # type: ignore[no-untyped-call]


class _Seed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, cotangent: Tensor) -> Tensor:
        ctx.cotangent = cotangent
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.cotangent, None


def _edge(one: Tensor | GradientEdge) -> GradientEdge:
    return get_gradient_edge(one) if isinstance(one, Tensor) else one


def has_odd_layout(t: Tensor) -> bool:
    """Whether a tensor has its channels last in memory while torch calls it contiguous.

    >>> has_odd_layout(torch.zeros(64, 1, 4).permute(1, 2, 0).reshape(1, 4, 8, 8))
    True
    """
    last = _LAST.get(t.dim())
    if last is None or t.is_contiguous() or not t.is_contiguous(memory_format=last):
        return False
    return t.stride() != torch.empty(t.shape, device="meta", memory_format=last).stride()


def regular(t: Tensor) -> Tensor:
    """The same values in a layout that is not odd."""
    return t.contiguous() if has_odd_layout(t) else t


def function_between(output: GradientEdge, value: GradientEdge) -> tuple[Any, int] | None:
    """The function of autograd's graph that reads `value` for the layer with this output, and in which argument.

    Its gradient for that argument is the gradient at the value *through the layer*, also if the value has other uses.
    None if there are several such functions, or if they are not found nearby.
    """
    seen: set[Any] = {None, value.node}
    todo: list[Any] = [output.node]
    found = []
    while todo:
        function = todo.pop()
        if function in seen:
            continue
        seen.add(function)
        if len(seen) > _NEARBY:
            return None
        for argument, (following, number) in enumerate(function.next_functions):
            if following is value.node and number == value.output_nr:
                found.append((function, argument))
            else:
                todo.append(following)
    return found[0] if len(found) == 1 else None


@contextlib.contextmanager
def caught(functions: Sequence[tuple[Any, int]]) -> Iterator[list[Tensor | None]]:
    """What functions of autograd's graph pass on to one of their arguments in a backward pass within this block."""
    found: list[Tensor | None] = [None] * len(functions)

    def catching(row: int, argument: int) -> Any:
        def catch(passed: Sequence[Tensor | None], _: Any) -> None:
            found[row] = passed[argument]

        return catch

    handles = [one.register_hook(catching(row, argument)) for row, (one, argument) in enumerate(functions)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _in_order(outputs: Sequence[GradientEdge], odd: bool) -> Iterator[None]:
    """Put the gradients that reach batch norms in order; the hooks are gone afterwards."""

    def ordered(found: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(None if g is None else _ordered(g, odd) for g in found)

    handles = [node.register_prehook(ordered) for node in _norms_behind(outputs)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _ordered(gradient: Tensor, odd: bool) -> Tensor:
    last = _LAST.get(gradient.dim()) if odd else None
    if last is None:
        return gradient.contiguous()
    # Unlike `contiguous`, a copy into new memory has the strides of this order in every axis.
    return torch.empty_like(gradient, memory_format=last).copy_(gradient)


def _norms_behind(outputs: Sequence[GradientEdge]) -> list[Any]:
    """The nodes of autograd's graph that differentiate a batch norm."""
    todo: list[Any] = [one.node for one in outputs]
    seen, found = {None}, []
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name() in _NORMS:
            found.append(node)
        todo.extend(following for following, _ in node.next_functions)
    return found
