"""Networks of other libraries that answer other questions than classes, with random weights, and what to ask them.

Each is built as its users build it. The questions of a network are two of a kind that differ in place or in words, so
their maps must differ too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import classlens
from classlens.core.targets.questions import Question
from classlens.errors import ClasslensError
from detectors import torchvision_detector

CLASSES = 5
NAMES = tuple(f"thing {i}" for i in range(CLASSES))


@dataclass(frozen=True, eq=False)
class Network:
    """A network, an image, and two questions that need different maps."""

    model: Any  # an nn.Module, or a LoadedModel
    image: Tensor
    questions: tuple[Question, Question]
    labels: Sequence[str] | None = None


def image(height: int = 96, width: int = 128) -> Tensor:
    """A picture with structure: smooth noise in [0,1]."""
    coarse = torch.rand(1, 3, height // 16, width // 16, generator=torch.Generator().manual_seed(0))
    return torch.nn.functional.interpolate(coarse, size=(height, width), mode="bicubic").clamp(0, 1)


def lively(model: nn.Module, std: float | None = None) -> nn.Module:
    """Random statistics of normalisations and larger weights of heads: untrained outputs are all alike otherwise."""
    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.1)
        last = any(word in name.lower() for word in ("classif", "class_embed", "class_labels", "head", "predictor"))
        if std and last and isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.normal_(module.weight, std=std)
    for name, parameter in model.named_parameters():
        if ("quer" in name and "embed" in name) or "detection_tokens" in name:
            nn.init.normal_(parameter, std=2.0)
        elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "out_proj.weight", "o_proj.weight")):
            nn.init.normal_(parameter, std=0.5)
    return model.eval()


def boxes(second: int = 1) -> tuple[Question, Question]:
    return classlens.detection(0), classlens.detection(second)


def pixels() -> tuple[Question, Question]:
    return classlens.region(1, pixel=(16, 16)), classlens.region(1, pixel=(112, 80))


def texts() -> tuple[Question, Question]:
    return classlens.text("a photo of a cat"), classlens.text("red grass")


# ---------------------------------------------------------------------------------------------------------- detectors


def of_torchvision(name: str) -> Network:
    return Network(torchvision_detector(name), image(), boxes())


def detr() -> Network:
    import transformers

    config = transformers.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None,
        backbone_config=transformers.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], layer_type="basic",
            out_features=["stage4"],
        ),
        num_queries=6, d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=32, decoder_ffn_dim=32,
        encoder_attention_heads=2, decoder_attention_heads=2, num_labels=CLASSES,
    )  # fmt: skip
    return Network(lively(transformers.DetrForObjectDetection(config), 1.0), image(), boxes(), NAMES)


def rt_detr() -> Network:
    import transformers

    backbone = transformers.RTDetrResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = transformers.RTDetrConfig(
        backbone_config=backbone, use_timm_backbone=False, backbone=None, encoder_in_channels=[16, 24, 32],
        encoder_hidden_dim=32, encoder_ffn_dim=32, decoder_ffn_dim=32, d_model=32, num_queries=6, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, decoder_in_channels=[32, 32, 32], num_denoising=0,
        num_labels=CLASSES, anchor_image_size=None, eval_size=None,
    )  # fmt: skip
    return Network(lively(transformers.RTDetrForObjectDetection(config), 0.3), image(), boxes(5), NAMES)


def yolos() -> Network:
    import transformers

    config = transformers.YolosConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=[96, 128],
        patch_size=16, num_detection_tokens=6, num_labels=CLASSES, use_mid_position_embeddings=False,
    )  # fmt: skip
    return Network(lively(transformers.YolosForObjectDetection(config), 1.0), image(), boxes(), NAMES)


def yolo(file: str) -> Network:
    from ultralytics.nn.tasks import DetectionModel

    model = DetectionModel(file, nc=CLASSES, verbose=False)
    head = model.model[-1]
    for tower in head.cv3:  # class logits
        nn.init.normal_(tower[-1].weight, std=1.0)
        nn.init.zeros_(tower[-1].bias)
    return Network(lively(model), image(96, 128), boxes())


# ------------------------------------------------------------------------------------------------------- segmentation


def torchvision_segmenter(name: str) -> Network:
    from classlens.models._torchvision import import_torchvision

    build = getattr(import_torchvision().models.segmentation, name)
    model = build(weights=None, weights_backbone=None, num_classes=CLASSES)
    return Network(lively(model, 0.3), image(), pixels())


def segformer() -> Network:
    import transformers

    config = transformers.SegformerConfig(
        hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=16,
        num_labels=CLASSES,
    )  # fmt: skip
    return Network(lively(transformers.SegformerForSemanticSegmentation(config), 0.3), image(), pixels())


def upernet() -> Network:
    import transformers

    backbone = transformers.ConvNextConfig(
        hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], out_features=["stage1", "stage2", "stage3", "stage4"]
    )
    config = transformers.UperNetConfig(
        backbone_config=backbone, backbone=None, hidden_size=16, num_labels=CLASSES, auxiliary_in_channels=24
    )
    return Network(lively(transformers.UperNetForSemanticSegmentation(config), 0.3), image(), pixels())


def mask2former() -> Network:
    import transformers

    backbone = transformers.SwinConfig(
        image_size=96, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2], window_size=3,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = transformers.Mask2FormerConfig(
        backbone_config=backbone, feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_layers=1,
        decoder_layers=2, num_attention_heads=2, dim_feedforward=32, encoder_feedforward_dim=32, num_queries=6,
        num_labels=CLASSES,
    )  # fmt: skip
    return Network(lively(transformers.Mask2FormerForUniversalSegmentation(config), 0.3), image(), pixels())


def smp(name: str) -> Network:
    import segmentation_models_pytorch

    model = getattr(segmentation_models_pytorch, name)("resnet18", encoder_weights=None, classes=CLASSES)
    return Network(lively(model, 0.3), image(), pixels())


# -------------------------------------------------------------------------------------------- texts, likeness, neurons


def hf_clip(kind: str) -> Network:
    from texts import hf_model, tokenizer

    model = hf_model(kind)
    loaded = classlens.LoadedModel(kind, model, _Processor(tokenizer()), None)
    return Network(loaded, image(32, 32), texts())


class _Processor:
    """Only the tokenizer is asked for: the image is given as a tensor."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, picture: Any) -> Any:
        raise AssertionError("the image is a tensor")


