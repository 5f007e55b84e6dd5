import numpy as np
import pytest
import torch

import reference
from classlens.core.rules.generic import divide, divide_released
from classlens.errors import MethodError
from classlens.methods.agf import terms as agf
from classlens.methods.agf.terms import PAPER, RELEASE


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("formula", [PAPER, RELEASE])
@pytest.mark.parametrize("shared", [True, False])
def test_factorisation_is_least_squares(formula: agf.Formula, shared: bool) -> None:
    y = random(2, 5, 4, 3) if shared else random(3, 2, 5, 4, 3)
    phi = random(3, 2, 1, 4, 3, seed=1)
    phi[0, 0, 0, 0] = 0.0  # neither foreground nor, in the release, background
    phi[1, 0] = phi[1, 0].abs()  # no background at all
    phi[2, 1] = -phi[2, 1].abs()
    phi[2, 1, 0, 1, 2] = 0.5  # a foreground of one position
    ours = agf.factorised(y, phi, formula)
    for k in range(3):
        for b in range(2):
            slow = reference.factorised(
                (y[b] if shared else y[k, b]).numpy(), phi[k, b, 0].numpy(), formula.sharpness, formula.ridge,
                formula.zero_is_background, formula.normalise_factors,
            )  # fmt: skip
            assert np.allclose(ours[k, b, 0], slow, rtol=1e-6, atol=1e-7 * slow.max())


def test_factorisation_in_float32_is_as_good_as_its_input() -> None:
    """The 2x2 system is nearly singular; solved in float32 the error would be of the order of the answer."""
    y, phi = random(1, 256, 7, 7).abs(), random(1, 1, 1, 7, 7, seed=1)
    exact = agf.factorised(y, phi, RELEASE)
    single = agf.factorised(y.float(), phi.float(), RELEASE).double()
    assert (single - exact).norm() / exact.norm() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_means_that_differ_by_rounding_have_no_factor(dtype: torch.dtype) -> None:
    """The gradient before an average over all positions is the same everywhere: nothing tells them apart."""
    same = random(2, 6, 1, 1).to(dtype).expand(2, 6, 4, 3)
    phi = random(3, 2, 1, 4, 3, seed=1).to(dtype)
    rounding = torch.where(random(2, 6, 4, 3, seed=2) > 0, 1.0, 1.0 - 2 * torch.finfo(dtype).eps).to(dtype)
    for y in (same, same * rounding):
        assert not agf.factorised(y, phi, PAPER).any()
    little = same * (1 + 1e-3 * random(2, 6, 4, 3, seed=2).to(dtype))
    assert torch.allclose(agf.factorised(little, phi, PAPER).amax((2, 3, 4)), torch.ones((), dtype=dtype))


def test_means_are_compared_relative_to_their_length_in_each_image() -> None:
    back = torch.ones(1, 2, 512, dtype=torch.float64)
    eps = torch.finfo(torch.float32).eps
    front = back * torch.tensor([1 + 40 * eps, 1 + 80 * eps], dtype=torch.float64).view(1, 2, 1)
    equal = agf._equal_means(3 * torch.stack([back, front], -2), torch.float32)
    assert equal.tolist() == [[[True], [False]]]


def test_means_of_one_set_alone_are_no_equal_means() -> None:
    y, phi = random(2, 6, 4, 3), random(1, 2, 1, 4, 3, seed=1).abs()
    assert agf.factorised(y, phi, PAPER).amax((2, 3, 4)).min() > 0.99


@pytest.mark.parametrize(("formula", "spread"), [(RELEASE, 0.1), (PAPER, 0.01)])
def test_features_that_are_alike_need_float64_inside(formula: agf.Formula, spread: float) -> None:
    """The two means are nearly parallel: solved in float32, nothing of the answer is left."""
    y, phi = (1 + spread * random(1, 256, 7, 7).abs()).float(), random(1, 1, 1, 7, 7, seed=1)
    exact = agf.factorised(y.double(), phi, formula)
    assert (agf.factorised(y, phi.float(), formula).double() - exact).norm() < 0.02 * exact.norm()


def test_the_formulas_are_those_of_the_paper_and_of_its_code() -> None:
    """Eq. 10: H = sigmoid(Y) and plain least squares; the code multiplies Y by 10 and adds a ridge of 1."""
    names = "sharpness", "ridge", "zero_is_background", "normalise_factors", "shift_everywhere", "gate"
    assert [getattr(PAPER, name) for name in names] == [1.0, 0.0, True, True, True, None]
    assert [getattr(RELEASE, name) for name in names] == [10.0, 1.0, False, False, False, None]
    assert (PAPER.quotient, RELEASE.quotient) == (divide, divide_released)


