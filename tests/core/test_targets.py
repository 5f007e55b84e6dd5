import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from classlens.core.targets import Contrast, Number, Scalar, directions, resolve_targets, scores, top
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
        (LOGITS[0].numpy().argmax(), [[1], [1]]),
        (LOGITS.numpy().argmax(1), [[1], [0]]),
        ([np.int32(3), np.uint8(2)], [[3], [2]]),
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
        ("cat", "matches 2 classes"),
        ("dog", "no class is named 'dog'"),
        ([1, 2, 3], "3 targets for 2 images; give one for each"),
        ([[1], [1, 2]], "the same number of classes"),
        ([[], []], "at least one"),
        ([1.5, 2], "a class is an index or a name, not 1.5"),
        ([True, 2], "not True"),
        (torch.tensor([1.0, 2.0]), "integers, not float32"),
        (np.array([1.5, 2.0]), "a class is an index or a name, not 1.5"),
        (np.array([True, False]), "not True"),
        ({1, 2}, "targets cannot be a set"),
        (top(9), "more classes than the model has"),
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
    assert scalars == (Number(scalar),)


def test_callables_and_classes_mix_and_each_callable_is_kept_once() -> None:
    indices, scalars = resolve_targets([[margin, "cup", largest], [largest, 0, margin]], LOGITS, LABELS)
    assert indices.tolist() == [[-1, 3, -2], [-2, 0, -1]]
    assert scalars == (Number(margin), Number(largest))
    assert resolve_targets([margin, largest], LOGITS)[0].tolist() == [[-1], [-2]]  # one for each image
    assert resolve_targets([margin, largest], LOGITS[:1])[0].tolist() == [[-1, -2]]  # two of one image


def test_scores_and_their_gradients() -> None:
    targets, others = torch.tensor([[-1, 3], [-2, 0]]), (Number(margin), Number(largest))
    values = scores(LOGITS, targets, others)
    assert torch.equal(values, torch.tensor([[1.0, -1.0], [5.0, 5.0]]))
    found = directions(LOGITS, targets, others)
    assert found[0].tolist() == [[0, 1, -1, 0], [1, 0, 0, 0]]
    assert torch.equal(found[1], directions(LOGITS, targets[:, 1:])[0])
    doubled = scores(LOGITS, targets, others, of_class=lambda y, t: 2 * y.gather(1, t))
    assert torch.equal(doubled, torch.tensor([[1.0, -2.0], [5.0, 10.0]]))


def test_names_of_callables() -> None:
    class CatOrDog:
        def __call__(self, y: Tensor) -> Tensor:
            return y[:2].logsumexp(0)

    assert Number(margin).name == "margin"
    assert Number(pick_three).name == "pick three"
    assert Number(CatOrDog()).name == "CatOrDog"
    assert Number(lambda y: y.sum()).name == "function of the logits"


@pytest.mark.parametrize(
    ("scalar", "message"),
    [
        (lambda y: y, r"gives shape \(4,\) for the logits \(4,\) of one image; it must give one number"),
        (lambda y: 3.0, "gives a float"),
        (lambda y: y[1].detach(), "has no gradient; compute it from the logits"),
    ],
)
def test_a_callable_that_makes_no_number_is_refused(scalar: Scalar, message: str) -> None:
    with pytest.raises(TargetError, match=message) as caught:
        resolve_targets(scalar, LOGITS)
    assert "\n" not in str(caught.value)


def test_a_callable_that_holds_tensors_is_compared_by_identity() -> None:
    @dataclass
    class Along:
        direction: Tensor

        def __call__(self, y: Tensor) -> Tensor:
            return y @ self.direction

    one, two = Along(torch.ones(4)), Along(torch.arange(4.0))
    indices, others = resolve_targets([[one, two], [two, one]], LOGITS)
    assert indices.tolist() == [[-1, -2], [-2, -1]]
    assert others == (Number(one), Number(two))


# ------------------------------------------------------------------------------------------- a class rather than others


def test_rather_than_one_rival_is_the_difference_of_two_logits_to_the_bit() -> None:
    indices, (found,) = resolve_targets("espresso", LOGITS[:1], LABELS, "tiger")
    assert indices.tolist() == [[-1]]
    assert found == Contrast(2, (1,))
    assert torch.equal(found.value(LOGITS[0]), LOGITS[0, 2] - LOGITS[0, 1])
    assert torch.equal(directions(LOGITS[:1], indices, [found])[0, 0], torch.tensor([0.0, -1.0, 1.0, 0.0]))


