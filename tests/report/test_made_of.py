"""The section on concepts: of the classes with enough pictures, and of confused classes; others are named."""

from __future__ import annotations

from pathlib import Path

import pytest
import relatives
import tagged
from typer.testing import CliRunner

from classlens.cli import app
from classlens.data.layouts import open_dataset
from classlens.progress import silent
from classlens.report import report
from classlens.report.choose import Pair, class_views, confusions, usual
from classlens.report.collect import Subject
from classlens.report.made_of import made_of


@pytest.fixture(scope="module")
def bakery(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return relatives.draw_relatives(tmp_path_factory.mktemp("relatives") / "bakery")


def test_classes_and_confused_classes_have_their_concepts(bakery: Path, tmp_path: Path) -> None:
    made = report(relatives.make(), bakery, tmp_path / "r.html", concepts=tmp_path / "index", batch_size=4)
    text = made.path.read_text()
    assert "tart taken for pie" in text  # the two are confused
    section = text[text.index("<section id=concepts>") : text.index("<section id=tables>")]
    assert "href='#concepts'" in text
    assert "<h3>pie <small>" in section
    assert "<h3>tart <small>" in section
    shared = section[section.index("What confused classes share") :]
    assert "<b>shared</b>" in shared
    assert "<b>mostly pie</b>" in shared
    assert "<b>mostly tart</b>" in shared
    assert "forward passes and" in text[text.index("<section id=made>") :]


def test_two_classes_are_compared_once(bakery: Path, tmp_path: Path) -> None:
    """Whichever of the two was said."""
    made = report(relatives.make(), bakery, tmp_path / "r.html")
    subject = Subject(relatives.make(), open_dataset(bakery))
    records = made.collected.records
    views, (pair, *_) = class_views(records, usual(records)), confusions(records)
    other = Pair(pair.other, pair.predicted, pair.records)
    found = made_of(subject, views, [pair, other], 12, tmp_path / "index", silent)
    assert [entry.title for entry in found.pairs] == ["pie and tart"]


def test_a_second_report_takes_them_from_the_index(bakery: Path, tmp_path: Path) -> None:
    for name in "ab":
        report(relatives.make(), bakery, tmp_path / f"{name}.html", concepts=tmp_path / "index", batch_size=4)
    assert "; 0 forward passes and 0 sweeps" in (tmp_path / "b.html").read_text()
    assert "; 0 forward passes and 0 sweeps" not in (tmp_path / "a.html").read_text()


def test_a_stopped_report_resumes(bakery: Path, tmp_path: Path) -> None:
    def stop(what: str, done: int, total: int) -> None:
        if what == "reference pictures":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        report(relatives.make(), bakery, tmp_path / "r.html", concepts=tmp_path / "index", progress=stop)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index"]
    begun = {path.name for path in (tmp_path / "index").iterdir()}
    report(relatives.make(), bakery, tmp_path / "r.html", concepts=tmp_path / "index")
    assert begun < {path.name for path in (tmp_path / "index").iterdir()}


def test_too_few_pictures_are_said(world: Path, tmp_path: Path) -> None:
    made = report(tagged.make_honest(), world / "classes", tmp_path / "r.html", concepts=tmp_path / "index")
    text = made.path.read_text()
    assert "Too few pictures are taken for these classes; concepts need 6: " in text
    assert "red (4)" in text


def test_a_network_without_coarse_feature_maps_says_why(world: Path, tmp_path: Path) -> None:
    mistaken = report(tagged.make_mistaken(), world / "classes", tmp_path / "r.html", concepts=tmp_path / "index")
    assert "red: the network has no feature map 8 times smaller" in mistaken.path.read_text()


def test_without_the_option_there_is_no_section(bakery: Path, tmp_path: Path) -> None:
    made = report(relatives.make(), bakery, tmp_path / "r.html")
    assert "id=concepts" not in made.path.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["r.html"]


def test_the_command(bakery: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "worlds"))
    words = ["report", "--data", str(bakery), "--model", "relatives:make", "--out", str(tmp_path / "r.html")]
    result = CliRunner().invoke(app, [*words, "--concepts", str(tmp_path / "index")], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "id=concepts" in (tmp_path / "r.html").read_text()
