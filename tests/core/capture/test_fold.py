import pytest
import torch
import torch.nn.functional as F
from torch import nn

import classlens
from classlens.core.capture import folded, record
from classlens.core.rules.linear import linear_map
from networks import build, pictures


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
