"""Networks in disguise: the same computation with other tensors or spellings gets the same map, or is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import classlens
from classlens.core.capture import record
from classlens.errors import CaptureError, ImageError, ModelError
from classlens.methods import METHODS
from networks import pictures
from quick import ANYWHERE, QUICK

METHODS_TRIED = ["agf", "agf-release", "attnlrp", "lrp", "gradient", "smoothgrad(samples=2)", "fullgrad"]
SHIFT = torch.randn(1, 6, 12, 12, generator=torch.Generator().manual_seed(7))
KERNEL = torch.randn(6, 6, 3, 3, generator=torch.Generator().manual_seed(8)) / 7
BIAS = torch.randn(6, generator=torch.Generator().manual_seed(9))


class Tagged(Tensor):
    """A tensor with metadata, as libraries for pictures have them."""


class Net(nn.Module):
    """Two convolutions with a step between them."""

    def __init__(self, step: Callable[[Tensor], Tensor] = lambda t: t) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Conv2d(6, 8, 3)
        self.hidden, self.last, self.step = nn.Linear(8 * 25, 10), nn.Linear(10, 5), step
        self.norm.running_mean.uniform_(-1, 1)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        t = self.step(F.relu(self.norm(self.first(x))))
        t = F.max_pool2d(F.relu(self.second(t)), 2).flatten(1)
        return self.last(F.relu(self.hidden(t)))


def in_inference_mode(t: Tensor) -> Tensor:
    with torch.inference_mode():
        t = t * 2
    return t.clone()


def rounded_to_8_bits(t: Tensor) -> Tensor:
    return torch.quantize_per_tensor(t, 1e-3, 0, torch.qint32).dequantize()


SAME = {  # a step, and the same step written plainly
    "type_as": (lambda t: t + SHIFT.double().type_as(t), lambda t: t + SHIFT),
    "to another tensor's type": (lambda t: t + SHIFT.to(t), lambda t: t + SHIFT),
    "a weight that is already there": (
        lambda t: F.conv2d(t, KERNEL.to(t), padding=1),
        lambda t: F.conv2d(t, KERNEL, padding=1),
    ),
    "expand_as": (lambda t: t + SHIFT.expand_as(t), lambda t: t + SHIFT),
    "broadcast_tensors": (lambda t: sum(torch.broadcast_tensors(t, SHIFT)), lambda t: t + SHIFT),
    "a bias after the layer": (
        lambda t: F.conv2d(t, KERNEL, padding=1) + BIAS[:, None, None],
        lambda t: F.conv2d(t, KERNEL, BIAS, padding=1),
    ),
    "a bias in place": (
        lambda t: F.conv2d(t, KERNEL, BIAS, padding=1).add_(BIAS[:, None, None]),
        lambda t: F.conv2d(t, KERNEL, 2 * BIAS, padding=1),
    ),
    "inference mode inside": (in_inference_mode, lambda t: t * 2),
    "rounded to whole numbers and back": (rounded_to_8_bits, lambda t: t),
    "8-bit floats": (lambda t: t.to(torch.float8_e5m2).to(torch.float32), lambda t: t),
}  # fmt: skip


def same(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).norm() <= 2e-3 * b.norm()) and bool(b.any())


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # torch's, of quantised tensors
@pytest.mark.parametrize("method", METHODS_TRIED)
@pytest.mark.parametrize("case", SAME)
def test_the_same_step_written_otherwise(case: str, method: str) -> None:
    disguised, plain = SAME[case]
    found = classlens.explain(Net(disguised), pictures(1, (12, 12)), 1, method)
    assert same(found.maps, classlens.explain(Net(plain), pictures(1, (12, 12)), 1, method).maps)
    assert any("float32" in note for note in found.report.notes) == case.startswith(("rounded", "8-bit"))


def of_a_subclass(model: Net) -> None:
    model.second.weight = nn.Parameter(model.second.weight.detach().as_subclass(Tagged))
    model.norm.running_mean = model.norm.running_mean.as_subclass(Tagged)


def sparse(model: Net) -> None:
    model.hidden.weight = nn.Parameter(model.hidden.weight.detach().to_sparse_csr())


def eight_bits(model: Net) -> None:
    model.hidden.weight.data = model.hidden.weight.data.to(torch.float8_e4m3fn)
    model.hidden.forward = lambda t: F.linear(t, model.hidden.weight.to(t.dtype), model.hidden.bias)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
@pytest.mark.parametrize("method", METHODS_TRIED)
@pytest.mark.parametrize("change", [of_a_subclass, sparse, eight_bits])
def test_the_same_weights_held_otherwise(change: Callable[[Net], None], method: str) -> None:
    model, plain = Net(), Net()
    if change is eight_bits:
        plain.hidden.weight.data = plain.hidden.weight.data.to(torch.float8_e4m3fn).float()
    change(model)
    found, wanted = (classlens.explain(m, pictures(1, (12, 12)), 1, method).maps for m in (model, plain))
    assert type(found) is Tensor
    assert same(found, wanted)


@pytest.mark.parametrize("method", METHODS_TRIED)
def test_images_with_metadata(method: str) -> None:
    x = pictures(1, (12, 12))
    found = classlens.explain(Net(), x.as_subclass(Tagged), 1, method)
    assert type(found.maps) is type(found.pictures) is Tensor
    assert torch.equal(found.maps, classlens.explain(Net(), x, 1, method).maps)


class Product(nn.Module):
    """A product of two signals, one of which may lie within [0,1] for one image and not for another."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.last, self.kind = nn.Conv2d(3, 6, 3, bias=False), nn.Conv2d(3, 6, 3), nn.Linear(6, 5), kind
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        a, b = F.relu(self.a(x)), 0.5 + F.relu(self.b(x))
        if self.kind == "matrices":
            return self.last((a.flatten(2) @ b.flatten(2).mT).mean(2))
        return self.last((a * b if self.kind == "units" else torch.einsum("bchw,bchw->bchw", a, b)).mean((2, 3)))


