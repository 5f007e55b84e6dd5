"""A network that returns probabilities is explained as the same network without its last step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import classlens
from classlens.core.capture import logits_of, of_labels, plain_logits, record, record_logits
from classlens.core.targets.answers import Models
from classlens.core.targets.survey import survey
from networks import build, pictures

ENDS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda y: y.softmax(1),
    "softmax of the last axis": lambda y: F.softmax(y, -1),
    "module": nn.Softmax(dim=1),
    "log_softmax": lambda y: torch.log_softmax(y, dim=1),
    "log of softmax": lambda y: torch.log(y.softmax(1)),
    "log_softmax module": nn.LogSoftmax(1),
    "sigmoid": torch.sigmoid,
    "sigmoid module": nn.Sigmoid(),
    "logsigmoid": F.logsigmoid,
}
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "across images": lambda y: y.softmax(0),
    "not the last step": lambda y: y.softmax(1) * 2,
    "a gate": lambda y: y * y.sigmoid(),
    "of something else": lambda y: (y.softmax(1), y * 3)[1],
    "log": lambda y: (y.sigmoid(), y.exp().log())[1],
}
METHODS = ["agf", "lrp", "gradient", "gradcam", "integrated-gradients(steps=3)", "clrp", "attnlrp", "rise(n_masks=20)"]
BOTH = torch.tensor([[0, 2], [0, 2]])


class Ends(nn.Module):
    def __init__(self, network: nn.Module, end: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.network, self.end = network, end
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.network(x))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("end", ["softmax", "log_softmax", "sigmoid"])
def test_the_map_is_that_of_the_logits(end: str, method: str) -> None:
    network, x = build("residual"), pictures(2)
    options = {"multilabel": "sigmoid" in end}
    plain = classlens.explain(network, x, BOTH, method, **options)
    model = Ends(network, ENDS[end])
    for _ in range(2):  # the second pass may not be recorded
        found = classlens.explain(model, x, BOTH, method)
        assert torch.allclose(found.maps, plain.maps, rtol=1e-5, atol=1e-6 * plain.maps.abs().max().item())
        assert torch.equal(found.logits, plain.logits)
        assert found.probability(1, 1) == pytest.approx(plain.probability(1, 1))
        assert f"the model returns probabilities; explained are the logits that its {end} reads" in found.report.notes
    assert not any("probabilities" in note for note in plain.report.notes)


@pytest.mark.parametrize("end", ENDS)
def test_every_pass_finds_the_logits(end: str) -> None:
    network, x = build("residual"), pictures(2)
    model, expected = Ends(network, ENDS[end]), network(x)
    tape = record(model, x)
    assert tape.ends in end.replace("module", tape.ends)
    assert of_labels(tape.ends, tape.logits) == ("sigmoid" in end)
    for logits in (tape.logits, record_logits(model, x).logits, plain_logits(model, x).logits, logits_of(model, x)):
        assert torch.equal(logits, expected)


@pytest.mark.parametrize("end", OTHERS)
def test_other_outputs_are_explained_as_they_are(end: str) -> None:
    network, x = build("residual"), pictures(2)
    model = Ends(network, OTHERS[end])
    for tape in (record(model, x), record_logits(model, x)):
        assert tape.ends == ""
        assert torch.equal(tape.logits, model(x))
    assert torch.equal(logits_of(model, x), model(x))


def test_a_softmax_that_the_user_asks_for_stays() -> None:
    network, x = build("residual"), pictures(2)
    tape = record(network, x, output=lambda y: y.softmax(1))
    assert tape.ends == ""
    assert torch.equal(tape.logits, network(x).softmax(1))


@pytest.mark.parametrize("after", [lambda p: p.clamp(1e-7, 1), lambda p: p.view(len(p), -1), lambda p: p * 1])
def test_probabilities_that_are_not_looked_through_have_a_note(after: Callable[[Tensor], Tensor]) -> None:
    network, x = build("residual"), pictures(2)
    tape = record(Ends(network, lambda y: after(y.softmax(1))), x)
    assert (tape.ends, len(tape.notes)) == ("", 1)
    assert "adds up to 1" in tape.notes[0]
    assert record(network, x).notes == ()


def test_a_saturated_probability_is_explained() -> None:
    network, x = build("residual"), pictures(1)
    nn.init.normal_(network.fc.weight, std=1e4, generator=torch.Generator().manual_seed(0))
    model = Ends(network, ENDS["softmax"])
    assert model(x).max() == 1
    assert classlens.explain(model, x, method="gradient").maps.abs().max() > 0


def test_trust_reads_the_same_logits() -> None:
    model = Ends(build("residual"), ENDS["softmax"])
    assert classlens.explain(model, pictures(1, (32, 32)), 1).trust().verdict


def test_the_page_shows_the_probabilities_of_the_model() -> None:
    network, x = build("residual"), pictures(1)
    for end in ("softmax", "sigmoid"):
        found = survey(Ends(network, ENDS[end]), x, Models())
        assert found.logits is not None
        assert torch.equal(found.logits, network(x)[0])
        assert found.labels == (end == "sigmoid")
