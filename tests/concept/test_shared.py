"""What two classes share: one set of directions for both, with the share of each class in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import relatives
import torch

import classlens
from classlens.concept.gather import Gathered, Subject, gather
from classlens.concept.shared import Shared, shared
from classlens.data.layouts import Dataset, open_dataset
from classlens.progress import silent

Both = tuple[tuple[Subject, Subject], Dataset, tuple[Gathered, Gathered]]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    dataset = open_dataset(relatives.draw_relatives(tmp_path_factory.mktemp("relatives") / "bakery"))
    model = relatives.make()
    pie, tart = (Subject(model, index, "lrp-epsilon-plus-flat") for index in (0, 1))
    found = gather(pie, dataset, dataset.items, 32, silent), gather(tart, dataset, dataset.items, 32, silent)
    return (pie, tart), dataset, found


@pytest.fixture(scope="module")
def found(both: Both) -> Shared:
    subjects, dataset, gathered = both
    return shared(subjects, dataset, gathered, next(iter(gathered[0].relevance)), 4, silent)


def test_the_part_that_both_classes_have_is_shared_and_the_others_are_not(found: Shared) -> None:
    red, *own = found.concepts
    assert int(red.direction.argmax()) == 0
    assert red.common > 0.2
    assert {int(one.direction.argmax()) for one in own} == {1, 2}
    for one in own:
        place = int(one.direction.argmax()) - 1  # green belongs to the pie, blue to the tart
        assert one.shares[place] > 0.3
        assert one.shares[1 - place] < 0.01
    assert found.common == pytest.approx(red.common, abs=0.02)


def test_the_shares_of_a_class_sum_to_one(found: Shared) -> None:
    for place in (0, 1):
        assert sum(one.shares[place] for one in found.concepts) == pytest.approx(1.0, abs=1e-5)


def test_references_are_pictures_of_their_own_class(found: Shared) -> None:
    for one in found.concepts:
        for kind, references in zip(("pie", "tart"), one.references, strict=True):
            assert {reference.name.split("/")[-1][:3] for reference in references} <= {kind[:3]}


def test_a_class_with_more_pictures_counts_no_more(both: Both, found: Shared) -> None:
    subjects, dataset, (pie, tart) = both
    layer = found.layer
    many = replace(pie, items=pie.items * 3, relevance={layer: torch.cat([pie.relevance[layer]] * 3)})
    again = shared(subjects, dataset, (many, tart), layer, 4, silent)
    assert again.common == pytest.approx(found.common, abs=1e-3)


def test_networks_and_methods_are_not_mixed(both: Both) -> None:
    (pie, tart), dataset, gathered = both
    other = Subject(tart.model, tart.target, "excitation-bp")
    with pytest.raises(classlens.ClasslensError, match="within one network and one method"):
        shared((pie, other), dataset, gathered, next(iter(gathered[0].relevance)), 4, silent)


def test_they_are_computed_once_for_an_index(both: Both, found: Shared, tmp_path: Path) -> None:
    (pie, tart), dataset, gathered = both
    kept = tuple(Subject(one.model, one.target, one.method, None, tmp_path) for one in (pie, tart))
    first = shared((kept[0], kept[1]), dataset, gathered, found.layer, 4, silent)
    before = kept[0].cost.forwards
    again = shared((kept[0], kept[1]), dataset, gathered, found.layer, 4, silent)
    assert kept[0].cost.forwards == before > 0
    for one, two, fresh in zip(first.concepts, again.concepts, found.concepts, strict=True):
        torch.testing.assert_close(one.direction, two.direction)
        torch.testing.assert_close(one.direction, fresh.direction)
        assert one.shares == pytest.approx(two.shares)
        assert [r.box for side in one.references for r in side] == [r.box for side in two.references for r in side]