def test_terms_are_left_out_by_their_names() -> None:
    for name in ("A", "Fx", "Fdx", "M", "gate"):
        assert agf.read_options(without=name) == agf.Options(frozenset([name]))
    assert agf.read_options(only="C") == agf.Options(frozenset(["A", "Fx", "Fdx", "M"]))
    assert not agf.Options().gradcam
    with pytest.raises(MethodError, match=r"unknown without='x'; the terms are A, Fx, Fdx, M, gate$"):
        agf.read_options(without="x")
    with pytest.raises(MethodError, match=r"unknown without='M'; the terms are Fx, Fdx, coarse$"):
        agf.read_options(without="M", known=("Fx", "Fdx", "coarse"))


def test_features_that_hardly_differ_factorise_to_almost_nothing() -> None:
    """Rounding errors must not look like a foreground: the residual is scaled to a magnitude afterwards."""
    y, phi = 1 + 0.001 * random(1, 256, 7, 7).abs(), random(1, 1, 1, 7, 7, seed=1)
    assert agf.factorised(y, phi, RELEASE).max() < 1e-8
    assert agf.factorised(y.float(), phi.float(), RELEASE).max() < 1e-8


def test_features_that_are_all_zero_factorise_to_zero() -> None:
    assert torch.equal(
        agf.factorised(torch.zeros(1, 3, 2, 2), random(1, 1, 1, 2, 2).float(), RELEASE).sum(), torch.tensor(0.0)
    )


def test_highlighting_is_equation_7() -> None:
    logits, targets = 3 * random(4, 6), torch.tensor([[0, 5], [1, 1], [2, 3], [4, 0]])
    ours = agf.highlighted(logits, targets)
    for b in range(4):
        for k in range(2):
            assert np.isclose(ours[b, k], reference.highlighted(logits[b].numpy(), int(targets[b, k])))


def test_below_zero_logits_are_counted_from_the_smallest() -> None:
    logits, targets = 3 * random(4, 6), torch.arange(6).expand(4, 6)
    logits[1, 2] = 0.0  # not below
    ours = agf.highlighted_from_lowest(logits, targets)
    for b in range(4):
        for k in range(6):
            y = logits[b].numpy()
            expected = reference.highlighted(y - y.min() if y[k] < 0 else y, k)
            assert np.isclose(ours[b, k], expected)


def above_rivals_slowly(y: np.ndarray, k: int) -> tuple[float, float]:
    """The score, and how much its likeliest rival weighs: beta by trying many values, the largest first."""
    rivals = np.delete(y, k)
    most = 1 / np.sqrt(((y - y.mean()) ** 2).mean())

    betas = most * np.linspace(1, 0, 20_001)[:, None]
    weights = np.exp(betas * (rivals - rivals.max()))
    weights /= weights.sum(1, keepdims=True)
    allowed = weights.max(1) <= 0.1
    chosen = weights[allowed.argmax() if allowed.any() else -1]
    return float(y[k] - chosen @ rivals), float(chosen.max())


@pytest.mark.parametrize("classes", [2, 3, 10, 11, 12, 40])
def test_the_class_above_its_rivals_by_hand(classes: int) -> None:
    """Few classes: the mean of the others. One far ahead: its weight is a tenth. None ahead: 1 / std(y)."""
    logits, targets = 3 * random(3, classes), torch.arange(classes).expand(3, classes)
    logits[0, -1] += 40  # a rival far ahead of all others
    ours = agf.above_rivals(logits, targets)
    for b in range(3):
        for k in (0, classes - 1):
            score, largest = above_rivals_slowly(logits[b].numpy(), k)
            assert np.isclose(ours[b, k], score, rtol=1e-3)
            if classes > 11 and b == k == 0:
                assert largest == pytest.approx(0.1, abs=1e-3)  # so the cap is tested, too


