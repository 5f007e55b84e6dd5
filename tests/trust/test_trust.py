"""The trust card: known good and bad maps, what could make a verdict silently wrong, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tagged
import torch
import world as squares
from torch import Tensor, nn

import classlens
from classlens import Explanation, explain
from classlens.core.targets import Asked
from classlens.errors import ClasslensError
from classlens.models import LoadedModel
from classlens.progress import reporting
from classlens.render import save
from classlens.report.measure import cells, pixels, positive_shares
from classlens.trust import Trust, measures, verdict
from classlens.trust.measures import Measures, Places, elsewhere, marked
from classlens.trust.subject import subject_of
from classlens.trust.verdict import CRITERIA, Limits, Reason

RED, GREEN, BLUE, NOTHING = range(4)
GRID = np.eye(16)


def image(loaded: LoadedModel, colour: str = "red", seed: int = 2) -> Tensor:
    pixels, _ = squares.picture(colour, seed)
    return loaded.preprocess.normalise(torch.from_numpy(pixels).permute(2, 0, 1) / 255)[None]


@pytest.fixture(scope="module")
def colours() -> LoadedModel:
    return squares.make()


@pytest.fixture(scope="module")
def honest(colours: LoadedModel) -> Explanation:
    return explain(colours, image(colours), RED, "lrp")


@pytest.fixture(scope="module")
def card(honest: Explanation) -> Trust:
    return honest.trust()


def says(found: Trust, measure: str) -> str:
    return next(reason.verdict for reason in found.reasons if reason.measure == measure)


# -------------------------------------------------------------------------------------------- good and bad maps


def test_a_map_on_what_decides_passes_the_tests_on_the_network(card: Trust) -> None:
    for measure in ("signal", "spread", "removal", "sufficiency", "stability", "agreement", "conservation"):
        assert says(card, measure) == verdict.TRUST, card
    assert card.measures.removed < 0.2 < 0.8 < card.measures.removed_elsewhere
    assert card.measures.kept > card.measures.kept_elsewhere + 0.2
    assert card.verdict == verdict.TRUST


def test_moved_turned_and_constant_maps_are_not_trusted(honest: Explanation) -> None:
    for maps in (honest.maps.roll((24, 24), (2, 3)), -honest.maps, torch.ones_like(honest.maps)):
        found = replace(honest, maps=maps).trust()
        assert found.verdict == verdict.NEVER, found
        assert found.because


def test_a_map_without_evidence_for_the_class(honest: Explanation) -> None:
    found = replace(honest, maps=-honest.maps.abs() - 1).trust()
    assert (found.verdict, found.because) == ("do not trust", "the map holds no evidence for the class")
    assert json.loads(json.dumps(found.to_json()))["measures"]["removal"] is None
    found.figure()


def test_a_class_that_is_not_in_the_picture(colours: LoadedModel) -> None:
    """Its map may look fine, but there is nothing to remove: that must not pass for a test."""
    loaded = squares.make_breeds()
    with torch.no_grad():
        loaded.model.head.weight[1] *= -1
    found = explain(loaded, image(loaded), 1, "sobel").trust()
    assert found.verdict == verdict.NEVER
    assert says(found, "signal") == verdict.NEVER
    assert math.isnan(found.measures.removal)


@pytest.mark.parametrize("method", ["sobel", "centre", "random"])
def test_maps_that_ignore_the_network(colours: LoadedModel, method: str) -> None:
    found = explain(colours, image(colours), RED, method).trust()
    assert found.verdict == verdict.NEVER
    assert says(found, "shuffled") == verdict.NEVER


def test_a_shortcut_is_evidence_too(world: Path) -> None:
    """Trust asks whether the map shows what the network uses, not whether the network should use it."""
    cheat = tagged.make_cheat()
    found = explain(cheat, str(next((world / "plain").iterdir()))).trust()
    assert says(found, "removal") == verdict.TRUST
    assert found.measures.where["top-left"][0] > 0.9


# ------------------------------------------------------------------------------------- every kind of question


def test_a_map_of_a_batch_has_the_card_of_its_own_image(colours: LoadedModel, card: Trust) -> None:
    two = torch.cat([image(colours, "blue", 3), image(colours)])
    both = explain(colours, two, [[BLUE, NOTHING], [GREEN, RED]], "lrp")
    found = both.trust(1, 1)
    assert found.explanation.question(1, 1) == "evidence for red" in str(found)
    assert found.measures.removal == pytest.approx(card.measures.removal, abs=1e-4)
    assert found.measures.stability == pytest.approx(card.measures.stability, abs=1e-4)


@pytest.mark.parametrize(
    "asked",
    [
        {"targets": RED, "rather_than": BLUE},
        {"targets": RED, "rather_than": "rivals"},
        {"targets": lambda y: y[RED] - 0.5 * y[GREEN]},
        {"targets": RED, "multilabel": True},
        {"targets": RED, "method": "random(cells=3)"},
        {"targets": RED, "method": "integrated-gradients", "steps": 4},
    ],
)
def test_other_questions_and_options(colours: LoadedModel, asked: dict[str, Any]) -> None:
    found = explain(colours, image(colours), **asked).trust()
    expected = verdict.NEVER if "random" in asked.get("method", "") else verdict.TRUST
    assert says(found, "removal") == verdict.TRUST or expected == verdict.NEVER
    assert found.verdict in verdict.VERDICTS


def test_half_precision_and_inference_mode(colours: LoadedModel, card: Trust) -> None:
    low = explain(squares.make().model.bfloat16(), image(colours), RED, "lrp").trust()
    assert low.measures.removal == pytest.approx(card.measures.removal, abs=0.1)
    with torch.inference_mode():
        found = explain(colours, image(colours), RED, "lrp").trust()
    assert (found.verdict, found.measures.missing) == (verdict.TRUST, {})


def test_a_network_without_preprocessing(colours: LoadedModel, card: Trust) -> None:
    found = explain(colours.model, image(colours), RED, "lrp").trust()
    assert found.measures.removal == pytest.approx(card.measures.removal, abs=1e-4)
    assert found.measures.stability > 0.5


# --------------------------------------------------------------------------------------------------- refusals


def refused(explanation: Explanation, *place: int) -> str:
    with pytest.raises(ClasslensError) as error:
        explanation.trust(*place)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_cannot_be_judged_is_refused_in_one_line(honest: Explanation) -> None:
    assert "no map 1 of image 0" in refused(honest, 0, 1)
    assert "explain" in refused(replace(honest, call=None))
    grey = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 2)).eval()
    assert "three channels" in refused(explain(grey, torch.rand(1, 1, 8, 8), 0))
    volume = nn.Sequential(nn.Conv3d(3, 2, 3), nn.Flatten(), nn.Linear(432, 2)).eval()
    assert "volumes" in refused(explain(volume, torch.rand(1, 3, 8, 8, 8), 0))


def test_a_question_about_a_place_is_refused() -> None:
    dense = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1)).eval()
    e = explain(dense, torch.ones(1, 3, 8, 8), classlens.region(1, pixel=(2, 2)))
    assert isinstance(e.target(), Asked)
    assert "bound to this very picture" in refused(e)


def test_a_network_or_an_image_that_has_changed_is_refused() -> None:
    loaded = squares.make()
    pixels = image(loaded)
    e = explain(loaded, pixels, RED)
    with torch.no_grad():
        loaded.model.head.weight[RED] *= 0.5
    assert "has changed" in refused(e)
    e = explain(loaded, pixels, RED)
    pixels.zero_()
    assert "has changed" in refused(e)


def test_a_test_that_cannot_run_leaves_doubt(honest: Explanation, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> float:
        raise ClasslensError("the logits are NaN")

    monkeypatch.setattr(measures, "shuffled_likeness", fails)
    found = honest.trust()
    assert says(found, "shuffled") == verdict.DOUBTFUL
    assert "shuffled could not be measured: the logits are NaN" in str(found)
    assert found.verdict != verdict.TRUST


# ------------------------------------------------------------------------------------------------ leaves no trace


class Counting(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.images = network, 0

    def forward(self, x: Tensor) -> Tensor:
        self.images += len(x)
        return self.network(x)


def test_fewer_than_forty_forward_passes_and_progress(colours: LoadedModel) -> None:
    counting = Counting(colours.model).eval()
    e = explain(counting, image(colours), RED)
    before, seen = counting.images, []
    with reporting(lambda what, done, total: seen.append((what, done, total))):
        e.trust()
    assert counting.images - before < 40
    assert ("trust", 4, 4) in seen


def test_the_network_and_the_random_numbers_are_left_alone(colours: LoadedModel, honest: Explanation) -> None:
    state = {name: value.clone() for name, value in colours.model.state_dict().items()}
    random, drawn = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002 - the global one
    first, second = honest.trust(), honest.trust()
    assert all(torch.equal(state[name], value) for name, value in colours.model.state_dict().items())
    assert torch.equal(random, torch.random.get_rng_state())
    assert (drawn == np.random.get_state()[1]).all()  # noqa: NPY002
    assert first.to_json() == second.to_json()


# ---------------------------------------------------------------------------------------------------- the parts


def test_the_marked_cells_are_the_strongest_and_ties_have_no_position() -> None:
    grid = np.arange(16.0).reshape(4, 4)
    assert marked(grid, 0.25, 0).ravel().tolist() == [False] * 12 + [True] * 4
    even = [marked(np.ones((16, 16)), 0.25, seed) for seed in range(40)]
    assert all(chosen.sum() == 64 for chosen in even)
    assert abs(np.mean([chosen[:8].mean() for chosen in even]) - 0.25) < 0.05


def test_elsewhere_has_the_same_shape_and_the_least_overlap() -> None:
    chosen = np.zeros((8, 8), bool)
    chosen[:4, :4] = True
    for place in elsewhere(chosen, 3, 0):
        assert place.sum() == 16
        assert not (place & chosen).any()
    most = ~chosen  # 48 of 64 cells: the least overlap is 32
    assert [(place & most).sum() for place in elsewhere(most, 3, 0)] == [32, 32, 32]


def test_certainty_is_the_weakest_over_the_strongest() -> None:
    places = Places(np.array([[0.1, -0.1, -0.4, 0.0]]), np.array([[0.2, 0.3, -0.1, 0.0]]))
    assert places.certainty.tolist() == [[0.5, 0.0, 0.25, 0.0]]


def test_removal_is_measured_against_pictures_without_content(honest: Explanation, card: Trust) -> None:
    """A second derivation of what is left: by hand, for each area, from the logits."""
    from classlens.evaluate.tests.perturbation import blurred
    from classlens.report.hide import hide

    x, net = honest.call.images, honest.call.model.model  # type: ignore[union-attr]

    def score(y: Tensor) -> float:
        logits = net(y)[0].detach()
        return float(logits[RED] - logits.mean())

    low, left = (score(blurred(x, 4.8)) + score(x.mean().expand_as(x))) / 2, []
    share = positive_shares(honest.maps[0, 0].numpy())
    for area in (0.15, 0.3):
        order = np.argsort(-cells(share).ravel(), kind="stable")[: round(area * 256)]  # type: ignore[arg-type]
        gone = np.zeros(256, bool)
        gone[order] = True
        left.append(score(hide(x, torch.from_numpy(pixels(gone.reshape(16, 16), (48, 48)))[None])))
    assert card.measures.removed == pytest.approx((np.mean(left) - low) / (score(x) - low), abs=0.02)


def test_what_is_left_elsewhere_counts_as_at_most_all_and_what_is_kept_as_at_least_nothing(honest: Explanation) -> None:
    """A place whose removal raises the class a little is no better for being beside places that raise it more."""
    subject = subject_of(honest)
    hidden, alone = [1.5, 3.0, 2.0, 1.7, 0.9, 3.0], [0.5, -2.0, -1.0, 0.7, 0.2, -3.0]  # of each area: marked, elsewhere
    found = measures.removal(replace(subject, scores=lambda images: np.array(hidden + alone)), GRID, 1.0, 0.0, 0)
    assert found["removed"] == pytest.approx(1.6)
    assert found["removed_elsewhere"] == pytest.approx(0.975)
    assert found["kept"] == pytest.approx(0.6)
    assert found["kept_elsewhere"] == pytest.approx(0.05)
    assert found["excess"] == 3.0


def test_a_class_that_grows_when_parts_are_hidden_is_doubtful_at_best(card: Trust) -> None:
    grown = replace(card.measures, excess=2.4)
    (reason,) = (reason for reason in verdict.reasons(grown) if reason.measure == "excess")
    assert reason.verdict == verdict.verdict(verdict.reasons(grown)) == verdict.DOUBTFUL
    assert reason.text == "a picture with hidden parts holds 240 % of the class, so hiding proves little here"


def three_red_squares() -> Tensor:
    pixels = torch.full((1, 3, 48, 48), 100 / 255)
    for top, left in ((6, 6), (30, 30), (30, 6)):
        pixels[..., top : top + 12, left : left + 12] = torch.tensor([200.0, 60.0, 60.0])[:, None, None] / 255
    return pixels


def test_a_map_that_leaves_a_cause_out_is_not_trusted_and_the_place_is_named(colours: LoadedModel) -> None:
    e = explain(colours, colours.preprocess.normalise(three_red_squares()[0])[None], RED, "lrp")
    whole = e.trust()
    assert says(whole, "correspondence") == verdict.TRUST, whole
    half = e.maps.clone()
    half[..., 24:, :] = 0
    found = replace(e, maps=half).trust()
    assert says(found, "correspondence") != verdict.TRUST
    assert found.measures.missed in ("bottom", "bottom-right", "bottom-left")
    assert f"the {found.measures.missed} matters more" in found.because
    assert found.measures.removal > 0.14  # what is shown matters; that more does is another question


def test_correspondence_by_hand(honest: Explanation, card: Trust) -> None:
    """A second derivation: each quarter of the picture is hidden, one by one."""
    from classlens.report.hide import hide

    x, net = honest.call.images, honest.call.model.model  # type: ignore[union-attr]
    share = positive_shares(honest.maps[0, 0].numpy())
    lost, evidence = [], []
    for top, left in ((y, x) for y in (0, 12, 24) for x in (0, 12, 24)):
        gone = torch.zeros(1, 48, 48, dtype=torch.bool)
        gone[0, top : top + 24, left : left + 24] = True
        out = net(hide(x, gone))[0].detach()
        lost.append(-float(out[RED] - out.mean()))
        evidence.append(float(share[top : top + 24, left : left + 24].sum()))  # type: ignore[index]
    assert card.measures.correspondence == pytest.approx(np.corrcoef(lost, evidence)[0, 1], abs=1e-5)


def test_nothing_corresponds_to_a_constant(honest: Explanation) -> None:
    subject = subject_of(honest)
    even = measures.correspondence(subject, np.ones((16, 16)) / 256)
    assert even["correspondence"] == 0
    deaf = replace(subject, scores=lambda images: np.full(len(images), 3.0))
    assert measures.correspondence(deaf, GRID / 16)["correspondence"] == 0


def test_windows_cover_the_picture_and_small_things_whole() -> None:
    found = measures.windows((16, 16))
    assert len(found) == 9
    assert all(window.sum() == 64 for window in found)
    for top in range(13):
        for left in range(13):
            thing = np.zeros((16, 16), bool)
            thing[top : top + 4, left : left + 4] = True
            assert any((thing <= window).all() for window in found)
    assert np.any(measures.windows((3, 1)), axis=0).all()  # a tiny picture has fewer cells


@pytest.mark.parametrize(
    ("limits", "value", "expected"),
    [
        (Limits(0.2, 0.0), 0.2, "trust"), (Limits(0.2, 0.0), 0.1, "doubtful"), (Limits(0.2, 0.0), 0.0, "do not trust"),
        (Limits(0.3, 0.5), 0.3, "trust"), (Limits(0.3, 0.5), 0.4, "doubtful"), (Limits(0.3, 0.5), 0.5, "do not trust"),
    ],
)  # fmt: skip
def test_limits(limits: Limits, value: float, expected: str) -> None:
    assert limits.judge(value) == expected


def test_the_worst_measure_decides() -> None:
    assert verdict.verdict((Reason("a", "trust", ""), Reason("b", "doubtful", ""))) == "doubtful"
    nothing = Measures(spread=0.1, signal=5.0)
    found = verdict.reasons(nothing)
    assert {reason.measure for reason in found} == set(CRITERIA) - {"conservation"}
    assert verdict.verdict(found) == "doubtful"  # nothing was measured


# --------------------------------------------------------------------------------------------------- the figure


def test_the_card_is_drawn_and_saved(honest: Explanation, card: Trust, tmp_path: Path) -> None:
    from classlens.render.trust import faded

    names = [path.name for path in save(honest, tmp_path, [card])]
    assert "trust-0-0-red.png" in names
    stored = json.loads((tmp_path / "report.json").read_text())["trust"][0]
    assert stored["verdict"] == card.verdict
    assert stored["measures"]["removal"] == pytest.approx(card.measures.removal)
    assert np.array(stored["places"]["low"]).shape == (16, 16)
    sure = replace(card, measures=replace(card.measures, places=Places(np.ones((16, 16)), np.ones((16, 16)))))
    unsure = replace(card, measures=replace(card.measures, places=Places(-np.ones((16, 16)), np.ones((16, 16)))))
    colour = [np.ptp(faded(one), axis=2).max() for one in (sure, unsure)]
    assert colour[0] > 100 > colour[1] == 0
