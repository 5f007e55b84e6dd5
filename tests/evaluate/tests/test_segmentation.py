from __future__ import annotations

import numpy as np
import pytest
from world import picture

import goldens
from classlens.data.masks import IGNORE
from classlens.evaluate.stats import estimate, ratio
from classlens.evaluate.tests import segmentation


def slow_average_precision(score: np.ndarray, positive: np.ndarray) -> float:
    """By the definition: at each threshold, precision times the recall gained."""
    total, before = 0.0, 0.0
    for threshold in sorted(set(score.tolist()), reverse=True):
        chosen = score >= threshold
        recall = positive[chosen].sum() / positive.sum()
        total += (recall - before) * positive[chosen].mean()
        before = recall
    return total


@pytest.mark.parametrize("levels", [2, 7, 10_000])
def test_average_precision_is_its_definition(levels: int) -> None:
    random = np.random.default_rng(levels)
    score, positive = random.integers(0, levels, 300) / levels, random.random(300) < 0.3
    assert segmentation.average_precision(score, positive) == pytest.approx(slow_average_precision(score, positive))


def test_average_precision_as_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    random = np.random.default_rng(0)
    score, positive = random.normal(size=5000).round(1), random.random(5000) < 0.2
    theirs = metrics.average_precision_score(positive, score)
    assert segmentation.average_precision(score, positive) == pytest.approx(theirs, rel=1e-12)
    assert segmentation.average_precision(score, np.zeros(5000, bool)) is None


def test_the_released_two_class_protocol() -> None:
    theirs = np.load(goldens.FOLDER / "metrics.npz")
    for i, evidence in enumerate(theirs["seg2_map"][:, 0]):
        mask = theirs["seg2_mask"][i]
        scores = segmentation.foreground_scores(evidence, np.where(mask < 0, IGNORE, mask).astype(np.uint8), True)
        assert (scores.correct, scores.labelled) == (theirs["seg2_correct"][i], theirs["seg2_labelled"][i])
        assert scores.ap_paper == pytest.approx(float(theirs["seg2_ap"][i]), rel=1e-12)


def test_the_released_voc_protocol() -> None:
    theirs = np.load(goldens.FOLDER / "metrics.npz")
    for i, stack in enumerate(theirs["voc_map"]):
        predicted = {int(c) + 1 for c in np.flatnonzero(theirs["voc_logit"][i] > 0)}  # sigmoid > 0.5
        score = segmentation.label_softmax(stack, predicted)
        np.testing.assert_allclose(score, theirs["voc_score"][i], rtol=1e-12)
        mask = np.where(theirs["voc_mask"][i] < 0, IGNORE, theirs["voc_mask"][i]).astype(np.uint8)
        # The reference's maps are already divided by their maxima, or not at all: here they must stay as they are.
        maps = {c: stack[c] for c in range(1, 21)}
        scores = segmentation.label_scores(maps, predicted, mask, True, 20, scaled=True)
        assert (scores.correct, scores.labelled) == (theirs["voc_correct"][i], theirs["voc_labelled"][i])
        assert scores.ap_paper == pytest.approx(float(theirs["voc_ap"][i]), rel=1e-9)
        assert sum(scores.intersection) == scores.correct


def test_a_perfect_map_is_perfect() -> None:
    mask = picture("red", 0)[1].astype(np.uint8)
    for evidence, signed in ((2.0 * mask - 1, True), (mask.astype(float), False)):
        scores = segmentation.foreground_scores(evidence, mask, signed)
        assert scores.correct == scores.labelled == mask.size
        assert scores.intersection == scores.union
        assert (scores.ap_paper, scores.ap_soft) == (1.0, 1.0)


def test_signed_maps_split_at_zero_and_others_at_their_mean() -> None:
    evidence = np.array([[-3.0, 0.0, 1.0, 6.0]])
    assert segmentation.hard_foreground(evidence, signed=True).tolist() == [[False, False, True, True]]
    assert segmentation.hard_foreground(evidence, signed=False).tolist() == [[False, False, False, True]]


def test_random_maps_score_by_chance() -> None:
    """Pixel accuracy one half, soft AP the object's share; both within their intervals."""
    random = np.random.default_rng(0)
    rows = []
    for seed in range(60):
        mask = picture("blue", seed)[1].astype(np.uint8)
        rows.append((segmentation.foreground_scores(random.normal(size=mask.shape), mask, True), mask.mean()))
    accuracy = estimate(np.array([[s.correct, s.labelled] for s, _ in rows], float), ratio)
    soft = estimate(np.array([[s.ap_soft, 1.0] for s, _ in rows], float), ratio)
    assert accuracy.low < 0.5 < accuracy.high
    share = float(np.mean([m for _, m in rows]))
    assert soft.low - 0.01 < share < soft.high
    assert soft.high < share + 0.03


def test_what_is_not_labelled_counts_for_nobody() -> None:
    mask = np.array([[1, 0, IGNORE, IGNORE]], np.uint8)
    scores = segmentation.foreground_scores(np.array([[1.0, -1.0, 5.0, -5.0]]), mask, True)
    assert (scores.correct, scores.labelled, scores.ap_soft) == (2, 2, 1.0)
    whole = segmentation.foreground_scores(np.array([[1.0, 1.0]]), np.ones((1, 2), np.uint8), True)
    assert whole.ap_soft is None  # nothing to tell apart
    nothing = segmentation.foreground_scores(np.array([[1.0]]), np.array([[IGNORE]], np.uint8), True)
    assert (nothing.labelled, nothing.ap_paper, nothing.ap_soft) == (0, None, None)


def test_two_classes_in_one_picture() -> None:
    """Class 3 on the left, class 7 on the right: right maps are perfect, swapped ones are not."""
    mask = np.zeros((4, 8), np.uint8)
    mask[1:3, :3], mask[1:3, 5:] = 3, 7
    left, right = (mask == 3) * 2.0 - 1, (mask == 7) * 5.0 - 1
    good = segmentation.label_scores({3: left, 7: right}, {3, 7}, mask, True, 20)
    assert (good.correct, good.ap_soft) == (32, 1.0)
    assert [good.intersection[c] for c in (0, 3, 7)] == [20, 6, 6]
    assert good.union == good.intersection
    swapped = segmentation.label_scores({3: right, 7: left}, {3, 7}, mask, True, 20)
    assert swapped.correct == 20
    # Present but not predicted: background wins there, yet the raw map of the class is still judged.
    missed = segmentation.label_scores({3: left, 7: right}, {3}, mask, True, 20)
    assert (missed.correct, missed.ap_soft) == (26, 1.0)