def test_the_gradient_is_that_of_log_odds_at_some_temperature() -> None:
    """Rivals' weights sum to one and are a softmax of their logits; the class itself has gradient one."""
    logits = (4 * random(1, 30)).requires_grad_()
    (gradient,) = torch.autograd.grad(agf.above_rivals(logits, torch.tensor([[4]])).sum(), logits)
    rivals = [k for k in range(30) if k != 4]
    assert gradient[0, 4] == 1
    assert torch.isclose(gradient[0, rivals].sum(), torch.tensor(-1.0, dtype=torch.float64))
    assert -gradient[0, rivals].min() <= 0.1 + 1e-12
    slope = (-gradient[0, rivals]).log() - (-gradient[0, rivals[0]]).log()
    beta = slope[1:] / (logits[0, rivals[1:]] - logits[0, rivals[0]])
    torch.testing.assert_close(beta, beta[:1].expand_as(beta))
    assert 0 < beta[0] <= 1 / logits.std(correction=0) + 1e-12


def test_the_class_above_its_rivals_does_not_see_where_logits_are_counted_from_and_grows_with_them() -> None:
    logits, targets = random(3, 9), torch.tensor([[0, 4]]).expand(3, 2)
    ours = agf.above_rivals(logits, targets)
    torch.testing.assert_close(agf.above_rivals(logits - 7, targets), ours)
    torch.testing.assert_close(agf.above_rivals(3 * logits, targets), 3 * ours)


def test_a_likelier_class_of_the_same_kind_does_not_turn_the_evidence_round() -> None:
    """Two breeds read the same feature; the likelier one must not make it evidence against the other."""
    head = torch.zeros(50, 3, dtype=torch.float64)
    head[0], head[1] = torch.tensor([4.0, 1.0, 0.0]), torch.tensor([3.5, 0.0, 1.0])  # two dogs: both see the dog
    head[2] = torch.tensor([0.0, 0.0, 4.0])  # a ball
    x = torch.tensor([[2.0, 0.4, 0.6]], dtype=torch.float64, requires_grad=True)
    score = agf.above_rivals(x @ head.T, torch.tensor([[1]]))
    (gradient,) = torch.autograd.grad(score.sum(), x)
    assert gradient[0, 0] > 2  # the dog speaks for the second breed as well
    (of_ball,) = torch.autograd.grad(agf.above_rivals(x @ head.T, torch.tensor([[2]])).sum(), x)
    assert of_ball[0, 0] < 0  # and against the ball


