"""Networks that are more than a float32 classifier of pictures: what classlens and its peers do with each.

    python benchmarks/beyond.py

Every row changes one small network: its precision, a wrapper around it, its input. Each library explains the changed
network and the plain float32 one with the same weights. If both maps correlate by at least .99, the row is "right". A
map that is different, constant or not finite is "wrong"; an error is named. Weights are random: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from classlens.errors import ClasslensError
from classlens.models._torchvision import import_torchvision

SIDE, DEPTH, CLASS = 32, 3, 1
RIGHT = 0.99  # the correlation of two maps


def network(channels: int = 3) -> nn.Sequential:
    """A classifier that every library knows how to explain."""
    torch.manual_seed(0)
    layers = nn.Conv2d(channels, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1)
    head = nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)
    return nn.Sequential(*layers, nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), *head).eval()


def pictures(channels: int = 3) -> Tensor:
    return torch.randn(1, channels, SIDE, SIDE, generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True)
class Row:
    """A changed network, and the plain one whose map it should have."""

    model: nn.Module
    images: Tensor = field(default_factory=pictures)
    plain: nn.Module = field(default_factory=network)
    plain_images: Tensor = field(default_factory=pictures)
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


# ---------------------------------------------------------------------------------------------------------- the rows


def half(dtype: torch.dtype) -> Row:
    return Row(network().to(dtype), pictures().to(dtype))


def autocast() -> Row:
    return Row(network(), around=lambda: torch.autocast("cpu", dtype=torch.bfloat16))


def dynamic_int8() -> Row:
    return Row(torch.ao.quantization.quantize_dynamic(network(), {nn.Linear}, dtype=torch.qint8))


def static_int8() -> Row:
    tools = torch.ao.quantization
    wrapped = tools.QuantWrapper(network())
    wrapped.qconfig = tools.get_default_qconfig("x86")  # type: ignore[assignment]
    prepared = tools.prepare(wrapped)
    prepared(pictures())
    return Row(tools.convert(prepared))


class Checkpointed(nn.Module):
    """The network with its middle part checkpointed."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers, self.reentrant = network(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        t = self.layers[:3](x)
        t = torch.utils.checkpoint.checkpoint(self.layers[3:7], t, use_reentrant=self.reentrant)
        out: Tensor = self.layers[7:](t)
        return out


