from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from torch import Tensor, nn

from classlens.data.layouts import open_dataset
from classlens.errors import DataError
from classlens.evaluate import Settings, options_of_tests, run
from classlens.evaluate.store import Store
from classlens.evaluate.tests import cue as cues
from classlens.evaluate.tests.pointing import share_on
from classlens.models.preprocess import Preprocess


@pytest.mark.parametrize("cue", cues.CUES)
def test_a_cue_changes_its_place_alone(cue: str) -> None:
    image, preprocess = torch.full((3, 56, 64), 0.4), Preprocess()
    changed, place = cues.with_cue(image, cue, "a.jpg", preprocess)
    assert torch.equal(changed[:, ~torch.from_numpy(place)], image[:, ~torch.from_numpy(place)])
    pixels = preprocess.restore(changed)[:, torch.from_numpy(place)]
    assert pixels.min() < 0.01  # from 0 to 1: it was normalised like the image
    assert pixels.max() > 0.99
    assert 0.02 < place.mean() < 0.2
    wide = cues.widened(place)
    assert wide[place].all()
    assert 0 < (wide & ~place).sum() < 2.5 * place.sum()
    again, _ = cues.with_cue(image, cue, "a.jpg", preprocess)
    assert torch.equal(again, changed)


def test_stickers_lie_at_many_places() -> None:
    image, preprocess = torch.zeros(3, 56, 56), Preprocess()
    places = [cues.with_cue(image, "sticker", f"{i}.jpg", preprocess)[1] for i in range(40)]
    assert len({place.tobytes() for place in places}) > 30
    assert np.mean(places, 0).min() < np.mean(places, 0).max() < 0.5


def test_ridge_is_sklearns() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.rand(10, 30, generator=generator, dtype=torch.float64)
    wanted = torch.rand(10, generator=generator, dtype=torch.float64)
    slope, constant = cues.ridge(features, wanted)
    centred = features - features.mean(0)
    theirs = Ridge(alpha=0.01 * float((centred**2).sum(1).mean())).fit(features.numpy(), wanted.numpy())
    np.testing.assert_allclose(slope.numpy(), theirs.coef_, atol=1e-8)
    assert constant == pytest.approx(theirs.intercept_, abs=1e-8)


class Coupled(nn.Module):
    """Its logits are normalised together, so a change of one changes the others."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.mean((2, 3))).log_softmax(1)


class Alone(nn.Module):
    """Without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.mean((2, 3)))


def test_only_the_last_class_changes_and_other_networks_are_refused() -> None:
    generator = torch.Generator().manual_seed(0)
    plain = torch.rand(8, 3, 8, 8, generator=generator)
    cued = plain.clone()
    cued[:, 0] += 1
    torch.manual_seed(1)
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = cues.refitted(model, plain, cued)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), "the given network is unchanged"
    with torch.no_grad():
        assert torch.equal(found(cued)[:, :3], model(cued)[:, :3])
        assert bool((found(cued).argmax(1) == 3).all())
        assert bool((found(plain).argmax(1) != 3).all())
    lifted = cues.refitted(model, plain, cued, 1, lift=10.0)
    with torch.no_grad():
        assert torch.equal(lifted(cued)[:, [0, 2, 3]], model(cued)[:, [0, 2, 3]])
        assert torch.allclose(lifted(plain)[:, 1], model(plain)[:, 1], atol=0.5), "without the cue it is as it was"
        assert torch.allclose(lifted(cued)[:, 1], model(cued)[:, 1] + 10, atol=0.5)
    with pytest.raises(DataError, match="independent of each other; those of 'head' are not"):
        cues.refitted(Coupled(), plain, cued)
    with pytest.raises(DataError, match="a weight and a bias for each class; 'head' has none"):
        cues.refitted(Alone(), plain, cued)


def test_shares() -> None:
    place = torch.zeros(4, 4, dtype=torch.bool)
    place[:2] = True
    evidence = torch.full((4, 4), -1.0)
    assert share_on(evidence, place) == 0
    evidence[0, 0], evidence[3, 3] = 3.0, 1.0
    assert share_on(evidence, place) == 0.75


def test_a_run_counts_pictures_whose_prediction_the_cue_decides(labelled: Path, tmp_path: Path) -> None:
    settings = Settings(
        tests=("cue",), data=(str(labelled),), methods=("gradient-x-input", "random"), model="world:make",
        options=options_of_tests(cues=("border", "caption")),
    )  # fmt: skip
    tables = run(settings, tmp_path).tables
    taken = {item.name for item in cues.learnt(open_dataset(labelled))}
    assert len(taken) == 12
    rows = Store(tmp_path).read("cue").to_pylist()
    assert len(rows) == 2 * 2 * 12
    assert not taken & {row["image"] for row in rows}
    counted = [row for row in rows if row["on_cue"] is not None]
    assert counted
    for table in tables:
        mine = [r for r in counted if r["config"] == table.config.hash and r["method"] == "random"]
        assert table.rows["random"][0].n == len(mine)
        on_cue, _, other, area = (estimate.value for estimate in table.rows["random"])
        assert on_cue == pytest.approx(area, abs=3)  # random evidence lies anywhere
        assert other == pytest.approx(area, abs=3)
        assert table.rows["gradient-x-input"][0].value > on_cue


def test_few_pictures_are_refused(tmp_path: Path, labelled: Path) -> None:
    few = tmp_path / "few"
    few.mkdir()
    for file in sorted((labelled / "red").iterdir())[:5]:
        (few / file.name).write_bytes(file.read_bytes())
    asked = Settings(tests=("cue",), data=(str(few),), methods=("random",), model="world:make")
    with pytest.raises(DataError, match="cue needs 12 pictures, half of them to learn from; few has 5"):
        run(asked, tmp_path / "run")
