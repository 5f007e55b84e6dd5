"""Class names: the 1000 of ImageNet with their WordNet ids, and the model output that a name refers to.

    >>> imagenet()[207]
    'golden retriever'
    >>> label_index("staffordshire_bull_terrier", imagenet(), 1000) == imagenet().index("Staffordshire bullterrier")
    True

Data sets and models often spell labels differently, so names are normalised before they are compared (`folded`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from classlens.errors import DataError

_WNID = re.compile(r"n\d{8}")

# Breeds of Oxford-IIIT Pet that have another name in ImageNet. Twelve breeds are not in ImageNet.
_OTHER_NAMES = {
    "american pit bull terrier": "American Staffordshire terrier",
    "basset hound": "basset",
    "egyptian mau": "Egyptian cat",
    "english cocker spaniel": "cocker spaniel",
    "german shorthaired": "German short-haired pointer",
    "japanese chin": "Japanese spaniel",
    "leonberger": "Leonberg",
    "persian": "Persian cat",
    "scottish terrier": "Scotch terrier",
    "siamese": "Siamese cat",
    "wheaten terrier": "soft-coated wheaten terrier",
}


@cache
def imagenet() -> tuple[str, ...]:
    """The 1000 ImageNet-1k class names, in the order of a network's outputs: `imagenet()[207]`."""
    return _lines("imagenet_classes.txt")


@cache
def imagenet_wnids() -> tuple[str, ...]:
    """The WordNet ids of the same classes, sorted: `imagenet_wnids().index("n02099601") == 207`."""
    return _lines("imagenet_wnids.txt")


def is_wnid(name: str) -> bool:
    """Whether a name has the form of a WordNet id: `is_wnid("n02099601")`."""
    return _WNID.fullmatch(name) is not None


def in_words(label: str) -> str:
    """The class name of a wnid; in other labels, spaces replace underscores."""
    known = _wnid_positions()
    return imagenet()[known[label]] if label in known else label.replace("_", " ")


# ------------------------------------------------------------------------------------------------------ matching


def label_index(label: str | None, labels: Sequence[str] | None, classes: int) -> int | None:
    """The model output that a label of a data set refers to: by wnid, by name, or by number if the model has no names.

    Names match if they differ only in case, spaces and hyphens, or if they are known synonyms. A name that several
    outputs share (crane: a bird, a machine) matches none of them.

        >>> label_index("n02099601", imagenet(), 1000), label_index("Ship", ("frog", "ship"), 2)
        (207, 1)
    """
    if label is None:
        return None
    if is_wnid(label):
        knows = classes == 1000 and (labels is None or tuple(labels) == imagenet())
        return _wnid_positions().get(label) if knows else None
    if labels is None:
        return int(label) if label.isdigit() and int(label) < classes else None
    names = _all_folded(tuple(labels))
    for wanted in (folded(label), _same_names().get(folded(label))):
        if wanted is not None and names.count(wanted) == 1:
            return names.index(wanted)
    return None


def class_outputs(classes: Sequence[str] | None, labels: Sequence[str] | None, outputs: int) -> tuple[int, ...] | None:
    """The model outputs for the classes of a data set's masks, in order; None if the model has other classes.

    >>> class_outputs(("cat", "tv monitor"), ("TVmonitor", "cat"), 2)
    (1, 0)
    """
    if classes is None or outputs != len(classes):
        return None
    if labels is None:
        return tuple(range(outputs))
    wanted, known = [folded(name) for name in classes], [folded(name) for name in labels]
    return tuple(known.index(name) for name in wanted) if set(known) == set(wanted) else None


def folded(name: str) -> str:
    """A class name in normal form: lower case, without spaces, `_` and `-`."""
    return re.sub(r"[\s_-]+", "", name.casefold())


def check_class_names(names: Sequence[str]) -> None:
    """Refuse names that differ only in case, spaces, `_` and `-`, because they are ambiguous."""
    seen: dict[str, str] = {}
    for name in names:
        if folded(name) in seen:
            raise DataError(
                f"the classes {seen[folded(name)]!r} and {name!r} differ at most in case or spaces: "
                "merge them, or rename one"
            )
        seen[folded(name)] = name


@cache
def _all_folded(labels: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(folded(name) for name in labels)


@cache
def _same_names() -> dict[str, str]:
    return {folded(name): folded(other) for name, other in _OTHER_NAMES.items()}


@cache
def _wnid_positions() -> dict[str, int]:
    return {wnid: index for index, wnid in enumerate(imagenet_wnids())}


def _lines(file: str) -> tuple[str, ...]:
    from importlib.resources import files  # slow to import, and most commands need no names

    # Through the top package: reading a text file must not import the image readers.
    return tuple((files("classlens") / "data" / file).read_text(encoding="utf-8").splitlines())
