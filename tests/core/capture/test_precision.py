"""Networks in half precision, in 8-bit integers, under autocast: explained in float32 with the same weights."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import classlens
from classlens.core.capture import record, record_logits
from classlens.core.capture.precision import low_precision
from classlens.errors import CaptureError
from networks import NETWORKS, build, pictures

quantising = pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")


def twin(model: nn.Module) -> nn.Module:
    """The same weights in float32."""
    return copy.deepcopy(model).float()


def same(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= 1e-5 * b.abs().max())


@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NETWORKS)
def test_half_precision_is_recorded_as_its_float32_twin(name: str, dtype: torch.dtype) -> None:
    model, x, output = build(name).to(dtype), pictures(2), "logits" if name == "dictionary" else None
    tape, expected = record(model, x, output), record(twin(model), x, output)
    assert [node.op for node in tape.nodes] == [node.op for node in expected.nodes]
    for node, other in zip(tape.nodes, expected.nodes, strict=True):
        for value, wanted in zip(node.outputs, other.outputs, strict=True):
            if wanted.tensor.is_floating_point():
                assert value.tensor.dtype == torch.float32
                assert same(value.tensor, wanted.tensor)
    assert all(parameter.dtype == dtype and parameter.grad is None for parameter in model.parameters())
    quick = record_logits(model, x, output)
    assert same(quick.logits, expected.logits)
    (note,) = quick.notes
    assert note == tape.notes[0] == f"the model computes in {str(dtype)[6:]}; " + note.split("; ")[1]


@pytest.mark.parametrize("method", ["agf", "lrp", "gradient"])
def test_half_precision_images(method: str) -> None:
    model, x = build("residual").half(), pictures(1).half()
    expected = classlens.explain(twin(model), x.float(), 1, method).maps
    assert same(classlens.explain(model, x, 1, method).maps, expected)


class Casts(nn.Module):
    """Computes partly in half precision although its weights are float32."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.body, self.how = build("residual"), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.body(x).float()
        low = {"half": x.half, "to": lambda: x.to(torch.bfloat16), "type_as": lambda: x.type_as(self.like)}[self.how]()
        return self.body(low.to(self.body.fc.weight.dtype))

    like = torch.zeros((), dtype=torch.float16)


@pytest.mark.parametrize("method", ["agf", "gradient"])
@pytest.mark.parametrize("how", ["autocast", "half", "to", "type_as"])
def test_parts_in_half_precision(how: str, method: str) -> None:
    model, x = Casts(how).eval(), pictures(1)
    for _ in range(2):  # the second time without recording
        e = classlens.explain(model, x, 1, method)
        assert same(e.maps, classlens.explain(model.body, x, 1, method).maps)
        assert any("half precision in some parts" in note for note in e.report.notes)


@pytest.mark.parametrize("method", ["agf", "lrp", "gradient", "integrated-gradients(steps=2)"])
def test_under_autocast(method: str) -> None:
    model, x = build("residual"), pictures(1)
    expected = classlens.explain(model, x, 1, method)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            e = classlens.explain(model, x, 1, method)
            assert torch.is_autocast_enabled("cpu")
            assert same(e.maps, expected.maps)
            assert any("autocast" in note for note in e.report.notes)
    assert not any("autocast" in note for note in expected.report.notes)


# ------------------------------------------------------------------------------------------------- 8-bit integers


def dynamic() -> tuple[nn.Module, nn.Module]:
    """A network with dynamically quantised dense layers, and the same one with their weights in floating point."""
    model = torch.ao.quantization.quantize_dynamic(build("dense-head"), {nn.Linear}, dtype=torch.qint8)
    plain = build("dense-head")
    for at in (0, 2, 4):
        weight, bias = model.head[at]._packed_params._packed_params.unpack()
        plain.head[at].weight.data, plain.head[at].bias.data = weight.dequantize(), bias.detach()
    return model, plain