def open_clip_vit() -> Network:
    import open_clip

    torch.manual_seed(0)
    vision = {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8}
    text = {"context_length": 20, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}
    model = open_clip.CLIP(embed_dim=16, vision_cfg=vision, text_cfg=text)
    nn.init.normal_(model.token_embedding.weight, std=0.3)
    return Network(model.eval(), image(32, 32), texts())


def open_clip_resnet() -> Network:
    import open_clip

    torch.manual_seed(0)
    vision = {"image_size": 64, "layers": [1, 1, 1, 1], "width": 16, "head_width": 16}
    text = {"context_length": 20, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}
    model = open_clip.CLIP(embed_dim=16, vision_cfg=vision, text_cfg=text)
    nn.init.normal_(model.token_embedding.weight, std=0.3)
    return Network(lively(model), image(64, 64), texts())


def dinov2() -> Network:
    import transformers

    config = transformers.Dinov2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=56, patch_size=14
    )
    torch.manual_seed(0)
    others = torch.randn(2, 32, generator=torch.Generator().manual_seed(1))
    asked = classlens.like(others[0]), classlens.like(others[1])
    return Network(transformers.Dinov2Model(config).eval(), image(56, 56)[..., :56, :56], asked)


def timm_encoder() -> Network:
    import timm

    model = timm.create_model("resnet18", num_classes=0)
    others = torch.randn(2, 512, generator=torch.Generator().manual_seed(1))
    return Network(lively(model), image(64, 64), (classlens.like(others[0]), classlens.like(others[1])))


