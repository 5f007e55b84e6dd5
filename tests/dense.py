"""Small segmentation networks, built as the real ones are: skip connections, pyramids, dilated context, tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 5


def conv(inside: int, out: int, stride: int = 1, dilation: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inside, out, 3, stride, dilation, dilation, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True)
    )


def larger(x: Tensor, like: Tensor) -> Tensor:
    return F.interpolate(x, size=like.shape[2:], mode="bilinear", align_corners=False)


class UNet(nn.Module):
    """Three levels, each joined to the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = conv(3, 8), conv(8, 12, 2), conv(12, 16, 2)
        self.up_b, self.up_a, self.head = conv(28, 12), conv(20, 8), nn.Conv2d(8, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(a)
        c = self.c(b)
        b = self.up_b(torch.cat([larger(c, b), b], 1))
        return self.head(self.up_a(torch.cat([larger(b, a), a], 1)))


class Pyramid(nn.Module):
    """FPN: lateral 1x1 convolutions, added top-down."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = conv(3, 8, 2), conv(8, 12, 2), conv(12, 16, 2)
        self.lateral = nn.ModuleList([nn.Conv2d(n, 10, 1) for n in (8, 12, 16)])
        self.smooth, self.head = conv(10, 10), nn.Conv2d(10, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(a)
        c = self.lateral[2](self.c(b))
        b = self.lateral[1](b)
        b = b + larger(c, b)
        a = self.lateral[0](a)
        return larger(self.head(self.smooth(a + larger(b, a))), x)


class Dilated(nn.Module):
    """DeepLabV3: branches of different dilation, and one that sees the mean of the picture; a dict of two."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(conv(3, 8, 2), conv(8, 12, 2), conv(12, 16))
        self.branches = nn.ModuleList([conv(16, 6), conv(16, 6, dilation=2), conv(16, 6, dilation=4)])
        self.mean = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(16, 6, 1), nn.ReLU())
        self.head, self.aux = nn.Sequential(conv(24, 10), nn.Conv2d(10, CLASSES, 1)), nn.Conv2d(16, CLASSES, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.backbone(x)
        context = larger(self.mean(y), y)
        out = self.head(torch.cat([*(branch(y) for branch in self.branches), context], 1))
        return {"out": larger(out, x), "aux": larger(self.aux(y), x)}


class Attends(nn.Module):
    """Segformer: patches overlap, attention over tokens, an all-linear decoder over two levels."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 12, 7, 4, 3), nn.Conv2d(12, 16, 3, 2, 1)
        self.qkv = nn.ModuleList([nn.Linear(12, 36), nn.Linear(16, 48)])
        self.norms = nn.ModuleList([nn.LayerNorm(12), nn.LayerNorm(16)])
        self.decode = nn.ModuleList([nn.Linear(12, 10), nn.Linear(16, 10)])
        self.fuse, self.head = conv(20, 10), nn.Conv2d(10, CLASSES, 1)

    def stage(self, i: int, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.flatten(2).mT
        q, k, v = self.qkv[i](self.norms[i](tokens)).chunk(3, -1)
        tokens = tokens + F.scaled_dot_product_attention(q, k, v)
        return tokens.mT.unflatten(2, x.shape[2:]), self.decode[i](tokens).mT.unflatten(2, x.shape[2:])

    def forward(self, x: Tensor) -> Tensor:
        y, a = self.stage(0, self.a(x))
        _, b = self.stage(1, self.b(y))
        return larger(self.head(self.fuse(torch.cat([a, larger(b, a)], 1))), x)


DENSE: dict[str, Callable[[], nn.Module]] = {
    "unet": UNet, "pyramid": Pyramid, "dilated": Dilated, "attends": Attends,
}  # fmt: skip


def dense(name: str, seed: int = 0) -> nn.Module:
    """A segmentation network with random weights, in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DENSE[name]()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.normal_(module.running_mean, std=0.3)
                nn.init.uniform_(module.running_var, 0.5, 1.5)
                nn.init.normal_(module.bias, std=0.2)
    return model.eval()
