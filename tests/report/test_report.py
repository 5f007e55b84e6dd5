from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import tagged
import torch
from odd import LATIN, REFUSED, SHOWN, odd_files, rename_latin
from typer.testing import CliRunner

from classlens import explanation
from classlens.app.studio import samples
from classlens.cli import app, main
from classlens.errors import ModelError, NotFiniteError
from classlens.evaluate import DataError, SettingsError
from classlens.explanation import explain
from classlens.models import LoadedModel, load
from classlens.report import Report, collect, report


def numbers(made: Report) -> dict[str, str]:
    return {finding.title: finding.number for finding in made.findings}


def test_a_model_that_looks_at_the_border_is_flagged(world: Path, tmp_path: Path) -> None:
    """Both models are right on every picture; the report tells them apart."""
    cheat = report(tagged.make_cheat(), world / "masked", tmp_path / "cheat.html")
    honest = report(tagged.make_honest(), world / "masked", tmp_path / "honest.html")
    for made, expected in ((cheat, "12"), (honest, "0")):
        found = numbers(made)
        assert (found["on the border"], found["off the object"]) == (expected, expected)
        assert found["known by the surroundings"] == expected
        assert "The maps show what the model uses." in made.findings[-1].text
    assert all(r.where.border > 0.9 and (r.where.inside or 0) < 0.1 for r in cheat.collected.records)
    assert all(r.where.border < 0.1 and (r.where.inside or 0) > 0.9 for r in honest.collected.records)
    text = (tmp_path / "cheat.html").read_text()
    assert "For 12 of 12 pictures more than half of the evidence lies outside of the object" in text
    assert "class='card flag'" in text
    assert "class='card flag'" not in (tmp_path / "honest.html").read_text()


def test_the_page_is_one_file_with_all_sections(world: Path, tmp_path: Path) -> None:
    made = report(tagged.make_mistaken(), world / "classes", tmp_path / "deep" / "r.html", top=2, command=["x", "a b"])
    text = made.path.read_text(encoding="utf-8")
    assert numbers(made)["right"] == "67 %"
    assert "green taken for red" in text
    assert "8 of 12 with a known label" in text
    assert "x &#39;a b&#39;" in text  # the command, quoted
    # Nothing is fetched: every address is a fragment of the page or data.
    addresses = re.findall(r"""(?:src|href)=['"]?([^'" >]+)""", text)
    assert len(addresses) > 20
    assert all(address.startswith(("#", "data:image/jpeg;base64,")) for address in addresses)
    assert not re.search(r"https?:|//[a-z]+\.|url\(|@import", re.sub(r"base64,[\w+/=]+", "", text))
    # Every link leads somewhere, and no id stands there twice.
    ids = re.findall(r"""\sid=['"]?([^'" >]+)""", text)
    assert len(ids) == len(set(ids))
    assert {address[1:] for address in addresses if address.startswith("#")} <= set(ids)
    assert [path.name for path in made.path.parent.iterdir()] == ["r.html"]


def test_a_plain_folder_without_names(world: Path, tmp_path: Path) -> None:
    made = report(tagged.make_nameless(), world / "plain", tmp_path / "r.html", limit=5, seed=3, batch_size=2)
    assert len(made.collected.records) == 5
    assert {r.item.name for r in made.collected.records} <= {p.name for p in (world / "plain").iterdir()}
    assert "right" not in numbers(made)
    assert made.notes[0].startswith("The data set has no labels")
    assert "class 2" in made.path.read_text()
    again = report(tagged.make_nameless(), world / "plain", tmp_path / "s.html", limit=5, seed=3, batch_size=5)
    assert [r.item for r in again.collected.records] == [r.item for r in made.collected.records]
    assert [r.hidden.elsewhere for r in again.collected.records] == pytest.approx(
        [r.hidden.elsewhere for r in made.collected.records], abs=1e-4
    )


