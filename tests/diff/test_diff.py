"""Two networks on the same drawn pictures: one finds the colour in the square, the other in a tag in the corner."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tagged
import torch
from PIL import Image
from torch import nn

from classlens.cli import main
from classlens.diff import Diff, diff
from classlens.diff.frames import Frame, Window
from classlens.diff.measures import NAMES, condition, estimated
from classlens.diff.pairs import matched
from classlens.diff.places import gathered
from classlens.errors import ClasslensError, DataError, ModelError, TargetError
from classlens.models import LoadedModel, Preprocess

COUNT = 6  # pictures of each colour: as many as a place needs


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tagged.draw_world(tmp_path_factory.mktemp("diff"), COUNT)


@pytest.fixture(scope="module")
def cheated(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Diff:
    out = tmp_path_factory.mktemp("page") / "diff.html"
    rules = ["appeared>0", "gone>0", "border.low > 0.5"]
    return diff(tagged.make_honest(), tagged.make_cheat(), pictures / "masked", out, top=3, fail_if=rules)


def permuted() -> LoadedModel:
    """The honest network with its classes in another order, and one class that the other network does not have."""
    loaded = tagged.make_honest()
    order = [2, 0, 1, 3]
    with torch.no_grad():
        head = nn.Linear(3, 5)
        head.weight.zero_()[:4] = loaded.model.head.weight[order]
        head.bias.fill_(-50.0)[:4] = loaded.model.head.bias[order]
        loaded.model.head = head
    return replace(loaded, name="permuted", labels=("Blue", "red", "green", "nothing", "violet"))


# ------------------------------------------------------------------------------------------------- what it finds


def test_a_shortcut_that_appeared_is_found_named_and_shown(cheated: Diff) -> None:
    assert {place.name for place in cheated.places if place.shortcut} == {"red", "green", "blue"}
    for place in (place for place in cheated.places if place.shortcut):
        assert place.appeared
        assert place.cells is not None
        assert place.cells[0, 0]  # the tag covers 4 of 40 pixels
        assert place.cells.sum() <= 6
        assert place.before < 0.01
        assert place.after > 0.8
        assert place.on_object == 0
        assert place.excess.low > 0.5
    assert cheated.failed == ("appeared>0", "border.low > 0.5")
    assert cheated.measures["predictions"].value == 0  # both are right on every picture: only the maps tell
    assert cheated.measures["off_object"].value > 0.9
    gone = [place for place in cheated.places if not place.appeared]
    assert len(gone) == 3  # the square, which the first network needs: no shortcut, for it is the object
    assert all(place.decides and place.on_object is not None and place.on_object > 0.9 for place in gone)
    text = cheated.path.read_text()
    assert "Shortcut appeared: red, top-left" in text
    assert text.count("<div class=crops>") == 3


def test_a_shortcut_that_went(pictures: Path, tmp_path: Path) -> None:
    made = diff(
        tagged.make_cheat(), tagged.make_honest(), pictures / "plain", tmp_path / "d.html", classes=["red"], top=1
    )
    assert [(p.name, p.appeared) for p in made.places if p.shortcut] == [("red", False)]
    assert {p.name for p in made.places} == {"red"}
    assert made.measures["border"].value < -0.9
    assert made.measures["off_object"].n == 0  # there are no masks
    assert not any(finding.alarming for finding in made.findings)


def test_equal_networks_whose_classes_have_another_order_differ_in_nothing(pictures: Path, tmp_path: Path) -> None:
    made = diff(tagged.make_honest(), permuted(), pictures / "classes", tmp_path / "d.html", top=1)
    assert made.measures["moved"].value == pytest.approx(0, abs=1e-6)
    assert made.measures["correlation"].value == pytest.approx(1, abs=1e-6)
    assert made.measures["probability"].value == pytest.approx(0, abs=1e-6)
    assert made.measures["accuracy"].value == 0
    assert made.places == ()
    assert "has the classes violet: they are not compared" in made.path.read_text()


class Bright(nn.Module):
    """The first class is the brightness of each pixel, wherever it is; the second is always there."""

    def __init__(self) -> None:
        super().__init__()
        self.grey = nn.Conv2d(3, 2, 1)
        with torch.no_grad():
            self.grey.weight.copy_(torch.stack([torch.ones(3), torch.zeros(3)])[:, :, None, None])
            self.grey.bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.grey(x)).mean((2, 3))


def bright(name: str, resize: int, crop: int) -> LoadedModel:
    plain = Preprocess(resize=resize, crop=crop, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), interpolation="nearest")
    return LoadedModel(name, Bright().eval(), plain, ("bright", "dark"))


def test_networks_with_another_crop_and_size_see_the_same_places(tmp_path: Path) -> None:
    """Compared pixel by pixel of their inputs, these maps would lie in different places."""
    pixels = np.zeros((96, 144, 3), np.uint8)
    pixels[30:42, 54:66] = 255
    (tmp_path / "photos").mkdir()
    for number in range(2):
        Image.fromarray(np.roll(pixels, 6 * number, 1)).save(tmp_path / "photos" / f"{number}.png")
    whole, close = bright("whole", 96, 96), bright("close", 192, 96)
    made = diff(whole, close, tmp_path / "photos", tmp_path / "d.html", method="gradient-x-input")
    assert len(made.collected.rows) == 2
    assert made.measures["moved"].value < 0.05
    assert made.measures["correlation"].value > 0.95
    assert made.measures["border"].value == pytest.approx(0, abs=0.02)
    assert any("see different parts of a picture" in note for note in made.notes)
    row = made.collected.rows[0]
    frame = Frame.of(whole.preprocess, close.preprocess, Image.fromarray(pixels))
    assert frame.window == Window(0.25, 0.75, 1 / 3, 2 / 3)  # what the closer crop shows
    assert row.a.elsewhere == row.b.elsewhere == pytest.approx(0, abs=1e-9)


def test_hidden_cells_are_the_same_part_of_the_picture_for_both() -> None:
    picture = Image.new("RGB", (144, 96))
    frame = Frame.of(Preprocess(96, 96), Preprocess(192, 96), picture)
    cells = np.zeros((16, 16), bool)
    cells[:8, :8] = True  # the top left quarter of the window, whose corner lies at pixel (24, 48) of the picture
    one, other = frame.hidden(0, cells, (96, 96)), frame.hidden(1, cells, (96, 96))
    assert np.argwhere(one).min(0).tolist() == [24, 24]  # the crop of the first starts at pixel 24 of the width
    assert np.argwhere(one).max(0).tolist() == [47, 47]
    assert np.argwhere(other).min(0).tolist() == [0, 0]
    assert np.argwhere(other).max(0).tolist() == [47, 47]


def test_evidence_that_the_other_network_cannot_see_is_counted_apart() -> None:
    frame = Frame.of(Preprocess(96, 96), Preprocess(192, 96), Image.new("RGB", (96, 96)))
    share = np.zeros((96, 96))
    share[0, 0], share[48, 48] = 0.75, 0.25
    assert frame.outside(0, share) == pytest.approx(0.75)
    assert frame.cells(0, share).sum() == pytest.approx(0.25)
    assert frame.border(0, share) == 0  # of what both see, nothing lies on the border


def test_no_place_is_found_in_chance() -> None:
    """Of many classes in which the evidence only jitters, about one in twenty has a place by chance."""
    random = np.random.default_rng(0)
    found = [gathered(random.normal(0, 1, (12, 16, 16)), seed) is not None for seed in range(40)]
    assert sum(found) <= 6
    change = random.normal(0, 1, (12, 16, 16))
    change[:, 3:6, 10:13] += 3
    cells = gathered(change, 0)
    assert cells is not None
    assert cells[4, 11]
    assert not cells[10, 2]


def test_rows_of_one_picture_count_once_and_are_drawn_together(cheated: Diff) -> None:
    rows = cheated.collected.rows
    doubled = [*rows, *(replace(row, name="again") for row in rows)]
    once, twice = (estimated(part, lambda row: row.b.border + len(row.item.name)) for part in (rows, doubled))
    assert (twice.value, twice.low, twice.high) == pytest.approx((once.value, once.low, once.high))
    assert estimated(doubled, lambda row: 1.0, per_picture=True).n == len(rows)


# ------------------------------------------------------------------------------------------------------ the page


def test_the_page_is_one_file_whose_links_lead_somewhere(cheated: Diff) -> None:
    text = cheated.path.read_text(encoding="utf-8")
    addresses = re.findall(r"""(?:src|href)=['"]?([^'" >]+)""", text)
    assert all(address.startswith(("#", "data:image/jpeg;base64,")) for address in addresses)
    ids = re.findall(r"""\sid=['"]?([^'" >]+)""", text)
    assert len(ids) == len(set(ids))
    assert {address[1:] for address in addresses if address.startswith("#")} <= set(ids)
    assert [path.name for path in cheated.path.parent.iterdir()] == ["diff.html"]