def test_what_speaks_for_other_classes_counts_against() -> None:
    """Whatever the logit's sign. Below zero, Eq. 7 lets what speaks for less likely classes count for the class."""
    logits = torch.tensor([[-2.0, 5.0, -3.0, -4.0, -5.0, -9.0]], dtype=torch.float64, requires_grad=True)

    def of_less_likely(score: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(score.sum(), logits)[0][0, 2:5]

    target = torch.tensor([[0]])
    assert (of_less_likely(agf.highlighted(logits, target)) > 0).all()
    assert (of_less_likely(agf.highlighted_from_lowest(logits, target)) < 0).all()
    assert (of_less_likely(agf.above_rivals(logits, target)) < 0).all()


def test_interaction_by_hand() -> None:
    x = torch.tensor([[[[1.0, 2.0]], [[3.0, -1.0]]]])  # (1,2,1,2)
    g = torch.tensor([[[[[1.0, -1.0]], [[1.0, 4.0]]]]])  # products 1+3 = 4 and -2-4 = -6
    assert torch.equal(agf.interaction(x, g), torch.tensor([[[[[1.0, 0.0]]]]]))


@pytest.mark.parametrize("everywhere", [True, False])
def test_shift_takes_off_what_the_residual_adds(everywhere: bool) -> None:
    c = torch.tensor([1.0, 0.0, -2.0, 4.0]).reshape(1, 1, 1, 2, 2)
    r = torch.tensor([3.0, 6.0, 0.0, 3.0]).reshape(1, 1, 1, 2, 2)
    ours = agf.shifted(c, r, everywhere).flatten()
    if everywhere:  # 12 / 3 off everywhere
        assert torch.equal(ours, torch.tensor([0.0, 2.0, -6.0, 3.0]))
    else:  # 6 / 3 off where c is not 0, and r only counts there
        assert torch.equal(ours, torch.tensor([2.0, 0.0, -4.0, 5.0]))
        assert ours.sum() == c.sum()


def test_a_single_unit_takes_off_all_that_it_adds() -> None:
    c = torch.tensor([0.0, 0.0, -2.0, 0.0]).reshape(1, 1, 1, 2, 2)
    assert torch.equal(agf.shifted(c, torch.full_like(c, 3.0), False), c)
    assert torch.equal(agf.shifted(0 * c, 0 * c, True), 0 * c)  # no unit at all: nothing is divided by 0


def test_balanced_residual_keeps_sum_zeros_and_proportion() -> None:
    carrier, residual = random(2, 3, 4, 5, 5), random(2, 3, 1, 5, 5, seed=1)
    carrier[random(2, 3, 4, 5, 5, seed=2) > 0.5] = 0  # how many units are off differs from place to place
    ours = agf.balanced_residual(residual, carrier, 0.2)
    added = ours - carrier
    assert torch.equal(ours == 0, carrier == 0)
    assert torch.allclose(ours.sum((2, 3, 4)), carrier.sum((2, 3, 4)))
    assert torch.allclose(added.abs().sum((2, 3, 4)), 0.2 * carrier.abs().sum((2, 3, 4)))
    for k, b in np.ndindex(2, 3):  # unit by unit: the residual less its mean over the units that are on
        on = carrier[k, b] != 0
        slow = torch.where(on, residual[k, b].expand(4, 5, 5), 0)
        slow = torch.where(on, slow - slow.sum() / on.sum(), 0)
        assert torch.allclose(added[k, b], slow * (0.2 * carrier[k, b].abs().sum() / slow.abs().sum()))


def test_a_constant_residual_is_left_out() -> None:
    """Centred, it is rounding noise; blown up to the carrier's size it would be a map of noise."""
    carrier = random(1, 1, 4, 5, 5).float()
    residual = torch.full((1, 1, 1, 5, 5), 0.1)
    assert torch.equal(agf.balanced_residual(residual, carrier, 0.2), carrier)
    assert torch.equal(agf.balanced_residual(-residual, carrier, 0.2), carrier)
    assert torch.equal(agf.balanced_residual(residual, 0 * carrier, 0.2), 0 * carrier)


def test_a_residual_that_differs_in_its_last_digit_is_left_out() -> None:
    carrier, residual = random(1, 1, 4, 56, 56).float(), torch.full((1, 1, 1, 56, 56), 0.1)
    residual[random(1, 1, 1, 56, 56, seed=1) > 0] = float(np.nextafter(np.float32(0.1), np.float32(1)))
    assert torch.equal(agf.balanced_residual(residual, carrier, 0.2), carrier)
    assert torch.equal(agf.balanced_residual(-residual, carrier, 0.2), carrier)


def test_what_deep_layers_saw_counts_alike_at_every_resolution() -> None:
    small, smaller = random(2, 3, 4, 4), 1000 * random(2, 3, 2, 2, seed=1)
    ours = agf.coarse([small, smaller], (8, 8))
    slow = torch.zeros(2, 3, 8, 8, dtype=torch.float64)
    for seen in (small, smaller):
        for k, b in np.ndindex(2, 3):
            large = _bilinear(seen[k, b], 8)
            large = large - large.mean()
            slow[k, b] += large / large.abs().sum()
    assert torch.allclose(ours[:, :, 0], slow)
    same_everywhere = torch.full((2, 3, 1, 1), 0.1)  # the gate of a squeezed layer: no place is told from another
    assert torch.equal(agf.coarse([small, same_everywhere], (8, 8)), agf.coarse([small], (8, 8)))


def test_coarse_evidence_counts_where_relevance_is_near() -> None:
    relevance, coarse = random(2, 3, 3, 40, 48), random(2, 3, 1, 40, 48, seed=1)
    relevance[..., :24] = 0  # nothing is found on the left
    ours = agf.with_coarse(relevance, coarse, agf.nearby(relevance))
    added = ours - relevance
    assert torch.allclose(ours.sum((2, 3, 4)), relevance.sum((2, 3, 4)))
    assert (added[..., :22] == 0).all()  # a twentieth of 40 pixels from any relevance
    assert (added[..., 22:] != 0).all()
    for k, b in np.ndindex(2, 3):
        fine, s = relevance[k, b].sum(0), coarse[k, b, 0]
        near = torch.stack(
            [fine[max(i - 2, 0) : i + 3, max(j - 2, 0) : j + 3].abs().mean() for i, j in np.ndindex(40, 48)]
        ).reshape(40, 48)
        slow = near * (s - (near * s).sum() / near.sum())
        slow *= fine.abs().sum() / slow.abs().sum()
        assert torch.allclose(added[k, b], slow.expand(3, 40, 48) / 3)  # colours share equally


def test_an_unlikely_class_has_more_evidence_against_it_than_for_it() -> None:
    """Two colours, two classes, two images. Pixels 6, 2, 0, -1 of a class with p = .35, with as much relevance
    near each: with 2.5 taken off each, 3.5 of the magnitude of 10 is positive."""
    pixels = torch.tensor([6.0, 2.0, 0.0, -1.0]).reshape(1, 1, 1, 2, 2)
    relevance = torch.cat([pixels, 0 * pixels], 2).repeat(2, 2, 1, 1, 1)
    p, near = torch.tensor([[0.35, 0.9], [1.0, 0.0]]), torch.full((2, 2, 1, 2, 2), 0.5).double()
    lowered, taken = agf.at_odds(relevance, near, p)
    assert torch.allclose(taken, 4 * torch.tensor([[2.5, 0.0], [0.0, 6.0]]).double())
    assert torch.allclose(lowered, relevance - (taken / 8).float()[..., None, None, None])  # a half of each colour
    for same in (0 * relevance, -pixels.abs().expand(2, 2, 2, 2, 2)):  # nothing is positive
        kept, nothing = agf.at_odds(same, near, p)
        assert torch.equal(kept, same)
        assert not nothing.any()


@pytest.mark.parametrize("scale", [1e-3, 1.0])
@pytest.mark.parametrize("p", [0.02, 0.3, 0.5, 0.97])
def test_evidence_for_and_against_is_at_the_odds_of_the_class(p: float, scale: float) -> None:
    relevance = scale * torch.randn(1, 3, 3, 9, 8, generator=torch.Generator().manual_seed(0)).double().abs()
    near = torch.rand(1, 3, 1, 9, 8, generator=torch.Generator().manual_seed(1)).double()
    lowered, taken = agf.at_odds(relevance, near, torch.full((1, 3), p).double())
    positive = lowered.sum(2).clamp(min=0).sum((2, 3)) / lowered.sum(2).abs().sum((2, 3))
    assert torch.allclose(positive, torch.full((1, 3), p).double())
    assert torch.allclose(taken, (relevance - lowered).sum((2, 3, 4)))
    level = (relevance - lowered).sum(2, keepdim=True) / near  # one for each image
    assert torch.allclose(level, level.amax((3, 4), keepdim=True).expand_as(level))


def test_no_evidence_against_an_unlikely_class_where_the_network_found_nothing() -> None:
    relevance = torch.zeros(1, 1, 1, 40, 40)
    relevance[..., 5:9, 5:9] = 1.0
    lowered, _ = agf.at_odds(relevance, agf.nearby(relevance), torch.tensor([[0.1]]))
    assert (lowered[..., 5:12, 5:12] < 0).any()
    assert not lowered[..., 12:, :].any()
    assert not lowered[..., 12:].any()


def test_nearby_is_the_mean_magnitude_of_a_square() -> None:
    """Of the sum over colours, cut off at the border: two of 40 pixels in each direction."""
    relevance = random(2, 1, 3, 40, 44)
    found = agf.nearby(relevance)
    for k, i, j in ((0, 0, 0), (0, 20, 43), (1, 39, 1), (1, 17, 22)):
        square = relevance[k, 0].sum(0)[max(i - 2, 0) : i + 3, max(j - 2, 0) : j + 3]
        assert torch.isclose(found[k, 0, 0, i, j], square.abs().mean())
    assert agf.nearby(relevance.float()).dtype == torch.float64


def test_relevance_is_near_within_a_twentieth_of_the_side() -> None:
    relevance = torch.zeros(1, 1, 1, 70, 90)
    relevance[..., 30, 40] = 1.0
    added = agf.with_coarse(relevance, random(1, 1, 1, 70, 90).float(), agf.nearby(relevance)) - relevance
    rows, columns = (added[0, 0, 0] != 0).nonzero().unbind(1)
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (26, 34, 36, 44)  # 70 / 20 is 3.5: four pixels


def test_the_least_likely_class_has_evidence_too() -> None:
    """Its logit is the one that others are measured from."""
    logits = torch.tensor([[-2.0, 1.0, -3.0]], dtype=torch.float64, requires_grad=True)
    score = agf.highlighted_from_lowest(logits, torch.tensor([[2]]))
    (gradient,) = torch.autograd.grad(score.sum(), logits)
    assert gradient[0, 2] > 0.01


def test_terms_by_their_names() -> None:
    for term in ("A", "Fx", "Fdx", "M", "gate"):
        assert agf.read_options(term).dropped == {term}
    assert agf.read_options(only="C").dropped == {"A", "Fx", "Fdx", "M"}
    assert agf.read_options(residual="gradcam").gradcam
    assert not agf.read_options().gradcam
    with pytest.raises(MethodError, match="unknown without='coarse'; the terms are A, Fx, Fdx, M, gate"):
        agf.read_options(["A", "coarse"])
    with pytest.raises(MethodError, match="unknown residual='cam'; the only choice is residual=gradcam"):
        agf.read_options(residual="cam")


def test_a_dropped_term_is_missing_in_the_residual() -> None:
    x, gradient, c = random(2, 3, 4, 4), random(1, 2, 3, 4, 4, seed=1), random(1, 2, 3, 4, 4, seed=2)
    terms = agf.residual(x, gradient, c, agf.BALANCED, agf.Options()).named()
    for dropped, name in (("Fx", "F_x"), ("Fdx", "F_dx"), ("M", "M")):
        left = agf.residual(x, gradient, c, agf.BALANCED, agf.Options(frozenset([dropped])))
        rest = {other: t for other, t in terms.items() if other != name}
        assert all(torch.equal(left.named()[other], t) for other, t in rest.items())
        assert not left.named()[name].any()


def test_constant_coarse_evidence_is_left_out() -> None:
    relevance = random(1, 1, 3, 6, 6).float()
    assert torch.equal(agf.with_coarse(relevance, torch.full((1, 1, 1, 6, 6), 0.1), agf.nearby(relevance)), relevance)
    nothing = 0 * relevance
    assert torch.equal(agf.with_coarse(nothing, random(1, 1, 1, 6, 6, seed=1), agf.nearby(nothing)), nothing)


def _bilinear(t: torch.Tensor, size: int) -> torch.Tensor:
    """A square map enlarged, place by place: centres of places lie on centres."""
    n, out = len(t), torch.zeros(size, size, dtype=t.dtype)
    for i, j in np.ndindex(size, size):
        y, x = (float(np.clip((v + 0.5) * n / size - 0.5, 0, n - 1)) for v in (i, j))
        top, left = int(y), int(x)
        for a, b in ((0, 0), (0, 1), (1, 0), (1, 1)):
            share = (y - top if a else 1 - y + top) * (x - left if b else 1 - x + left)
            out[i, j] += share * t[min(top + a, n - 1), min(left + b, n - 1)]
    return out


def test_smoothing_conserves_and_stays_on_active_units() -> None:
    t, active = random(2, 1, 3, 6, 5), random(1, 3, 6, 5, seed=1) > 0
    ours = agf.smoothed(t * active, active)
    assert torch.allclose(ours.sum((2, 3, 4)), (t * active).sum((2, 3, 4)))
    assert torch.equal(ours * active, ours)
    # Where everything is active it is [1 2 1]/4 along both axes.
    point = torch.zeros(1, 1, 1, 5, 5, dtype=torch.float64)
    point[..., 2, 2] = 16.0
    plain = agf.smoothed(point, torch.ones(1, 1, 5, 5, dtype=torch.bool))[0, 0, 0]
    assert torch.allclose(plain[1:4, 1:4], torch.tensor([[1.0, 2, 1], [2, 4, 2], [1, 2, 1]]).double())


def test_checkerboard_is_smoothed_away() -> None:
    board = torch.zeros(1, 1, 1, 8, 8)
    board[..., ::2, ::2] = 4.0
    inner = agf.smoothed(board, torch.ones(1, 1, 8, 8, dtype=torch.bool))[0, 0, 0, 2:-2, 2:-2]
    assert torch.allclose(inner, torch.ones_like(inner))


def test_the_residual_is_made_of_its_terms() -> None:
    x, gradient, c = random(2, 3, 4, 4), random(1, 2, 3, 4, 4, seed=1), random(1, 2, 3, 4, 4, seed=2)
    for formula, gate in ((PAPER, 1 / (1 + torch.exp(-c))), (RELEASE, 1 / (1 + torch.exp(-c))), (agf.BALANCED, 0.5)):
        found, phi = agf.residual(x, gradient, c, formula, agf.Options()), c.mean(2, keepdim=True)
        f_x, f_dx = agf.factorised(x, phi, formula), agf.factorised(gradient, phi, formula)
        m = agf.interaction(x, gradient, formula.quotient)
        assert torch.allclose(found.q, f_dx + (f_x + m) * gate)
        instead = agf.residual(x, gradient, c, formula, agf.Options(gradcam=True)).q
        assert torch.allclose(instead, f_dx + agf.gradcam_residual(x, gradient) * gate)
