"""Finds the class that a user's text names.

>>> match(["cat", "tabby cat", "caterpillar"], "Cat")
0
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

from classlens.errors import TargetError

_SHOWN = 8  # candidates an error lists


def match(labels: Sequence[str], text: str) -> int:
    """The index of the class that `text` names; digits are an index.

    Case and underscores are ignored. A match of the whole name comes before a whole word, a whole word before a part:

        >>> match(["cat", "tabby cat", "caterpillar"], "Cat"), match(["tabby cat", "catfish"], "cat")
        (0, 0)
    """
    wanted = _fold(text)
    if not wanted:
        raise TargetError("the class name is empty: give a name or an index")
    if wanted.isascii() and wanted.isdigit():
        return _checked_index(wanted, len(labels))
    names = [_fold(label) for label in labels]
    word = re.compile(rf"(?<!\w){re.escape(wanted)}(?!\w)")
    for found in (
        [i for i, name in enumerate(names) if name == wanted],
        [i for i, name in enumerate(names) if word.search(name)],
        [i for i, name in enumerate(names) if wanted in name],
    ):
        if len(found) == 1:
            return found[0]
        if found:
            raise TargetError(f"{text!r} matches {len(found)} classes, give an index: {_listed(labels, found)}")
    near = [names.index(name) for name in difflib.get_close_matches(wanted, dict.fromkeys(names), n=5)]
    hint = f"nearest: {_listed(labels, near)}" if near else "give an index, or a name from the model's labels"
    raise TargetError(f"no class is named {text!r}; {hint}")


def _fold(text: str) -> str:
    return " ".join(text.casefold().replace("_", " ").split())


def _checked_index(digits: str, count: int) -> int:
    if len(digits) > 9 or int(digits) >= count:  # int() refuses to read thousands of digits
        raise TargetError(f"there is no class {digits[:20]}: the model has {count} classes, 0 to {count - 1}")
    return int(digits)


def _listed(labels: Sequence[str], indices: Sequence[int]) -> str:
    shown = ", ".join(f"{i} {labels[i]}" for i in indices[:_SHOWN])
    return shown + (", ..." if len(indices) > _SHOWN else "")


def near(text: str, names: Iterable[str]) -> str:
    """The end of an error about a name with a typo: "; did you mean layer3 or layer4?", or nothing."""
    found = difflib.get_close_matches(text, sorted(names), n=3, cutoff=0.4)
    return f"; did you mean {' or '.join(found)}?" if found else ""
