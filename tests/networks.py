"""Small networks that do what real ones do and what trips explanation libraries up; each is seeded and in eval mode."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Plain(nn.Module):
    """conv-bn-relu twice with pooling, dropout, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
            nn.MaxPool2d(2), nn.Conv2d(8, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.3), nn.Linear(12, 7))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class DenseHead(nn.Module):
    """A flattened feature map under three linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 8, 3, padding=1)
        self.head = nn.Sequential(nn.Linear(8 * 16, 20), nn.ReLU(), nn.Linear(20, 12), nn.ReLU(), nn.Linear(12, 7))

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.a(x)), 2)
        x = F.max_pool2d(F.relu(self.b(x)), 2)
        return self.head(torch.flatten(F.adaptive_avg_pool2d(x, 4), 1))


class Residual(nn.Module):
    """Skip connections, one reused in-place ReLU, a projection, `+=`."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (8, 8, 12, 12, 12))
        self.c1, self.c2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.Conv2d(8, 12, 3, stride=2, padding=1)
        self.c3, self.skip = nn.Conv2d(12, 12, 1), nn.Conv2d(8, 12, 1, stride=2, bias=False)
        self.relu, self.fc = nn.ReLU(inplace=True), nn.Linear(12, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norms[0](self.stem(x)))
        out = self.norms[1](self.c1(x))
        out += x
        x = self.relu(out)
        out = self.norms[3](self.c3(self.relu(self.norms[2](self.c2(x)))))
        x = F.relu(out + self.norms[4](self.skip(x)))
        return self.fc(x.mean((2, 3)))


class Dense(nn.Module):
    """Concatenation, BatchNorm before the activation, average pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.n1, self.n2 = nn.BatchNorm2d(8), nn.BatchNorm2d(12)
        self.c1, self.c2 = nn.Conv2d(8, 4, 3, padding=1), nn.Conv2d(12, 8, 1)
        self.fc = nn.Linear(8, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.cat([x, self.c1(F.relu(self.n1(x)))], 1)
        x = F.avg_pool2d(self.c2(F.relu(self.n2(x))), 2)
        return self.fc(torch.relu(x).mean([2, 3]))


class Gated(nn.Module):
    """Squeeze-and-excite, depthwise and dilated and grouped convolutions, relu6, hardswish."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=8)
        self.grouped = nn.Conv2d(8, 12, 3, padding=1, groups=2)
        self.squeeze, self.excite = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)
        self.fc = nn.Linear(12, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self.norm(self.stem(x)))
        x = F.hardswish(self.depthwise(x))
        gate = F.hardsigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1)))))
        x = self.grouped(gate * x)
        return self.fc(F.adaptive_avg_pool2d(F.silu(x), 1).flatten(1))


