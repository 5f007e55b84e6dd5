"""Options of the command as users write them.

>>> numbers("0.5,1,2")
(0.5, 1.0, 2.0)
"""

from __future__ import annotations

from classlens.errors import ClasslensError
from classlens.masks.subject import DATA, MODEL


def numbers(text: str) -> tuple[float, ...]:
    """Scales, separated by commas; each between 0.1 and 4."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ClasslensError(f"--scales {text!r}: write numbers separated by commas, such as 0.5,1,2") from None
    if not all(0.1 <= number <= 4 for number in found):
        raise ClasslensError(f"--scales {text!r}: a scale lies between 0.1 and 4")
    return found


def checked_labels(text: str | None) -> str | None:
    """Who says what a picture shows."""
    if text not in (None, DATA, MODEL):
        raise ClasslensError(f"--labels {text!r}: choose {DATA} or {MODEL}")
    return text