def test_an_unsigned_method(world: Path, tmp_path: Path) -> None:
    made = report(tagged.make_honest(), world / "plain", tmp_path / "r.html", method="sobel", limit=2)
    assert "from none to most" in made.path.read_text()


def test_noise_is_not_believed(world: Path, tmp_path: Path) -> None:
    made = report(tagged.make_honest(), world / "plain", tmp_path / "r.html", method="random", limit=4)
    assert "from against to for the class" in made.path.read_text()
    assert 0.3 < made.collected.records[0].where.border < 0.42  # noise is spread evenly
    assert made.findings[-1].alarming  # and says nothing about the model


def test_broken_pictures_and_masks_are_counted_and_named(world: Path, tmp_path: Path) -> None:
    data = Path(shutil.copytree(world / "masked", tmp_path / "data"))
    (data / "images" / "red0.png").write_bytes(b"no picture")
    (data / "masks" / "red1.png").unlink()
    made = report(tagged.make_honest(), data, tmp_path / "r.html")
    assert len(made.collected.records) == 11
    assert list(made.collected.skipped) == ["red0.png"]
    assert list(made.collected.without_mask) == ["red1.png"]
    text = made.path.read_text()
    assert "1 picture could not be used" in text
    assert "red0.png: images/red0.png is not a picture in a known format" in text
    assert "red1.png: the mask red1.png does not exist" in text
    assert str(tmp_path) not in text  # where on the machine the data lie is nobody's business


def test_nothing_is_written_without_pictures(world: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DataError, match=r"no known layout.*empty folder"):
        report(tagged.make_honest(), empty, tmp_path / "r.html")
    (empty / "a.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"none of 1 picture could be used; the first, a.png: a.png is empty"):
        report(tagged.make_honest(), empty, tmp_path / "r.html")
    with pytest.raises(DataError, match="is a folder: give a file name"):
        report(tagged.make_honest(), world / "plain", tmp_path)
    with pytest.raises(SettingsError, match="cannot have 26 entries; give 1 to 25"):
        report(tagged.make_honest(), world / "plain", tmp_path / "r.html", top=26)
    assert not list(tmp_path.glob("*.html"))


def test_a_stop_leaves_nothing_behind(world: Path, tmp_path: Path) -> None:
    def stop(what: str, done: int, total: int) -> None:
        if what == "drawing":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        report(tagged.make_honest(), world / "plain", tmp_path / "out" / "r.html", limit=3, progress=stop)
    assert not (tmp_path / "out").exists()


def test_maps_without_evidence_are_skipped(world: Path, tmp_path: Path) -> None:
    blind = tagged.make_honest()
    with torch.no_grad():
        blind.model.get_parameter("head.weight").zero_()
    with pytest.raises(DataError, match="the map holds no evidence for the class"):
        report(blind, world / "plain", tmp_path / "r.html", method="gradient")


def test_a_single_output_is_refused(world: Path, tmp_path: Path) -> None:
    two = tagged.make_honest()
    one = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * tagged.SIDE**2, 1)).eval()
    with pytest.raises(ModelError, match="a single output"):
        report(LoadedModel("one", one, two.preprocess, None), world / "plain", tmp_path / "r.html", method="gradient")


def test_the_command(world: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    words = f"report --data {world / 'classes'} --model tagged:make_mistaken --out {out} --limit 9 --device cpu --top 3"
    done = CliRunner().invoke(app, words.split())
    assert done.exit_code == 0, done.output
    assert "- The model is right on " in done.stdout
    assert f"-> {out}" in done.stdout
    assert "pictures: 9 of 9, " in done.stderr
    assert out.stat().st_size < 8e6


def test_a_wrong_folder_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["report", "--data", str(tmp_path), "--model", "tagged:make_honest", "--out", str(tmp_path / "r.html")])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_odd_files_are_skipped_and_odd_names_shown_escaped(world: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(world / "plain", tmp_path / LATIN))
    rename_latin(min(root.glob("*.png")))
    path = tmp_path / "r.html"
    with odd_files(root):
        made = report(tagged.make_honest(), root, path, command=["classlens", "report", "--data", str(root)])
    assert made.collected.skipped.keys() == REFUSED.keys()
    assert all(text in made.collected.skipped[name] for name, text in REFUSED.items())
    assert len(made.collected.records) == 12
    assert path.read_text(encoding="utf-8").count(SHOWN) > 2  # the picture, the data set, the command


