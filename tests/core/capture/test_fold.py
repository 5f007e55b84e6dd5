from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import classlens
from classlens.core.capture import Tape, folded, record
from classlens.core.ops import LINEAR_OPS
from classlens.core.rules.linear import linear_map
from networks import build, pictures
from steps import Does


@pytest.mark.parametrize("name", ["plain", "residual", "dense", "gated"])
def test_folded_layers_give_the_normalised_output(name: str) -> None:
    tape = record(build(name).double(), pictures().double())
    new = folded(tape)
    assert new.output is tape.output
    for node in new.nodes:
        again = node.call(*(v.tensor for v in node.inputs))[0]
        assert torch.allclose(again, node.outputs[0].tensor, rtol=1e-12, atol=1e-12), node.where


def test_only_a_norm_that_alone_reads_a_layer_is_folded() -> None:
    ops = folded(record(build("dense"), pictures())).ops()
    assert ops["batch_norm"] == 2  # one after a concatenation, one whose convolution is used twice


def test_linear_layers_fold_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))
    nn.init.uniform_(model[2].running_var, 0.5, 2)
    nn.init.normal_(model[2].running_mean)
    tape = folded(record(model.eval(), pictures()))
    assert "batch_norm" not in tape.ops()
    node = next(n for n in tape.nodes if n.op == "linear")
    assert torch.allclose(node.call(node.inputs[0].tensor)[0], node.outputs[0].tensor, rtol=1e-4, atol=1e-5)


def test_statistics_of_the_batch_are_not_folded() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False), nn.Flatten()).eval()
    assert "batch_norm" in folded(record(model, pictures())).ops()


def test_the_model_keeps_its_weights() -> None:
    model = build("plain")
    weight = model.features[0].weight.clone()
    folded(record(model, pictures()))
    assert torch.equal(weight, model.features[0].weight)


class Padded(nn.Module):
    """Convolutions with zeros put around by an operation of their own, as TensorFlow's "same" padding is ported."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Conv2d(3, 4, 3, stride=2)
        self.b = nn.Conv2d(4, 5, 3, padding=(0, 1))
        self.norm = nn.BatchNorm2d(5)
        self.c = nn.Conv2d(5, 2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.a(F.pad(x, (0, 1, 2, 3))))
        x = torch.relu(self.norm(self.b(F.pad(x, [1, 0]))))
        return self.c(F.pad(x, (1, 1), value=0.5)).flatten(1)


def test_zeros_around_an_input_become_padding() -> None:
    tape = folded(record(Padded().double().eval(), pictures(2, (9, 12)).double()))
    assert tape.ops()["pad"] == 1  # the one that puts 0.5
    assert tape.nodes[0].inputs[0] is tape.image
    for node in tape.nodes:
        if node.op == "conv2d":
            layer = linear_map(node)
            out = layer.forward(layer.x, layer.weight) + layer.bias
            assert torch.allclose(out, node.outputs[0].tensor)
            assert torch.allclose(node.call(layer.x)[0], node.outputs[0].tensor)
            r = torch.rand(2, *out.shape, dtype=torch.float64)
            assert torch.allclose((out - layer.bias).mul(r).sum(), (layer.x * layer.adjoint(r, layer.weight)).sum())


def test_no_relevance_is_lost_in_padding() -> None:
    model, x = Padded().double().eval(), pictures(2, (9, 12)).double()
    assert classlens.explain(model, x, 1, "lrp").report.conservation.max() < 1e-10


def agrees(tape: Tape) -> bool:
    """Whether every folded layer still gives what was recorded, run again and as a linear map."""
    for node in tape.nodes:
        if node.op in LINEAR_OPS:
            layer = linear_map(node)
            out = layer.forward(layer.x, layer.weight) + (0 if layer.bias is None else layer.bias)
            given = node.outputs[0].tensor
            if not (torch.allclose(out, given) and torch.allclose(node.call(layer.x)[0], given)):
                return False
    return True


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_layers_of_any_dimension_take_norm_and_padding(n: int, bias: bool) -> None:
    torch.manual_seed(0)
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[n - 1](3, 4, 2, bias=bias)
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[n - 1](4)
    nn.init.uniform_(norm.running_var, 0.5, 2)
    nn.init.normal_(norm.running_mean)
    nn.init.normal_(norm.weight)
    pads = [1, 2, 3, 0, 2, 1][: 2 * n]
    model = nn.Sequential(Does(lambda x: F.pad(x, pads)), conv, norm, nn.Flatten()).double().eval()
    tape = folded(record(model, torch.randn(2, 3, *(4, 3, 5)[:n], dtype=torch.float64)))
    assert set(tape.ops()) == {f"conv{n}d", "flatten"}
    assert agrees(tape)


WEIGHT = torch.randn(4, 3, 2, 3, generator=torch.Generator().manual_seed(0)).double()
MEAN, VARIANCE = torch.tensor([0.1, -0.2, 0.3, 0.0]).double(), torch.tensor([1e-5, 1.0, 2.0, 0.5]).double()


@pytest.mark.parametrize(
    "conv",
    [
        lambda x: F.conv2d(x, WEIGHT), lambda x: F.conv2d(x, WEIGHT, padding=1),
        lambda x: F.conv2d(x, WEIGHT, None, 2, (1, 0)), lambda x: F.conv2d(x, WEIGHT, padding="valid"),
        lambda x: F.conv2d(F.pad(x, (1, 2)), WEIGHT, padding=1), lambda x: F.conv2d(F.pad(x, []), WEIGHT),
        lambda x: F.conv2d(F.pad(x, (0, 0, 3, 1), "constant", 0.0), WEIGHT),
    ],
)  # fmt: skip
def test_functions_fold_as_modules_do(conv: Callable[[Tensor], Tensor]) -> None:
    """A norm without weight and bias, with torch's own eps."""
    model = Does(lambda x: F.batch_norm(conv(x), MEAN, VARIANCE).flatten(1)).eval()
    tape = folded(record(model, pictures(2, (6, 5)).double()))
    assert set(tape.ops()) == {"conv2d", "flatten"}
    assert agrees(tape)


