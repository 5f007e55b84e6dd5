"""Detectors, segmentation networks, encoders and CLIP of other libraries: every answer is right, noted or refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from libraries import NETWORKS, Network, asked, verdict

METHODS = ("agf", "agf-release", "lrp", "gradcam", "layercam", "odam", "gradient", "integrated-gradients(steps=2)")


@cache
def network(name: str) -> Network:
    torch.manual_seed(0)
    return NETWORKS[name]()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", NETWORKS)
def test_every_answer_is_right_noted_or_refused(name: str, method: str) -> None:
    found = verdict(network(name), method)
    assert found.word != "wrong", found.why
    if method in ("agf", "gradient"):  # one forward pass and a rule for every operation: these must answer
        assert found.word in ("ok", "noted"), found


def pixel(key: str | None, at: tuple[int, int]) -> Callable[[Any], Tensor]:
    def read(result: Any) -> Tensor:
        logits = result if key is None else result[key]
        height, width = logits.shape[2:]
        return logits[0, 1, at[1] * height // 96, at[0] * width // 128]

    return read


def of_queries(result: Any) -> Tensor:
    """Mask2Former: the probability of the class, over the queries that show it at the pixel (16,16) of (96,128)."""
    classes, masks = result["class_queries_logits"][0].softmax(1)[:, 1], result["masks_queries_logits"][0].sigmoid()
    return (classes * masks[:, masks.shape[1] * 16 // 96, masks.shape[2] * 16 // 128]).sum()


def best_query(no_object: bool) -> Callable[[Any], Tensor]:
    def read(result: Any) -> Tensor:
        logits = result["logits"][0]
        chances = logits.double().softmax(1)[:, :-1] if no_object else logits.double().sigmoid()
        row, column = divmod(int(chances.argmax()), chances.shape[1])
        return logits[row, column]

    return read


def best_of_yolo(result: Any) -> Tensor:
    return result[0][0, 4:].max().logit()


def like_first(result: Any) -> Tensor:
    vector = result if isinstance(result, Tensor) else result["pooler_output"]
    other = torch.randn(2, vector.shape[1], generator=torch.Generator().manual_seed(1))[0]
    return F.cosine_similarity(vector[0], other, dim=0)


NUMBERS: dict[str, Callable[[Any], Tensor]] = {  # the number of the first question, read from the result by hand
    "transformers: DETR": best_query(True), "transformers: YOLOS": best_query(True),
    "transformers: RT-DETR": best_query(False),
    "ultralytics: YOLOv8n": best_of_yolo, "ultralytics: YOLO11n": best_of_yolo,
    "torchvision: LR-ASPP": pixel("out", (16, 16)), "torchvision: DeepLabV3": pixel("out", (16, 16)),
    "smp: Unet": pixel(None, (16, 16)), "smp: FPN": pixel(None, (16, 16)),
    "transformers: Segformer": pixel("logits", (16, 16)), "transformers: UperNet": pixel("logits", (16, 16)),
    "transformers: Mask2Former": of_queries,
    "transformers: DINOv2": like_first, "timm: ResNet-18 without a head": like_first,
}  # fmt: skip


@contextlib.contextmanager
def norms_by_hand(model: nn.Module) -> Iterator[None]:
    """Batch norms written out: torch's own gradient is wrong where tokens become the map of one image (RT-DETR)."""

    def written_out(norm: nn.BatchNorm2d, x: Tensor) -> Tensor:
        scale = norm.weight / (norm.running_var + norm.eps).sqrt()
        return x * scale[:, None, None] + (norm.bias - norm.running_mean * scale)[:, None, None]

    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.forward = partial(written_out, norm)
    try:
        yield
    finally:
        for norm in norms:
            del norm.forward


@pytest.mark.parametrize("name", NUMBERS)
def test_the_number_and_its_gradient_are_the_network_s_own(name: str) -> None:
    one = network(name)
    e = asked(one, "gradient-x-input")
    x = one.image.clone().requires_grad_()
    number = NUMBERS[name](one.model(x))
    assert float(e.target(0, 0).value(e.logits[0])) == pytest.approx(float(number.detach()), rel=1e-4, abs=1e-5)
    with norms_by_hand(one.model):
        (gradient,) = torch.autograd.grad(NUMBERS[name](one.model(x)), x)
    expected = (gradient * x).sum(1)[0].detach()
    assert expected.any()
    assert float((e.maps[0, 0] - expected).abs().max() / expected.abs().max()) < 1e-3
