"""Reads a method as users write it: a name, with options in brackets if there are any.

>>> parse("agf-release(without=A)", known=["agf", "agf-release"])
('agf-release', {'without': 'A'})

The registry of methods imports torch. This module does not, so that a command can refuse a wrong name at once.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Collection, Mapping
from typing import Any

from classlens.errors import MethodError

AUTO = "auto"  # the method that was chosen for a network; not a method itself


def parse(text: str, known: Collection[str]) -> tuple[str, dict[str, Any]]:
    """The name and the options of a method; the name must be one of `known`."""
    match = re.fullmatch(r"\s*([\w-]+)\s*(?:\((.*)\))?\s*", text)
    if not match:
        raise MethodError(f"cannot read the method {text!r}; write a name such as agf, or agf(without=M)")
    name, inside = match.groups()
    if name == AUTO and name not in known:
        raise MethodError("auto needs `classlens choose`, and serves explain, report and the page: name a method here")
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(known)}"
        raise MethodError(f"there is no method {name!r}; {hint}")
    return name, _options(inside, text) if inside else {}


def written(name: str, options: Mapping[str, Any]) -> str:
    """A method with its options as users write it.

    >>> written("agf", {"only": "C"})
    'agf(only=C)'
    """
    inside = ",".join(f"{key}={value}" for key, value in options.items())
    return f"{name}({inside})" if inside else name


def _options(inside: str, text: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for part in re.split(r",(?![^\[(]*[\])])", inside):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not key.isidentifier() or not value:
            raise MethodError(f"cannot read {part.strip()!r} in {text!r}; options are written name=value")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value  # a bare word is a string
    return options


def refuse_unknown(name: str, given: Collection[str], known: Collection[str]) -> None:
    """Refuse options that a method does not have."""
    for key in given:
        if key not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise MethodError(f"{name} has no option {key!r}; {has}")


def split_names(text: str) -> list[str]:
    """Split at commas that are not inside brackets.

    >>> split_names("agf, agf(a=1,b=2)")
    ['agf', 'agf(a=1,b=2)']
    """
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return list(dict.fromkeys(part.strip() for part in parts if part.strip()))
