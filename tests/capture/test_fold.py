import pytest
import torch
from torch import nn

from classlens.capture import fold_batchnorm, record
from networks import build, pictures


@pytest.mark.parametrize("name", ["plain", "residual", "dense", "gated"])
def test_folded_layers_give_the_normalised_output(name: str) -> None:
    tape = record(build(name).double(), pictures().double())
    folded = fold_batchnorm(tape)
    assert folded.output is tape.output
    for node in folded.nodes:
        again = node.call(*(v.tensor for v in node.inputs))[0]
        assert torch.allclose(again, node.outputs[0].tensor, rtol=1e-12, atol=1e-12), node.where


def test_only_a_norm_that_alone_reads_a_layer_is_folded() -> None:
    ops = fold_batchnorm(record(build("dense"), pictures())).ops()
    assert ops["batch_norm"] == 2  # one after a concatenation, one whose convolution is used twice


def test_linear_layers_fold_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))
    nn.init.uniform_(model[2].running_var, 0.5, 2)
    nn.init.normal_(model[2].running_mean)
    folded = fold_batchnorm(record(model.eval(), pictures()))
    assert "batch_norm" not in folded.ops()
    node = next(n for n in folded.nodes if n.op == "linear")
    assert torch.allclose(node.call(node.inputs[0].tensor)[0], node.outputs[0].tensor, rtol=1e-4, atol=1e-5)


def test_statistics_of_the_batch_are_not_folded() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False), nn.Flatten()).eval()
    assert "batch_norm" in fold_batchnorm(record(model, pictures())).ops()


def test_the_model_keeps_its_weights() -> None:
    model = build("plain")
    weight = model.features[0].weight.clone()
    fold_batchnorm(record(model, pictures()))
    assert torch.equal(weight, model.features[0].weight)