class ConvHead(nn.Module):
    """Classes made by a 1x1 convolution before the pool; parallel branches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2)
        self.small, self.large = nn.Conv2d(8, 6, 1), nn.Conv2d(8, 6, 3, padding=1)
        self.classes = nn.Conv2d(12, 7, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.stem(x)), 3, 2, ceil_mode=True)
        x = torch.cat([F.relu(self.small(x), inplace=True), F.relu(self.large(x), inplace=True)], dim=1)
        return torch.flatten(F.adaptive_avg_pool2d(F.relu(self.classes(x)), (1, 1)), 1)


class Modern(nn.Module):
    """Layer norm over permuted channels, GELU, layer scale, a strided patch stem."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(3, 8, 4, stride=4), nn.Conv2d(8, 12, 2, stride=2)
        self.mix, self.norm = nn.Conv2d(8, 8, 7, padding=3, groups=8), nn.LayerNorm(8)
        self.up, self.back = nn.Linear(8, 16), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.full((8, 1, 1), 0.7))
        self.group, self.fc = nn.GroupNorm(3, 12), nn.Linear(12, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.norm(self.mix(x).permute(0, 2, 3, 1))
        y = self.back(F.gelu(self.up(y))).permute(0, 3, 1, 2)
        x = self.group(self.down(x + self.scale * y))
        return self.fc(x.mean([-2, -1]))


class Awkward(nn.Module):
    """In-place on a view, a filled buffer, an even 'same' kernel, reflection, split and shuffle, no_grad inside."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, padding="same")
        self.mirror = nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect")
        self.fc = nn.Linear(8, 7)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x[:, :4].relu_()
        half, rest = torch.chunk(x, 2, dim=1)
        buffer = torch.zeros_like(x)
        buffer[:, :4] = half * 0.5
        buffer[:, 4:] = F.relu(rest)
        x = buffer.reshape(-1, 2, 4, *buffer.shape[2:]).transpose(1, 2).reshape(buffer.shape)
        x = F.elu(self.mirror(x), inplace=True)
        return self.fc(x.flatten(2).sum(-1) / x[0, 0].numel())


class Dictionary(nn.Module):
    """Gives a dict with the logits and more."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Plain()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.body.features(x)
        return {"logits": self.body.head(features), "features": features}


class Tokens(nn.Module):
    """A class token and patches of any number, two blocks with attention, a head on the class token."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.token = nn.Conv2d(3, 12, 4, stride=4), nn.Parameter(torch.randn(1, 1, 12))
        self.norms = nn.ModuleList(nn.LayerNorm(12) for _ in range(5))
        self.mixes = nn.ModuleList(nn.Linear(12, 36) for _ in range(2))
        self.ups, self.downs = (nn.ModuleList(nn.Linear(*n) for _ in range(2)) for n in ((12, 24), (24, 12)))
        self.head = nn.Linear(12, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        for i in range(2):
            q, k, v = self.mixes[i](self.norms[2 * i](x)).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            x = x + self.downs[i](F.gelu(self.ups[i](self.norms[2 * i + 1](x))))
        return self.head(self.norms[4](x[:, 0]))


class Volume(nn.Module):
    """For volumes and videos: a stem that strides space alone, a skip, pools, a branch that is enlarged again."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv3d(3, 6, 3, (1, 2, 2), 1, bias=False), nn.BatchNorm3d(6)
        self.space, self.time = (
            nn.Conv3d(6, 6, (1, 3, 3), padding=(0, 1, 1)),
            nn.Conv3d(6, 6, (3, 1, 1), padding=(1, 0, 0)),
        )
        self.down, self.skip = nn.Conv3d(6, 8, 3, 2, 1), nn.Conv3d(6, 8, 1, 2, bias=False)
        self.deep, self.fc = nn.Conv3d(8, 8, 3, 2, 1), nn.Linear(8, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = F.max_pool3d(F.relu(x + self.time(F.relu(self.space(x)))), (1, 2, 2))
        x = F.relu(self.down(x) + self.skip(x))
        below = F.interpolate(F.relu(self.deep(x)), size=x.shape[2:], mode="trilinear")
        return self.fc(F.adaptive_avg_pool3d(F.avg_pool3d(x + below, (1, 2, 2), ceil_mode=True), 1).flatten(1))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "plain": Plain, "dense-head": DenseHead, "residual": Residual, "dense": Dense, "gated": Gated,
    "conv-head": ConvHead, "modern": Modern, "awkward": Awkward, "dictionary": Dictionary,
}  # fmt: skip
WITH_ATTENTION: dict[str, Callable[[], nn.Module]] = {"tokens": Tokens}
VOLUMES: dict[str, Callable[[], nn.Module]] = {"volume": Volume}  # their images are (B,C,D,H,W)
RELU_LIKE = ("plain", "dense-head", "residual", "dense", "conv-head")


def build(name: str, seed: int = 0) -> nn.Module:
    """A network of the table with random weights and BatchNorm statistics that are not the trivial ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = (NETWORKS | VOLUMES | WITH_ATTENTION)[name]()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d | nn.BatchNorm3d):
                nn.init.normal_(module.running_mean, std=0.3)
                nn.init.uniform_(module.running_var, 0.5, 1.5)
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias, std=0.2)
    return model.eval()


def pictures(batch: int = 2, size: tuple[int, int] = (32, 32), seed: int = 1) -> Tensor:
    """Random smooth pictures, so that neighbouring pixels are alike as in photographs."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(batch, 3, 6, 6, generator=generator)
    return F.interpolate(coarse, size=size, mode="bilinear", align_corners=False)


def volumes(batch: int = 2, size: tuple[int, int, int] = (4, 32, 32), seed: int = 1) -> Tensor:
    """The same, smooth along three axes."""
    coarse = torch.randn(batch, 3, 3, 6, 6, generator=torch.Generator().manual_seed(seed))
    return F.interpolate(coarse, size=size, mode="trilinear", align_corners=False)


def inputs(name: str, batch: int) -> Tensor:
    """Images for a network of the tables."""
    return volumes(batch) if name in VOLUMES else pictures(batch)
