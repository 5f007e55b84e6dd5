"""What a handler changes on the page."""

from __future__ import annotations

from typing import Any

Updates = dict[Any, Any]  # part of the page -> its new value


def together(*changes: Updates) -> Updates:
    """Changes one after the other; properties of a part that a later one does not name are kept.

    >>> together({"list": {"value": 1, "label": "one"}}, {"list": {"value": 2}})
    {'list': {'value': 2, 'label': 'one'}}
    """
    merged: Updates = {}
    for part, change in (item for changed in changes for item in changed.items()):
        before = merged.get(part)
        merged[part] = {**before, **change} if isinstance(change, dict) and isinstance(before, dict) else change
    return merged
