import pytest
import torch
from torch import Tensor

from classlens.core.targets import Scalar, directions, name_of, resolve_targets, scores, top
from classlens.errors import TargetError

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
    indices, scalars = resolve_targets(targets, LOGITS, LABELS)  # type: ignore[arg-type]
    assert indices.tolist() == expected
    assert scalars == ()


def test_a_flat_list_for_one_image_is_its_classes() -> None:
    assert resolve_targets([1, "cup", 0], LOGITS[:1], LABELS)[0].tolist() == [[1, 3, 0]]


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
    assert resolve_targets("2", LOGITS)[0].tolist() == [[2], [2]]


@pytest.mark.parametrize("k", [0, -1, 1.5])
def test_top_of_nothing(k: object) -> None:
    with pytest.raises(TargetError, match="explains nothing"):
        top(k)  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------- numbers made of the logits


def margin(y: Tensor) -> Tensor:
    return y[1] - y[2]


def pick_three(y: Tensor) -> Tensor:
    return y[3]


def largest(y: Tensor) -> Tensor:
    return y.max()


def test_a_callable_that_hands_back_a_logit_is_that_class() -> None:
    assert resolve_targets(pick_three, LOGITS)[0].tolist() == [[3], [3]]
    indices, scalars = resolve_targets([[pick_three, 0], [lambda y: y[None][0, 2], "1"]], LOGITS)
    assert indices.tolist() == [[3, 0], [2, 1]]
    assert scalars == ()


@pytest.mark.parametrize(
    "scalar",
    [largest, lambda y: y[1] + 1, lambda y: 2 * y[1], lambda y: -y[1], lambda y: y[1].relu(), lambda y: y[1].abs()],
)
def test_any_other_callable_is_not(scalar: Scalar) -> None:
    indices, scalars = resolve_targets(scalar, LOGITS[:1])
    assert indices.tolist() == [[-1]]
    assert scalars == (scalar,)


def test_callables_and_classes_mix_and_each_callable_is_kept_once() -> None:
    indices, scalars = resolve_targets([[margin, "cup", largest], [largest, 0, margin]], LOGITS, LABELS)
    assert indices.tolist() == [[-1, 3, -2], [-2, 0, -1]]
    assert scalars == (margin, largest)
    assert resolve_targets([margin, largest], LOGITS)[0].tolist() == [[-1], [-2]]  # one for each image
    assert resolve_targets([margin, largest], LOGITS[:1])[0].tolist() == [[-1, -2]]  # two of one image


def test_scores_and_their_gradients() -> None:
    targets = torch.tensor([[-1, 3], [-2, 0]])
    values = scores(LOGITS, targets, (margin, largest))
    assert torch.equal(values, torch.tensor([[1.0, -1.0], [5.0, 5.0]]))
    found = directions(LOGITS, targets, (margin, largest))
    assert found[0].tolist() == [[0, 1, -1, 0], [1, 0, 0, 0]]
    assert torch.equal(found[1], directions(LOGITS, targets[:, 1:])[0])
    doubled = scores(LOGITS, targets, (margin, largest), of_class=lambda y, t: 2 * y.gather(1, t))
    assert torch.equal(doubled, torch.tensor([[1.0, -2.0], [5.0, 10.0]]))


def test_names_of_callables() -> None:
    class CatOrDog:
        def __call__(self, y: Tensor) -> Tensor:
            return y[:2].logsumexp(0)

    assert name_of(margin) == "margin"
    assert name_of(pick_three) == "pick three"
    assert name_of(CatOrDog()) == "CatOrDog"
    assert name_of(lambda y: y.sum()) == "function of the logits"


@pytest.mark.parametrize(
    ("scalar", "message"),
    [
        (lambda y: y, r"gives shape \(4,\) for the logits \(4,\) of one image; it must give one number"),
        (lambda y: 3.0, "gives a float"),
        (lambda y: y[1].detach(), "has no gradient; make its number of the logits"),
    ],
)
def test_a_callable_that_makes_no_number_is_refused(scalar: Scalar, message: str) -> None:
    with pytest.raises(TargetError, match=message) as caught:
        resolve_targets(scalar, LOGITS)
    assert "\n" not in str(caught.value)