# ---------------------------------------------------------------------------------------------------- conditions


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("bordr>0.1", f"there is no measure bordr; the measures are {', '.join(NAMES)}"),
        ("border", "is not a condition; write a measure, a sign"),
        ("border=0.1", "is not a condition"),
        ("border>ten", "ten is not a number"),
        ("border>10%", "10% is not a number; shares are written as 0.1"),
        ("border>nan", "nan is not a number"),
        ("border.lower>0", "border has no lower; write border, border.low or border.high"),
        ("appeared.low>0", "appeared is counted and has no interval"),
        ("", "is not a condition"),
    ],
)
def test_a_wrong_condition_is_refused_by_name(text: str, wrong: str) -> None:
    with pytest.raises(ClasslensError, match=re.escape(wrong)):
        condition(text)


def test_conditions_are_those_written(cheated: Diff) -> None:
    found = cheated.measures
    border = found["border"].value
    for text, holds in (
        (f"border>{border}", False), (f"border>={border}", True), (f"border<={border}", True), ("border< 0", False),
        ("border.high>0.5", True), ("border.low<0.5", False),
    ):  # fmt: skip
        assert condition(text).holds(found) is holds, text


def test_a_condition_on_what_the_data_cannot_tell_is_refused(pictures: Path, tmp_path: Path) -> None:
    honest, cheat, out = tagged.make_honest(), tagged.make_cheat(), tmp_path / "d.html"
    with pytest.raises(DataError, match="the data have no masks"):
        diff(honest, cheat, pictures / "plain", out, fail_if=["off_object>0"])
    with pytest.raises(DataError, match="the data have no labels that are classes of both"):
        diff(honest, cheat, pictures / "plain", out, fail_if=["accuracy<0"], limit=2)
    with pytest.raises(DataError, match="one picture has no interval"):
        diff(honest, cheat, pictures / "plain", out, fail_if=["moved.low>0"], limit=1)
    assert not out.exists()


