"""Questions: each finds its numbers in the network's result, or says in one line why it does not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import classlens
from classlens.core.targets import Question
from classlens.core.targets.candidates import overlap, suppressed
from classlens.core.targets.questions import in_words
from classlens.errors import ClasslensError, MethodError, TargetError
from classlens.methods import METHODS
from classlens.models import LoadedModel, Preprocess
from dense import CLASSES, DENSE, dense
from detectors import small_detector
from networks import build, pictures
from quick import QUICK

ATTENTION = ("libragrad", "legrad", "attention-rollout", "generic-attention", "transformer-attribution")
TAKE = [name for name, method in METHODS.items() if method.scalars and name not in ATTENTION]
REFUSE = [name for name, method in METHODS.items() if not method.scalars]
CONTROLS = ("random", "centre", "sobel")
# By construction these show more than what is read: averages, masks, and the paper's shift of every pixel.
ELSEWHERE = ("gradcam", "rise", "meaningful-perturbation", "agf-paper")
SIZE = (48, 64)


def run(model: Any, x: Any, targets: Any, method: str, **more: Any) -> classlens.Explanation:
    return classlens.explain(model, x, targets, method, **QUICK.get(method, {}), **more)


def out(result: Any) -> Tensor:
    return result["out"] if isinstance(result, dict) else result


# ------------------------------------------------------------------ every question by every method: right, or refused

Scalar = Callable[[Any], Tensor]  # what the network returns for one image -> the number that the question is about
MASK = torch.zeros(SIZE, dtype=torch.bool)
MASK[8:20, 30:50] = True
VECTOR = torch.linspace(-1, 2, 7)
ASKED: dict[str, tuple[Callable[[], nn.Module], Question, Scalar]] = {
    "pixel of a U-Net": (lambda: dense("unet"), classlens.region(2, pixel=(50, 9)), lambda r: r[0, 2, 9, 50]),
    "mask of DeepLab": (lambda: dense("dilated"), classlens.region(1, MASK), lambda r: r["out"][0, 1][MASK].mean()),
    "box minus pixel of a pyramid": (
        lambda: dense("pyramid"),
        classlens.region(3, box=(8, 10, 20, 30)) - 0.5 * classlens.region(0, pixel=(3, 4)),
        lambda r: r[0, 3, 10:30, 8:20].mean() - 0.5 * r[0, 0, 4, 3],
    ),
    "query": (
        lambda: small_detector("queries"), classlens.detection(1), lambda r: r["logits"][0][query_of(r, 1)],
    ),
    "cell": (lambda: small_detector("one tensor"), classlens.detection(0), lambda r: logit_of_best(r)),
    "neuron": (lambda: build("residual"), classlens.neuron("c2", 3, (2, 1)), lambda r: r),
    "likeness": (
        lambda: build("plain"), classlens.like(VECTOR), lambda r: F.cosine_similarity(r[0], VECTOR.to(r), dim=0),
    ),
}  # fmt: skip


def query_of(result: Any, number: int) -> tuple[int, int]:
    chances = result["logits"][0].softmax(1)[:, :-1]
    i = int(chances.max(1).values.argsort(descending=True)[number])
    return i, int(chances[i].argmax())


def logit_of_best(result: Any) -> Tensor:
    """The largest class logit of all cells: the sigmoid does not change the order."""
    return torch.cat([y[0].flatten() for y in result[1]]).max()


def loaded(model: nn.Module) -> LoadedModel:
    return LoadedModel("small", model, Preprocess(resize=SIZE, crop=None), tuple("abcde"))


def asked_of(name: str) -> tuple[Any, nn.Module, Question, Scalar]:
    make, question, scalar = ASKED[name]
    model = make().double()
    return (loaded(model) if name == "query" else model), model, question, scalar


def by_hand(name: str, model: nn.Module, scalar: Scalar, x: Tensor) -> tuple[Tensor, Tensor]:
    """The number and its gradient at the image, without this package."""
    leaf = x.clone().requires_grad_()
    if name == "neuron":
        kept: list[Tensor] = []
        handle = model.c2.register_forward_hook(lambda module, args, output: kept.append(output.clone()))
        model(leaf)
        handle.remove()
        value = kept[0][0, 3, 2, 1]
    else:
        value = scalar(model(leaf))
    return value.detach(), torch.autograd.grad(value, leaf)[0]


@pytest.mark.parametrize("name", ASKED)
def test_the_gradient_is_autograds_of_the_same_number(name: str) -> None:
    model, plain, question, scalar = asked_of(name)
    x = pictures(1, SIZE).double()
    value, gradient = by_hand(name, plain, scalar, x)
    e = run(model, x, question, "gradient-x-input")
    assert float(e.target().value(e.logits[0])) == pytest.approx(float(value), rel=1e-9)
    torch.testing.assert_close(e.maps[0, 0], (gradient * x).sum(1)[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", TAKE)
@pytest.mark.parametrize("name", ASKED)
def test_every_method_takes_every_question(name: str, method: str) -> None:
    model, _, question, _ = asked_of(name)
    x = pictures(2, SIZE).double()
    e = run(model, x, question, method)
    assert e.maps.shape == (2, 1, *SIZE)
    assert torch.isfinite(e.maps).all()
    assert e.maps[0].any() or method in ("gradcam", "layercam", "odam")  # those keep what is positive alone
    alone = run(model, x[1:], question, method)
    likeness = F.cosine_similarity(e.maps[1].flatten(), alone.maps[0].flatten(), dim=0)
    assert likeness > 1 - 1e-6 or not alone.maps.any()
    if method.startswith("lrp") or method == "deeplift-shap":
        assert e.report.conservation.max() < (1e-4 if "epsilon" in method else 1e-6)  # a stabiliser keeps a little
    if method.startswith("lrp"):  # relevance starts with the number itself
        values = torch.stack([e.target(i).value(e.logits[i]) for i in range(2)])
        torch.testing.assert_close(e.report.started[:, 0], values, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("method", ATTENTION)
def test_methods_that_need_attention_refuse_networks_without(method: str) -> None:
    with pytest.raises(MethodError, match=f"{method} needs attention, and this network has none") as caught:
        run(dense("unet"), pictures(1, SIZE), classlens.region(2, pixel=(50, 9)), method)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("method", REFUSE)
def test_methods_that_need_a_class_refuse_questions_in_a_line(method: str) -> None:
    with pytest.raises(MethodError, match=rf"{method} contrasts a class with the others: .*class 2 at pixel \(50, 9\)"):
        run(dense("unet"), pictures(1, SIZE), classlens.region(2, pixel=(50, 9)), method)


@pytest.mark.parametrize("method", [m for m in TAKE if m not in (*CONTROLS, *ELSEWHERE)])
def test_the_evidence_of_a_pixel_lies_in_what_it_reads(method: str) -> None:
    """Two pixels of a U-Net far apart: nothing outside the reach of each, found by autograd on random pictures."""
    model, x = dense("unet").double(), pictures(1, (96, 128)).double()
    where = {"layer": "up_a"} if method == "layercam" else {}
    e = run(model, x, [classlens.region(2, pixel=(20, 15)), classlens.region(2, pixel=(110, 80))], method, **where)
    for k, (px, py) in enumerate([(20, 15), (110, 80)]):
        seen = torch.zeros(96, 128, dtype=torch.bool)
        reach = 16  # strides, kernels and bilinear upsampling add up to less
        seen[max(py - reach, 0) : py + reach + 1, max(px - reach, 0) : px + reach + 1] = True
        if method in ("agf", "fullgrad", "smoothgrad"):  # smoothed, or a coarse map enlarged: nearly all of it
            share = e.maps[0, k][seen].abs().sum() / e.maps[0, k].abs().sum()
            assert share > (0.2 if method != "smoothgrad" else 0.99)
        else:
            assert not e.maps[0, k][~seen].any()
        assert e.maps[0, k][seen].any()


# ----------------------------------------------------------------------------------------------------------- regions


@pytest.mark.parametrize("name", DENSE)
def test_a_region_without_a_place_is_where_the_network_finds_the_class(name: str) -> None:
    model, x = dense(name).double(), pictures(1, SIZE).double()
    logits = out(model(x))[0].detach()
    index = int(logits.argmax(0).flatten().mode().values)
    e = run(model, x, classlens.region(index), "lrp")
    expected = logits[index][logits.argmax(0) == index].mean()
    torch.testing.assert_close(e.report.started[0, 0], expected, rtol=1e-6, atol=1e-9)
    assert e.name() == f"class {index} where the network finds it"


def test_a_coarser_output_gets_the_share_of_the_mask_on_each_cell() -> None:
    model = nn.Sequential(nn.Conv2d(3, CLASSES, 4, stride=4)).eval().double()
    x, mask = pictures(1, SIZE).double(), torch.zeros(SIZE)
    mask[4:10, 8:12] = 1  # a cell and a half
    e = run(model, x, classlens.region(1, mask), "lrp")
    y = model(x)[0, 1].detach()
    assert float(e.report.started) == pytest.approx(float((y[1, 2] + 0.5 * y[2, 2]) / 1.5), rel=1e-9)
    pixel = run(model, x, classlens.region(1, pixel=(11, 7)), "lrp")
    assert float(pixel.report.started) == pytest.approx(float(y[1, 2]), rel=1e-9)


# ------------------------------------------------------------------------------------------------------------- boxes


def test_boxes_are_found_by_place_and_class() -> None:
    model, x = loaded(small_detector("queries").double()), pictures(1, SIZE).double()
    first = classlens.explain(model, x, classlens.detection(0), "lrp")
    at = first.target().found.outlines[0]
    same = classlens.explain(model, x, classlens.box(at.left, at.top, at.right, at.bottom), "lrp")
    assert torch.equal(first.maps, same.maps)
    assert first.name().startswith("box 0: ")
    other = classlens.explain(model, x, classlens.detection(1), "lrp")
    assert not torch.allclose(first.maps, other.maps)
    with pytest.raises(TargetError, match=r"no detection overlaps the box \(0, 0, 2, 1\) by half; the nearest is box"):
        classlens.explain(model, x, classlens.box(0, 0, 2, 1))


def test_two_boxes_have_maps_of_their_own() -> None:
    model, x = small_detector("one tensor").double(), pictures(1, SIZE).double()
    e = classlens.explain(model, x, [classlens.detection(0), classlens.detection(3)], "lrp")
    for k in range(2):
        at = e.target(0, k).found.outlines[0]
        rows, columns = e.maps[0, k].nonzero().T
        centre = (at.left + at.right) / 2, (at.top + at.bottom) / 2
        assert abs(columns - centre[0]).max() <= 16  # a cell reads a patch of 4 pixels, or 3x3 of them
        assert abs(rows - centre[1]).max() <= 16
    with torch.no_grad():
        scores = model(x)[0][0, 4:].max(0).values
    assert e.name().endswith(f"{100 * float(scores.max()):.0f} %")


def test_non_maximum_suppression_keeps_the_best_of_each_class_and_place() -> None:
    boxes = torch.tensor([[0.0, 0, 10, 10], [1, 0, 11, 10], [1, 0, 11, 10], [20, 20, 30, 30]])
    scores, labels = torch.tensor([0.5, 0.9, 0.4, 0.04]), torch.tensor([1, 1, 2, 1])
    assert suppressed(boxes, scores, labels) == [1, 2]
    assert float(overlap(boxes[:1], boxes[1:2])) == pytest.approx(9 / 11)


# ---------------------------------------------------------------------------------------------- likeness, text, neurons


class ChannelsLast(nn.Module):
    """A block that keeps channels last, as windowed transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.block, self.head = nn.Conv2d(3, 12, 4, 4), nn.Linear(12, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.patch(x).permute(0, 2, 3, 1)).mean((1, 2)))


