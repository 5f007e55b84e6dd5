import pytest
import torch

from classlens.errors import TargetError
from classlens.targets import resolve_targets, top

LOGITS = torch.tensor([[0.1, 3.0, 2.0, -1.0], [5.0, 0.0, 1.0, 2.0]])
LABELS = ("tabby cat", "tiger cat", "espresso", "cup")


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (None, [[1], [0]]),
        (top(3), [[1, 2, 0], [0, 3, 2]]),
        (2, [[2], [2]]),
        ("Espresso", [[2], [2]]),
        ("3", [[3], [3]]),
        ([1, 3], [[1], [3]]),
        (["cup", 0], [[3], [0]]),
        ([[1, 2], [0, 3]], [[1, 2], [0, 3]]),
        ([("tiger", "cup")] * 2, [[1, 3], [1, 3]]),
        (torch.tensor([3, 2]), [[3], [2]]),
        (torch.tensor([[3, 1], [2, 0]]), [[3, 1], [2, 0]]),
    ],
)
def test_every_way_of_naming_classes(targets: object, expected: list[list[int]]) -> None:
    assert resolve_targets(targets, LOGITS, LABELS).tolist() == expected  # type: ignore[arg-type]


def test_a_flat_list_for_one_image_is_its_classes() -> None:
    assert resolve_targets([1, "cup", 0], LOGITS[:1], LABELS).tolist() == [[1, 3, 0]]


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (4, "class 4 is out of range; the model has classes 0..3"),
        (-1, "class -1 is out of range"),
        ("cat", "fits 2 classes"),
        ("dog", "no class is named 'dog'"),
        ([1, 2, 3], "3 targets for 2 images; give one for each"),
        ([[1], [1, 2]], "the same number of classes"),
        ([[], []], "at least one"),
        ([1.5, 2], "a class is an index or a name, not 1.5"),
        ([True, 2], "not True"),
        (torch.tensor([1.0, 2.0]), "whole numbers, not float32"),
        ({1, 2}, "targets cannot be a set"),
        (top(9), "more classes than the model's 4"),
    ],
)
def test_wrong_targets_are_one_line(targets: object, message: str) -> None:
    with pytest.raises(TargetError, match=message) as caught:
        resolve_targets(targets, LOGITS, LABELS)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_names_need_labels() -> None:
    with pytest.raises(TargetError, match=r"no class names, so 'cup' cannot be found; give an index 0\.\.3"):
        resolve_targets("cup", LOGITS)
    assert resolve_targets("2", LOGITS).tolist() == [[2], [2]]


@pytest.mark.parametrize("k", [0, -1, 1.5])
def test_top_of_nothing(k: object) -> None:
    with pytest.raises(TargetError, match="explains nothing"):
        top(k)  # type: ignore[arg-type]