# ------------------------------------------------------------------------------------------------------- refused


def test_classes_that_cannot_be_matched_are_refused(pictures: Path, tmp_path: Path) -> None:
    honest = tagged.make_honest()
    with pytest.raises(ModelError, match="nameless has no class names, so its 4 outputs cannot be matched"):
        matched(honest, tagged.make_nameless(), 4, 4)
    with pytest.raises(ModelError, match="have no class of the same name"):
        matched(honest, replace(honest, labels=("a", "b", "c", "d")), 4, 4)
    both = matched(honest, permuted(), 4, 5)
    assert both.to_b == {0: 1, 1: 2, 2: 0, 3: 3}
    assert (both.only_a, both.only_b) == ((), ("violet",))
    with pytest.raises(TargetError, match="violet"):
        diff(honest, permuted(), pictures / "plain", tmp_path / "d.html", classes=["violet"])


def test_the_command(pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["diff", "tagged:make_honest", "tagged:make_cheat", "--data", str(pictures / "plain"), "--limit", "9"]
    asked += ["--out", str(tmp_path / "d.html"), "--top", "1", "--device", "cpu", "--class", "red"]
    with pytest.raises(SystemExit) as stopped:
        main([*asked, "--fail-if", "moved>0.5"])
    out, err = capsys.readouterr()
    assert stopped.value.code == 3
    assert "--fail-if moved>0.5 holds" in out
    assert f"-> {tmp_path / 'd.html'}" in out
    assert "pictures: 9 of 9" in err
    with pytest.raises(SystemExit) as stopped:
        main([*asked, "--fail-if", "moves>0.5"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