@pytest.mark.parametrize(
    "conv",
    [
        lambda x: F.conv2d(F.pad(x, (1, 1, 0, 0), mode="reflect"), WEIGHT),
        lambda x: F.conv2d(F.pad(x, (1, 1, 0, 0), "replicate"), WEIGHT),
        lambda x: F.conv2d(F.pad(x, (1, 1), value=0.5), WEIGHT), lambda x: F.conv2d(F.pad(x, (2, -1)), WEIGHT),
        lambda x: F.conv2d(F.pad(x, (0, 0, 0, 0, 1, 0))[:, 1:], WEIGHT),
        lambda x: F.conv2d(F.pad(x[:, :2], (0, 0, 0, 0, 1, 0)), WEIGHT),
        lambda x: F.conv2d(F.pad(x, (1, 1)), WEIGHT[:, :, :1], padding="same"),
    ],
)  # fmt: skip
def test_what_is_no_border_of_zeros_stays(conv: Callable[[Tensor], Tensor]) -> None:
    tape = folded(record(Does(lambda x: conv(x).flatten(1)).eval(), pictures(2, (6, 5)).double()))
    assert tape.ops()["pad"] == 1
    assert agrees(tape)


@pytest.mark.parametrize(
    "before",
    [
        lambda x: F.conv2d(x, x.mean() * WEIGHT), lambda x: F.relu(F.conv2d(x, WEIGHT)),  # a weight of the image's own
        lambda x: F.conv_transpose2d(x, WEIGHT.transpose(0, 1)),
    ],
)  # fmt: skip
def test_a_norm_stays_where_it_cannot_be_folded(before: Callable[[Tensor], Tensor]) -> None:
    model = Does(lambda x: F.batch_norm(before(x), MEAN, VARIANCE).flatten(1)).eval()
    tape = folded(record(model, pictures(2, (6, 5)).double()))
    assert tape.ops()["batch_norm"] == 1


@pytest.mark.parametrize(
    "after", [F.relu, lambda x: F.max_pool2d(x, 2), lambda x: F.conv_transpose2d(x, WEIGHT.transpose(0, 1))]
)
def test_a_border_before_anything_but_a_convolution_stays(after: Callable[[Tensor], Tensor]) -> None:
    model = Does(lambda x: after(F.pad(x, (1, 1))).flatten(1)).eval()
    assert folded(record(model, pictures(2, (6, 5)).double())).ops()["pad"] == 1


def test_a_border_that_something_else_reads_stays() -> None:
    def twice(x: Tensor) -> Tensor:
        wide = F.pad(x, (1, 1))
        return F.conv2d(wide, WEIGHT).flatten(1) + wide.mean((1, 2, 3))[:, None]

    assert folded(record(Does(twice).eval(), pictures(2, (6, 5)).double())).ops()["pad"] == 1