@pytest.mark.parametrize("size", [(32, 32), (48, 32)])
def test_a_neuron_of_a_layer_with_channels_last_is_refused(size: tuple[int, int]) -> None:
    """Its index would silently mean a row."""
    model, x = ChannelsLast().eval(), torch.rand(1, 3, *size)
    assert classlens.explain(model, x, classlens.neuron("patch", 3), "gradient").maps.any()
    with pytest.raises(TargetError, match="which looks like channels last"):
        classlens.explain(model, x, classlens.neuron("block", 3), "gradient")


def test_likeness_to_an_image_is_the_cosine_of_embeddings(tmp_path: Path) -> None:
    model, x = build("plain").double(), pictures(2, SIZE).double()
    y = model(x).detach()
    e = run(model, x[:1], [classlens.like(x[1:]), classlens.unlike(y[1])], "lrp")
    expected = F.cosine_similarity(y[0], y[1], dim=0)
    assert e.report.started[0].tolist() == pytest.approx([float(expected), -float(expected)], rel=1e-6)
    torch.testing.assert_close(e.maps[0, 0], -e.maps[0, 1])
    assert [e.name(0, k) for k in range(2)] == ["likeness to the other image", "minus likeness to the vector"]


def test_text_asks_the_models_text_tower() -> None:
    model, x = build("plain").double(), pictures(1, SIZE).double()
    asked: list[Any] = []

    def embed_text(texts: Any) -> Tensor:
        asked.extend(texts)
        return torch.stack([VECTOR if "cat" in one else -VECTOR.flip(0) for one in texts])

    clip = LoadedModel("clip", model, Preprocess(resize=SIZE, crop=None), None, embed_text=embed_text)
    e = run(clip, x, classlens.text("a cat") - classlens.text("a dog"), "lrp")
    y = model(x)[0].detach()
    expected = F.cosine_similarity(y, VECTOR.double(), dim=0) + F.cosine_similarity(y, VECTOR.flip(0).double(), dim=0)
    assert float(e.report.started) == pytest.approx(float(expected), rel=1e-6)
    assert asked == ["a cat", "a dog"]
    assert e.question() == "evidence for the text 'a cat' minus the text 'a dog'"


