import pytest
import torch

from classlens.errors import ClasslensError
from classlens.selfsup.sinkhorn import self_labels, sinkhorn


def scores(count: int, labels: int) -> torch.Tensor:
    return torch.randn(count, labels, generator=torch.Generator().manual_seed(3)).double().log_softmax(1)


def optimum(log_probabilities: torch.Tensor, sharpness: float) -> torch.Tensor:
    """The same matrix derived otherwise: max <Q, scores> + entropy(Q) / sharpness under the sums, by Newton's method.

    The sums are linear equations A q = b; each step solves the Karush-Kuhn-Tucker equations for all N*K entries.
    """
    count, labels = log_probabilities.shape
    constraints = torch.zeros(count + labels - 1, count, labels, dtype=torch.float64)  # the last one follows
    for i in range(count):
        constraints[i, i] = 1
    for k in range(labels - 1):
        constraints[count + k, :, k] = 1
    A = constraints.flatten(1)
    b = torch.tensor([1 / count] * count + [1 / labels] * (labels - 1), dtype=torch.float64)
    q = torch.full((count * labels,), 1 / (count * labels), dtype=torch.float64)
    for _ in range(500):
        gradient = sharpness * log_probabilities.flatten() - q.log() - 1
        # Maximise gradient.d - d^2/(2q) under A d = b - A q.
        multipliers = torch.linalg.solve(A * q @ A.T, A @ (q * gradient) - (b - A @ q))
        step = q * (gradient - A.T @ multipliers)
        q = q + step * min(1.0, 0.5 / float((-step / q).max().clamp(min=1e-300)))  # no entry loses more than half
        if float(step.abs().max()) < 1e-14:
            break
    return q.view(count, labels)


@pytest.mark.parametrize("sharpness", [1.0, 5.0])
def test_it_is_the_optimum_that_another_derivation_finds(sharpness):
    found = sinkhorn(scores(9, 4), sharpness, tolerance=1e-10)
    assert torch.allclose(found, optimum(scores(9, 4), sharpness), atol=1e-8)


def test_rows_and_columns_sum_to_equal_shares():
    q = sinkhorn(scores(60, 7), tolerance=1e-6)
    assert torch.allclose(q.sum(1), torch.full((60,), 1 / 60).double(), atol=1e-12)
    assert torch.allclose(q.sum(0), torch.full((7,), 1 / 7).double(), atol=1e-6)


def test_sharp_scores_neither_underflow_nor_overflow():
    q = sinkhorn(200 * scores(30, 5), tolerance=1e-2)
    assert torch.isfinite(q).all()
    assert torch.allclose(q.sum(1), torch.full((30,), 1 / 30).double())


def test_labels_are_balanced_where_the_network_prefers_one():
    biased = (scores(300, 3) + torch.tensor([4.0, 0.0, 0.0])).log_softmax(1)
    assert torch.bincount(biased.argmax(1), minlength=3)[0] > 250
    counts = torch.bincount(self_labels(biased), minlength=3)
    assert counts.min() > 80


def test_a_network_that_is_sure_keeps_its_labels_when_they_are_balanced():
    sure = torch.eye(4).repeat(5, 1).mul(20).log_softmax(1)
    assert torch.equal(self_labels(sure), torch.arange(4).repeat(5))


def test_scores_that_are_not_finite_are_refused():
    with pytest.raises(ClasslensError, match="smaller learning rate"):
        sinkhorn(torch.tensor([[0.0, float("nan")]]))
