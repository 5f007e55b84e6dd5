"""The sweep itself: what it merges, what it writes down, what it does where nothing arrives."""

import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from classlens.core.capture import Node, Value, record
from classlens.core.rules import RULES, propagate, register, rule_for
from classlens.core.rules.propagate import (
    ABSORBING,
    MULTI_OUTPUT,
    Ledger,
    Reached,
    Sweep,
    forgetting,
    stopping_at,
    without_denormals,
)
from classlens.errors import CaptureError, UnsupportedOp
from steps import Does

X = torch.tensor([[[[1.0, -2.0], [3.0, 0.5]]], [[[4.0, 1.0], [-1.0, 2.0]]], [[[-3.0, 5.0], [2.0, 1.0]]]])  # (3,1,2,2)
ONES = torch.ones(3, 1, 2, 2)


def swept(do: Callable[[Tensor], Tensor], classes: int = 2) -> tuple[Sweep, Tensor]:
    """A sweep through a function by the default rules, and what was put in: random, (K,B,...)."""
    tape = record(Does(do).eval(), X)
    start = torch.rand(classes, *tape.output.shape, generator=torch.Generator().manual_seed(0))
    return propagate(tape, {tape.output: start}, rule_for), start


def filled(x: Tensor) -> Tensor:
    x = x * 1
    x[:, :, 0] = 7.0
    return x


def into_a_part(x: Tensor) -> Tensor:
    buffer = torch.ones(3, 2, 2, 2)
    buffer[:, 1:].copy_(x)
    return buffer


TAKE_CONSTANTS: dict[str, Callable[[Tensor], Tensor]] = {
    "where": lambda x: torch.where(x > 0, x, 9 * ONES),
    "setitem": filled,
    "as_strided_scatter": into_a_part,
    "pad": lambda x: F.pad(x, (1, 0), value=2.0),
    "maximum": lambda x: torch.maximum(x, ONES + torch.tensor([0.2, 0.3])),  # one number would be an activation
    "minimum": lambda x: torch.minimum(x, ONES + torch.tensor([0.2, 0.3])),
    "masked_fill": lambda x: x.masked_fill(x < 0, 5.0),
    "cat": lambda x: torch.cat([x, ONES], 1),
    "stack": lambda x: torch.stack([x, ONES], 1),
    "hstack": lambda x: torch.hstack([x, ONES]),
}


@pytest.mark.parametrize("name", TAKE_CONSTANTS)
def test_what_constants_draw_is_written_down(name: str) -> None:
    sweep, start = swept(TAKE_CONSTANTS[name])
    arrived = sweep.relevance.flatten(2).sum(2)
    assert sweep.absorbed.dtype == torch.float64
    assert (sweep.absorbed > 0.01).all()
    assert torch.allclose(arrived + sweep.absorbed, start.flatten(2).sum(2).double(), rtol=1e-5)


def test_a_copy_onto_constants_is_followed() -> None:
    sweep, start = swept(lambda x: torch.zeros(3, 2, 2, 2).copy_(x))  # broadcast over two channels
    assert torch.allclose(sweep.relevance, start.sum(2, keepdim=True))
    assert (sweep.absorbed.abs() < 1e-5).all()


@pytest.mark.parametrize("join", [torch.vstack, torch.cat])
def test_constants_among_the_images_keep_what_they_draw(join: Callable[..., Tensor]) -> None:
    """A picture and a constant along the batch. Constants among several pictures belong to none of them."""
    tape = record(Does(lambda x: join([x, ONES[:1]]).unflatten(0, (2, 1)).sum(0)).eval(), X[:1])
    sweep = propagate(tape, {tape.output: ONES[None, :1]}, rule_for)
    share = X[:1].abs() / (X[:1].abs() + 1)
    assert torch.allclose(sweep.relevance[0], share, rtol=1e-4)
    assert torch.allclose(sweep.absorbed[0, 0], (1 - share).sum().double())
    with pytest.raises(UnsupportedOp, match="the 3 images cannot be told apart; explain one image at a time"):
        swept(lambda x: join([x, ONES]).unflatten(0, (2, 3)).sum(0))


def test_nothing_absorbed_is_0_in_float64() -> None:
    sweep, _ = swept(lambda x: x.flip(2))
    assert torch.equal(sweep.absorbed, torch.zeros(2, 3, dtype=torch.float64))


def test_where_nothing_arrives_the_image_gets_0() -> None:
    tape = record(Does(lambda x: x.flip(2)).eval(), X.double())
    start = {tape.output: torch.ones(2, *X.shape).double()}
    sweep = propagate(tape, start, lambda node: lambda node, relevance: [None])
    assert torch.equal(sweep.relevance, torch.zeros(2, *X.shape).double())