@pytest.mark.parametrize("layer", ["features.1", "features.2", "features", "head.3"])
def test_a_layer_that_is_overwritten_later_is_read_as_it_was(layer: str) -> None:
    """The ReLU after features.1 works in place."""
    model, x = build("plain").double(), pictures(2, SIZE).double()
    kept: list[Tensor] = []
    module = model.get_submodule(layer)
    handle = module.register_forward_hook(lambda module, args, output: kept.append(output.detach().clone()))
    model(x)
    handle.remove()
    for method in ("lrp", "integrated-gradients"):
        e = run(model, x, classlens.neuron(layer, 3), method)
        expected = kept[0][:, 3].flatten(1).mean(1) if kept[0].dim() == 4 else kept[0][:, 3]
        values = [float(e.target(i).value(e.logits[i])) for i in range(2)]
        assert values == pytest.approx(expected.tolist(), rel=1e-9)


# ------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: classlens.region(1, torch.zeros(SIZE)), "the mask is empty"),
        (lambda: classlens.region(1, MASK, pixel=(1, 2)), "one way, not as mask and pixel"),
        (lambda: classlens.region(1, torch.ones(3, 3)), r"the mask has shape \(3, 3\), but the input is \(48, 64\)"),
        (lambda: classlens.region(1, pixel=(64, 3)), r"pixel \(64, 3\) lies outside the input, 64 pixels wide and"),
        (lambda: classlens.region(1, box=(5, 5, 5, 9)), "left < right"),
        (lambda: classlens.region(1, box=(500, 5, 600, 9)), "lies outside the input"),
        (lambda: classlens.region(9, pixel=(1, 1)), "class 9 is out of range; the output has classes 0..4"),
        (lambda: classlens.region("person"), "no class names, so 'person' cannot be found"),
        (lambda: classlens.neuron("up_bb", 1), r"no operation was recorded in a layer 'up_bb'; did you mean up_b"),
        (lambda: classlens.neuron("up_b", 99), "has channels 0..11, not 99"),
        (lambda: classlens.neuron("up_b", 1, (99, 0)), r"has positions \(24, 32\), so there is no position \(99, 0\)"),
        (lambda: classlens.text("a cat"), "the network has no text tower, .* the text 'a cat'"),
        (lambda: classlens.text(" "), "a text is a string with words in it"),
        (lambda: classlens.like(torch.ones(4)), r"needs an embedding \(B,D\); this network has none"),
        (lambda: classlens.detection(0), r"boxes need a detector: .* returns a tensor \(1, 5, 48, 64\)"),
        (lambda: classlens.detection(-1), "counted from 0, so there is no box -1"),
        (lambda: classlens.region(1, pixel=(1, 1)) + 3, "3 cannot be combined with a question"),
        (lambda: classlens.region(1, pixel=(1, 1)) * "a", "multiplied by a number, not by 'a'"),
        (lambda: [classlens.region(1, pixel=(1, 1)), 3], "3 cannot be mixed with other questions"),
        (lambda: 1, r"output has shape \(1, 5, 48, 64\), .* ask with classlens.region"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said_in_a_line(ask: Callable[[], Any], message: str) -> None:
    with pytest.raises(ClasslensError, match=message) as caught:
        classlens.explain(dense("unet"), pictures(1, SIZE), ask())
    assert "\n" not in str(caught.value)


def test_a_box_that_is_not_there_and_labels_that_are_needed() -> None:
    model, x = small_detector("queries"), pictures(1, SIZE)
    with pytest.raises(TargetError, match=r"there is no box 99; the detector finds boxes 0\.\.\d"):
        classlens.explain(loaded(model), x, classlens.detection(99))
    with pytest.raises(TargetError, match="6 outputs for each box: give its labels"):
        classlens.explain(model, x, classlens.detection(0))
    with pytest.raises(TargetError, match="rather_than works only with classes"):
        classlens.explain(loaded(model), x, classlens.detection(0), rather_than=1)


def test_a_class_that_the_network_finds_nowhere_brings_those_it_finds() -> None:
    model, x = dense("unet"), pictures(1, SIZE)
    with torch.no_grad():
        model.head.bias[3] = -100
    with pytest.raises(TargetError, match=r"finds class 3 at no pixel; .* a class that it finds: class"):
        classlens.explain(model, x, classlens.region(3))


def test_questions_print_as_words() -> None:
    assert in_words([(1, "a"), (-1, "b"), (0.5, "c")]) == "a minus b plus 0.5 × c"
    assert in_words([(-2, "a")]) == "minus 2 × a"
    one, other = classlens.text("a"), classlens.text("b")
    assert (2 * one - other * 0.5).parts == ((2.0, one), (-0.5, other))
    assert (-(one + other)).parts == ((-1.0, one), (-1.0, other))