class Rounded(torch.autograd.Function):
    """Straight-through: rounds to 1/4096, and its gradient is that of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (4096 * x).round() / 4096

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


@torch.library.custom_op("classlens_beyond::same", mutates_args=())
def same_without_gradient(x: Tensor) -> Tensor:
    """An operation for which torch has no gradient."""
    return x.clone()


class Between(nn.Module):
    """A function after the first convolution."""

    def __init__(self, do: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers, self.do = network(), do

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers[1:](self.do(self.layers[0](x)))
        return out


def without_gradients(x: Tensor) -> Tensor:
    """A part that its author put into inference mode, to save memory."""
    with torch.inference_mode():
        x = x * 1
    return x.clone()


def straight_through(x: Tensor) -> Tensor:
    """The same rounding as `Rounded`, as most write it."""
    with torch.no_grad():
        added = (4096 * x).round() / 4096 - x
    return x + added


def in_8_bits(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn).to(x.dtype)


class Tagged(Tensor):
    """A tensor with metadata, as libraries for pictures have them."""


def tagged() -> Row:
    model = network()
    for layer in (model[0], model[3]):
        layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Tagged))
    return Row(model)


def sparse() -> Row:
    """Half of the weights of a dense layer are 0, and stored as a sparse matrix."""
    model, plain = network(), network()
    weight = plain[9].weight.data
    weight[weight.abs() < weight.abs().median()] = 0
    model[9].weight = nn.Parameter(weight.to_sparse_csr())
    return Row(model, plain=plain)


def hooked() -> Row:
    model = network()
    model.register_full_backward_hook(lambda module, into, out: tuple(None if g is None else -g for g in into))
    return Row(model)


def sharded() -> Row:
    """FSDP2, in a process group of this process alone."""
    from torch.distributed.fsdp import fully_shard

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    return Row(fully_shard(network(), mesh=mesh))


def identity_after_eval() -> Row:
    model = network().append(nn.Identity())
    return Row(model)


def parametrised() -> Row:
    model = network()
    nn.utils.parametrizations.weight_norm(model[0])  # its module is in training mode
    return Row(model)


def exported() -> Row:
    return Row(torch.export.export(network(), (pictures(),)).module())


def volumes() -> Row:
    """The same slice several times, and kernels that do not look along the depth: every slice gets the flat map."""
    plain, deep = network(), []
    for layer in plain:
        if isinstance(layer, nn.Conv2d):
            conv = nn.Conv3d(layer.in_channels, layer.out_channels, (1, 3, 3), padding=(0, 1, 1))
            conv.weight.data, conv.bias.data = layer.weight.data[:, :, None], layer.bias.data
            deep.append(conv)
        else:
            replaced = {nn.MaxPool2d: nn.MaxPool3d((1, 2, 2)), nn.AdaptiveAvgPool2d: nn.AdaptiveAvgPool3d((1, 4, 4))}
            deep.append(replaced.get(type(layer), layer))
    images = pictures()[:, :, None].expand(-1, -1, DEPTH, -1, -1).contiguous()
    return Row(nn.Sequential(*deep).eval(), images, plain)


def channels(count: int) -> Row:
    """As many channels, of which the network reads the first; the plain one gets three in the same way."""
    models = []
    for size in (3, count):
        model = network(1)
        model[0].weight.data = F.pad(model[0].weight.data, (0, 0, 0, 0, 0, size - 1))
        models.append(model)
    first = pictures(1)
    others = first.flip(3).expand(-1, 12, -1, -1)  # within its range, and never read
    given = {size: torch.cat([first, others[:, : size - 1]], 1) for size in (3, count)}
    return Row(models[1], given[count], models[0], given[3])


ROWS: dict[str, Callable[[], Row]] = {
    "bfloat16 weights": lambda: half(torch.bfloat16),
    "float16 weights": lambda: half(torch.float16),
    "under `torch.autocast`": autocast,
    "dynamic int8 (`quantize_dynamic`)": dynamic_int8,
    "static int8": static_int8,
    "non-reentrant checkpointing": lambda: Row(Checkpointed(False)),
    "reentrant checkpointing": lambda: Row(Checkpointed(True)),
    "a straight-through Function": lambda: Row(Between(Rounded.apply)),
    "straight-through in `torch.no_grad()`": lambda: Row(Between(straight_through)),
    "a custom operation without autograd": lambda: Row(Between(same_without_gradient)),
    "a part in inference mode": lambda: Row(Between(without_gradients)),
    "activations in 8-bit floats": lambda: Row(Between(in_8_bits)),
    "weights of a subclass of `Tensor`": tagged,
    "sparse weights (CSR)": sparse,
    "a full backward hook on the model": hooked,
    "FSDP2 (`fully_shard`)": sharded,
    "`nn.Identity()` added after `eval()`": identity_after_eval,
    "probabilities (a softmax at the end)": lambda: Row(network().append(nn.Softmax(1)).eval()),
    "log-probabilities (a log-softmax)": lambda: Row(network().append(nn.LogSoftmax(1)).eval()),
    "a parametrised layer": parametrised,
    "`torch.fx.symbolic_trace`": lambda: Row(torch.fx.symbolic_trace(network())),
    "`torch.export`: `program.module()`": exported,
    "volumes (B,C,D,H,W)": volumes,
    "1 channel": lambda: channels(1),
    "13 channels": lambda: channels(13),
}


# ------------------------------------------------------------------------------------------------------ the libraries


def ours(method: str) -> Callable[[nn.Module, Tensor], Tensor]:
    def explain(model: nn.Module, images: Tensor) -> Tensor:
        import classlens

        return classlens.explain(model, images, CLASS, method).maps[0, 0]

    return explain


def captum(name: str) -> Callable[[nn.Module, Tensor], Tensor]:
    def explain(model: nn.Module, images: Tensor) -> Tensor:
        import captum.attr

        leaf = images.clone().requires_grad_()
        found: Tensor = getattr(captum.attr, name)(model).attribute(leaf, target=CLASS)
        return found[0].sum(0)

    return explain


def gradcam(model: nn.Module, images: Tensor) -> Tensor:
    from pytorch_grad_cam import GradCAM
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    convolutions = [m for m in model.modules() if "Conv" in type(m).__name__]
    with GradCAM(model=model, target_layers=[convolutions[-1]]) as cam:
        return torch.from_numpy(cam(images, [ClassifierOutputTarget(CLASS)])[0])


def zennit(model: nn.Module, images: Tensor) -> Tensor:
    from zennit.attribution import Gradient
    from zennit.composites import EpsilonPlusFlat

    with Gradient(model=model, composite=EpsilonPlusFlat()) as attributor:
        out = model(images)
        chosen = F.one_hot(torch.tensor([CLASS]), out.shape[1]).to(out)
        found: Tensor = attributor(images.clone().requires_grad_(), chosen)[1]
        return found[0].sum(0)


LIBRARIES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "classlens `agf`": ours("agf"),
    "classlens `lrp`": ours("lrp"),
    "captum `Saliency`": captum("Saliency"),
    "captum `IntegratedGradients`": captum("IntegratedGradients"),
    "pytorch-grad-cam `GradCAM`": gradcam,
    "zennit `EpsilonPlusFlat`": zennit,
}


# ------------------------------------------------------------------------------------------------------------ verdicts


def correlation(found: Tensor, wanted: Tensor) -> float:
    """Of two maps; a volume is compared slice by slice, and its worst slice counts."""
    found, wanted = found.detach().double(), wanted.detach().double()
    if found.dim() > wanted.dim():
        return min(correlation(part, wanted) for part in found)
    if not torch.isfinite(found).all() or found.std() == 0:
        return 0.0
    return float(torch.corrcoef(torch.stack([found.flatten(), wanted.flatten()]))[0, 1])


def verdict(row: Row, explain: Callable[[nn.Module, Tensor], Tensor]) -> str:
    """Right with its correlation, wrong, refused by a line of classlens, or the error."""
    wanted = explain(copy.deepcopy(row.plain), row.plain_images)
    try:
        with row.around():
            found = explain(row.model, row.images)
        alike = correlation(found, wanted)
    except ClasslensError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"error: {type(error).__name__}"
    return f"right, {alike:.3f}" if alike >= RIGHT else f"**wrong**, {alike:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=sorted(ROWS), default=list(ROWS), metavar="ROW")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    import_torchvision()
    print("| | " + " | ".join(LIBRARIES) + " |")
    print("|---" * (1 + len(LIBRARIES)) + "|")
    for name in given.rows:
        cells = [verdict(ROWS[name](), explain) for explain in LIBRARIES.values()]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
