"""What decides: the tests for a data set, the methods that are tried, and what is refused before the work.

Each test has one score for each picture, between 0 and 1 (`picture_score` of the registry); higher is better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from classlens.core.method_text import split_names
from classlens.data.layouts import Dataset, Item
from classlens.errors import DataError, ImageError, MethodError
from classlens.evaluate import TESTS, SettingsError
from classlens.explanation import run
from classlens.methods import METHODS, check_options, resolve
from classlens.models.network import Network

DEFAULT = "agf"
CANDIDATES = (
    DEFAULT, "gradcam", "layercam", "fullgrad", "lrp-epsilon-plus-flat", "contrastive-excitation-bp",
    "libragrad", "legrad", "generic-attention", "transformer-attribution",
)  # fmt: skip
"""Methods of several families that answer every question and cost at most a dozen forward passes. Those that need
attention are tried on networks with attention only."""

MASKS, DELETION = "masks", "deletion"
HALVES = ("A", "B")
LIMIT = 40  # images of each half
LEAST_PICTURES, LEAST_GRIDS = 10, 5  # of each half
_CONFIDENT = 0.5  # the least probability of a picture in a grid
_SURE = 20  # a prediction is sure of anything if its probability is this many times that of chance, at most 1/2


@dataclass(frozen=True)
class Contest:
    """The methods that can explain the network, the tests that decide, and those that were left out, with reasons."""

    methods: tuple[str, ...]
    tests: tuple[str, ...]
    shape: str  # of the grids
    left_out: dict[str, str]


def contest(
    network: Network, dataset: Dataset, limit: int, seed: int, methods: str | Sequence[str] | None = None,
    tests: Sequence[str] | None = None,
) -> Contest:  # fmt: skip
    """Refuse what cannot be decided, and say what is tried."""
    halves = [dataset.select(limit, seed, half) for half in HALVES]
    for half, items in zip(HALVES, halves, strict=True):
        if len(items) < LEAST_PICTURES:
            raise DataError(
                f"{dataset.name} has {len(items)} pictures for half {half}; a choice needs at least {LEAST_PICTURES} "
                "in each half (about 30 in all, since names decide the half)"
            )
    wanted, deciding = wanted_methods(methods), wanted_tests(tests, dataset)
    seen = _check_classes(network, dataset, halves[0])
    first = next(image for image, *_ in seen)
    refused = {name: why for name in wanted if (why := _refusal(network, first, name))}
    able = tuple(name for name in wanted if name not in refused)
    if len(able) < 2:
        raise MethodError(
            f"{len(able)} of {len(wanted)} methods can explain {network.loaded.name}; there is nothing to choose from: "
            + "; ".join(refused.values())
        )
    said = {name: why for name, why in refused.items() if methods or not resolve(name)[0].attention}
    confident = [predicted for _, predicted, share in seen if share >= _CONFIDENT]
    enough = len(set(confident)) >= 4 and len(confident) >= 4 * (LEAST_GRIDS + 1)  # one more: not all classes differ
    return Contest(able, deciding, "2x2" if enough else "2x1", said)


def wanted_tests(tests: Sequence[str] | None, dataset: Dataset) -> tuple[str, ...]:
    """The tests by their names in the registry, from names such as "masks"; by default those that suit the data."""
    known = {test.chooses: name for name, test in TESTS.items() if test.chooses}
    if tests is None:
        left_out = DELETION if dataset.has_masks else MASKS
        return tuple(name for short, name in known.items() if short != left_out)
    for test in tests:
        if test not in known:
            raise SettingsError(f"there is no test {test!r} for a choice; choose from {', '.join(known)}")
        if test == MASKS and not dataset.has_masks:
            raise DataError(f"{dataset.name} has no masks; leave out the test {MASKS}")
    if not tests:
        raise SettingsError(f"no test was given; choose from {', '.join(known)}")
    return tuple(known[test] for test in dict.fromkeys(tests))


def wanted_methods(methods: str | Sequence[str] | None) -> tuple[str, ...]:
    """The methods to try: those that were named, with the default first; controls are refused."""
    names = CANDIDATES if methods is None else split_names(methods) if isinstance(methods, str) else tuple(methods)
    for name in names:
        chosen, options = resolve(name)
        check_options(chosen, options)
        if chosen.family == METHODS["random"].family:
            raise MethodError(f"{name} is a control, which says nothing about a network, so it cannot be chosen")
    return tuple(dict.fromkeys((DEFAULT, *names)))


def _check_classes(network: Network, dataset: Dataset, items: Sequence[Item]) -> list[tuple[torch.Tensor, int, float]]:
    """Refuse pictures of which the network recognises hardly any.

    Returns those that it recognises: the input of the network, the likeliest class, its probability.
    """
    least = min(0.5, _SURE / network.classes)
    sure: list[tuple[torch.Tensor, int, float]] = []
    seen = 0
    for item in items:
        try:
            image = network.preprocess(dataset.picture(item))[None]
        except ImageError:
            continue
        logits = network.forward(image).double()[0]
        share = logits.sigmoid() if network.loaded.multilabel else logits.softmax(0)
        seen += 1
        if share.max() >= least:
            sure.append((image, int(share.argmax()), float(share.max())))
    if seen < LEAST_PICTURES:
        raise DataError(f"only {seen} of {len(items)} pictures of half A in {dataset.name} can be read")
    if len(sure) < seen / 4:
        raise DataError(
            f"{network.loaded.name} recognises a class in {len(sure)} of {seen} pictures of {dataset.name} (with a "
            f"probability of {100 * least:.0f} %): give pictures of its classes, or trained weights"
        )
    return sure


def _refusal(network: Network, image: torch.Tensor, method: str) -> str:
    """Why a method cannot explain this network; empty if it can."""
    try:
        run(network.loaded, image, None, method)
    except MethodError as error:
        return f"{method}: {error}"
    return ""


def title(test: str) -> str:
    """A test, as tables call it."""
    return TESTS[test].chooses or test


def about(test: str) -> str:
    """What its score is."""
    return TESTS[test].picture_score_name
