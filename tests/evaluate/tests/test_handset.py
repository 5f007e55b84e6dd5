from __future__ import annotations

from pathlib import Path

import pytest
import torch

from classlens.evaluate import Settings, SettingsError, options_of_tests, run
from classlens.evaluate.known import CLASSES, draw
from classlens.evaluate.store import Store
from classlens.evaluate.tests import handset


def test_the_truth_is_perfect_at_any_scale() -> None:
    picture = draw(3)
    for k, name in enumerate(CLASSES):
        found = handset.scores(7 * picture.truth[k], picture, name)
        assert found == pytest.approx({"sign": 1, "place": 1, "ignored": 0, "amount": 1})


def test_what_each_score_punishes() -> None:
    picture = draw(3)
    truth, red = picture.truth[CLASSES.index("against")], picture.truth[CLASSES.index("colour")]
    turned = handset.scores(-truth, picture, "against")
    assert (turned["sign"], turned["amount"], turned["place"]) == (0, 0, pytest.approx(1))
    without_sign = handset.scores(truth.abs(), picture, "against")
    reds = sum(thing.colour == "red" for thing in picture.things)
    assert without_sign["sign"] == without_sign["amount"] == pytest.approx(reds / (reds + 1))
    elsewhere = handset.scores(picture.truth[CLASSES.index("any")], picture, "colour")
    assert elsewhere == pytest.approx({"sign": 0, "place": 0, "ignored": 1, "amount": 0})
    assert handset.scores(torch.zeros(64, 64), picture, "colour") == dict.fromkeys(handset.SCORES, 0.0)
    half = red.clone()  # one object too large: its share grows at the cost of the others
    first = next(thing for thing in picture.things if thing.colour == "red")
    half[first.mask] *= 3
    assert handset.scores(half, picture, "colour")["amount"] == pytest.approx(1 / reds + (reds - 1) / (reds + 2))


def test_a_coarse_map_may_have_the_right_amounts() -> None:
    picture = draw(0)
    truth = picture.truth[0]
    coarse = handset.by_cell(truth).repeat_interleave(8, 0).repeat_interleave(8, 1)
    found = handset.scores(coarse, picture, CLASSES[0])
    assert (found["sign"], found["amount"]) == (1, pytest.approx(1))
    assert found["place"] == pytest.approx(9 / 64)
    assert float(handset.by_cell(truth).sum()) == pytest.approx(float(truth.sum()))


def test_it_needs_neither_data_nor_model(tmp_path: Path) -> None:
    options = options_of_tests(networks=("plain",), drawings=2)
    settings = Settings(tests=("handset",), data=(), methods=("lrp", "clrp"), model=handset.TEST.own, options=options)
    of_class, of_logit = run(settings, tmp_path).tables
    colour = [metric.name for metric in of_class.metrics].index("amount, colour")
    assert of_class.rows["lrp"][colour].value == pytest.approx(100, abs=1e-3)
    assert of_logit.rows["lrp"][colour].value == pytest.approx(100, abs=1e-3)
    assert of_logit.rows["clrp"][0].n == 0  # it explains classes only
    before = Store(tmp_path).read("handset").to_pylist()
    assert len(before) == 2 * 2 * 2 * len(CLASSES)
    run(settings, tmp_path)
    assert Store(tmp_path).read("handset").to_pylist() == before
    with pytest.raises(SettingsError, match="handset draws its own pictures; leave out --data"):
        Settings(tests=("handset",), data=("x",), methods=("lrp",))
    with pytest.raises(SettingsError, match="sanity needs pictures: give --data DIR"):
        Settings(tests=("sanity",), data=(), methods=("lrp",))
