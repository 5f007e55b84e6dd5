"""What comes along: a network that learnt without labels, and the module within reach of `import classlens`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import classlens
from classlens.demo import picture
from classlens.models.network import fingerprint


def test_the_module_is_there_when_it_is_asked_for() -> None:
    code = (
        "import sys, classlens; assert 'torch' not in sys.modules; assert 'selfsup' in dir(classlens); "
        "print(classlens.selfsup.explain.__module__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "classlens.selfsup.contrast"


def test_the_network_that_comes_along() -> None:
    rotnet = classlens.load("rotnet-96")
    assert rotnet.name == "rotnet-96"
    assert rotnet.labels == ("upright", "turned left", "upside down", "turned right")
    assert not rotnet.model.training
    random = classlens.load("rotnet-96", weights=None)
    assert fingerprint(random) != fingerprint(rotnet) == fingerprint(classlens.load("rotnet-96"))


def test_it_is_explained_by_what_differs() -> None:
    rotnet = classlens.load("rotnet-96")
    image = rotnet.preprocess(picture())
    changed = image.clone()
    changed[:, 30:60, 40:70] = image[:, :30, :30]
    e = classlens.selfsup.explain(rotnet, changed[None], image[None], "lrp")
    inside = torch.zeros(96, 96, dtype=torch.bool)
    inside[25:65, 35:75] = True  # with a rim, as far as a first layer sees

    def share(found: classlens.Explanation) -> float:
        strength = found.maps[0, 0].abs()
        return float(strength[inside].sum() / strength.sum())

    assert e.without is not None
    assert share(e) > 1.3 * share(e.without)


def test_its_own_name_goes_before_a_folder_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rotnet-96").mkdir()
    monkeypatch.chdir(tmp_path)
    assert classlens.load("rotnet-96").labels is not None