def test_relevance_of_a_value_used_twice_is_merged_and_that_of_others_is_not() -> None:
    merged: list[int] = []

    def merge(value: Value, shares: list[Tensor]) -> Tensor:
        merged.append(len(shares))
        return torch.stack(shares).sum(0)

    def do(x: Tensor) -> Tensor:
        y = x * 2
        return torch.cat([y.flip(2), y.flip(3), y], 1).relu()

    tape = record(Does(do).eval(), X)
    start = torch.rand(1, *tape.output.shape)
    found = propagate(tape, {tape.output: start}, rule_for, merge=merge).relevance
    assert merged == [3]
    first, second, third = start.split(1, 2)
    assert torch.allclose(found, first.flip(3) + second.flip(4) + third)


def test_a_rule_for_an_operation_of_several_outputs_sees_all_of_them() -> None:
    seen: list[object] = []
    try:

        @register("std_mean", multi_output=True)
        def both(node: Node, relevance: list[Tensor | None]) -> list[Tensor]:
            seen.append(relevance)
            return [torch.zeros(1, *node.inputs[0].shape)]

        tape = record(Does(lambda x: torch.std_mean(x, (2, 3))[1]).eval(), X)
        propagate(tape, {tape.output: torch.ones(1, 3, 1)}, rule_for)
    finally:
        del RULES["std_mean"]
        MULTI_OUTPUT.discard("std_mean")
    ((of_std, of_mean),) = seen
    assert of_std is None
    assert torch.equal(of_mean, torch.ones(1, 3, 1))


@pytest.mark.parametrize("absorbs", [True, False])
def test_the_last_registered_rule_says_whether_relevance_is_absorbed(absorbs: bool) -> None:
    before = RULES["flip"]
    try:
        register("flip", absorbs=not absorbs)(before)
        register("flip", absorbs=absorbs)(lambda node, relevance: [relevance / 4])
        assert ("flip" in ABSORBING) == absorbs
        sweep, start = swept(lambda x: x.flip(2))
    finally:
        register("flip")(before)
    assert "flip" not in ABSORBING
    assert torch.allclose(sweep.absorbed, 0.75 * absorbs * start.flatten(2).sum(2).double())


# ------------------------------------------------------------------------------------------------------------ stopping


def test_a_sweep_stops_at_a_value_and_goes_on_from_there() -> None:
    """What goes on is what arrived, by the same rules, as often as one likes; nothing is left behind."""

    def do(x: Tensor) -> Tensor:
        below = (2 * x).masked_fill(x < 0, 5.0)
        other, seen = torch.cat([below.flip(2), below], 1).chunk(2, 1)
        return torch.cat([seen.flip(2), seen.flip(3), seen.masked_fill(seen > 9, 1.0), other], 1)

    tape = record(Does(do).eval(), X)
    (chunk,) = [node for node in tape.nodes if node.op == "chunk"]
    other, seen = chunk.outputs
    start = torch.rand(2, *tape.output.shape, generator=torch.Generator().manual_seed(0))
    start[:, :, 3:] = 0  # of the other part
    whole = propagate(tape, {tape.output: start}, rule_for)
    with stopping_at(seen):
        with pytest.raises(Reached, match="the sweep arrived at the value") as stopped, stopping_at(other):
            propagate(tape, {tape.output: start}, rule_for)
        assert not stopped.value.relevance.any()  # only zeros arrived there
        with pytest.raises(Reached) as stopped:  # the inner block is over, the outer one is not
            propagate(tape, {tape.output: start}, rule_for)
    found = stopped.value
    down, across, rest = (part for part in start[:, :, :3].split(1, 2))
    kept = (seen.tensor <= 9).float()
    assert torch.allclose(found.relevance, down.flip(3) + across.flip(4) + kept * rest)
    for _ in range(2):
        onward = found.onward(torch.cat([found.relevance, 3 * found.relevance]))
        assert torch.allclose(onward.relevance, torch.cat([whole.relevance, 3 * whole.relevance]))
        above = (rest * (1 - kept)).flatten(2).sum(2)  # what was absorbed before the stop is not counted again
        assert torch.allclose(onward.absorbed[:2], whole.absorbed - above, atol=1e-6)
        assert torch.allclose(onward.absorbed[2:], 3 * onward.absorbed[:2])
    assert torch.equal(propagate(tape, {tape.output: start}, rule_for).relevance, whole.relevance)


