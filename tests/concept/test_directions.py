"""The parts of concepts: they and the rest are the relevance, and each side has its own directions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from classlens.concept.directions import fitted, likeness, supporting
from classlens.concept.references import box, shares_of, strongest_place


@pytest.fixture
def relevance() -> Tensor:
    """(6,2,5,4,4): channels 0 and 1 speak for the class at different places, channel 4 against it."""
    random = torch.Generator().manual_seed(0)
    found = torch.zeros(6, 2, 5, 4, 4)
    for picture in found:
        picture[0, 0, :2] = torch.rand(2, 4, generator=random)
        picture[0, 1, 2:] = 0.5 * torch.rand(2, 4, generator=random)
        picture[1, 4] = -0.2 * torch.rand(4, 4, generator=random)
    return found


def test_each_side_has_its_directions(relevance: Tensor) -> None:
    found = fitted(relevance, 2)
    assert found.signs == (1, 1, -1)
    assert [int(one.argmax()) for one in (*found.support, *found.against)] == [0, 1, 4]


def test_parts_are_shares_of_the_relevance(relevance: Tensor) -> None:
    found = fitted(relevance + 0.05 * relevance.roll(1, 2), 2)
    parts = found.parts(relevance)
    assert parts.shape == (3, 6, 5, 4, 4)
    support, against = parts[:2].sum(0), parts[2:].sum(0)
    assert (support <= relevance[:, 0] + 1e-6).all()
    assert (against >= relevance[:, 1] - 1e-6).all()
    shares = shares_of(parts, relevance)
    assert (shares[:2] > 0).all()
    assert (shares[2:] < 0).all()
    assert 0.8 < float(shares.abs().sum(0).min()) <= 1 + 1e-5
    assert float(shares.abs().sum(0).max()) <= 1 + 1e-5


def test_a_side_without_relevance_has_no_concepts(relevance: Tensor) -> None:
    relevance[:, 1] = 0
    found = fitted(relevance, 2)
    assert found.signs == (1, 1)
    assert found.parts(relevance).shape[0] == 2


def test_halves_with_the_same_concepts_are_alike(relevance: Tensor) -> None:
    first, second = supporting(relevance[:3], 2), supporting(relevance[3:], 2)
    assert likeness(first, second) > 0.99
    assert likeness(first, torch.eye(5)[2:4]) < 0.01


def test_the_strongest_place_alone_is_left() -> None:
    part = torch.rand(3, 4, 4)
    left = strongest_place(part)
    assert int((left.sum(0) != 0).sum()) == 1
    assert float(left.sum()) == pytest.approx(float(part.sum(0).max()))


@pytest.mark.parametrize(
    ("spot", "expected"), [((10, 30, 20, 40), (10, 20, 30, 40)), ((0, 2, 58, 60), (0, 50, 10, 60))]
)
def test_the_box_holds_the_spot_and_stays_inside(spot: tuple[int, ...], expected: tuple[int, ...]) -> None:
    field = torch.zeros(60, 60)
    field[spot[0] : spot[1], spot[2] : spot[3]] = -1.0
    top, left, bottom, right = box(field)
    assert bottom - top == right - left
    assert max(abs(a - b) for a, b in zip((top, left, bottom, right), expected, strict=True)) <= 2
