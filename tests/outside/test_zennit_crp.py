"""Relevance through channels, held to zennit-crp: a ResNet and a VGG of torchvision, in float64.

Both libraries get the same rules: epsilon in dense layers, positive contributions in convolutions, flat at the image,
no biases. zennit divides a sum by its signed summands and we by their magnitudes; here it gets ours.
"""

from __future__ import annotations

import pytest
import torch
from crp.attribution import CondAttribution
from crp.concepts import ChannelConcept
from torch import Tensor, nn
from zennit.composites import SpecialFirstLayerMapComposite
from zennit.core import BasicHook
from zennit.rules import Epsilon, Flat, Pass, ZPlus
from zennit.torchvision import ResNetCanonizer, VGGCanonizer
from zennit.types import Activation, AvgPool, Convolution, Linear

from classlens.concept.flow import flow
from classlens.core.capture import record
from classlens.methods.featuremaps import named_map
from classlens.models._torchvision import import_torchvision


class AbsoluteSum(BasicHook):
    """R_j = |x_j| / sum_j |x_j| R, for sums and average pools."""

    def __init__(self) -> None:
        super().__init__(
            input_modifiers=[torch.abs],
            output_modifiers=[lambda out: out],
            gradient_mapper=lambda gradient, outputs: [gradient / (out + (out == 0)) for out in outputs],
            reducer=lambda inputs, gradients: inputs[0].abs() * gradients[0],
        )


def _composite(canonizer: object) -> SpecialFirstLayerMapComposite:
    from zennit.layer import Sum

    rules = [
        (Activation, Pass()), (Sum, AbsoluteSum()), (AvgPool, AbsoluteSum()),
        (Convolution, ZPlus(stabilizer=1e-12, zero_params="bias")), (Linear, Epsilon(1e-6, zero_params="bias")),
    ]  # fmt: skip
    first = [(Convolution, Flat(stabilizer=1e-12))]
    return SpecialFirstLayerMapComposite(rules, first, canonizers=[canonizer])


def _network(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = import_torchvision().models.get_model(name, weights=None, num_classes=10).eval().double()
    for module in model.modules():  # statistics as after training, so that folding them changes something
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, 0.0, 0.1)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
            module.eps = 0.0  # the norm that zennit leaves behind a folded layer still divides by sqrt(1 + eps)
    return model


def _theirs(model: nn.Module, x: Tensor, target: int, layer: str, channels: list[int], canonizer: object) -> Tensor:
    asked = [{layer: [channel], "y": [target]} for channel in channels]
    attribution = CondAttribution(model)
    found = attribution(
        x.clone().requires_grad_(), asked, _composite(canonizer), mask_map={layer: ChannelConcept.mask},
        init_rel=lambda out: out.detach(),
    )  # fmt: skip
    return found.heatmap.detach()


@pytest.mark.parametrize(
    ("name", "layer", "canonizer"),
    [
        ("resnet18", "layer3.1", ResNetCanonizer), ("resnet18", "layer2.0", ResNetCanonizer),
        ("vgg11", "features.12", VGGCanonizer), ("vgg11_bn", "features.14", VGGCanonizer),
    ],
)  # fmt: skip
def test_channels_agree(name: str, layer: str, canonizer: type) -> None:
    model, x = _network(name), torch.randn(1, 3, 64, 64).double()
    tape = record(model, x)
    target = int(tape.logits.argmax())
    ours = flow(tape, model, torch.tensor([[target]]), "lrp-epsilon-plus-flat", named_map(tape, layer))
    strongest = ours.relevance[0, 0].abs().sum((1, 2)).topk(8).indices.tolist()
    maps = ours.channels(strongest)[:, 0, 0]
    theirs = _theirs(model, x, target, layer, strongest, canonizer())
    distance = (maps - theirs).flatten(1).norm(dim=1) / theirs.flatten(1).norm(dim=1)
    assert distance.max() < 1e-10
