"""The walk along the table: every operation is called each way, has arguments by name, and a rule that conserves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from calls import BY_HAND, SHAPES, SPECS, Call, numbers, writings
from classlens.core.capture import Node, Tape, Value, record
from classlens.core.capture.tape import leaves
from classlens.core.ops import LIVE_WEIGHTS, OPERATIONS, Kind, arguments, canonical
from classlens.core.rules import RULES, propagate, rule_for
from classlens.core.rules.propagate import MULTI_OUTPUT
from classlens.errors import UnsupportedOp
from classlens.methods.deeplift import multipliers
from steps import Does

OUT_OF_SIGHT = (Kind.CREATION, Kind.QUERY, Kind.EXPORT)  # they are never written down
NOT_CALLED = {"identity", "alias", LIVE_WEIGHTS}  # functions of other libraries, and a name that the recorder gives
CALLED = list(dict.fromkeys([*SPECS, *(op for op, _, _ in BY_HAND)]))


def calls(op: str) -> Iterator[tuple[str, dict[str, Any], Call]]:
    """(how it is written, what arguments() must say, the call)."""
    if op in SPECS:
        yield from ((how, SPECS[op], call) for how, call in writings(op))
    yield from (("by hand", named, call) for name, named, call in BY_HAND if name == op)


def recorded(op: str, call: Call, seed: int = 0) -> Tape:
    def first_tensor(x: Tensor) -> Tensor:
        tensors = [leaf for leaf in leaves(call(x)) if isinstance(leaf, Tensor)]
        first = tensors[0] if tensors[0].is_floating_point() else tensors[0] * x
        return first.double()

    return record(Does(first_tensor).eval(), numbers(*SHAPES.get(op, (2, 4, 6, 6)), seed=seed))


def node_of(tape: Tape, op: str) -> Node:
    found = [node for node in tape.nodes if node.op == op]
    assert found, f"no {op} among {[node.op for node in tape.nodes]}"
    return found[0]


def same(a: Any, b: Any) -> bool:
    if isinstance(b, Tensor):
        return isinstance(a, Tensor) and torch.equal(a, b)
    return bool(tuple(a) == tuple(b)) if isinstance(b, tuple) else bool(a == b)


def test_every_operation_is_called() -> None:
    assert OPERATIONS.keys() >= set(CALLED)
    missing = {op for op, row in OPERATIONS.items() if row.kind not in OUT_OF_SIGHT} - set(CALLED)
    assert missing == NOT_CALLED


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", CALLED)
def test_arguments_by_name_however_it_is_called(op: str) -> None:
    for how, named, call in calls(op):
        node = node_of(recorded(op, call), op)
        found = node.arguments()
        for name, expected in named.items():
            assert name in found, f"{how}: {name} is not among {list(found)}"
            assert same(found[name], expected), f"{how}: {name}"
        live = [leaf for leaf in leaves(found) if isinstance(leaf, Value)]
        assert live == list(node.inputs), how  # none lost, none doubled
        if how != "by hand":
            assert next(iter(found)) in ("input", "input1"), how


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", CALLED)
def test_rules_conserve_however_it_is_called(op: str) -> None:
    for how, _, call in calls(op):
        tape = recorded(op, call)
        if OPERATIONS[op].unruled:
            with pytest.raises(UnsupportedOp, match=f"no rule for the operation {op}"):
                rule_for(node_of(tape, op))
            continue
        start = numbers(2, *tape.logits.shape)
        sweep = propagate(tape, {tape.output: start}, rule_for)
        total = float(sweep.absorbed.sum() + sweep.relevance.sum())
        assert total == pytest.approx(float(start.sum()), rel=1e-9), how


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", [op for op in CALLED if not OPERATIONS[op].unruled])
def test_deeplift_is_complete_on_every_operation(op: str) -> None:
    """sum(m (x - x0)) = start . (y - y0): each operation is in the list that its Jacobian needs."""
    for how, _, call in calls(op):
        tape, other = recorded(op, call), recorded(op, call, seed=7)
        start = numbers(*tape.logits.shape)
        parts = multipliers(tape, other, start[None])[0] * (tape.image.tensor - other.image.tensor)
        difference = start * (tape.logits - other.logits)
        allowed = 1e-4 if OPERATIONS[op].kind is Kind.NORM else 1e-9  # norms are integrated numerically
        assert (parts.sum() - difference.sum()).abs() <= allowed * difference.abs().sum(), how


def test_rules_and_table_name_the_same_operations() -> None:
    assert RULES.keys() <= OPERATIONS.keys()
    for name, row in OPERATIONS.items():
        assert (name in RULES) != bool(row.unruled), f"{name} needs a rule, or a reason why it has none; not both"
    assert {name for name, row in OPERATIONS.items() if row.several} == MULTI_OUTPUT


def test_one_spelling_is_one_operation() -> None:
    spellings = [spelling for row in OPERATIONS.values() for spelling in row.spellings]
    assert len(spellings) == len(set(spellings))
    assert not OPERATIONS.keys() & set(spellings)


OURS = "constant_through_live_weights", "identity", "transpose_all", "transpose_last"  # names that the recorder gives


def test_spellings_are_torchs_own() -> None:
    """A spelling that torch does not have would be a typing error."""
    for name, row in OPERATIONS.items():
        for spelling in (name, *row.spellings):
            written = {spelling, f"{spelling}_", f"__{spelling}__"}
            known = any(hasattr(home, w) for home in (torch, F, Tensor, torch.ops.aten) for w in written)
            assert known or name in OURS, spelling


def test_a_call_whose_names_nobody_knows_says_so() -> None:
    with pytest.raises(UnsupportedOp, match=r"the names of the arguments of odd are unknown; read node.args"):
        arguments("odd", getattr, (1, 2), {})
    assert arguments("odd", getattr, (), {"one": 1}) == {"one": 1}


def test_torch_ops_have_names_too() -> None:
    x = numbers(2, 3)
    assert canonical(torch.ops.aten.leaky_relu) == "leaky_relu"
    assert arguments("leaky_relu", torch.ops.aten.leaky_relu, (x, 0.1), {}) == {"input": x, "negative_slope": 0.1}
    assert arguments("sum", torch.ops.aten.sum.dim_IntList, (x, [1], True), {})["keepdim"] is True
