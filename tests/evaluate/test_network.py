from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from world import make

import classlens
from classlens.core.capture import record
from classlens.evaluate import network
from classlens.evaluate.network import Network, Stopwatch, fingerprint, framed, images_per_forward, short_name
from classlens.models import LoadedModel, Preprocess
from networks import Plain

SLOW = ("meaningful-perturbation", "rise")


def plain() -> LoadedModel:
    torch.manual_seed(0)
    return LoadedModel("plain", Plain().eval(), Preprocess(resize=36, crop=32), None)


@pytest.mark.parametrize("method", list(classlens.METHODS))
def test_one_recorded_forward_gives_the_maps_that_explain_gives(method: str) -> None:
    loaded = plain()
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    targets = torch.tensor([[0, 3], [6, 2]])
    tested = Network(loaded)
    tape = tested.record(images)
    if method in SLOW:
        targets, images = targets[:1, :1], images[:1]
        tape = tested.record(images)
    tested.maps(tape, targets, "agf-release", seed=5)  # another method has used the tape before
    ours = tested.maps(tape, targets, method, seed=5)
    options = {"seed": 5} if "seed" in classlens.METHODS[method].options else {}
    theirs = classlens.explain(loaded, images, targets, method, **options).maps
    assert torch.equal(ours, theirs)


def test_methods_that_draw_repeat_themselves_and_disturb_nobody() -> None:
    tested = Network(plain())
    tape = tested.record(torch.randn(1, 3, 32, 32))
    drawing = [name for name in classlens.METHODS if name in ("random", "smoothgrad")]
    state = torch.get_rng_state()
    for name in drawing:
        one, two, other = (tested.maps(tape, torch.tensor([[1]]), name, seed) for seed in (1, 1, 2))
        assert torch.equal(one, two), name
        assert not torch.equal(one, other), name
        written = [tested.maps(tape, torch.tensor([[1]]), f"{name}(seed=7)", seed) for seed in (1, 2)]
        assert torch.equal(*written), name
    assert torch.equal(torch.get_rng_state(), state)


def test_the_number_of_classes_is_asked_of_the_network() -> None:
    assert Network(plain()).classes == 7


def test_a_fingerprint_sees_weights_and_preprocessing() -> None:
    loaded = plain()
    other = copy.deepcopy(loaded)
    assert fingerprint(loaded) == fingerprint(other)
    with torch.no_grad():
        other.model.head[3].bias[0] += 1e-6
    assert fingerprint(loaded) != fingerprint(other)
    assert fingerprint(loaded) != fingerprint(LoadedModel("x", loaded.model, Preprocess(crop=31), None))


def test_names_do_not_tell_where_things_lie() -> None:
    assert short_name("/home/someone/nets/resnet50/card.json") == "resnet50"
    assert short_name("/home/someone/nets/resnet50") == "resnet50"
    assert short_name("../cards/vgg.json") == "vgg"
    assert short_name("timm:resnet50.a1_in1k") == "timm:resnet50.a1_in1k"


def test_the_whole_picture_is_squashed() -> None:
    assert framed(Preprocess(resize=256, crop=224), "model") == Preprocess(resize=256, crop=224)
    whole = framed(Preprocess(resize=256, crop=224), "whole")
    assert (whole.resize, whole.crop, whole.fit) == ((224, 224), None, "squash")


def test_memory_decides_how_many_go_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 2, 1))
    model = torch.nn.Sequential(model, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    tape = record(model.eval(), torch.randn(2, 3, 10, 10))
    # The convolution's output and the ReLU's, 8 channels each, are the most that is alive at once.
    assert network.peak_bytes(tape) == 2 * (8 + 8) * 100 * 4
    assert images_per_forward(tape, 2 * 5 * 16 * 100 * 4 / 1e9, "cpu") == 5
    assert images_per_forward(tape, 1e-9, "cpu") == 1
    monkeypatch.setattr(network, "_REUSED_BLOCK", 3 * 8 * 100 * 4)
    assert images_per_forward(tape, None, "cpu") == 3


def test_time_is_counted_once() -> None:
    watch = Stopwatch()
    with watch("outer"), watch("inner"):
        end = network.time.perf_counter() + 0.02
        while network.time.perf_counter() < end:
            pass
    taken = watch.take()
    assert taken["inner"] > 0.02 > taken["outer"]
    assert watch.take() == {}


def test_the_world_is_as_its_tests_want_it(labelled: Path) -> None:
    """The network of the other tests recognises every picture."""
    loaded = make()
    for file in sorted(labelled.glob("*/*.png")):
        logits = loaded.model(loaded.preprocess(file)[None])
        assert loaded.labels is not None
        assert loaded.labels[int(logits.argmax())] == file.parent.name