def test_a_sweep_stops_where_nothing_arrives_too() -> None:
    """The value has relevance 0 of its own shape, for each class."""
    tape = record(Does(lambda x: x.unflatten(2, (1, 2)).chunk(2, 1)[0]).eval(), X.double())
    start = {tape.nodes[-1].outputs[0]: torch.ones(2, *tape.output.shape).double()}
    with pytest.raises(Reached) as stopped, stopping_at(tape.nodes[0].outputs[0]):
        propagate(tape, start, lambda node: lambda node, relevance: [None])
    assert torch.equal(stopped.value.relevance, torch.zeros(2, *tape.nodes[0].outputs[0].shape).double())


# ---------------------------------------------------------------------------------------------------------- the ledger


def test_the_ledger_adds_up_by_class_and_image() -> None:
    ledger, r = Ledger(2), torch.arange(48.0).reshape(2, 2, 3, 2, 2)
    slow = torch.tensor([[float(r[k, b].sum()) for b in range(2)] for k in range(2)]).double()
    ledger.absorb(r)
    ledger.absorb(r, 0.5)
    ledger.absorb(r[:, :, :, 0, 0], -1.0)  # (K,B,C)
    assert torch.allclose(ledger.absorbed, 1.5 * slow - r[:, :, :, 0, 0].sum(2))


def test_the_ledger_does_not_round_channels_away() -> None:
    r = torch.tensor([1e8, 1.0, -1e8]).reshape(1, 1, 3)
    assert float(Ledger(1).total(r)) == 1.0
    assert float(Ledger(1).total(r[..., None, None])) == 1.0


def test_windows_of_an_image_are_added_up_for_it() -> None:
    """Four windows of each image along the batch axis: all values of the second image are replaced by a constant."""
    x = torch.zeros(2, 1, 4, 4)
    x[1] = 1

    def fill(x: Tensor) -> Tensor:
        windows = x.reshape(2, 2, 2, 2, 2).permute(0, 1, 3, 2, 4).reshape(8, 4)
        return windows.masked_fill(windows > 0, 5.0)

    tape = record(Does(fill).eval(), x)
    sweep = propagate(tape, {tape.output: torch.ones(1, 8, 4)}, rule_for)
    assert torch.equal(sweep.absorbed, torch.tensor([[0.0, 16.0]]).double())


def test_tokens_before_images_do_not_mix_them() -> None:
    """(4 tokens, 2 images, 3): the first axis could be taken for two tokens of each image."""
    x = torch.zeros(2, 3, 2, 2)
    x[1] = 1

    def fill(x: Tensor) -> Tensor:
        tokens = x.flatten(2).permute(2, 0, 1)
        return tokens.masked_fill(tokens > 0, 5.0)

    tape = record(Does(fill).eval(), x)
    sweep = propagate(tape, {tape.output: torch.ones(1, 4, 2, 3)}, rule_for)
    assert torch.equal(sweep.absorbed, torch.tensor([[0.0, 12.0]]).double())


def test_images_that_cannot_be_told_apart_are_refused() -> None:
    x = torch.rand(2, 1, 2, 2)
    tape = record(Does(lambda x: (x.flatten(1).mT @ x.flatten(1)).masked_fill(torch.eye(4) > 0, 5.0)).eval(), x)
    with pytest.raises(UnsupportedOp, match="masked_fill in the model itself, where the 2 images cannot be told apart"):
        propagate(tape, {tape.output: torch.ones(1, 4, 4)}, rule_for)


def test_where_no_constant_takes_part_images_need_not_be_told_apart() -> None:
    """Nothing stays where two values from the image are joined, so there is nothing to write down."""

    def do(x: Tensor) -> Tensor:
        mixed = x.flatten(1).mT @ x.flatten(1)
        return torch.cat([mixed, 2 * mixed])

    tape = record(Does(do).eval(), torch.rand(2, 1, 2, 2))
    sweep = propagate(tape, {tape.output: torch.ones(1, 8, 4)}, rule_for)
    assert torch.equal(sweep.absorbed, torch.zeros(1, 2).double())


def test_numbers_are_cut_only_where_they_are_slow() -> None:
    """Graphics cards (here a device without numbers) and half precision have no slow denormal numbers."""
    elsewhere = torch.empty(1, 1, 3, device="meta")
    assert without_denormals(elsewhere, 1.0) is elsewhere
    half = torch.tensor([[[6e-8, 1.0]]], dtype=torch.float16)
    assert without_denormals(half, 1.0) is half
    assert without_denormals(torch.tensor([[[1e-30, 1.0]]]), 1.0).tolist() == [[[0.0, 1.0]]]


