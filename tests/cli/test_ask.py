"""The options of `classlens explain` for networks that are not classifiers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from classlens import cli
from classlens.cli.questions import region_of
from classlens.core.targets import Box
from classlens.models import LoadedModel, Preprocess
from dense import dense
from detectors import small_detector
from texts import LONGEST, hf_folder

NAMES = ("background", "person", "cat", "dog", "car")


def segmenter() -> LoadedModel:
    """For --model test_ask:segmenter."""
    return LoadedModel("unet", dense("unet"), Preprocess(resize=(48, 64), crop=None), NAMES)


def detector() -> LoadedModel:
    return LoadedModel("cells", small_detector("one tensor"), Preprocess(resize=(48, 64), crop=None), NAMES)


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "photo.png"
    Image.linear_gradient("L").convert("RGB").save(path)
    return path


@pytest.fixture
def ask(photo: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `classlens explain` on the photo: the exit code, and all that it prints."""

    def call(*options: str) -> tuple[Any, str]:
        arguments = ["explain", str(photo), "--method", "lrp", "--out", str(photo.parent / "out"), *options]
        with pytest.raises(SystemExit) as stopped:
            cli.main(arguments)
        said = capsys.readouterr()
        return stopped.value.code or 0, said.out + said.err

    return call


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def test_regions_and_boxes_are_named_and_drawn(photo: Path, ask: Any) -> None:
    asked = ["--region", "cat@40,20", "--region", "3@5,5,30,30", "--json"]
    code, text = ask("--model", "test_ask:segmenter", *asked)
    assert code == 0, text
    classes = json.loads(text)["images"][0]["classes"]
    assert [one["name"] for one in classes] == ["cat at pixel (40, 20)", "dog in the box (5, 5, 30, 30)"]
    code, text = ask("--model", "test_ask:detector", "--box", "0", "--neuron", "b:2")
    assert code == 0, text
    assert "box 0: " in text
    assert "channel 2 of b" in text
    overlays = list((photo.parent / "out" / "photo").glob("0--1-box-0*.png"))
    assert (255, 212, 0) in {pixel for _, pixel in Image.open(overlays[0]).getcolors(1 << 20)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "test_ask:detector", "--box", "9999"], "there is no box 9999"),
        (["--model", "test_ask:detector", "--text", "a cat"], "the network has no text tower"),
        (["--model", "test_ask:segmenter", "--region", "cta@3,3"], "no class is named 'cta'; nearest: 2 cat"),
        (["--model", "test_ask:segmenter", "--region", "cat@3"], "cannot read --region"),
        (["--model", "test_ask:segmenter", "--neuron", "up_bb:1"], "did you mean up_b"),
        (["--model", "test_ask:segmenter", "--neuron", "up_b"], "cannot read --neuron"),
        (["--model", "test_ask:segmenter", "--region", "cat", "--class", "1"], "or classes"),
    ],
)
def test_bad_questions_exit_with_2(ask: Any, options: list[str], message: str) -> None:
    code, text = ask(*options)
    assert code == 2
    assert message in " ".join(text.replace("│", " ").split())


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> str:
    return hf_folder(tmp_path_factory.mktemp("clip"), "CLIP")


def test_texts_are_asked(photo: Path, ask: Any, clip: str) -> None:
    code, text = ask("--model", clip, "--text", "a photo of a cat", "--text", "a dog")
    assert code == 0, text
    assert "the text 'a photo of a cat'" in text
    assert (photo.parent / "out" / "photo" / "figure.png").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--text", "  "], "a text is a string with words in it"),
        (["--text", "a " * 40], f"has 42 tokens, but the text tower reads at most {LONGEST}; shorten it"),
        (["--top", "2"], "has no classes; ask with --text"),
        (["--box", "0"], "boxes need a detector"),
        (["--region", "0"], "needs an output for each pixel"),
        (["--neuron", "both.vision_model.encodr:1"], "did you mean both.vision_model.encoder"),
        (["--neuron", "both.visual_projection:99"], "has channels 0..15, not 99"),
        (["--like", "missing.png"], "missing.png does not exist"),
    ],
)
def test_bad_questions_to_clip_exit_with_2(ask: Any, clip: str, options: list[str], message: str) -> None:
    code, text = ask("--model", clip, *options)
    assert code == 2
    assert message in " ".join(text.replace("│", " ").split())


def test_a_region_is_read_as_written() -> None:
    assert region_of("traffic light@4,5").pixel == (4, 5)
    assert region_of("a@1,2,3,4").box == Box(1, 2, 3, 4)
    assert region_of("person").category == "person"
