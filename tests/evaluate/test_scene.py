from __future__ import annotations

from pathlib import Path

import pytest
import torch
from world import make

import classlens
from classlens.evaluate.scene import maps_of
from classlens.models import LoadedModel, Preprocess
from classlens.models.network import Network
from networks import Plain
from quick import ANYWHERE

SLOW = ("meaningful-perturbation", "rise")


def plain() -> LoadedModel:
    torch.manual_seed(0)
    return LoadedModel("plain", Plain().eval(), Preprocess(resize=36, crop=32), None)


@pytest.mark.parametrize("method", ANYWHERE)
def test_one_recorded_forward_gives_the_maps_that_explain_gives(method: str) -> None:
    loaded = plain()
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    targets = torch.tensor([[0, 3], [6, 2]])
    tested = Network(loaded)
    tape = tested.record(images)
    if method in SLOW:
        targets, images = targets[:1, :1], images[:1]
        tape = tested.record(images)
    maps_of(tested, tape, targets, "agf-release", seed=5)  # another method has used the tape before
    ours = maps_of(tested, tape, targets, method, seed=5)
    options = {"seed": 5} if "seed" in classlens.METHODS[method].options else {}
    theirs = classlens.explain(loaded, images, targets, method, **options).maps
    assert torch.equal(ours, theirs)


def test_methods_that_draw_repeat_themselves_and_disturb_nobody() -> None:
    tested = Network(plain())
    tape = tested.record(torch.randn(1, 3, 32, 32))
    drawing = [name for name in classlens.METHODS if name in ("random", "smoothgrad")]
    state = torch.get_rng_state()
    for name in drawing:
        one, two, other = (maps_of(tested, tape, torch.tensor([[1]]), name, seed) for seed in (1, 1, 2))
        assert torch.equal(one, two), name
        assert not torch.equal(one, other), name
        written = [maps_of(tested, tape, torch.tensor([[1]]), f"{name}(seed=7)", seed) for seed in (1, 2)]
        assert torch.equal(*written), name
    assert torch.equal(torch.get_rng_state(), state)


def test_the_world_is_as_its_tests_want_it(labelled: Path) -> None:
    """The network of the other tests recognises every picture."""
    loaded = make()
    for file in sorted(labelled.glob("*/*.png")):
        logits = loaded.model(loaded.preprocess(file)[None])
        assert loaded.labels is not None
        assert loaded.labels[int(logits.argmax())] == file.parent.name