@pytest.mark.parametrize("kind", ["units", "matrices", "einsum"])
@pytest.mark.parametrize("method", [name for name in ANYWHERE if METHODS[name].family != METHODS["gradcam"].family])
def test_a_gate_of_one_image_may_be_a_signal_in_another(method: str, kind: str) -> None:
    model = Product(kind).double()
    x = pictures(1, (8, 8)).double()
    highest = F.relu(model.a(x)).amax()
    batch = torch.cat([x * 0.9 / highest, x * 3 / highest])
    together = classlens.explain(model, batch, 1, method, **QUICK.get(method, {})).maps
    alone = [classlens.explain(model, image[None], 1, method, **QUICK.get(method, {})).maps for image in batch]
    assert torch.allclose(together, torch.cat(alone), rtol=1e-6, atol=1e-6 * float(together.abs().max()))


def test_a_number_of_python_is_said() -> None:
    model, plain = Net(lambda t: t * t.mean().detach().item()), Net(lambda t: t * 2)
    for _ in range(2):  # the second time without recording
        (note,) = classlens.explain(model, pictures(1, (12, 12)), 1, "gradient").report.notes
        assert note.startswith("the model reads a value as a number of Python")
    assert classlens.explain(plain, pictures(1, (12, 12)), 1, "gradient").report.notes == ()


def test_copies_of_values_are_refused() -> None:
    with pytest.raises(CaptureError, match="the model copies a value out of the record"):
        record(Net(lambda t: t + t.new_tensor(t)), pictures(1, (12, 12)))
    assert record(Net(lambda t: t + torch.ones_like(input=t)), pictures(1, (12, 12))).nodes


def test_weights_that_are_not_there() -> None:
    with pytest.raises(ModelError, match=r"^the weights of first are on the meta device, without values; load them$"):
        classlens.explain(Net().to("meta"), pictures(1, (12, 12)))
    lazy = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(5)).eval()
    with pytest.raises(ModelError, match=r"^2 has no weights yet \(LazyLinear\); run the model once$"):
        classlens.explain(lazy, pictures(1, (12, 12)))


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors is in prototype stage:UserWarning")
def test_masked_images_are_refused() -> None:
    x = pictures(1, (12, 12))
    with pytest.raises(ImageError, match=r"^the images are a MaskedTensor, not a plain tensor; give its values$"):
        classlens.explain(Net(), torch.masked.masked_tensor(x, x > 0))