def test_negligible_relevance_is_cut_before_products_alone() -> None:
    seen: dict[str, list[float]] = {}

    def choose(node: Node) -> Callable[..., list[Tensor]]:
        def rule(node: Node, relevance: Tensor) -> list[Tensor]:
            seen[node.op] = relevance.flatten().tolist()
            return [relevance]

        return rule

    def do(x: Tensor) -> Tensor:
        x = F.linear(x, torch.eye(2))
        return (torch.addcmul(torch.ones(2), x, torch.ones(2)) * torch.ones(2)).flip(3)

    tape = record(Does(do).eval(), X[:1, :, :1])
    propagate(tape, {tape.output: torch.tensor([1.0, 1e-40]).reshape(1, 1, 1, 1, 2)}, choose)
    for unit_by_unit in ("flip", "mul", "addcmul"):
        assert seen[unit_by_unit] == torch.tensor([1.0, 1e-40]).tolist()
    assert seen["linear"] == [1.0, 0.0]


def test_what_next_to_nothing_caused_stays() -> None:
    """Below 1e-19 a sum in float32 is nothing: its relevance would be blown up by as much."""
    ledger = Ledger(1)
    relevance = torch.tensor([[[2.0, 3.0, 5.0, 7.0]]])
    total = torch.tensor([[1e-25, -1e-10, 0.0, 4.0]])
    assert torch.allclose(ledger.quotient(relevance, total), torch.tensor([[[0.0, -3e10, 0.0, 1.75]]]))
    assert torch.allclose(ledger.absorbed, torch.tensor([[7.0]]).double())
    assert Ledger(1).quotient(relevance[..., :0], total[..., :0]).shape == (1, 1, 0)
    least = torch.tensor([[2.0**-63, 0.0]])  # the first of these still counts
    assert torch.equal(Ledger(1).quotient(least[None], least), torch.tensor([[[1.0, 0.0]]]))


def test_biases_alone_keep_relevance_apart_for_each_image() -> None:
    """Three images of one channel; without a ledger of the caller's the sweep makes its own."""

    class Fills(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.masked_fill(x < 0, 5.0)

    tape = record(Fills().eval(), X)
    sweep = propagate(tape, {tape.output: torch.ones(1, *X.shape)}, rule_for)
    assert torch.equal(sweep.absorbed, (X < 0).sum((1, 2, 3)).double()[None])


def test_the_whole_relevance_stays_if_no_weight_is_given() -> None:
    ledger = Ledger(1)
    ledger.quotient(torch.tensor([[[3.0, 4.0]]]), torch.tensor([[0.0, 2.0]]))
    assert torch.as_tensor(ledger.absorbed).tolist() == [[3.0]]


def test_values_are_freed_behind_the_sweep() -> None:
    """Those of the node that was visited and of all later ones; the network's output and earlier values stay."""
    tape = record(Does(lambda x: ((x * 2).relu() + 1).flip(2)).eval(), X)
    first, relu, add, _ = tape.nodes
    gradients = {node.outputs[0]: ONES for node in tape.nodes}
    forgetting(tape, gradients)(relu)
    for node in (relu, add):
        with pytest.raises(CaptureError, match="was freed"):
            _ = node.outputs[0].tensor
    assert torch.equal(tape.output.tensor, (2 * X).relu().add(1).flip(2))
    assert torch.equal(first.outputs[0].tensor, 2 * X)
    assert set(gradients) == {first.outputs[0]}


@pytest.mark.parametrize(("much", "calls"), [(48, [0, 1, 1, 1]), (49, [0, 0, 1, 0]), (97, [0, 0, 0, 1])])
def test_memory_is_given_back_when_it_is_much(monkeypatch: pytest.MonkeyPatch, much: int, calls: list[int]) -> None:
    """Three values of 12 numbers, of 4 bytes each, are freed one after the other; the network's output stays."""
    given: list[int] = []
    module = sys.modules[forgetting.__module__]
    monkeypatch.setattr(module, "MUCH_MEMORY", much)
    monkeypatch.setattr(module, "give_back_memory", lambda: given.append(1))
    tape = record(Does(lambda x: ((x * 2).relu() + 1).flip(2)).eval(), X)
    assert tape.output.edge is not None
    forget, counts = forgetting(tape), []
    for node in reversed(tape.nodes):
        forget(node)
        counts.append(len(given))
        given.clear()
    assert counts == calls
    assert tape.output.edge is None


def test_a_ledger_that_is_given_is_the_one_that_is_reported() -> None:
    tape = record(Does(lambda x: x.flip(2)).eval(), X)
    visited: list[Node] = []
    ledger = Ledger(3, torch.full((1, 3), 5.0).double())
    sweep = propagate(tape, {tape.output: ONES[None]}, rule_for, ledger=ledger, done=visited.append)
    assert sweep.absorbed.tolist() == [[5.0, 5.0, 5.0]]
    assert tuple(visited) == tape.nodes
