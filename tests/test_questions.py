"""Two questions: evidence for a class, and for it rather than for its rivals. Tested on every method."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import classlens
from classlens.comparison import compare
from classlens.core.targets import Class, Contrast
from classlens.errors import ClasslensError, MethodError, TargetError
from classlens.methods import METHODS
from classlens.models import LoadedModel, Preprocess
from networks import NETWORKS, build, pictures
from quick import ANYWHERE, QUICK

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")

TAKE = [name for name in ANYWHERE if METHODS[name].scalars]
REFUSE = [name for name, method in METHODS.items() if not method.scalars]
# Methods whose map is linear in the score, so that the opposite question has the opposite map.
LINEAR = [
    "gradient-x-input", "integrated-gradients", "gradient-shap", "deeplift-shap", "lrp", "lrp-ab",
    "lrp-epsilon-plus-flat", "lrp-epsilon-gamma-box", "excitation-bp",
]  # fmt: skip


def run(model: nn.Module, x: Tensor, targets: Any, method: str, **asked: Any) -> classlens.Explanation:
    return classlens.explain(model, x, targets, method, **QUICK.get(method, {}), **asked)


def rival(e: classlens.Explanation, row: int, k: int = 0) -> tuple[Any, ...]:
    return e.likeliest_rival(row, k) or ()


def loaded() -> LoadedModel:
    return LoadedModel("tiny", build("plain"), Preprocess(resize=40, crop=32), tuple(f"thing {i}" for i in range(7)))


@pytest.mark.parametrize("method", TAKE)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_contrast_is_the_difference_of_two_logits(name: str, method: str) -> None:
    model, x = build(name), pictures(2)
    e = run(model, x, [[1, 5], [2, 5]], method, rather_than=3)
    expected = run(
        model,
        x,
        [[lambda y: y[1] - y[3], lambda y: y[5] - y[3]], [lambda y: y[2] - y[3], lambda y: y[5] - y[3]]],
        method,
    )
    torch.testing.assert_close(e.maps, expected.maps, rtol=1e-5, atol=1e-6 * float(expected.maps.abs().max()))
    assert e.targets.tolist() == [[1, 5], [2, 5]]
    assert e.probability(1, 0) == pytest.approx(float(e.logits[1].softmax(0)[2]))
    assert rival(e, 1) == (3, pytest.approx(float(e.logits[1].softmax(0)[3])))


@pytest.mark.parametrize("method", LINEAR)
def test_the_opposite_question_has_the_opposite_map(method: str) -> None:
    model, x = build("residual").double(), pictures(2).double()
    one, other = (run(model, x, a, method, rather_than=b).maps for a, b in ((1, 4), (4, 1)))
    torch.testing.assert_close(one, -other, rtol=1e-6, atol=1e-9 * float(other.abs().max()))


@pytest.mark.parametrize("method", ["agf", "lrp", "gradient-x-input"])
def test_rather_than_its_rivals_is_the_log_odds_at_the_spread_of_the_logits(method: str) -> None:
    model, x = build("residual").double(), pictures(2).double()
    e = run(model, x, 2, method, rather_than="rivals")

    def odds(y: Tensor) -> Tensor:
        t = y.detach().std(correction=0)
        return y[2] - t * torch.cat([y[:2], y[3:]]).div(t).exp().sum().log()

    torch.testing.assert_close(e.maps, run(model, x, odds, method).maps, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(("method", "tolerance"), [("deeplift-shap", 1e-6), ("integrated-gradients", 0.05)])
def test_maps_that_are_complete_add_up_to_the_contrasts_difference(method: str, tolerance: float) -> None:
    """The temperature is a constant of the picture: the number explained at the baseline is the same one."""
    model, x = build("residual").double(), 3 * pictures(2).double()
    options: dict[str, Any] = {"baselines": "zero"} if method == "deeplift-shap" else {"steps": 200}
    e = classlens.explain(model, x, 2, method, rather_than="rivals", **options)
    with torch.no_grad():
        ends = zip(e.asked, model(x), model(torch.zeros_like(x)), strict=True)
        difference = torch.stack([row[0].value(here) - row[0].value(there) for row, here, there in ends])
    torch.testing.assert_close(e.maps.sum((1, 2, 3)), difference, rtol=tolerance, atol=tolerance * 1e-2)


@pytest.mark.parametrize("method", REFUSE)
@pytest.mark.parametrize("rather_than", ["rivals", 3, [0, 3]])
def test_methods_with_rivals_of_their_own_say_what_to_use(method: str, rather_than: Any) -> None:
    with pytest.raises(MethodError, match=f"{method} chooses the rivals of a class itself.* agf, ") as caught:
        run(build("plain"), pictures(1), 1, method, rather_than=rather_than)
    assert "\n" not in str(caught.value)


def test_a_comparison_asks_all_methods_the_same_and_names_those_that_cannot() -> None:
    model, x = build("residual"), pictures(1)
    c = compare(model, x, [1, 2], ["agf", "clrp"], rather_than=4)
    assert torch.equal(c.explanations["agf"].maps, classlens.explain(model, x, [1, 2], rather_than=4).maps)
    assert "chooses the rivals of a class itself" in c.failures["clrp"]
    assert c.likeness("agf") is None  # maps of classes with the same rival are alike because of the rival


def test_an_explanation_knows_its_question() -> None:
    m, x = loaded(), pictures(2)
    plain = classlens.explain(m, x, [[1, 2], [3, 4]])
    assert plain.question() == "evidence for thing 1"
    assert plain.question(1, 1) == "evidence for thing 4"
    assert plain.target(1, 0) == Class(3)
    assert plain.likeliest_rival(0, 0) is None
    e = classlens.explain(m, x, [[1, 2], [3, 4]], rather_than=["thing 5", 0])
    assert e.question() == "evidence for thing 1 rather than thing 5 or thing 0"
    assert e.question(1, 0) == "evidence for thing 3 rather than thing 5 or thing 0"
    assert isinstance(e.target(0, 1), Contrast)
    likeliest = max((0, 5), key=e.logits[1].tolist().__getitem__)
    assert rival(e, 1) == (likeliest, pytest.approx(float(e.logits[1].softmax(0)[likeliest])))
    assert "thing 1 rather than thing 5 or thing 0, thing 2 rather" in repr(e)
    number = classlens.explain(m, x, lambda y: y.sum(), "lrp")
    assert number.question() == "evidence for function of the logits"


def test_the_likeliest_of_all_rivals_is_the_winner_or_the_runner_up() -> None:
    e = classlens.explain(loaded(), pictures(1), classlens.top(2), rather_than="rivals")
    first, second = e.targets[0].tolist()
    assert [rival(e, 0, k)[0] for k in range(2)] == [second, first]
    assert e.name() == f"thing {first} rather than its rivals"


def test_in_a_multi_label_network_a_rival_has_a_probability_of_its_own() -> None:
    e = classlens.explain(build("plain"), pictures(1), 1, rather_than=3, multilabel=True)
    assert rival(e, 0) == (3, pytest.approx(float(e.logits[0, 3].sigmoid())))


def test_a_network_with_one_output_is_refused_in_a_line() -> None:
    model = nn.Sequential(build("plain"), nn.Linear(7, 1)).eval()
    with pytest.raises(TargetError, match="one output, so its class has no rivals"):
        classlens.explain(model, pictures(1), rather_than="rivals")


def test_wrong_rivals_name_what_the_user_wrote() -> None:
    for rather_than, message in (
        ("thing 1", "thing 1 cannot be explained rather than itself"),
        ("thin 44", "nearest:"),
    ):
        with pytest.raises(ClasslensError, match=message):
            classlens.explain(loaded(), pictures(1), "thing 1", rather_than=rather_than)


def test_how_much_arrived_is_the_share_that_no_bias_absorbed() -> None:
    model, x = build("plain").double(), pictures(1).double()
    r = classlens.explain(model, x, 1, "agf").report
    assert float(r.arrived_share) == pytest.approx(float(r.arrived.abs() / (r.arrived.abs() + r.absorbed.abs())))
    assert 0 < float(r.arrived_share) < 1  # although all of it is accounted for
    assert float(r.conservation) < 1e-9
    assert r.to_json()["arrived_share"] == r.arrived_share.tolist()
    assert float(classlens.explain(model, x, 1, "lrp").report.arrived_share) == 1  # its rule gives biases nothing
    assert classlens.explain(model, x, 1, "gradcam").report.to_json()["arrived_share"] == [[None]]