def neurons(name: str, layers: tuple[str, str]) -> Network:
    import timm

    first, second = (classlens.neuron(layer, 3) for layer in layers)
    return Network(lively(timm.create_model(name)), image(224, 224), (first, second))


# ------------------------------------------------------------------------------------------------------------ verdicts


@dataclass(frozen=True)
class Verdict:
    """How a method answers: "ok", "same" (one map for all targets, as it is described), "noted", "refused", "wrong"."""

    word: str
    why: str = ""


def asked(network: Network, method: str) -> Any:
    """The explanation of both questions."""
    # Without its compiled operations, torchvision compiles roi_align when it is called, and would compile the recorder.
    with torch.compiler.set_stance("force_eager"):
        return classlens.explain(network.model, network.image, [list(network.questions)], method, labels=network.labels)


def verdict(network: Network, method: str) -> Verdict:
    """Whether a method answers both questions with maps that can be right, says what is wrong, or refuses."""
    described = classlens.METHODS[method.split("(")[0]]
    try:
        e = asked(network, method)
    except ClasslensError as error:
        return Verdict("wrong", "an error of several lines") if "\n" in str(error) else Verdict("refused", str(error))
    except Exception as error:
        return Verdict("wrong", f"{type(error).__name__}: {error}")
    if e.maps.shape != (1, 2, *network.image.shape[2:]) or not torch.isfinite(e.maps).all():
        return Verdict("wrong", f"maps {tuple(e.maps.shape)}")
    a, b = e.maps[0].flatten(1).double()
    empty = not a.any() or not b.any()
    alike = float(torch.nn.functional.cosine_similarity(a, b, dim=0)) > 1 - 1e-6
    if (empty or (alike and described.class_specific)) and not e.report.notes:
        return Verdict("wrong", "an empty map without a note" if empty else "one map for two targets without a note")
    if e.report.notes:
        return Verdict("noted", "; ".join(e.report.notes))
    return Verdict("same" if alike else "ok")


NETWORKS: dict[str, Callable[[], Network]] = {
    **{f"torchvision: {label}": partial(of_torchvision, name) for label, name in {
        "SSDlite": "ssdlite320_mobilenet_v3_large", "RetinaNet": "retinanet_resnet50_fpn",
        "FCOS": "fcos_resnet50_fpn"}.items()},
    "transformers: DETR": detr, "transformers: RT-DETR": rt_detr, "transformers: YOLOS": yolos,
    "ultralytics: YOLOv8n": partial(yolo, "yolov8n.yaml"), "ultralytics: YOLO11n": partial(yolo, "yolo11n.yaml"),
    **{f"torchvision: {label}": partial(torchvision_segmenter, name) for label, name in {
        "LR-ASPP": "lraspp_mobilenet_v3_large", "DeepLabV3": "deeplabv3_mobilenet_v3_large"}.items()},
    **{f"smp: {name}": partial(smp, name) for name in ("Unet", "FPN", "DeepLabV3Plus", "Segformer")},
    "transformers: Segformer": segformer, "transformers: UperNet": upernet, "transformers: Mask2Former": mask2former,
    "transformers: CLIP": partial(hf_clip, "CLIP"), "transformers: SigLIP": partial(hf_clip, "Siglip"),
    "open_clip: ViT": open_clip_vit, "open_clip: ResNet": open_clip_resnet,
    "transformers: DINOv2": dinov2, "timm: ResNet-18 without a head": timm_encoder,
    "timm: ResNet-18": partial(neurons, "resnet18", ("layer2", "layer3")),
    "timm: ViT": partial(neurons, "vit_tiny_patch16_224", ("blocks.3", "blocks.7")),
    "torchvision: Faster R-CNN": partial(of_torchvision, "fasterrcnn_mobilenet_v3_large_320_fpn"),
}  # fmt: skip
