"""The names of a function's parameters, read from torch itself.

>>> signature_of(torch.conv2d, (1, 2), {}).names[:4]
('input', 'weight', 'bias', 'stride')
>>> x = torch.ones(2)
>>> signature_of(torch.max, (x, 0), {}).names, signature_of(torch.max, (x, x), {}).names
(('input', 'dim', 'keepdim'), ('input', 'other'))
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.overrides import get_testing_overrides


@dataclass(frozen=True)
class Signature:
    """One way to call a function: the names of its positional parameters, in order."""

    names: tuple[str, ...]
    types: tuple[str, ...] = ()  # as torch's schema says; () where nothing is known
    rest: str | None = None  # the parameter that takes all further positional arguments

    def takes(self, args: tuple[Any, ...]) -> bool:
        """Whether these positional arguments may be meant for it."""
        if len(args) > len(self.names) and self.rest is None:
            return False
        return all(_fits(arg, kind) for arg, kind in zip(args, self.types, strict=False))


def signature_of(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature | None:
    """The signature that a call was made by; None where torch does not tell."""
    known = signatures(func)
    if len(known) == 1:
        return known[0]
    fitting = [signature for signature in known if signature.takes(args)]
    named = [signature for signature in fitting if kwargs.keys() <= set(signature.names)]
    return next(iter(named or fitting), None)


@functools.lru_cache(1024)
def signatures(func: Callable[..., Any]) -> tuple[Signature, ...]:
    """All ways to call a function: Python functions have one, torch's own may have several."""
    return _of_python(func) or _of_schemas(func) or _of_python(get_testing_overrides().get(func))


def _of_python(func: Callable[..., Any] | None) -> tuple[Signature, ...]:
    try:
        parameters = inspect.signature(func).parameters.values()  # type: ignore[arg-type]
    except (ValueError, TypeError):
        return ()
    by_kind = {parameter.kind: parameter.name for parameter in parameters}
    rest = by_kind.get(inspect.Parameter.VAR_POSITIONAL)
    if rest is not None and inspect.Parameter.VAR_KEYWORD in by_kind:
        return ()  # it hands its arguments on to one of several functions: nothing is known
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = tuple(parameter.name for parameter in parameters if parameter.kind in positional)
    return (Signature(_from_input(names), rest=rest),)


def _of_schemas(func: Callable[..., Any]) -> tuple[Signature, ...]:
    """The overloads of torch's own operation of that name; one that goes on where another ends stands for both."""
    found: list[Signature] = []
    for schema in sorted(_schemas(func), key=lambda schema: -len(schema.arguments)):
        positional = [a for a in schema.arguments if not a.kwarg_only]
        if inspect.ismethoddescriptor(func):  # x.where(condition, other)
            positional.sort(key=lambda a: a.name != "self")
        names, types = _from_input(tuple(a.name for a in positional)), tuple(str(a.real_type) for a in positional)
        if not any("Tensor" in kind for kind in types):
            continue  # torch has operations on numbers and strings, too
        longer = next((other for other in found if other.names[: len(names)] == names), None)
        if longer is not None:
            found[found.index(longer)] = replace(longer, types=_merged(longer.types, types))
            continue
        # The last list of numbers may be written without brackets: x.view(2, 3).
        rest = names[-1] if len(names) == 2 and types[1] == "List[int]" else None
        found.append(Signature(names, types, rest))
    return tuple(found)


def _merged(longer: tuple[str, ...], types: tuple[str, ...]) -> tuple[str, ...]:
    """Types of two overloads: where they differ, either."""
    merged = [a if b in a.split("|") else f"{a}|{b}" for a, b in zip(longer, types, strict=False)]
    return (*merged, *longer[len(types) :])


def _schemas(func: Callable[..., Any]) -> Iterable[Any]:
    if hasattr(func, "_schema"):  # torch.ops.aten.add.Tensor
        return [func._schema]
    name = getattr(func, "_qualified_op_name", None)  # torch.ops.aten.add
    plain = getattr(func, "__name__", "").strip("_")
    found: Iterable[Any] = torch._C._jit_get_schemas_for_operator(name or f"aten::{plain}")
    return found


INPUT_NAMES = "self", "x", "a", "tensor"  # the tensor an operation is about, which most call `input`


def _from_input(names: tuple[str, ...]) -> tuple[str, ...]:
    """`input` for the first of them, or for what schemas and methods call `self`."""
    renamed = ["input" if name == "self" else name for name in names]
    return tuple(["input" if name in INPUT_NAMES else name for name in renamed[:1]] + renamed[1:])


def _fits(arg: Any, kind: str) -> bool:
    """Whether an argument may stand for a parameter of this type; of types that are not told apart, yes."""
    if "|" in kind:
        return any(_fits(arg, one) for one in kind.split("|"))
    if kind.startswith("Optional["):
        return arg is None or _fits(arg, kind[len("Optional[") : -1])
    if kind == "Tensor":
        return not isinstance(arg, int | float | str | list | tuple | torch.dtype | torch.device)
    if kind in ("int", "bool"):
        return isinstance(arg, bool) if kind == "bool" else isinstance(arg, int) and not isinstance(arg, bool)
    if kind == "List[int]":
        return isinstance(arg, int | list | tuple) and not isinstance(arg, bool)
    if kind == "ScalarType":
        return isinstance(arg, torch.dtype)
    if kind == "Device":
        return isinstance(arg, torch.device | str)
    return True