def test_one_picture_whose_map_overflows_does_not_cost_the_others(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = tagged.make_honest()
    first = honest.preprocess(min((world / "plain").iterdir()))
    asked = explanation.explain

    def overflows(model: LoadedModel, images: torch.Tensor, *rest: object, **options: object) -> object:
        if any(torch.equal(image, first) for image in images):
            raise NotFiniteError("the map of image 0 holds NaN")
        return asked(model, images, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("classlens.report.collect.explain", overflows)
    made = report(honest, world / "plain", tmp_path / "r.html", batch_size=4)
    assert list(made.collected.skipped.values()) == ["the map holds NaN or infinite values"]
    assert len(made.collected.records) == 11


@pytest.fixture(scope="module")
def embedded() -> LoadedModel:
    return load("efficientnet-lite0")


def said_of(model: LoadedModel, folder: Path, content: bytes, label: str, method: str) -> str:
    """What the report says of one picture: of its likeliest class, and of the class that it is labelled."""
    for name in (label, "tench"):
        (folder / "pictures" / name).mkdir(parents=True)
        (folder / "pictures" / name / "one.png").write_bytes(content)
    made = report(model, folder / "pictures", folder / "r.html", method=method)
    section = made.path.read_text(encoding="utf-8").split("<section id=confused>")[1].split("</section>")[0]
    return next(part for part in section.split("<article") if f"true: <b>{label}</b>" in part)


def test_two_objects_are_found_on_different_things(embedded: LoadedModel, tmp_path: Path) -> None:
    said = said_of(embedded, tmp_path, samples()["cat and espresso"], "Egyptian cat", "agf")
    assert "said: <b>espresso</b>" in said
    assert "the classes are found on different things" in said


@pytest.mark.parametrize("method", ["agf", "gradcam"])
def test_two_breeds_are_not_found_on_different_things(embedded: LoadedModel, tmp_path: Path, method: str) -> None:
    said = said_of(embedded, tmp_path, samples()["cat"], "tabby", method)
    assert "said: <b>Egyptian cat</b>" in said
    assert "of the evidence for the two lies in the same places" in said
    assert "different things" not in said


@pytest.mark.parametrize(
    ("method", "why"),
    [("clrp", "contrasts"), ("contrastive-excitation-bp", "contrasts"), ("lrp", "shows much the same")],
)
def test_nothing_is_concluded_from_a_contrast_or_from_maps_that_are_always_the_same(
    embedded: LoadedModel, tmp_path: Path, method: str, why: str
) -> None:
    said = said_of(embedded, tmp_path, samples()["cat and espresso"], "Egyptian cat", method)
    assert "of the evidence for the two lies in the same places" in said
    assert "different things" not in said
    assert "same thing" not in said
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert f"{method} {why}" in text
    assert "its maps do not show whether two classes are found on different things" in text


def test_the_page_says_which_question_its_maps_answer(world: Path, tmp_path: Path) -> None:
    for method, words in (("agf", "evidence for the class, by itself"), ("clrp", "evidence for the class, against")):
        made = report(tagged.make_honest(), world / "plain", tmp_path / "r.html", method=method)
        assert words in made.path.read_text(encoding="utf-8")


def test_the_maps_of_a_pair_are_those_of_the_default_question(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def noted(*arguments: Any, **options: Any) -> Any:
        found = explain(*arguments, **options)
        asked.extend(target.kind for row in found.asked for target in row)
        return found

    monkeypatch.setattr(collect, "explain", noted)
    report(tagged.make_mistaken(), world / "classes", tmp_path / "r.html")
    assert set(asked) == {"class"}