class Adds(nn.Module):
    """A skip connection with the functions that quantisation replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.end = torch.ao.quantization.QuantStub(), torch.ao.quantization.DeQuantStub()
        self.a = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU())
        self.b, self.skip = nn.Conv2d(8, 8, 3, padding=1, groups=2), torch.ao.nn.quantized.FloatFunctional()
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(self.start(x))
        return self.end(self.head(self.skip.add_relu(self.b(x), x)))


def static() -> tuple[nn.Module, nn.Module]:
    """A statically quantised network, and the one it was made from with the quantised weights."""
    tools = torch.ao.quantization
    torch.manual_seed(0)
    plain = Adds().eval()
    fused = tools.fuse_modules(plain, [["a.0", "a.1"]])
    fused.qconfig = tools.get_default_qconfig("x86")
    prepared = tools.prepare(fused)
    prepared(pictures(4))
    model = tools.convert(prepared)
    for name, layer in plain.named_modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.weight.data = model.get_submodule(name).weight().dequantize()
    return model, plain


@quantising
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, while it quantises
@pytest.mark.parametrize("method", ["agf", "lrp", "gradient", "gradcam", "rise(n_masks=4)"])
@pytest.mark.parametrize("kind", [dynamic, static])
def test_quantised_networks(kind: Callable[[], tuple[nn.Module, nn.Module]], method: str) -> None:
    (model, plain), x = kind(), pictures(1)
    for _ in range(2):
        e = classlens.explain(model, x, 1, method)
        expected = classlens.explain(plain, x, 1, method)
        assert e.maps.abs().max() > 0
        assert same(e.maps, expected.maps)
        assert any("int8" in note for note in e.report.notes)
    assert torch.allclose(e.logits, model(x), atol=0.1 * float(e.logits.abs().max()))


@quantising
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_unknown_quantised_operations_are_named() -> None:
    class Clamped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.quantized.celu(x, 0.1, 0, 1.0)

    model, _ = static()
    model.b = nn.Sequential(model.b, Clamped())
    with pytest.raises(CaptureError, match=r"b\.1 calls the quantised operation celu.*before quantisation") as caught:
        record(model, pictures(1))
    assert "\n" not in str(caught.value)


def test_names_of_precisions() -> None:
    named = [("", nn.Sequential(nn.Linear(2, 2).half(), nn.Linear(2, 2).bfloat16()))]
    assert low_precision(named) == ""
    assert low_precision([*named, *named[0][1].named_modules()]) == "bfloat16 and float16"
    assert low_precision([("", nn.Linear(2, 2).double())]) == ""


# --------------------------------------------------------------------------------------- parts without a gradient


class Step(nn.Module):
    """A convolution, a step, a linear layer."""

    def __init__(self, step: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.inner, self.fc, self.step = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3), nn.Linear(6, 4), step

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.step(self.inner, F.relu(self.conv(x))).mean((2, 3)))


def checkpointed(reentrant: bool) -> Callable[..., Tensor]:
    def step(inner: nn.Module, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(lambda t: F.relu(inner(t)), x, use_reentrant=reentrant)

    return step


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # without gradients
@pytest.mark.parametrize("method", ["agf-release", "lrp", "gradient", "smoothgrad(samples=2)"])
def test_checkpointing_is_right_or_refused(method: str) -> None:
    x = pictures(1)
    expected = classlens.explain(Step(lambda inner, t: F.relu(inner(t))).eval(), x, 1, method).maps
    assert same(classlens.explain(Step(checkpointed(False)).eval(), x, 1, method).maps, expected)
    hidden = Step(checkpointed(True)).eval()
    if method == "lrp":
        assert same(classlens.explain(hidden, x, 1, method).maps, expected)
        return
    with pytest.raises(CaptureError, match="use_reentrant") as caught:
        classlens.explain(hidden, x, 1, method)
    assert "\n" not in str(caught.value)


def in_autocast(step: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(inner: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return step(inner, x).float()

    return run


@pytest.mark.parametrize("low", ["bfloat16", "float16", "autocast inside", "autocast outside"])
@pytest.mark.parametrize("method", ["agf", "agf-release", "gradient", "smoothgrad(samples=2)"])
def test_checkpointing_in_low_precision(method: str, low: str) -> None:
    """A checkpoint computes its part again in the backward pass: in float32 there, too."""
    x = pictures(1)
    plain, step = Step(lambda inner, t: F.relu(inner(t))).eval(), checkpointed(False)
    model = Step(in_autocast(step) if low == "autocast inside" else step).eval()
    if low in ("bfloat16", "float16"):
        model.to(getattr(torch, low))
        plain.load_state_dict({name: t.float() for name, t in model.state_dict().items()})
    expected = classlens.explain(plain, x, 1, method).maps
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low == "autocast outside"):
        found = classlens.explain(model, x, 1, method)
    assert same(found.maps, expected)
    assert any("float32" in note for note in found.report.notes)


class Blocks(nn.Module):
    """A vision transformer of two blocks, checkpointed if `how` says so."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.how = nn.Conv2d(3, 8, 8, 8), how
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 12, activation="gelu", batch_first=True, norm_first=True) for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        t = self.patches(x).flatten(2).transpose(1, 2)
        if self.how == "whole":
            return torch.utils.checkpoint.checkpoint(self.above, t, use_reentrant=False)
        return self.above(t)

    def above(self, t: Tensor) -> Tensor:
        for block in self.blocks:
            t = torch.utils.checkpoint.checkpoint(block, t, use_reentrant=False) if self.how == "blocks" else block(t)
        return self.head(self.norm(t).mean(1))


