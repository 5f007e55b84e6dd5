"""The numbers of the authors' released code, in golden/; golden/README.md says what each file holds."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from classlens.models._torchvision import import_torchvision

FOLDER = Path(__file__).resolve().parent / "golden"
SMALL = ("vgg_id", "vgg_bn_pool", "resnet_basic", "resnet_bottleneck")
LARGE = ("vgg11_smallhead", "resnet18", "resnet50", "vgg19")


def load(name: str) -> tuple[nn.Module, Tensor, Any]:
    """(model, input, arrays) of a case, in float64."""
    arrays = np.load(FOLDER / f"{name}.npz")
    meta = json.loads(str(arrays["meta"]))
    model = _build(meta)
    if name in SMALL:
        model.load_state_dict({k[3:]: torch.from_numpy(arrays[k]) for k in arrays.files if k.startswith("sd/")})
        x = torch.from_numpy(arrays["x"])
    else:
        model.load_state_dict(_drawn_weights(model, meta, arrays))
        mean, std = (np.array(v)[:, None, None] for v in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
        x = torch.from_numpy(((arrays["image_u8"].astype(np.float64) / 255 - mean) / std).astype(np.float32))
    return model.eval().double(), x.double(), arrays


def targets(arrays: Any) -> Tensor:
    """(B,K) targets of a case."""
    rows = torch.as_tensor(arrays["targets"])
    return rows.reshape(rows.shape[0], -1).T.contiguous()


def tolerance(arrays: Any) -> float:
    """Relative L2 that an independent float64 implementation can be held to: 1e-6, more where the case is unstable."""
    sensitivity = float(arrays["f64_sensitivity"])
    return 1e-6 * max(1.0, 1e-9 * sensitivity if sensitivity == sensitivity else 1.0)


def stored(maps: Tensor, arrays: Any) -> Tensor:
    """The places of our maps (...,H,W) that a case stores: all, or of the large cases every second row and column."""
    step = int(arrays["map_step"]) if "map_step" in arrays.files else 1
    return maps[..., ::step, ::step]


def distance(ours: Tensor, theirs: Any) -> float:
    """Relative L2."""
    theirs = torch.as_tensor(theirs).double()
    return float((ours.double() - theirs).norm() / theirs.norm())


def _build(meta: dict[str, Any]) -> nn.Module:
    models = import_torchvision().models
    if meta["family"] == "vgg":
        channels = [c for c in meta["cfg"] if c != "M"][-1]
        height, width = meta["pool"]
        hidden, classes = meta["hid"], meta["num_classes"]
        return nn.Sequential(
            OrderedDict(
                features=models.vgg.make_layers(meta["cfg"], batch_norm=meta["bn"]),
                avgpool=nn.AdaptiveAvgPool2d((height, width)),
                flatten=nn.Flatten(),
                classifier=nn.Sequential(
                    nn.Linear(channels * height * width, hidden), nn.ReLU(), nn.Dropout(),
                    nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(), nn.Linear(hidden, classes),
                ),
            )
        )  # fmt: skip
    block = {"basic": models.resnet.BasicBlock, "bottleneck": models.resnet.Bottleneck}[meta["block"]]
    model = models.ResNet(block, meta["layers"], num_classes=meta["num_classes"])
    model.inplanes = meta["stem"]
    model.conv1, model.bn1 = nn.Conv2d(3, meta["stem"], 7, 2, 3, bias=False), nn.BatchNorm2d(meta["stem"])
    for i, (width, depth) in enumerate(zip(meta["widths"], meta["layers"], strict=True)):
        setattr(model, f"layer{i + 1}", model._make_layer(block, width, depth, stride=1 if i == 0 else 2))
    model.fc = nn.Linear(meta["widths"][3] * block.expansion, meta["num_classes"])
    return model


def _drawn_weights(model: nn.Module, meta: dict[str, Any], arrays: Any) -> dict[str, Tensor]:
    """The recipe of the large cases: one random stream, the state dict in order."""
    random, state = np.random.RandomState(meta["seed"]), model.state_dict()
    keys = [k for k in state if not k.endswith("num_batches_tracked")]
    norms = {k.rsplit(".", 1)[0] for k in keys if k.endswith("running_mean")}
    last = [k for k in keys if k.endswith(".weight") and state[k].dim() == 2][-1]
    branch_end = ".bn3" if meta.get("block") == "bottleneck" else ".bn2"
    for key in keys:
        module, leaf = key.rsplit(".", 1)
        shape = tuple(state[key].shape)
        if leaf.startswith("running_"):
            drawn = arrays["bn/" + key]
        elif module in norms and leaf == "weight":
            drawn = (0.5 + random.random_sample(shape)) * (0.15 if module.endswith(branch_end) else 1.0)
        elif module in norms:
            drawn = 0.1 * random.standard_normal(shape)
        elif leaf == "bias":
            drawn = 0.05 * random.standard_normal(shape) - 0.05
        else:
            drawn = random.standard_normal(shape) * np.sqrt(2.0 / np.prod(shape[1:]))
            drawn = drawn * float(arrays["last_linear_gain"]) if key == last else drawn
        state[key] = torch.from_numpy(np.asarray(drawn, np.float64).astype(np.float32))
    return state
