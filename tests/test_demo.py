"""The demo: a real picture, a real network, both classes found where they are."""

from __future__ import annotations

import io
import runpy
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import classlens
from classlens import demo, render

SCENE = Path(__file__).parents[1] / "tools" / "demo_scene.py"


def test_the_demo_writes_its_figure_and_says_what_it_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    explain = classlens.explain
    monkeypatch.setattr(demo, "explain", lambda *a, **k: made.append(explain(*a, **k)) or made[-1])
    path = demo.run(tmp_path / "out")
    assert path == tmp_path / "out" / "demo.png"
    with Image.open(path) as figure:
        assert figure.width > 2 * figure.height  # the picture and two overlays
    printed = capsys.readouterr().out
    assert str(path) in printed
    assert render.summary(made[0]) in printed

    # One call, two classes, each found where a person sees it: the cat above, the cup below.
    (explanation,) = made
    assert [explanation.label(i) for i in explanation.targets[0].tolist()] == ["Egyptian cat", "espresso"]
    assert min(explanation.probability(0, k) for k in (0, 1)) > 0.1
    cat, espresso = (render.shares(evidence)[0] for evidence in explanation.maps[0])
    assert sum(share for cell, share in cat.items() if cell.startswith("top")) > 0.6
    assert sum(share for cell, share in espresso.items() if cell.startswith("bottom")) > 0.6
    assert espresso["bottom-centre"] == max(espresso.values())


def test_the_picture_is_what_its_script_makes() -> None:
    pytest.importorskip("skimage")
    scene = runpy.run_path(str(SCENE))["scene"]()
    with Image.open(io.BytesIO(demo.picture())) as shipped:
        assert shipped.size == scene.size
        difference = np.abs(np.asarray(shipped, float) - np.asarray(scene, float))
    assert difference.mean() < 3  # the loss of JPEG
    assert len(demo.picture()) < 150_000