@pytest.mark.parametrize("low", ["bfloat16", "float16", "autocast", "channels last"])
@pytest.mark.parametrize("how", ["blocks", "whole"])
@pytest.mark.parametrize("method", ["agf", "attnlrp", "generic-attention", "legrad", "libragrad", "gradient"])
def test_checkpointed_transformers_in_low_precision(method: str, how: str, low: str) -> None:
    model, plain, x = Blocks(how), Blocks("plain"), pictures(2, (32, 32))
    if low in ("bfloat16", "float16"):
        model.to(getattr(torch, low))
        plain.load_state_dict({name: t.float() for name, t in model.state_dict().items()})
    if low == "channels last":
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low == "autocast"):
        found = classlens.explain(model, x, 1, method).maps
    expected = classlens.explain(plain, x, 1, method).maps
    assert expected.any()
    assert (found - expected).norm() <= 1e-4 * expected.norm()


@torch.library.custom_op("classlens_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


_library = torch.library.Library("classlens_tests", "FRAGMENT")
_library.define("halved(Tensor x) -> Tensor")
_library.impl("halved", lambda x: x.detach() / 2, "CPU")


@pytest.mark.parametrize("method", ["gradient", "smoothgrad(samples=2)", "meaningful-perturbation(steps=1)"])
@pytest.mark.parametrize("op", ["doubled", "halved"])
def test_operations_without_a_gradient_are_named(op: str, method: str) -> None:
    model = Step(lambda _, x: getattr(torch.ops.classlens_tests, op)(x)).eval()
    with pytest.raises(CaptureError, match=rf"{op}.*needs one") as caught:
        classlens.explain(model, pictures(1), 1, method)
    assert "\n" not in str(caught.value)


class Rounded(torch.autograd.Function):
    """Straight-through: rounds, and its gradient is that of the identity."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return (8 * x).round() / 8

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


@pytest.mark.parametrize("place", ["values", "logits"])
def test_straight_through_functions(place: str) -> None:
    model, x = Step(lambda _, t: Rounded.apply(t) if place == "values" else t).eval(), pictures(1)
    output = Rounded.apply if place == "logits" else None
    e = classlens.explain(model, x, 1, "gradient", output=output)
    leaf = x.clone().requires_grad_()
    logits = model(leaf) if output is None else Rounded.apply(model(leaf))
    (gradient,) = torch.autograd.grad(logits[0, 1], leaf)
    assert same(e.maps[0, 0], gradient[0].abs().amax(0))
    for method in ("agf", "lrp"):
        assert classlens.explain(model, x, 1, method, output=output).maps.abs().max() > 0


# --------------------------------------------------------------------------------------------------------- memory


def test_new_output_functions_do_not_pile_up() -> None:
    from classlens.core.capture import forward

    model, x = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).eval(), torch.ones(1, 3, 2, 2)
    for i in range(1000):
        e = classlens.explain(model, x, 0, "gradient", output=lambda y, i=i: y * (i + 1))
    assert len(forward._recorded(model)) <= 32
    assert same(e.maps[0, 0], 1000 * model[1].weight[0].reshape(3, 2, 2).abs().amax(0))
