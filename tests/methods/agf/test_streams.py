"""The two streams at the top: what is refused, what is kept, and for how long."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from classlens.core.capture import record
from classlens.core.targets.numbers import Number
from classlens.errors import CaptureError, TargetError
from classlens.methods import METHODS, Case
from classlens.methods.agf import terms
from classlens.methods.agf.streams import Streams, open_streams
from classlens.methods.layers import last_layers
from networks import pictures


def model(bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3, bias=bias)).eval()


def case(targets: list[list[int]], equal: bool = False, **options: bool) -> Case:
    """Two images; with `equal`, all logits of the second are 0."""
    network, x = model(bias=not equal), pictures(2, (8, 8))
    if equal:
        nn.init.zeros_(network[0].bias)
        x[1] = 0
    scalars = (Number(lambda logits: logits[0] + 2 * logits[1]),)
    return Case(network, x, record(network, x), torch.tensor(targets), scalars=scalars, **options)


def opened(one: Case) -> Streams:
    return open_streams(one, one.tape, last_layers(one.tape), [], terms.highlighted)


@pytest.mark.parametrize("targets", [[[0], [0]], [[2], [1]], [[-1, 0], [-1, 0]]])
def test_classes_of_equal_logits_are_refused(targets: list[list[int]]) -> None:
    with pytest.raises(TargetError, match="logits of image 1 are all equal"):
        opened(case(targets, equal=True))
    opened(case(targets))


def test_equal_logits_matter_only_where_a_class_is_asked_for() -> None:
    streams = opened(case([[0], [-1]], equal=True))  # a class of image 0, and a number of image 1
    (start,) = streams.start.values()
    assert start[0, 0].any()


def test_equal_logits_do_not_matter_to_a_number_made_of_them() -> None:
    assert opened(case([[-1], [-1]], equal=True)).start


@pytest.mark.parametrize("once", [True, False])
def test_the_graph_and_the_values_serve_until_the_last_use(once: bool) -> None:
    one = case([[0], [1]], once=once)
    first = opened(one)
    assert (first.done is not None) is once
    if once:
        with pytest.raises(CaptureError, match="backward through the graph a second time"):
            opened(one)
    else:
        assert all(torch.equal(first.start[value], again) for value, again in opened(one).start.items())


@pytest.mark.parametrize("trace", [True, False])
def test_a_trace_is_kept_if_it_is_asked_for(trace: bool) -> None:
    for method in ("agf", "agf-paper", "agf-release"):
        assert bool(METHODS[method].run(case([[0], [1]], trace=trace)).trace) is trace


def test_a_score_without_a_gradient_is_noted() -> None:
    def saturated(logits: Tensor, targets: Tensor) -> Tensor:
        """No gradient for the first image."""
        return logits.gather(1, targets) * torch.tensor([[0.0], [1.0]])

    one = case([[0], [1]])
    assert opened(one).notes == ()
    assert opened(case([[-1], [-1]])).notes == ()  # a number that does not depend on one of the logits
    (note,) = open_streams(one, one.tape, last_layers(one.tape), [], saturated).notes
    assert note.startswith("a score is saturated")
