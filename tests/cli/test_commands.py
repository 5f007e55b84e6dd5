"""The command: what it prints, what it writes, and how it fails."""

from __future__ import annotations

import inspect
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from odd import LATIN, SHOWN, odd_files, rename_latin
from PIL import Image

import classlens
from classlens.cli import bar
from classlens.cli import commands as cli
from classlens.cli import explain as explain_command
from classlens.methods import METHODS
from classlens.models import KINDS, MODELS

# The command runs the whole library on a network of its own, small enough to be explained in a moment.
TINY = """
import torch
from torch import nn
from classlens.models import LoadedModel, Preprocess

def net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
        model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(6, 4))
    return LoadedModel("tiny", model, Preprocess(resize=16, crop=16), ("tabby cat", "tiger cat", "espresso", "cup"))
"""


class Outcome:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def error(self) -> str:
        """The one line that was printed instead of a traceback."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("error: ")
        return lines[0]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with a network, two pictures and a broken one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLASSLENS_DEBUG", "")  # also takes back what --debug sets
    monkeypatch.delitem(sys.modules, "tiny", raising=False)
    (tmp_path / "tiny.py").write_text(TINY)
    for name, seed in (("one", 0), ("two", 1)):
        pixels = np.random.default_rng(seed).integers(0, 256, (20, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{name}.png")
    (tmp_path / "broken.png").write_bytes((tmp_path / "one.png").read_bytes()[:100])
    return tmp_path


@pytest.fixture
def run(folder: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: str) -> Outcome:
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        captured = capsys.readouterr()
        return Outcome(int(ended.value.code or 0), captured.out, captured.err)

    return call


def explain(run: Any, *arguments: str) -> Outcome:
    return run("explain", "--model", "tiny:net", "--device", "cpu", *arguments)


# ---------------------------------------------------------------------------------------------- explaining


def test_explain_prints_each_class_and_writes_its_overlay(run: Any, folder: Path) -> None:
    result = explain(run, "one.png", "--class", "espresso", "--class", "0")
    assert (result.code, result.err) == (0, "")
    heading, espresso, tabby, relevance, note, pointer = result.out.splitlines()
    assert relevance.startswith("  relevance: ")
    assert "reached the picture, the rest stayed in biases; " in relevance
    assert note.startswith("  note: no layer reads a feature map or a patch grid 8 times smaller")
    assert heading.startswith("one.png  evidence for the class  (tiny:net, agf, ")
    assert espresso.split()[:2] == ["espresso", "(2)"]
    assert tabby.split()[:3] == ["tabby", "cat", "(0)"]
    assert "%" in espresso
    assert pointer == "  -> out/one/figure.png"
    assert sorted(p.name for p in (folder / "out" / "one").iterdir()) == [
        "0-0-tabby-cat.png", "0-2-espresso.png", "figure.png", "maps.npz", "report.json",
    ]  # fmt: skip


def test_the_likeliest_class_is_the_default_and_top_gives_more(run: Any) -> None:
    one = json.loads(explain(run, "one.png", "--json").out)["images"][0]["classes"]
    three = json.loads(explain(run, "one.png", "--json", "--top", "3").out)["images"][0]["classes"]
    assert [c["name"] for c in one] == [c["name"] for c in three[:1]]
    assert one[0]["cells"] == pytest.approx(three[0]["cells"], rel=1e-5, abs=1e-9)
    probabilities = [c["probability"] for c in three]
    assert probabilities == sorted(probabilities, reverse=True)


def test_json_is_one_document_and_nothing_else(run: Any, folder: Path) -> None:
    result = explain(run, "one.png", "two.png", "--json", "--method", "gradcam", "--out", "maps")
    assert (result.code, result.err) == (0, "")
    document = json.loads(result.out)
    assert (document["model"], document["method"], document["failed"]) == ("tiny:net", "gradcam", [])
    assert [image["path"] for image in document["images"]] == ["one.png", "two.png"]
    for image in document["images"]:
        assert all(Path(file).exists() for file in image["files"])
        assert image["classes"][0]["name"] in {"tabby cat", "tiger cat", "espresso", "cup"}
        assert image["report"]["seconds"] > 0


def test_the_command_gives_what_the_library_gives(run: Any, folder: Path) -> None:
    explain(run, "one.png", "--class", "cup")
    expected = classlens.explain(classlens.load("tiny:net"), "one.png", targets=["cup"])
    with np.load(folder / "out" / "one" / "maps.npz") as saved:
        np.testing.assert_array_equal(saved["maps"], expected.maps.numpy())


def test_the_other_question_is_answered_as_by_the_library(run: Any, folder: Path) -> None:
    result = explain(run, "one.png", "--class", "cup", "--rather-than", "espresso")
    assert (result.code, result.err) == (0, "")
    e = classlens.explain(classlens.load("tiny:net"), "one.png", "cup", rather_than="espresso")
    heading, cup, *_ = result.out.splitlines()
    assert "  evidence for the class rather than espresso  (" in heading
    assert f"rather than espresso ({100 * float(e.logits[0].softmax(0)[2]):.1f} %): " in cup
    assert (folder / "out" / "one" / "0-3-cup-rather-than-espresso.png").exists()
    with np.load(folder / "out" / "one" / "maps.npz") as saved:
        np.testing.assert_array_equal(saved["maps"], e.maps.numpy())
        assert saved["names"].tolist() == [["cup rather than espresso"]]
    several = ["--rather-than", "espresso", "--rather-than", "0", "--json"]
    (entry,) = json.loads(explain(run, "one.png", "--class", "cup", *several).out)["images"][0]["classes"]
    assert entry["question"] == "evidence for cup rather than espresso or tabby cat"
    assert entry["rival"]["index"] == max((0, 2), key=e.logits[0].tolist().__getitem__)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--class", "cup", "--rather-than", "cup"], "cup cannot be explained rather than itself"),
        (["--class", "cup", "--rather-than", "expresso"], "no class is named 'expresso'; nearest: 2 espresso"),
        (["--class", "cup", "--rather-than", "rivals", "--method", "clrp"], "omit rather_than, or use a method"),
    ],
)
def test_rivals_that_cannot_be_are_one_line(run: Any, arguments: list[str], message: str) -> None:
    result = explain(run, "one.png", *arguments)
    assert result.code == 2
    assert message in result.error


def test_a_rival_that_wins_on_one_picture_does_not_stop_the_others(run: Any) -> None:
    (likeliest,) = json.loads(explain(run, "one.png", "--json").out)["images"][0]["classes"]
    result = explain(run, "one.png", "one.png", "--rather-than", str(likeliest["index"]))
    assert result.code == 2
    assert len(result.err.splitlines()) == 2  # of each picture by itself
    assert explain(run, "one.png", "--rather-than", "rivals").code == 0


def test_compare_asks_every_method_the_same(run: Any, folder: Path) -> None:
    arguments = ["--class", "cup", "--class", "0", "--rather-than", "espresso", "--methods", "agf,clrp", "--json"]
    found = json.loads(run("compare", "one.png", "--model", "tiny:net", *arguments).out)
    assert found["methods"]["agf"]["classes"][0]["question"] == "evidence for cup rather than espresso"
    assert found["methods"]["agf"]["likeness"] is None
    assert "chooses the rivals of a class itself" in found["failed"]["clrp"]


def test_options_of_a_method_are_passed_on(run: Any) -> None:
    assert explain(run, "one.png", "--method", "agf-release(without=A)").code == 0
    result = explain(run, "one.png", "--method", "agf-release(without=nonsense)")
    assert result.code == 2
    assert "nonsense" in result.error


def test_trace_draws_the_terms_of_the_layers(run: Any, folder: Path) -> None:
    result = explain(run, "one.png", "--class", "cup", "--trace", "--method", "agf-release")
    assert result.code == 0
    with Image.open(folder / "out" / "one" / "decomposition-3.png") as picture:
        assert picture.width > 1000  # six terms beside each other


def test_trace_of_a_method_without_terms_is_an_error(run: Any) -> None:
    result = explain(run, "one.png", "--trace", "--method", "gradcam")
    assert result.code == 2
    assert "AGF" in result.error


def test_images_of_the_same_name_get_folders_of_their_own() -> None:
    images = [Path("a/cat.jpg"), Path("b/cat.png"), Path("cat-2.jpg"), Path("cat")]
    assert [f.name for f in explain_command.folders_for(images, Path("out"))] == ["cat", "cat-2", "cat-2-2", "cat-3"]


# ------------------------------------------------------------------------------------------------ bad input


def test_a_broken_image_is_reported_and_the_others_go_on(run: Any, folder: Path) -> None:
    result = explain(run, "broken.png", "one.png", "missing.png", "--json")
    assert result.code == 2
    document = json.loads(result.out)
    assert [image["path"] for image in document["images"]] == ["one.png"]
    assert [image["path"] for image in document["failed"]] == ["broken.png", "missing.png"]
    first, second = result.err.splitlines()
    assert first.startswith("error: ")
    assert "broken.png" in first
    assert "missing.png" in second
    assert (folder / "out" / "one" / "report.json").exists()
    assert not (folder / "out" / "broken").exists()


def test_an_ambiguous_class_lists_the_candidates(run: Any) -> None:
    result = explain(run, "one.png", "--class", "cat")
    assert (result.code, result.out) == (2, "")
    assert "tabby cat" in result.error
    assert "tiger cat" in result.error


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--class", "zebra"], "zebra"),
        (["--class", "4"], "4"),
        (["--top", "5"], "5"),
        (["--method", "agf-relaese"], "agf-release"),
        (["--method", "gradcam(depth=3)"], "depth"),
        (["--model", "efficientnet-lite9"], "efficientnet-lite"),
        (["--weights", "nowhere.safetensors"], "nowhere.safetensors"),
        (["--out", "one.png"], "one.png"),
    ],
)
def test_what_a_user_can_mend_is_one_line_and_code_2(run: Any, arguments: list[str], word: str) -> None:
    result = explain(run, "one.png", *arguments)
    assert (result.code, result.out) == (2, "")
    assert word in result.error


@pytest.mark.parametrize(
    "arguments", [["--class", "cup", "--top", "2"], ["--top", "0"], ["--device", "tpu"], ["--colour", "red"]]
)
def test_wrong_options_end_with_code_2(run: Any, arguments: list[str]) -> None:
    result = explain(run, "one.png", *arguments)
    assert (result.code, result.out) == (2, "")
    assert "Traceback" not in result.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there(run: Any) -> None:
    result = explain(run, "one.png", "--device", "cuda")
    assert result.code == 2
    assert "cuda" in result.error


def broken_explain(*_: Any, **__: Any) -> None:
    raise RuntimeError("first line\nsecond line")


def test_a_bug_is_one_line_that_says_how_to_see_more(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classlens, "explain", broken_explain)
    result = explain(run, "one.png")
    assert result.code == 1
    assert "RuntimeError: first line second line" in result.error
    assert "--debug" in result.error


@pytest.mark.parametrize("debug", [["--debug"], []])
def test_debug_shows_the_traceback(folder: Path, monkeypatch: pytest.MonkeyPatch, debug: list[str]) -> None:
    monkeypatch.setattr(classlens, "explain", broken_explain)
    if not debug:
        monkeypatch.setenv("CLASSLENS_DEBUG", "1")
    with pytest.raises(RuntimeError, match="first line"):
        cli.main([*debug, "explain", "one.png", "--model", "tiny:net"])


def test_ctrl_c_ends_quietly(run: Any, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(classlens, "explain", interrupted)
    result = explain(run, "one.png")
    assert result.code == 130
    assert "Traceback" not in result.err
    assert not (folder / "out").exists()


# ------------------------------------------------------------------------------------------- lists and help


def test_models_lists_the_registry(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    listed = run("models").out
    for name, info in (MODELS | KINDS).items():
        assert name in listed
        assert info.description in listed
        assert (info.install or "") in listed


def test_methods_lists_the_registry(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    listed = run("methods").out
    for name, method in METHODS.items():
        assert name in listed
        assert method.summary in listed


def test_the_defaults_are_those_of_the_library() -> None:
    ours = inspect.signature(cli.explain).parameters
    assert ours["model"].default == inspect.signature(classlens.load).parameters["name"].default
    assert ours["weights"].default == inspect.signature(classlens.load).parameters["weights"].default
    assert ours["method"].default == inspect.signature(classlens.explain).parameters["method"].default


def test_help_teaches_by_examples(run: Any) -> None:
    assert "classlens explain photo.jpg --class tabby --class espresso" in run("explain", "--help").out
    assert run("--version").out.startswith("classlens ")


def test_a_bar_appears_on_stderr_when_it_takes_long(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes stderr for a terminal
    monkeypatch.setattr(bar, "_PATIENCE", 0.0)
    result = explain(run, "one.png", "two.png", "--json")
    assert len(json.loads(result.out)["images"]) == 2
    assert "two.png" in result.err
    assert "1/2" in result.err


def test_the_module_is_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["classlens", "--version"])
    with pytest.raises(SystemExit):
        runpy.run_module("classlens", run_name="__main__")
    assert capsys.readouterr().out.startswith("classlens ")


def test_a_folder_is_explained_picture_by_picture(run: Any, folder: Path) -> None:
    (folder / "photos").mkdir()
    for name in ("two.png", "one.png", "broken.png"):
        (folder / name).rename(folder / "photos" / name)
    found = run("explain", "photos", "--model", "tiny:net")
    assert found.code == 2  # one is broken, and named
    assert "broken.png" in found.error
    assert found.out.index("one") < found.out.index("two")
    assert "2 images" in found.out
    assert "images/s" in found.out
    assert {path.name for path in (folder / "out").iterdir()} == {"one", "two"}
    (folder / "empty").mkdir()
    assert "no images in empty" in run("explain", "empty", "--model", "tiny:net").error


def test_a_folder_is_read_recursively_but_not_what_was_written_into_it(run: Any, folder: Path) -> None:
    (folder / "photos" / "cats").mkdir(parents=True)
    for source, target in (("two.png", "photos/two.png"), ("one.png", "photos/cats/one.png")):
        (folder / source).rename(folder / target)
    for _ in range(2):  # the second time, the figures of the first are there too
        found = run("explain", "photos", "--model", "tiny:net", "--method", "gradcam", "--out", "photos/maps")
        assert (found.code, "2 images" in found.out) == (0, True)
    assert {path.name for path in (folder / "photos" / "maps").iterdir()} == {"one", "two"}


def test_a_name_that_is_no_utf8_is_shown_escaped(folder: Path, run: Any) -> None:
    rename_latin(folder / "one.png")
    done = run("explain", LATIN, "pipe.png", "--model", "tiny:net", "--method", "gradcam")
    assert SHOWN in done.out
    assert (done.code, "pipe.png does not exist" in done.error) == (2, True)
    (folder / "out").rename(folder / "first")
    with odd_files(folder):
        refused = run("explain", LATIN, "pipe.png", "--model", "tiny:net", "--method", "gradcam")
    assert (refused.code, "pipe.png is a pipe or a device" in refused.error) == (2, True)
    assert (folder / "out" / Path(LATIN).stem / "figure.png").is_file()
