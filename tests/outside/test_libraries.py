"""Networks of other libraries, as their users build them. `make outside` runs these tests in an environment of its own.

The weights are random and nothing is downloaded. Each network is held to the same promise: the logits are the
network's own, the maps are finite and not empty, relevance is accounted for, and the network is left as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import classlens
from classlens.core.capture import Picker, pick_output

Built = tuple[nn.Module, Tensor, Picker]


def images(side: int, channels: int = 3) -> Tensor:
    return torch.randn(2, channels, side, side, generator=torch.Generator().manual_seed(0))


def hf_vit() -> Built:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=8,
        num_labels=5,
    )  # fmt: skip
    return ViTForImageClassification(config), images(32), None


def hf_resnet() -> Built:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=5)
    return ResNetForImageClassification(config), images(32), None


def hf_convnext() -> Built:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=5)
    return ConvNextForImageClassification(config), images(32), None


def open_clip_image_tower() -> Built:
    from open_clip.transformer import VisionTransformer

    tower = VisionTransformer(
        image_size=32, patch_size=8, width=32, layers=2, heads=2, mlp_ratio=2.0, output_dim=16
    )  # fmt: skip
    return tower, images(32), None


def smp_unet() -> Built:
    import segmentation_models_pytorch as smp

    model = smp.Unet("resnet18", encoder_weights=None, classes=4)
    return model, images(64), lambda masks: masks.mean((2, 3))


def monai_densenet() -> Built:
    from monai.networks.nets import DenseNet121

    return DenseNet121(spatial_dims=2, in_channels=1, out_channels=4), images(64, channels=1), None


def peft_lora() -> Built:
    from peft import LoraConfig, get_peft_model

    base, x, output = hf_vit()
    names = {name.split(".")[-1] for name, module in base.named_modules() if isinstance(module, nn.Linear)}
    layers = sorted(name for name in names if name.startswith(("q", "v")))
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=layers, init_lora_weights=False))
    return adapted, x, output


def ultralytics_classifier() -> Built:
    from ultralytics.nn.tasks import ClassificationModel

    return ClassificationModel("yolov8n-cls.yaml", nc=5, verbose=False), images(64), 1


NETWORKS: dict[str, Callable[[], Built]] = {
    "transformers: ViT": hf_vit, "transformers: ResNet": hf_resnet, "transformers: ConvNeXt": hf_convnext,
    "open_clip: image tower": open_clip_image_tower, "segmentation_models_pytorch: U-Net": smp_unet,
    "monai: DenseNet-121": monai_densenet, "peft: LoRA": peft_lora, "ultralytics: classifier": ultralytics_classifier,
}  # fmt: skip


def state(model: nn.Module) -> dict[str, Any]:
    return {
        "weights": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "gradients": {name for name, parameter in model.named_parameters() if parameter.grad is not None},
        "modes": {name: module.training for name, module in model.named_modules()},
    }


@pytest.mark.parametrize("method", ["agf", "lrp", "gradcam", "integrated-gradients(steps=4)"])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_other_libraries(name: str, method: str) -> None:
    torch.manual_seed(0)
    model, x, output = NETWORKS[name]()
    model.eval()
    before = state(model)
    e = classlens.explain(model, x, classlens.top(2), method, output=output)
    with torch.no_grad():
        assert torch.allclose(e.logits, pick_output(model(x), output), atol=1e-5)
    assert e.maps.shape == (2, 2, *x.shape[2:])
    assert torch.isfinite(e.maps).all()
    assert (e.maps.abs().amax((2, 3)) > 0).all()
    if classlens.METHODS[method.split("(")[0]].conserves:
        assert e.report.conservation.max() < 1e-3
    after = state(model)
    assert {k: after[k] for k in ("gradients", "modes")} == {k: before[k] for k in ("gradients", "modes")}
    assert all(torch.equal(after["weights"][key], old) for key, old in before["weights"].items())