@pytest.mark.parametrize(("rather_than", "others"), [("rivals", [0, 1, 3]), (["tabby", 3], [0, 3])])
def test_several_rivals_are_a_soft_maximum_at_the_spread_of_the_images_logits(
    rather_than: Any, others: list[int]
) -> None:
    _, found = resolve_targets("espresso", LOGITS, LABELS, rather_than)
    for y, contrast in zip(LOGITS.double().tolist(), found, strict=True):
        mean = sum(y) / 4
        t = math.sqrt(sum((value - mean) ** 2 for value in y) / 4)
        expected = y[2] - t * math.log(sum(math.exp(y[i] / t) for i in others))
        assert float(contrast.value(torch.tensor(y).double())) == pytest.approx(expected, rel=1e-6)


def test_equal_logits_have_a_contrast_too() -> None:
    _, (found,) = resolve_targets(0, torch.ones(1, 4), None, "rivals")
    assert float(found.value(torch.ones(4))) == pytest.approx(-math.log(3))


def test_every_class_of_a_batch_gets_its_own_contrast() -> None:
    indices, others = resolve_targets([[1, 2], [2, 3]], LOGITS, LABELS, 0)
    assert indices.tolist() == [[-1, -2], [-2, -3]]
    assert others == (Contrast(1, (0,)), Contrast(2, (0,)), Contrast(3, (0,)))
    assert resolve_targets(top(2), LOGITS[:1], LABELS, "cup")[1] == (Contrast(1, (3,)), Contrast(2, (3,)))
    assert resolve_targets(None, LOGITS[:1], LABELS, "cup")[1] == (Contrast(1, (3,)),)
    assert resolve_targets(pick_three, LOGITS[:1], LABELS, 1)[1] == (Contrast(3, (1,)),)
    of_all = resolve_targets(2, LOGITS, LABELS, "rivals")[1]  # each image has its own spread
    assert len(of_all) == 2


@pytest.mark.parametrize(
    ("rivals", "words"),
    [
        (None, "cup rather than its rivals"),
        ((2,), "cup rather than espresso"),
        ((2, 0), "cup rather than espresso or tabby cat"),
        ((2, 0, 1), "cup rather than espresso, tabby cat or tiger cat"),
    ],
)
def test_a_contrast_in_words(rivals: tuple[int, ...] | None, words: str) -> None:
    assert Contrast(3, rivals).words(LABELS.__getitem__) == words


@pytest.mark.parametrize(
    ("targets", "rather_than", "message"),
    [
        ("cup", "cup", "cup cannot be explained rather than itself; name another rival, or 'rivals'"),
        (top(2), 1, "tiger cat cannot be explained rather than itself"),
        ("cup", ["espresso", "Cup"], "cup cannot be explained rather than itself"),
        ("cup", "expresso", "no class is named 'expresso'; nearest: 2 espresso"),
        ("cup", 9, "class 9 is out of range"),
        ("cup", [], "names no rival"),
        ("cup", ["rivals", 1], "'rivals' already means all other classes"),
        ("cup", 1.5, "a class is an index or a name, not 1.5"),
        (margin, "cup", "rather_than works only with classes, and 'margin' is a callable"),
    ],
)
def test_wrong_rivals_are_one_line(targets: Any, rather_than: Any, message: str) -> None:
    with pytest.raises(TargetError, match=message) as caught:
        resolve_targets(targets, LOGITS, LABELS, rather_than)
    assert "\n" not in str(caught.value)


def test_a_network_with_one_output_has_no_rivals() -> None:
    for rather_than in ("rivals", 0, 1):
        with pytest.raises(TargetError, match="one output, so its class has no rivals; omit rather_than"):
            resolve_targets(0, LOGITS[:, :1], None, rather_than)


def test_rivals_without_class_names_are_indices() -> None:
    assert resolve_targets(0, LOGITS, None, "3")[1] == (Contrast(0, (3,)),)
    with pytest.raises(TargetError, match="the model has no class names, so 'cup' cannot be found"):
        resolve_targets(0, LOGITS, None, "cup")
    with pytest.raises(TargetError, match="class 2 cannot be explained rather than itself"):
        resolve_targets(2, LOGITS, None, 2)
