"""Short texts for error messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


def reason(error: BaseException) -> str:
    """The message of another library's error in one line: "OSError: no space left on device"."""
    text = " ".join(str(error).split())
    short = text if len(text) <= 160 else f"{text[:157]}..."
    return f"{type(error).__name__}: {short}" if short else type(error).__name__


def nearest(name: str, known: Iterable[str]) -> str:
    """The known names closest to `name`, as part of an error message: "; nearest: resnet50, resnet34"."""
    near = get_close_matches(name, list(known), n=5, cutoff=0.5)
    return f"; nearest: {', '.join(near)}" if near else ""


def some(names: Sequence[str], shown: int = 4) -> str:
    """The number of names, and the first few: "3 (a, b, c)"."""
    if not names:
        return "0"
    return f"{len(names)} ({', '.join(names[:shown])}{', ...' if len(names) > shown else ''})"
