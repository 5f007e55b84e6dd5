"""Names of classes: the 1000 of ImageNet, and their WordNet ids.

>>> imagenet()[207]
'golden retriever'
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files


@cache
def imagenet() -> tuple[str, ...]:
    """The 1000 ImageNet-1k class names, in the order of the networks' outputs: `imagenet()[207]`."""
    return _lines("imagenet_classes.txt")


@cache
def imagenet_wnids() -> tuple[str, ...]:
    """The WordNet ids of the same classes, sorted: `imagenet_wnids().index("n02099601") == 207`."""
    return _lines("imagenet_wnids.txt")


def _lines(file: str) -> tuple[str, ...]:
    # Reached through the top package: reading a text file must not import the readers of pictures.
    return tuple((files("classlens") / "data" / file).read_text(encoding="utf-8").splitlines())
