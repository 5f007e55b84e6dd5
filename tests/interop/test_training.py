"""Pictures of maps while a network trains: in evaluation mode, and without a trace."""

import io

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image
from torch import nn

import classlens
from classlens import render
from classlens.errors import MethodError
from classlens.interop.training import drawn, evaluating


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


@pytest.fixture
def images():
    return torch.rand(2, 3, 24, 32, generator=torch.Generator().manual_seed(1))


def test_a_training_network_is_drawn_as_in_evaluation_mode_and_left_as_it_was(images):
    model = network().train()
    model[1].eval()  # a frozen batch norm stays frozen
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.inference_mode():  # as Lightning validates
        pixels = drawn(model, images, [[1, 2]] * 2)
    assert [module.training for module in model] == [True, False, True, True, True, True, True]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    e = classlens.explain(network().eval(), images, [[1, 2]] * 2)
    expected = np.asarray(Image.open(io.BytesIO(render.png(e.figure()))).convert("RGB"))
    assert np.array_equal(pixels, expected)


def test_modes_are_restored_after_an_error():
    model = network().train()
    during = []

    def fail():
        with evaluating(model):
            during.append(model[3].training)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert during == [False]
    assert model.training
    assert model[3].training


def test_tensorboard_holds_a_picture_for_each_step(images, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    from classlens.interop.tensorboard import log_maps

    model = network()
    with SummaryWriter(str(tmp_path)) as writer:
        for step in (0, 10):
            log_maps(writer, model, images, 1, step=step, method="gradcam")
    events = EventAccumulator(str(tmp_path)).Reload()
    logged = events.Images("classlens")
    assert [event.step for event in logged] == [0, 10]
    assert logged[0].encoded_image_string.startswith(b"\x89PNG")
    assert logged[0].width > 500


@pytest.mark.parametrize("signed", [True, False])
def test_a_shared_scale_compares_amounts(signed):
    strong = np.random.default_rng(0).normal(size=(9, 9)) if signed else np.random.default_rng(0).random((9, 9))
    strong.flat[0] = 0.0
    maps = np.stack([strong, 0.1 * strong])
    scale = render.shared_scale(maps, signed)
    one, tenth = (render.scaled(evidence, signed, scale) for evidence in maps)
    inside = np.abs(one) < 1
    assert inside.sum() > 70
    assert np.allclose(tenth[inside], 0.1 * one[inside])
    assert np.allclose(*(render.scaled(evidence, signed) for evidence in maps))  # on its own scale it looks the same


def test_the_colour_bar_of_a_fixed_scale_has_numbers(images):
    e = classlens.explain(network().eval(), images, 1, "agf")
    texts = [text.get_text() for text in e.figure(scale=0.25).texts]
    assert "against -0.25" in texts
    assert "0.25 for" in texts
    _, high = render.shared_scale(e.maps, True)
    shared = e.figure(scale="shared")
    assert f"{high:.2g} for" in [text.get_text() for text in shared.texts]
    for text in shared.texts:  # all of it within the figure
        box = text.get_window_extent(FigureCanvasAgg(shared).get_renderer())
        assert 0 <= box.x0 < box.x1 <= shared.bbox.width
    assert "for" in [text.get_text() for text in e.figure().texts]
    for wrong in ("common", 0, -1.0, float("nan"), float("inf"), True):
        with pytest.raises(MethodError, match='"own", "shared" or a positive number'):
            e.figure(scale=wrong)
